"""What a run may be asked for: every plan and mode, other ranks and seeds, validation by steps,
stopping early, going on, loggers.

All of it at the command's own defaults on 2 ranks of the pool (tests/jobs.py), on generated logs of
20 steps an epoch. Ids are one-hot but for the sample tables. `pooled` sums in another order: in
double precision that is rounding, and the comparison is sharp. In single precision AUC and log loss
are held to the tolerance that docs/concepts.md states.
"""

import csv
import itertools
import re
from pathlib import Path

import pytest
from compilers import needs_compiler
from jobs import command, metrics_of, small, validation

from recapp.stored.stored_model import read_manifest, verify

pytestmark = pytest.mark.full

HOSTS = "topology.hosts=2"
CUT = "++plan.column_width=5"  # tables are 16 wide: four strips, the last of one column
SEVEN = {
    "table_wise": [],
    "row_wise": [],
    "column_wise": [CUT],
    "table_row_wise": [HOSTS],
    "grid_shard": [HOSTS, CUT],
    "data_parallel": [],
    "mixed": [],
}
SAMPLE = [
    "dataset=sample",
    "dataset.generate.rows=6000",
    "dataset.id_rule=hash",
    "tables.max_rows=20000",
    "dataset.lanes=8",
    "dataset.table_dims={large_table:16,wide_table:256,small_table:8}",
    "dataset.batch_size=256",
    "dataset.val_batch_size=256",
]
DOUBLE = ["trainer.precision=64-true", "tables.data_type=fp64"]
EXPECTED = (
    "step ",
    "writing ",
    "compiling kernels ",
    "compiled in ",
    "stopped early at step ",
    "torch.compile has ",
)
REPLACED = ": the checkpoints of an earlier run are deleted: "  # tests share names of runs
# of AUC and log loss, absolute (docs/concepts.md); of every metric, relative
SINGLE_APART = 0.005
DOUBLE_APART = 1e-9
SCHEDULE = [
    "optimizer/schedule=warmup_poly",
    "optimizer.schedule.warmup_steps=10",
    "optimizer.schedule.decay_start=15",
    "optimizer.schedule.decay_steps=100",
]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The data sets, and a directory per run."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def train(jobs, base):
    """`train(name, *overrides)` on the generated logs: metrics; nothing but progress may be said on
    standard error.
    """

    def run(name, *overrides, world=2, data=None):
        found = jobs.train(
            base / name,
            *(small(base / "logs") if data is None else data),
            *overrides,
            world=world,
        )
        for file in (base / name).glob("rank*.err"):
            lines = [line for line in file.read_text().splitlines() if REPLACED not in line]
            assert [line for line in lines if not line.startswith(EXPECTED)] == []
        return found

    return run


@pytest.fixture(scope="module")
def go_on(train, base):
    """`go_on(name, other, *overrides)`: train on from the last checkpoint of the run `other`."""

    def run(name, other, *overrides, world=2):
        return train(
            name,
            f"ckpt_path={base / other}/checkpoints/last.ckpt",
            *overrides,
            world=world,
            data=(),
        )

    return run


def last(base, name):
    """The manifest of a run's last checkpoint."""
    return read_manifest(Path(base, name, "checkpoints/last.ckpt"))


# ---- plans and modes


@pytest.fixture(scope="module", params=[2, 4])
def whole(request, train):
    """What every plan must give: its number of ranks and the metrics of table_wise."""
    return request.param, validation(
        train(f"whole{request.param}", "+plan=table_wise", world=request.param)
    )


@pytest.mark.parametrize("plan", SEVEN)
def test_the_plan_does_not_change_the_model_by_a_bit(train, whole, plan):
    world, expected = whole
    found = train(f"{plan}{world}", f"+plan={plan}", *SEVEN[plan], world=world)
    assert validation(found) == expected and found["plan"] == plan
    assert found["collectives_per_step"] == 4 + (CUT in SEVEN[plan])


@pytest.mark.parametrize(
    ("plan", "cells"),
    [("column_wise", 4), ("grid_shard", 8), ("row_wise", 2), ("table_row_wise", 2)],
)
def test_those_plans_really_cut(base, train, plan, cells):
    world = 4 if HOSTS in SEVEN[plan] else 2
    train(f"cut_{plan}", f"+plan={plan}", *SEVEN[plan], "trainer.max_steps=1", world=world)
    shards = last(base, f"cut_{plan}").info["plan"]["tables"]["C1"]["shards"]
    assert len(shards) == cells and len({tuple(rectangle) for _, *rectangle in shards}) == cells


def test_without_a_plan_recapp_decides_and_the_model_stays_the_same(train):
    found = train("automatic")
    assert found["plan"] == "automatic" and validation(found) == validation(
        train("chosen", "+plan=row_wise")
    )


@needs_compiler
def test_a_compiled_dense_part_trains_the_same_model_up_to_rounding(train, base):
    plain = train("not_compiled", "+plan=row_wise")
    compiled = train("compiled", "+plan=row_wise", "engine.compile=true")
    assert compiled["val_log_loss"] == pytest.approx(plain["val_log_loss"], abs=1e-4)
    (said,) = [
        line
        for line in (base / "compiled/rank0.err").read_text().splitlines()
        if line.startswith("torch.compile has ")
    ]
    assert (
        "model.bottom" in said
        and "model.top" in said
        and "embedding" not in said
        and "metrics" not in said
    )


def test_single_tables_and_globs_can_be_overridden(base, train):
    train(
        "overridden",
        "+plan=mixed",
        "+plan.tables.C3=row_wise",
        "+plan.tables={C2*: data_parallel, C2: table_wise}",
        "trainer.max_steps=2",
    )
    kinds = {
        name: table["sharding_type"]
        for name, table in last(base, "overridden").info["plan"]["tables"].items()
    }
    assert (kinds["C1"], kinds["C2"], kinds["C3"], kinds["C20"], kinds["C26"]) == (
        "row_wise",
        "table_wise",
        "row_wise",
        "data_parallel",
        "data_parallel",
    )


@pytest.fixture(scope="module")
def unique(base, train):
    """What pooled tables must come close to, in double and in single precision; and the sample
    data's settings.
    """
    data = [*SAMPLE, f"dataset.path={base / 'sample'}"]
    return [
        validation(train("unique", "+plan=table_wise", "plan.mode=unique", *precision, data=data))
        for precision in (DOUBLE, [])
    ], data


@pytest.mark.parametrize(
    "asked", ["planner.mode=pooled", "+plan=row_wise", "+plan=grid_shard", "+plan=mixed"]
)
def test_pooled_tables_train_the_same_model_up_to_rounding(base, train, unique, asked):
    plan = asked.partition("=")[2]
    more = (
        [f"+plan={plan}", *(x for x in SEVEN[plan] if x != CUT), "plan.mode=pooled"]
        if plan in SEVEN
        else [asked]
    )
    (double, single), data = unique
    assert validation(train("pooled", *more, *DOUBLE, data=data)) == pytest.approx(
        double, rel=DOUBLE_APART
    )
    found = train("pooled", *more, data=data)
    for name in ("val_auc", "val_log_loss"):
        assert found[name] == pytest.approx(single[name], abs=SINGLE_APART)
    replicated = plan == "data_parallel"
    assert {table["mode"] for table in last(base, "pooled").info["plan"]["tables"].values()} == {
        "replicated" if replicated else "pooled"
    }


def test_on_the_sample_tables_mixed_cuts_rows_columns_and_nothing(base, train):
    data = [
        *SAMPLE,
        f"dataset.path={base / 'sample'}",
        "tables.max_rows=100001",
        "dataset.table_dims={large_table:128,wide_table:256,small_table:32}",
    ]
    found = train("mixed_sample", "+plan=mixed", "trainer.max_steps=5", "optimizer=sgd", data=data)
    plan = last(base, "mixed_sample").info["plan"]["tables"]
    assert {name: plan[name]["sharding_type"] for name in plan} == {
        "large_table": "row_wise",
        "wide_table": "column_wise",
        "small_table": "table_wise",
    }
    assert len(plan["wide_table"]["shards"]) == 4 and found["collectives_per_step"] == 4


# ---- how long, how often


def test_max_steps_lets_a_run_go_on_over_several_epochs(base, train):
    found = train("epochs", "+plan=mixed", "trainer.max_steps=45")
    assert found["steps"] == 45 and last(base, "epochs").position == {
        "epoch": 2,
        "batches": 5,
        "batch_size": 256,
    }
    assert [row["step"] for row in validations(base, "epochs")] == ["19", "39", "44"]


def test_validation_every_n_steps_counts_across_epochs_with_its_own_batches(base, train):
    train(
        "often",
        "+plan=mixed",
        "trainer.max_steps=45",
        "trainer.val_check_interval=7",
        "trainer.limit_val_batches=2",
        "dataset.val_batch_size=128",
    )
    assert [row["step"] for row in validations(base, "often")] == [
        "6",
        "13",
        "20",
        "27",
        "34",
        "41",
        "44",
    ]


def test_training_stops_when_validation_has_stopped_growing(base, train):
    found = train("early", "+plan=mixed", "callbacks=early_stopping", "trainer.max_epochs=9")
    aucs = [float(row["val_auc"]) for row in validations(base, "early")]
    assert found["steps"] == 20 * len(aucs) < 180 and max(aucs) == found["val_auc"] == aucs[-3]
    assert found["checkpoint_step"] == found["steps"] - 40
    why = (
        f"step {found['steps']}/180: Monitored metric val_auc did not improve in the last 2 records"
    )
    summary = (base / "early/rank0.out").read_text().partition("Summary")[2]
    assert f"stopped early at {why}" in (base / "early/rank0.err").read_text() and found[
        "stopped"
    ].startswith(why)
    assert re.search(rf"^stopped early +{re.escape(why[:30])}", summary, re.MULTILINE)
    assert f".ckpt (step {found['checkpoint_step']} of {found['steps']})\n" in summary


def test_the_best_checkpoint_is_kept_beside_the_last_and_the_metrics_are_its_own(base, train):
    found = train("best", "+plan=mixed", "trainer.max_epochs=3")
    aucs = [float(row["val_auc"]) for row in validations(base, "best")]
    # a second epoch of this little data is one too many
    assert aucs[0] == max(aucs) > aucs[2]
    assert found["checkpoint"].endswith("step_000020.ckpt") and found["val_auc"] == aucs[0]
    assert last(base, "best").metrics["val_auc"] == aucs[2]
    assert {path.name for path in (base / "best").rglob("*.ckpt")} == {
        "step_000020.ckpt",
        "last.ckpt",
    }


@pytest.mark.parametrize("logger", ["csv_and_tensorboard", "none"])
def test_loggers_write_rates_and_metrics_where_they_are_wanted(base, train, logger):
    train(
        f"log_{logger}",
        "+plan=mixed",
        f"logger={logger}",
        "trainer.max_steps=4",
        "trainer.log_every_n_steps=2",
        *SCHEDULE,
    )
    wanted = {"csv", "tensorboard"} & set(logger.split("_and_"))
    assert {path.name for path in (base / f"log_{logger}").iterdir() if path.is_dir()} == {
        "checkpoints",
        *wanted,
    }
    if "csv" in wanted:
        with open(base / f"log_{logger}/csv/metrics.csv") as file:
            rates = [
                {float(v) for k, v in row.items() if k.startswith("lr-") and v}
                for row in csv.DictReader(file)
            ]
        assert [sorted(rate) for rate in rates if rate] == [
            pytest.approx([1e-3 * s / 10, 0.05 * s / 10]) for s in (2, 4)
        ]
    if "tensorboard" in wanted:
        (events,) = (base / f"log_{logger}/tensorboard").glob("events.*")
        assert b"val_auc" in events.read_bytes()


def validations(base, name):
    """The rows of a run's CSV log that hold a validation."""
    with open(base / name / "csv/metrics.csv") as file:
        return [row for row in csv.DictReader(file) if row["val_auc"]]


# ---- going on


@pytest.fixture(scope="module")
def unbroken(base, train):
    """Two epochs in one piece; the metrics at their end."""
    train("unbroken", "+plan=mixed", *SCHEDULE, "trainer.max_epochs=2")
    return last(base, "unbroken").metrics


@pytest.mark.parametrize("stop", ["trainer.max_epochs=1", "trainer.max_steps=27"])
def test_going_on_gives_the_bits_of_the_unbroken_run_whatever_the_plan(
    base, train, go_on, unbroken, stop
):
    train("stopped", "+plan=mixed", *SCHEDULE, stop)
    assert last(base, "stopped").metrics != unbroken
    assert go_on("goes_on", "stopped", "trainer.max_epochs=2")["steps"] == 40
    assert last(base, "goes_on").metrics == unbroken
    go_on("goes_on_otherwise", "stopped", "trainer.max_steps=40", "+plan=column_wise", CUT)
    assert last(base, "goes_on_otherwise").metrics == unbroken


@pytest.mark.parametrize("world", [1, 4])
def test_going_on_with_other_ranks_stays_close(base, train, go_on, unbroken, world):
    train("stopped", "+plan=mixed", *SCHEDULE, "trainer.max_steps=33")
    go_on("goes_on", "stopped", "trainer.max_epochs=2", world=world)
    assert last(base, "goes_on").metrics == pytest.approx(unbroken, rel=0.01)


def test_going_on_in_the_same_directory_adds_to_it(base, train, go_on):
    train("same", "+plan=mixed", "trainer.max_epochs=1")
    first = metrics_of(base / "same")
    go_on("same", "same", "trainer.max_epochs=2")
    assert verify(first["checkpoint"]) and last(base, "same").info["step"] == 40
    # its first epoch was the better one
    assert metrics_of(base / "same")["val_auc"] == first["val_auc"]


@pytest.mark.parametrize("stop", ["trainer.max_epochs=1", "trainer.max_steps=20"])
def test_where_nothing_is_left_the_setting_to_raise_is_named(base, train, go_on, stop):
    first = train("over", "+plan=mixed", stop)
    found = go_on("nothing", "over")
    said = (base / "nothing/rank0.out").read_text().splitlines()[0]
    assert (
        said.startswith("nothing is left to train: ")
        and "20 steps behind it (1 epochs and 0 batches)" in said
        and stop in said
    )
    assert validation(found) == validation(first) and found["samples_per_second"] is None


def test_where_nothing_is_left_the_best_checkpoint_of_the_run_counts(base, train, go_on):
    first = train("twice", "+plan=mixed", "trainer.max_epochs=2")
    assert first["checkpoint_step"] == 20  # its first epoch was the better one
    (base / "twice").rename(base / "moved")
    found = go_on("nothing_twice", "moved")
    assert validation(found) == validation(first) and found["steps"] == 40
    assert found["checkpoint_step"] == 20
    assert Path(found["checkpoint"]).parent == base / "moved/checkpoints"


# ---- evaluation


def test_test_data_is_evaluated_where_it_was_named(base, train, jobs):
    train("data", "trainer.max_steps=1")
    files = sorted((base / "logs").glob("*.parquet"))
    train(
        "tested",
        "+plan=mixed",
        f"dataset.test_path=[{files[-2]},{files[-1]}]",
        f"dataset.val_path={files[-1]}",
    )
    named = f"ckpt_path={base}/tested/checkpoints/last.ckpt"
    found = jobs.evaluate(base / "test", named, "split=test")
    assert found["split"] == "test" and not validation(found)
    other = jobs.evaluate(
        base / "test_as_val",
        named,
        f"dataset.val_path=[{files[-2]},{files[-1]}]",
        "+plan=row_wise",
    )
    assert {
        name.removeprefix("test_"): value
        for name, value in found.items()
        if name.startswith("test_")
    } == {name.removeprefix("val_"): value for name, value in validation(other).items()}


# ---- sweeps of other things than plans


def test_a_sweep_over_ranks_and_seeds_compares_them(base, train):
    train("data", "trainer.max_steps=1")
    done = command(
        "train",
        "-m",
        "+plan=row_wise",
        "trainer.devices=1,4",
        "seed=1,2",
        *small(base / "logs"),
        "trainer.max_steps=5",
        f"hydra.sweep.dir={base}/sweep",
        cwd=base,
    )
    assert done.code == 0, done.err
    with open(base / "sweep/comparison.csv") as file:
        rows = list(csv.DictReader(file))
    assert [(row["ranks"], row["seed"]) for row in rows] == [
        (r, s) for r, s in itertools.product("14", "12")
    ]
    for seed in "12":
        one, four = [row for row in rows if row["seed"] == seed]
        assert float(four["val_auc"]) == pytest.approx(float(one["val_auc"]), rel=0.01)
        assert float(four["bytes_per_rank"]) < 0.3 * float(one["bytes_per_rank"])
    assert rows[0]["val_auc"] != rows[1]["val_auc"]


RECIPE = [
    "optimizer/schedule=cosine",
    "optimizer.schedule.total_steps=10",
    "optimizer.restart_tables=['*']",
    "trainer.accumulate_grad_batches=2",
    "trainer.gradient_clip_val=0.1",
    "engine.clip_tables=true",
    "trainer.max_epochs=2",
    "trainer.limit_train_batches=9",  # the last step of an epoch has one batch
]


@pytest.fixture(scope="module")
def recipe_run(train):
    """A recipe of restarts, accumulation and clipping on two ranks, unbroken."""
    return validation(train("recipe", "+plan=table_wise", *RECIPE))


def test_a_recipe_of_several_epochs_is_the_same_under_another_plan(train, recipe_run):
    assert validation(train("recipe_cut", "+plan=column_wise", CUT, *RECIPE)) == recipe_run


@pytest.mark.parametrize("stop", [5, 7])  # at the end of the first epoch, within the second
def test_a_recipe_of_several_epochs_goes_on_exactly(train, go_on, recipe_run, stop):
    half = f"recipe_{stop}"
    train(half, "+plan=row_wise", *RECIPE, f"trainer.max_steps={stop}")
    found = go_on(f"{half}_on", half, "+plan=mixed", "trainer.max_steps=null")
    assert validation(found) == recipe_run


def test_a_step_of_two_batches_trains_as_one_twice_as_large(train):
    exact = ["optimizer=sgd", *DOUBLE, "trainer.limit_train_batches=6"]
    wanted = validation(train("large_batches", *exact, "dataset.batch_size=256"))
    twice = ["trainer.accumulate_grad_batches=2", "trainer.limit_train_batches=12"]
    found = validation(train("small_batches", *exact, *twice, "dataset.batch_size=128"))
    assert found == {name: pytest.approx(value, rel=1e-9) for name, value in wanted.items()}
