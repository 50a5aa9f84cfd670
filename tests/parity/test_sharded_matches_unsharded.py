"""The specification of the engine: after several steps on W ranks, outputs, weights and optimiser
state equal one process on the concatenated batch, for every way of cutting tables, asking for rows,
pooling and updating.
"""

import pytest
from parity.cases import KINDS, RULES, train_and_compare
from tiers import cover

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
AXIS_NAMES = ("kind", "world", "pooling", "weighted", "mode", "rule", "backend", "row_order")


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
        of_rule = {"weight", *(name for name, _ in RULES[rule].state)}
        assert {tensor for _, tensor in compared} in (of_rule, set())


@pytest.mark.parametrize(AXIS_NAMES, cover(2, AXES))
def test_training_equals_one_process_on_the_concatenated_batch(
    ranks, kind, world, pooling, weighted, mode, rule, backend, row_order
):
    check(ranks, 1, kind, world, pooling, weighted, mode, rule, backend, row_order)


@pytest.mark.full
@pytest.mark.parametrize(AXIS_NAMES, cover(3, AXES))
def test_training_equals_one_process_wherever_three_choices_meet(
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
