"""The oracle: a batch as plain Python, `{key: [bag, ...]}`, a bag being a list of (value,
weight).
"""

import torch
from hypothesis import strategies as st

from recapp.sparse.jagged_tensor import JaggedTensor
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor

Plain = dict[str, list[list[tuple[int, float]]]]


@st.composite
def batches(draw, min_keys=0, stride=None, names="abcdefgh") -> Plain:
    """Draw any batch: no keys, no samples, empty bags and keys without values included."""
    keys = draw(st.lists(st.sampled_from(names), unique=True, min_size=min_keys, max_size=5))
    stride = draw(st.integers(0, 4)) if stride is None else stride
    pair = st.tuples(st.integers(-(2**63), 2**63 - 1), st.sampled_from([0.0, 0.5, 1.0, -2.0]))
    return {key: [draw(st.lists(pair, max_size=3)) for _ in range(stride)] for key in keys}


def flat(plain: Plain) -> list[tuple[int, float]]:
    return [pair for bags in plain.values() for bag in bags for pair in bag]


def lengths(plain: Plain) -> list[int]:
    return [len(bag) for bags in plain.values() for bag in bags]


def build(plain: Plain, weighted: bool, stride: int | None = None) -> KeyedJaggedTensor:
    values = [v for v, _ in flat(plain)]
    weights = [w for _, w in flat(plain)]
    return KeyedJaggedTensor(
        list(plain), values, weights if weighted else None, lengths=lengths(plain), stride=stride
    )


def read(kjt: KeyedJaggedTensor | JaggedTensor) -> list[list[tuple[int, float | None]]]:
    """Return all bags of a jagged tensor, with None for a weight where it has none."""
    values = kjt.values().tolist()
    result = []
    start = 0
    weights = kjt.weights_or_none()
    weights = [None] * len(values) if weights is None else weights.tolist()
    for length in kjt.lengths().tolist():
        result.append(
            list(zip(values[start : start + length], weights[start : start + length], strict=True))
        )
        start += length
    assert start == len(values)
    return result


def expected(plain: Plain, weighted: bool) -> list[list[tuple[int, float | None]]]:
    return [
        [(v, w if weighted else None) for v, w in bag] for bags in plain.values() for bag in bags
    ]


def same(one: KeyedJaggedTensor, other: KeyedJaggedTensor) -> bool:
    mine = one.weights_or_none()
    theirs = other.weights_or_none()
    return (
        one.keys() == other.keys()
        and one.stride() == other.stride()
        and one.length_per_key() == other.length_per_key()
        and torch.equal(one.lengths(), other.lengths())
        and torch.equal(one.values(), other.values())
        and (mine is theirs if mine is None or theirs is None else torch.equal(mine, theirs))
    )
