"""What a sweep's report says is best and fastest, and what it calls noise."""

import pytest
from reporting.sweeps import make_sweep

from recapp.reporting.runs import read_runs
from recapp.reporting.variants import (
    Objective,
    changes_speed,
    learned_variants_of,
    metric_verdict,
    speed_variants_of,
    speed_verdict,
    tied_with,
    without_effect,
)


def by_plan(folder, **plans):
    """Return the variants of a sweep with one run for each plan."""
    jobs = [
        {"overrides": [f"+plan={plan}"], "plan": plan, **options} for plan, options in plans.items()
    ]
    return speed_variants_of(read_runs(make_sweep(folder, None, jobs)))


# ---- which is best


def learned(folder, *jobs):
    runs = read_runs(make_sweep(folder, None, jobs))
    objective = Objective()
    without = without_effect(runs, objective)
    return metric_verdict(learned_variants_of(runs, objective), objective, without), without


def test_one_seed_each_says_that_chance_is_not_known(tmp_path):
    jobs = [
        {"overrides": [f"tables.dim={dim}"], "auc": auc} for dim, auc in ((8, 0.71), (16, 0.72))
    ]
    (answer, sure), without = learned(tmp_path, *jobs)
    assert answer == "Best: dim=16, validation AUC 0.72000; higher is better." and without == []
    assert sure.startswith(
        "It leads dim=8 by 0.01000. Each was run with one seed, so how much of that is chance is "
        "not known"
    )


def test_seeds_that_lie_apart_leave_no_doubt(tmp_path):
    jobs = [
        {"overrides": [f"tables.dim={dim}", f"seed={seed}"], "auc": auc + seed / 1000}
        for dim, auc in ((8, 0.71), (16, 0.72))
        for seed in (1, 2)
    ]
    said, _ = learned(tmp_path, *jobs)
    assert said == [
        "Best: dim=16, validation AUC 0.72150 (mean of 2 seeds, 0.72100 to 0.72200); higher is "
        "better."
    ]


def test_what_changes_nothing_makes_no_variants(tmp_path):
    jobs = [
        {
            "overrides": [f"+plan={plan}", f"engine.look_ahead={ahead}", f"tables.dim={dim}"],
            "plan": plan,
            "auc": 0.7 + dim / 1000,
        }
        for plan in ("mixed", "row_wise")
        for ahead in (0, 1)
        for dim in (8, 16)
    ]
    said, without = learned(tmp_path, *jobs)
    assert without == ["plan", "engine.look_ahead"] and said[0].startswith(
        "Best: dim=16, validation AUC 0.71600;"
    )
    assert said[-1].startswith("The plan and engine.look_ahead do not change what is learned")


def test_a_setting_that_differs_once_has_an_effect(tmp_path):
    jobs = [
        {"overrides": [f"+plan={plan}", f"seed={seed}"], "plan": plan, "auc": auc}
        for plan, seed, auc in (
            ("mixed", 1, 0.7),
            ("mixed", 2, 0.71),
            ("row_wise", 1, 0.7),
            ("row_wise", 2, 0.7101),
        )
    ]
    assert learned(tmp_path, *jobs)[1] == []


def test_a_sweep_without_the_metric_has_no_best(tmp_path):
    jobs = [
        {"overrides": [f"seed={n}"], "curves": False, "more": {"val_auc": None}} for n in (1, 2)
    ]
    assert learned(tmp_path, *jobs)[0] == ["No run has val_auc, so none is best."]


def test_a_metric_that_is_no_number_is_none(tmp_path):
    jobs = [
        {"overrides": [f"tables.dim={n}"], "auc": 0.7 if n == 8 else float("nan"), "curves": False}
        for n in (8, 16)
    ]
    assert learned(tmp_path, *jobs)[0][0].startswith("Validation AUC: 0.70000")


# ---- which is fastest


def test_a_clear_order_names_the_fastest_and_the_slowest(tmp_path):
    variants = by_plan(
        tmp_path,
        mixed={"step_ms": 8.0, "dense_ms": 4.0, "spread": 0.05},
        row_wise={"step_ms": 16.0, "dense_ms": 4.1, "spread": 0.05},
    )
    assert speed_verdict(variants) == [
        "Fastest: mixed, 16,000 samples/s. Slowest: row_wise, 8,000 samples/s, 2.00 times fewer."
    ]
    assert tied_with(variants[0], variants) == []


def test_steps_that_overlap_are_noise(tmp_path):
    variants = by_plan(
        tmp_path, mixed={"step_ms": 8.0, "spread": 0.2}, row_wise={"step_ms": 10.0, "spread": 0.2}
    )
    assert speed_verdict(variants) == [
        "The order by speed is noise: mixed is fastest (16,000 samples/s) and row_wise slowest "
        "(12,800 samples/s), but the middle halves of their steps overlap, or differ by no more "
        "than the dense phase, which no plan changes."
    ]


def test_a_dense_phase_that_differs_as_much_as_steps_makes_their_order_noise(tmp_path):
    variants = by_plan(
        tmp_path,
        mixed={"step_ms": 30.7, "dense_ms": 22.8, "spread": 0.1},
        row_wise={"step_ms": 42.7, "dense_ms": 34.5, "spread": 0.1},
        data_parallel={"step_ms": 38.0, "dense_ms": 28.0, "spread": 0.3},
    )
    assert speed_verdict(variants)[0].startswith("The order by speed is noise: mixed is fastest")
    assert len(tied_with(variants[0], variants)) == 2


def test_what_ties_with_the_slowest_is_named_too(tmp_path):
    variants = by_plan(
        tmp_path,
        mixed={"step_ms": 8.0, "dense_ms": 4.0, "spread": 0.05},
        row_wise={"step_ms": 16.0, "dense_ms": 4.1, "spread": 0.05},
        table_wise={"step_ms": 15.5, "dense_ms": 4.0, "spread": 0.05},
    )
    (answer,) = speed_verdict(variants)
    assert answer.endswith(
        "2.00 times fewer. table_wise cannot be told from the slowest: that difference is noise."
    )


def test_a_dense_phase_that_differs_less_than_the_plans_leaves_an_order(tmp_path):
    variants = by_plan(
        tmp_path,
        mixed={"step_ms": 90.0, "dense_ms": 82.0, "spread": 0.02},
        table_wise={"step_ms": 97.0, "dense_ms": 90.0, "spread": 0.02},
        row_wise={"step_ms": 134.0, "dense_ms": 84.0, "spread": 0.02},
    )
    assert speed_verdict(variants) == [
        "Fastest: mixed, 1,422 samples/s. Slowest: row_wise, 955 samples/s, 1.49 times fewer. "
        "table_wise cannot be told from the fastest: that difference is noise."
    ]


def test_dense_phases_of_other_batches_or_ranks_are_not_compared(tmp_path):
    jobs = [
        {
            "overrides": [f"dataset.batch_size={batch}"],
            "batch": batch,
            "step_ms": ms,
            "dense_ms": ms - 4,
            "spread": 0.02,
        }
        for batch, ms in ((64, 10.0), (640, 50.0))
    ]
    variants = speed_variants_of(read_runs(make_sweep(tmp_path, None, jobs)))
    # a longer step with ten times the samples is faster
    assert speed_verdict(variants) == [
        "Fastest: batch_size=640, 12,800 samples/s. Slowest: batch_size=64, 6,400 samples/s, "
        "2.00 times fewer."
    ]


def test_runs_that_cannot_differ_in_speed_are_one_and_their_difference_is_noise(tmp_path):
    jobs = [
        {"overrides": [f"optimizer.dense.lr={lr}"], "step_ms": ms}
        for lr, ms in ((0.01, 80.1), (0.001, 148.0))
    ]
    (only,) = speed_variants_of(read_runs(make_sweep(tmp_path, None, jobs)))
    assert speed_verdict([only]) == [
        "A step takes 114 ms, 9,621 samples/s.",
        "Speed is not compared: the runs do not differ in anything that changes it. That the "
        "medians of their steps go from 80.1 to 148 ms "
        "is noise.",
    ]


@pytest.mark.parametrize(
    ("name", "values", "changes"),
    [
        ("seed", [1, 2], False),
        ("optimizer.dense.lr", [0.1, 0.2], False),
        ("optimizer.sparse.eps", [1e-8, 1e-6], False),
        ("optimizer.schedule.warmup_steps", [10, 20], False),
        ("optimizer/schedule", ["warmup_poly", "null"], False),
        ("trainer.max_steps", [10, 20], False),
        ("callbacks", ["none", "default"], False),
        ("tables.init_range", [0.1, 0.2], False),
        ("optimizer", ["sgd", "adam"], True),
        ("optimizer.dense._target_", ["torch.optim.SGD", "torch.optim.Adam"], True),
        ("dataset.batch_size", [64, 128], True),
        ("trainer.devices", [1, 2], True),
        ("trainer.precision", ["32-true", "bf16-mixed"], True),
        ("tables.dim", [8, 16], True),
        ("model.top_layers", ["[64,1]", "[8,1]"], True),
        ("engine.payload", ["full", "bf16"], True),
        ("dataset", ["sample", "generated"], True),
        ("optimizer.dense.fused", ["true", "false"], True),
    ],
)
def test_only_some_settings_change_the_length_of_a_step(name, values, changes):
    assert changes_speed(name, values) == changes
