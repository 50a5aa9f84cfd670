"""The specification of the engine: after several steps on W ranks, outputs, weights and optimiser
state equal one process on the concatenated batch, for every way of cutting tables, asking for rows,
pooling and updating.
"""

from itertools import product

import pytest
import torch
from parity.cases import KINDS, RULES, Oracle, loss_of, make_case, rows_held

from recapp.engine.sharded_embedding_bag import shard_bags

TOLERANCE = {"rtol": 1e-9, "atol": 1e-9}


def train_and_compare(comm, seed, kind, backend, options, break_it=False):
    """Runs on every rank; returns collectives per step and the names of the tensors that were
    compared.
    """
    case = make_case(seed, kind, comm.world, **options)
    sharded = shard_bags(case.tables, case.plan, comm, case.rule, seed, backend)
    oracle = Oracle(case, seed)
    if break_it and comm.rank == comm.world - 1:
        next(b for b in sharded.blocks() if b.tensor == "weight" and b.data.numel()).data[0, 0] += (
            1e-3
        )
    for batches in case.batches:
        before = comm.calls
        values = sharded(batches[comm.rank]).values()
        rows = sum(sharded.shared.header.rows_W)
        (loss_of(values, case.head).sum() * comm.world / max(rows, 1)).backward()
        calls = comm.calls - before
        torch.testing.assert_close(values.detach(), oracle.step(batches)[comm.rank], **TOLERANCE)
    compared = []
    for block in sharded.blocks():
        whole = oracle.tensor(block.table, block.tensor)
        torch.testing.assert_close(
            block.data,
            whole[rows_held(block), block.cols.start : block.cols.stop],
            **TOLERANCE,
        )
        compared.append(block.tensor)
    return calls, sorted(set(compared)), sharded.shared.state.row_statistics is not None


AXES = [
    KINDS,
    [1, 2, 4],
    ["sum", "mean"],
    [False, True],
    ["unique", "pooled"],
    list(RULES),
    ["numba", "torch"],
    ["natural", "mixed"],
]
ALL = list(product(*AXES))
FULL = [row for number, row in enumerate(ALL) if (number + number // 2) % 2]  # orders in turn
AXIS_NAMES = ("kind", "world", "pooling", "weighted", "mode", "rule", "backend", "row_order")


def covering():
    """A subset of the product in which every pair of values of two axes meets."""
    n = len(AXES)
    missing = {
        (i, a, j, b) for i in range(n) for j in range(i + 1, n) for a in AXES[i] for b in AXES[j]
    }
    chosen = []
    while missing:
        best = max(
            ALL,
            key=lambda row: sum(
                (i, row[i], j, row[j]) in missing for i in range(n) for j in range(i + 1, n)
            ),
        )
        missing -= {(i, best[i], j, best[j]) for i in range(n) for j in range(i + 1, n)}
        chosen.append(best)
    return chosen


def check(ranks, seed, kind, world, pooling, weighted, mode, rule, backend, row_order):
    options = {
        "rule": rule,
        "mode": mode,
        "pooling": pooling,
        "weighted": weighted,
        "uneven": seed % 2 == 1,
        "row_order": row_order,
    }
    for calls, compared, agreed in ranks.run(
        train_and_compare, world, seed, kind, backend, options
    ):
        assert calls == (4 if world > 1 else 3) + agreed  # one rank learns from the gradient itself
        assert (
            compared == sorted(["weight", *(name for name, _ in RULES[rule].state)]) or not compared
        )


@pytest.mark.parametrize(AXIS_NAMES, covering())
def test_training_equals_one_process_on_the_concatenated_batch(
    ranks, kind, world, pooling, weighted, mode, rule, backend, row_order
):
    check(ranks, 1, kind, world, pooling, weighted, mode, rule, backend, row_order)


@pytest.mark.full
@pytest.mark.parametrize(AXIS_NAMES, FULL)
def test_training_equals_one_process_in_every_combination(
    ranks, kind, world, pooling, weighted, mode, rule, backend, row_order
):
    check(ranks, 7, kind, world, pooling, weighted, mode, rule, backend, row_order)


@pytest.mark.parametrize(
    ("world", "seeds"),
    [
        (2, range(3)),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in ((2, range(3, 6)), (4, range(6)))
        ),
    ],
)
def test_random_tilings_of_both_modes_and_poolings_in_one_model(ranks, world, seeds):
    for seed in seeds:
        check(
            ranks,
            seed,
            "random",
            world,
            "both",
            seed % 3 == 0,
            "both",
            list(RULES)[seed % 4],
            "numba" if seed % 2 else "torch",
            "mixed" if seed % 3 else "natural",
        )


def test_the_comparison_notices_one_wrong_weight(ranks):
    options = {"rule": "sgd", "mode": "unique", "pooling": "sum", "weighted": False}
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        ranks.run(train_and_compare, 2, 3, "row_wise", "numba", options, True)
