"""The strides and inverse indices of a KeyedJaggedTensor: the number of bags of each key, and the
bag that each sample takes. This module checks them, and concatenates them for several tensors.

Suffixes: F keys, S samples.

A KeyedJaggedTensor as a tree of torch's `pytree`: `torch.export` and data loaders take it apart
and put it together.

    leaves    values, weights, lengths; and the inverse indices, if there are some
    context   keys, stride; and the bags per key and rank, where keys have different numbers, and
              the keys of the inverse indices

If all keys have the same number of bags and there are no inverse indices, the lengths give the
stride, and the context has None for it. So an exported program takes batches of other sizes.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.fx._pytree import register_pytree_flatten_spec
from torch.utils._pytree import GetAttrKey, KeyEntry, TreeSpec, register_pytree_node

from recapp.errors import DataError
from recapp.sparse.bags import InverseIndices, Strides, check_distinct, concatenate, on_host

T = TypeVar("T")


def check_keys(keys: Sequence[str]) -> list[str]:
    """Return keys as a list.

    Raises:
        DataError: `keys` is a text instead of a list, or a key occurs twice.
    """
    if isinstance(keys, str):
        raise DataError(f"keys are the text {keys!r}: give a list of names, [{keys!r}]")
    names = list(keys)
    check_distinct(names)
    return names


def check_strides(keys: Sequence[str], strides: Sequence[Sequence[int]] | Tensor) -> Strides:
    """Return the checked number of bags of each key from each rank.

    Args:
        keys: The keys.
        strides: `stride_per_key_per_rank`: for each key a list of one number per rank.

    Raises:
        DataError: The shape is another, or a number is below 0.
    """
    name = "stride_per_key_per_rank"
    rows = strides.tolist() if isinstance(strides, Tensor) else list(strides)
    if not all(isinstance(row, Sequence) and not isinstance(row, str) for row in rows):
        raise DataError(f"{name} is {rows}: give a list for each key, with one number per rank")
    table = [list(row) for row in rows]
    if len(table) != len(keys) or len({len(row) for row in table}) > 1:
        raise DataError(
            f"{name} is {table}, but there are {len(keys)} keys: give a list for each key, with "
            "one number per rank"
        )
    if any(type(n) is not int or n < 0 for row in table for n in row):
        raise DataError(f"{name} is {table}: a key has a whole number of bags, 0 or more")
    return table


def check_inverse(inverse: tuple[Sequence[str], Tensor]) -> InverseIndices:
    """Return checked inverse indices: keys, and the bag of each key that every sample takes.

    Raises:
        DataError: The argument does not have the form of `inverse_indices`.
    """
    name = "inverse_indices"
    if not isinstance(inverse, tuple | list) or len(inverse) != 2:
        raise DataError(f"{name}: give a tuple of keys and a tensor [keys, samples]")
    names = check_keys(inverse[0])
    index_FS = inverse[1]
    if not isinstance(index_FS, Tensor) or index_FS.dim() != 2 or len(index_FS) != len(names):
        shape = list(index_FS.shape) if isinstance(index_FS, Tensor) else type(index_FS).__name__
        raise DataError(
            f"{name} have {len(names)} keys and a tensor {shape}: give a tensor [keys, samples]"
        )
    if index_FS.is_floating_point() or index_FS.is_complex() or index_FS.dtype == torch.bool:
        raise DataError(f"{name} are {index_FS.dtype}: give integers")
    return names, index_FS


def check_taken_bags(
    keys: Sequence[str], bags_F: Sequence[int], inverse: InverseIndices | None
) -> None:
    """Check on CPU that samples take bags that exist.

    Args:
        keys: The keys of the tensor.
        bags_F: The number of bags of each key.
        inverse: The bag of each key that every sample takes.

    Raises:
        DataError: An index is out of range.
    """
    if inverse is None or not on_host(inverse[1]) or not inverse[1].numel():
        return
    known = dict(zip(keys, bags_F, strict=True))
    for key, index_S in zip(*inverse, strict=True):
        low, high = (int(n) for n in index_S.aminmax())
        if key in known and not 0 <= low <= high < known[key]:
            raise DataError(
                f"inverse_indices of key {key!r} run from {low} to {high}, but it has "
                f"{known[key]} bags: give each sample the number of a bag"
            )


def check_stride(
    keys: Sequence[str],
    bags: int,
    stride: int | None,
    strides: Strides | None,
    inverse: InverseIndices | None,
) -> int:
    """Return the number of samples B.

    Args:
        keys: The keys.
        bags: The number of bags of all keys.
        stride: B, if it is given.
        strides: The number of bags of each key from each rank, if it is given.
        inverse: The bag of each key that every sample takes, if it is given.

    Raises:
        DataError: The bags do not fit the keys.
    """
    count = len(keys)
    if strides is not None:
        whole = sum(map(sum, strides))
        if bags != whole:
            raise DataError(
                f"there are {bags} bags, but stride_per_key_per_rank sums to {whole}: give one "
                "length per bag"
            )
        longest = max(map(sum, strides), default=stride or 0)
        samples = longest if inverse is None else inverse[1].shape[1]
        if stride not in (None, samples):
            raise DataError(
                f"stride is {stride}, but by inverse_indices or the longest key there are "
                f"{samples} samples: leave stride out"
            )
        return samples
    if stride is not None and bags != count * stride:
        raise DataError(
            f"there are {bags} bags, but {count} keys of stride {stride} have {count * stride}: "
            "give one length per key and sample"
        )
    if not count and bags:
        raise DataError(f"there are {bags} bags but no keys: name the key of every {bags} bags")
    if count and bags % count:
        raise DataError(
            f"{bags} bags are no multiple of {count} keys ({', '.join(keys)}): give each key one "
            "length per sample"
        )
    return bags // count if count else stride or 0


def check_derived(**arguments: tuple[Any, Callable[[], Any]]) -> None:
    """Check arguments that follow from other arguments.

    Args:
        arguments: By name, the given value or None, and the function that computes the value
            from the others.

    Raises:
        DataError: A given value differs from the computed one.
    """
    for name, (value, find) in arguments.items():
        if value is not None and value != (derived := find()):
            raise DataError(
                f"{name} is {value}, but by the other arguments it is {derived}: leave it out"
            )


def concatenate_weights(weights: Mapping[str, Tensor | None]) -> Tensor | None:
    """Return the concatenated weights of several tensors; None if none has weights.

    Args:
        weights: The weights of each tensor, by its name in messages.

    Raises:
        DataError: Only some tensors have weights.
    """
    with_weights = [key for key, w in weights.items() if w is not None]
    if not with_weights:
        return None
    without = [key for key, w in weights.items() if w is None]
    if without:
        raise DataError(
            f"{with_weights[0]} has weights, {without[0]} has none: give all of them weights "
            "(ones change nothing), or none"
        )
    return concatenate("weights", [w for w in weights.values() if w is not None])


def _all_or_none(values: Sequence[T | None], argument: str) -> list[T]:
    """Return the values of an argument that all tensors were given; an empty list if none was.

    Raises:
        DataError: Only some tensors were given the argument.
    """
    some = [value for value in values if value is not None]
    if some and len(some) < len(values):
        raise DataError(
            f"{argument}: only some of the tensors have them: give them to all tensors, or to none"
        )
    return some


def concatenate_strides(strides_of_tensors: Sequence[Strides | None]) -> Strides | None:
    """Return the concatenated numbers of bags per key and rank of several tensors.

    Raises:
        DataError: Only some tensors have them, or the numbers of ranks differ.
    """
    some = _all_or_none(strides_of_tensors, "stride_per_key_per_rank")
    if not some:
        return None
    rows = [of_ranks for strides in some for of_ranks in strides]
    if len({len(of_ranks) for of_ranks in rows}) > 1:
        raise DataError(
            f"stride_per_key_per_rank have {sorted({len(of_ranks) for of_ranks in rows})} ranks: "
            "give each key one number per rank"
        )
    return rows


def concatenate_inverse(inverses: Sequence[InverseIndices | None]) -> InverseIndices | None:
    """Return the concatenated inverse indices of several tensors.

    Raises:
        DataError: Only some tensors have them, or the numbers of samples differ.
    """
    some = _all_or_none(inverses, "inverse_indices")
    if not some:
        return None
    samples = [index_FS.shape[1] for _, index_FS in some]
    if len(set(samples)) > 1:
        raise DataError(
            f"inverse_indices of the tensors are of {samples} samples: give all tensors the same "
            "number of samples"
        )
    keys = check_keys([key for names, _ in some for key in names])
    return keys, torch.cat([index_FS for _, index_FS in some])


def in_segments(tensor_N: Tensor, sizes: Sequence[int], order: Sequence[int]) -> Tensor:
    """Return the segments of a tensor in another order, which may omit and repeat segments.

    Args:
        tensor_N: The segments, one after the other.
        sizes: The sizes of the segments.
        order: The index of each segment of the result.
    """
    parts = torch.split(tensor_N, list(sizes))
    return torch.cat([parts[i] for i in order]) if order else tensor_N[:0]


def sums_of(numbers: Sequence[int], counts: Sequence[int]) -> list[int]:
    """Return the sums of consecutive parts of a list; `counts` has the length of each part."""
    edges = [0, *accumulate(numbers)]
    at = [0, *accumulate(counts)]
    return [edges[b] - edges[a] for a, b in pairwise(at)]


def joined_parts(
    keys: int,
    tensors: Sequence[Tensor],
    has_strides: bool,
    ranks: int,
    order: Sequence[int] | None,
    stride_per_rank: Sequence[int] | None,
    stagger: int,
) -> dict[str, Any]:
    """Return the arguments of a KeyedJaggedTensor whose parts came from several ranks. The
    parameters are those of `KeyedJaggedTensor.dist_init`.

    Raises:
        DataError: The number of tensors is wrong, there are no strides, or the order does not fit
            the parts.
    """
    most = 4 if has_strides else 3
    if len(tensors) not in (most - 1, most):
        raise DataError(
            f"tensors: there are {len(tensors)}, but lengths and values"
            f"{', strides' if has_strides else ''} and perhaps weights make {most - 1} or {most}"
        )
    lengths, values = tensors[:2]
    weights = tensors[-1] if len(tensors) == most else None
    arguments: dict[str, Any] = {}
    if has_strides:
        sizes = tensors[2].tolist()
        of_keys = torch.tensor(sizes, dtype=torch.int64, device="cpu").view(ranks, keys).T
        if stagger > 1:
            of_keys = of_keys[:, torch.arange(ranks, device="cpu").view(stagger, -1).T.reshape(-1)]
        arguments["stride_per_key_per_rank"] = of_keys.tolist()
    else:
        if stride_per_rank is None:
            raise DataError("stride_per_rank is None: give the number of samples of each rank")
        first = stride_per_rank[0] if stride_per_rank else 0
        size = first if len(set(stride_per_rank)) <= 1 else 1
        sizes = [size] * (len(lengths) // size if size else 0)
        arguments["stride"] = sum(stride_per_rank)
    if order is not None and sorted(order) != list(range(len(sizes))):
        raise DataError(
            f"recat is {list(order)}, but there are {len(sizes)} parts: give each of "
            f"0..{len(sizes) - 1} once, or None"
        )
    if order is not None:
        counts = [int(part.sum()) for part in torch.split(lengths, sizes)]
        values = in_segments(values, counts, order)
        weights = None if weights is None else in_segments(weights, counts, order)
        lengths = in_segments(lengths, sizes, order)
    return arguments | {"values": values, "weights": weights, "lengths": lengths}


Context = tuple[Any, ...]

_LEAVES = [GetAttrKey(name) for name in ("_values", "_weights", "_lengths", "_inverse_indices")]


def register_tree(kind: Any) -> None:
    """Register a KeyedJaggedTensor with torch's `pytree`.

    Args:
        kind: The class.
    """

    def unflatten(leaves: Any, context: Context) -> Any:
        values, weights, lengths, *index = leaves
        keys, stride, strides, inverse = (*context, None, None)[:4]
        stride = _stride(len(keys), lengths) if stride is None else stride
        return kind.unchecked(
            list(keys),
            values,
            weights,
            lengths,
            stride,
            strides=None if strides is None else [list(of_ranks) for of_ranks in strides],
            inverse_indices=None if inverse is None else (list(inverse), index[0]),
        )

    register_pytree_node(
        kind,
        _flatten,
        unflatten,
        serialized_type_name="recapp.sparse.keyed_jagged_tensor.KeyedJaggedTensor",
        to_dumpable_context=list,
        from_dumpable_context=_as_tuple,
        flatten_with_keys_fn=_flatten_with_keys,
    )
    register_pytree_flatten_spec(kind, _flatten_as)


def _flatten(kjt: Any) -> tuple[list[Any], Context]:
    leaves = [kjt.values(), kjt.weights_or_none(), kjt.lengths()]
    keys = tuple(kjt.keys())
    inverse = kjt.inverse_indices_or_none()
    if inverse is None and not kjt.variable_stride_per_key():
        return leaves, (keys, None if keys else kjt.stride())
    context = (keys, kjt.stride())
    strides = None
    if kjt.variable_stride_per_key():
        strides = tuple(map(tuple, kjt.stride_per_key_per_rank()))
    if inverse is None:
        return leaves, (*context, strides)
    return [*leaves, inverse[1]], (*context, strides, tuple(inverse[0]))


def _stride(keys: int, lengths: Any) -> int:
    """Return the number of bags of each key. While torch maps a tree, leaves may have any type."""
    return lengths.shape[0] // keys if isinstance(lengths, Tensor) and lengths.dim() else 0


def _flatten_with_keys(kjt: Any) -> tuple[list[tuple[KeyEntry, Any]], Context]:
    leaves, context = _flatten(kjt)
    return list(zip(_LEAVES, leaves, strict=False)), context


def _as_tuple(stored: Any) -> Any:
    """Return the lists of JSON as tuples again."""
    return tuple(map(_as_tuple, stored)) if isinstance(stored, list) else stored


def _flatten_as(kjt: Any, spec: TreeSpec) -> list[Any]:
    """Return the leaves of a tensor with its keys in the order of the tensor with which a graph was
    traced.
    """
    keys = list(spec.context[0])
    if keys != kjt.keys():
        kjt = kjt.permute([kjt.index_of(key) for key in keys])
    return _flatten(kjt)[0]
