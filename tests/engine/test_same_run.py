"""At a fixed number of ranks a training run is the same run under every plan: outputs, losses,
weights, optimiser state and dense parameters have the same bits. In mode `pooled` owners add rows
before they travel, so sums are in another order: equal within 1e-5.
"""

import pytest
import row_wise_on_two
import torch
from engine.engine_cases import (
    KINDS,
    RULES,
    Head,
    batch_of,
    make_tables,
    same_bits,
    sharded,
    whole_tensors,
)
from tiers import cover, one_of

from recapp.data_parallel import wrap_dense
from recapp.sharding.sharding_types import register

STEPS = 3
ROWS = 12
FEW_WIDTHS = {"dims": (12, 3, 6)}  # of tables and strips: each is a kernel to compile
STRIP = 3


def training_run(comm, tables, kind, rule, one_hot, weighted, seed=0, **plan):
    """Everything that a run produces, by name. Compiled kernels on two ranks, the pool's default
    (tests/ranks.py) on others.
    """
    backend = "numba" if comm.world == 2 else "auto"
    plan = {"backend": backend, "column_width": STRIP} | plan
    collection = sharded(comm, tables, kind, rule, seed=seed, **plan)
    head = Head(collection)
    model = wrap_dense(head, comm, process_group=comm.group, broadcast_buffers=False)
    optimizer = torch.optim.Adam(head.layers.parameters(), 0.01)
    seen = {}
    for step in range(STEPS):
        batch = batch_of(
            tables, ROWS + comm.rank, 100 * step + comm.rank, one_hot=one_hot, weighted=weighted
        )
        logits = model(batch)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(
            logits, (torch.arange(len(logits)) % 2).to(logits.dtype)
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen |= {f"logits of step {step}": logits.detach(), f"loss of step {step}": loss.detach()}
    seen |= {f"dense {name}": p.detach() for name, p in head.layers.named_parameters()}
    return seen | {
        f"{tensor} of {table}": data
        for (table, tensor), data in whole_tensors(comm, collection).items()
    }


def differing(comm, kinds, rule, one_hot, weighted, changes=None, compare=same_bits, **plan):
    """Names of what differs from the table-wise run, by kind of plan. Kinds are compared where they
    are made: on every rank.
    """
    tables = make_tables(**FEW_WIDTHS | (changes or {}))
    reference = training_run(comm, tables, "table_wise", rule, one_hot, weighted)
    assert len(reference) == 2 * STEPS + 4 + 3 * (1 + len(RULES[rule].state))
    found = {}
    for kind in kinds:
        run = training_run(comm, tables, kind, rule, one_hot, weighted, **plan)
        assert run.keys() == reference.keys()
        found[kind] = [name for name in run if not compare(run[name], reference[name])]
    return found


CUT = ("column_wise", "grid_shard", "random")
OTHERS = [k for k in KINDS if k != "table_wise"]


ONE_HOT = (True, False)
MULTI_HOT = (False, False)
WEIGHTED = (False, True)


def check(ranks, world, rule, bags, **changes):
    kinds = OTHERS if rule != "rowwise_adagrad" else ["row_wise", "table_row_wise", "data_parallel"]
    for found in ranks.run(differing, world, kinds, rule, *bags, changes):
        assert found == {kind: [] for kind in kinds}


@pytest.mark.parametrize(
    ("world", "rule", "bags"),
    [
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                (2, "sgd", ONE_HOT),
                (2, "adam", MULTI_HOT),
                (2, "adagrad", WEIGHTED),
                (4, "adam", ONE_HOT),
                (4, "adagrad", MULTI_HOT),
            )
        ),
        (2, "rowwise_adagrad", WEIGHTED),
        (4, "sgd", WEIGHTED),
        (4, "rowwise_adagrad", ONE_HOT),
    ],
)
def test_a_run_has_the_same_bits_under_every_plan(ranks, world, rule, bags):
    check(ranks, world, rule, bags)


@pytest.mark.full
@pytest.mark.parametrize(
    ("world", "rule", "bags", "pooling"),
    cover(2, [[2, 3, 4], list(RULES), [ONE_HOT, MULTI_HOT, WEIGHTED], ["sum", "mean"]]),
)
def test_a_run_has_the_same_bits_where_two_choices_meet(ranks, world, rule, bags, pooling):
    check(ranks, world, rule, bags, pooling=pooling)


def test_a_sharding_type_of_ones_own_keeps_the_bits_too(ranks):
    for found in ranks.run(under_own_type, 4):
        assert found == {row_wise_on_two.NAME: []}


def under_own_type(comm):
    register(row_wise_on_two.row_wise_on_two())
    return differing(comm, [row_wise_on_two.NAME], "rowwise_adagrad", False, True)


@pytest.mark.parametrize(
    ("world", "rule", "bags"),
    one_of(30, [(w, r, b) for w in (2, 4) for r in RULES for b in (ONE_HOT, MULTI_HOT, WEIGHTED)]),
)
def test_mixed_rows_keep_the_bits_too(ranks, world, rule, bags):
    for found in ranks.run(mixed_rows, world, rule, *bags):
        assert found == {kind: [] for kind in found} and len(found) >= 4


def mixed_rows(comm, rule, one_hot, weighted):
    kinds = ["table_wise", "row_wise", "table_row_wise", "data_parallel"]
    kinds += [] if rule == "rowwise_adagrad" else CUT
    return differing(comm, kinds, rule, one_hot, weighted, row_order="mixed")


@pytest.mark.full
def test_mean_pooling_keeps_the_bits_too(ranks):
    check(ranks, 4, "adagrad", WEIGHTED, pooling="mean")


@pytest.mark.parametrize("kind", ["column_wise", "grid_shard"])
def test_rowwise_adagrad_keeps_the_bits_under_strips_of_the_default_width(ranks, kind):
    for found in ranks.run(wide_strips, 4, kind, 64):
        assert found == {kind: []}


def test_strips_of_32_columns_sum_squares_in_another_order_so_the_bit_comparison_can_fail(ranks):
    for found in ranks.run(wide_strips, 4, "column_wise", 32):
        assert (
            "sum of t0" in found["column_wise"] and "logits of step 0" not in found["column_wise"]
        )


def wide_strips(comm, kind, column_width):
    # in fp64 another order of the sum shows in the last bits
    tables = {"dims": (256, 130, 64), "data_type": "fp64"}
    return differing(
        comm, [kind], "rowwise_adagrad", False, False, tables, column_width=column_width
    )


def close_ulps(a, b):
    return torch.allclose(a, b, rtol=4 * torch.finfo(torch.float32).eps, atol=1e-9)


def test_rowwise_adagrad_under_other_strips_is_equal_up_to_the_order_of_one_fp64_sum(ranks):
    """The mean square is a sum of fp64 numbers, rounded to fp32 once: another order shows in about
    one of a hundred million rows.
    """
    for found in ranks.run(odd_strips, 4):
        assert found == {kind: [] for kind in CUT}


def odd_strips(comm):
    return differing(comm, CUT, "rowwise_adagrad", False, True, compare=close_ulps)


def close_sums(a, b):
    return torch.allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("rule", one_of(2, ["rowwise_adagrad", "sgd"]))
def test_pooled_tables_agree_within_a_hundred_thousandth(ranks, rule):
    for found in ranks.run(pooled, 4, rule, close_sums):
        assert found == {kind: [] for kind in OTHERS}


def test_pooled_sums_are_made_in_another_order_so_the_bit_comparison_can_fail(ranks):
    for found in ranks.run(pooled, 4, "sgd", same_bits):
        assert found["row_wise"] and not found["data_parallel"]


def pooled(comm, rule, compare):
    return differing(comm, OTHERS, rule, False, True, compare=compare, mode="pooled")


def test_another_seed_is_another_run(ranks):
    for found in ranks.run(other_seed, 2):
        assert len(found["row_wise"]) == 2 * STEPS + 4 + 3


def other_seed(comm):
    return differing(comm, ["row_wise"], "sgd", True, False, seed=9)
