"""Every setting of `recapp.train` that the command line changes beside `ckpt_path` reaches the
resumed run, or is refused in one line.
"""

from types import SimpleNamespace

import pytest
from jobs import recipe as composed
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping
from tiers import one_of
from trainer.runs import SIZES, STOP, compose, fit

from recapp.errors import RecappError
from recapp.run.recipe import Train
from recapp.run.resume import resumed_run
from recapp.run.run_checks import (
    check_data,
    check_resumed,
    check_training,
)
from recapp.run.training import changed_optimizer
from recapp.settings.records import names_of, to_plain
from recapp.stored.stored_model import read_manifest
from recapp.trainer.restore import ChangedCallbacks


class Every(Callback):
    """A callback of a user's own that keeps its settings in its state, one under another name."""

    def __init__(self, steps=1, label="a"):
        self.inner = {"every": steps}
        self.label = label
        self.seen = 0

    def on_train_batch_end(self, *_):
        self.seen += 1

    def state_dict(self):
        return {"inner": dict(self.inner), "label": self.label, "seen": self.seen}

    def load_state_dict(self, state_dict):
        vars(self).update(state_dict)


ROWS = ",".join(map(str, SIZES[1:]))
OWN = "trainer.test_changed_settings.Every"
FIRST = (
    "callbacks=early_stopping",
    f"+callbacks.own={{_target_: {OWN}, steps: 2}}",
    "+optimizer.schedule={_target_: torch.optim.lr_scheduler.StepLR, step_size: 1, gamma: 0.5}",
    "trainer.average={kind: ema, every: 1}",
    "logger=tensorboard",
    "trainer.log_every_n_steps=3",
)
# what objects with a state in the checkpoint have after a resume: (override, look, found)
LIVE = {
    "seed": ("seed=9", lambda run: run.data.seed, 9),
    "dataset.batch_size": ("dataset.batch_size=48", lambda run: run.data.batch_size, 48),
    "dataset.val_batch_size": (
        "dataset.val_batch_size=32",
        lambda run: run.data.settings.val_batch_size,
        32,
    ),
    "dataset.lanes": ("dataset.lanes=4", lambda run: run.data.settings.lanes, 4),
    "dataset.shuffle_rows": (
        "dataset.shuffle_rows=32",
        lambda run: run.data.settings.shuffle_rows,
        32,
    ),
    "tables.frozen": (
        "tables.frozen=[C2]",
        lambda run: run.trainer.strategy.sharded_tables()[0].rules["C2"].name,
        "frozen",
    ),
    "optimizer.dense": (
        "+optimizer.dense.weight_decay=0.25",
        lambda run: run.optimizer.dense.param_groups[0]["weight_decay"],
        0.25,
    ),
    "optimizer.sparse": (
        "optimizer.sparse.lr=0.8",
        lambda run: run.optimizer.sparse_groups[0]["initial_lr"],
        0.8,
    ),
    "optimizer.schedule": (
        FIRST[2].replace("0.5", "0.25"),
        lambda run: run.trainer.lr_scheduler_configs[0].scheduler.gamma,
        0.25,
    ),
    "optimizer.restart_tables": (
        "optimizer.restart_tables=['*']",
        lambda run: "RestartTables" in run.callbacks,
        True,
    ),
    "trainer.max_epochs": ("trainer.max_epochs=3", lambda run: run.trainer.max_epochs, 3),
    "trainer.max_steps": (
        f"trainer.max_steps={STOP + 2}",
        lambda run: run.trainer.global_step,
        STOP + 2,
    ),
    "trainer.val_check_interval": (
        "trainer.val_check_interval=2",
        lambda run: run.trainer.val_check_interval,
        2,
    ),
    "trainer.limit_train_batches": (
        "trainer.limit_train_batches=30",
        lambda run: run.trainer.num_training_batches,
        30,
    ),
    "trainer.limit_val_batches": (
        "trainer.limit_val_batches=1",
        lambda run: run.trainer.num_val_batches,
        [1],
    ),
    "trainer.gradient_clip_val": (
        "trainer.gradient_clip_val=0.5",
        lambda run: run.trainer.gradient_clip_val,
        0.5,
    ),
    "trainer.gradient_clip_algorithm": (
        "trainer.gradient_clip_algorithm=value",
        lambda run: run.trainer.gradient_clip_algorithm,
        "value",
    ),
    "trainer.accumulate_grad_batches": (
        "trainer.accumulate_grad_batches=2",
        lambda run: run.trainer.accumulate_grad_batches,
        2,
    ),
    "trainer.average.decay": (
        "trainer.average.decay=0.75",
        lambda run: run.callbacks["AverageWeights"].settings.decay,
        0.75,
    ),
    "trainer.average.every": (
        "trainer.average.every=2",
        lambda run: run.callbacks["AverageWeights"].average.every,
        2,
    ),
    "trainer.average.start": (
        "trainer.average.start=3",
        lambda run: run.callbacks["AverageWeights"].settings.start,
        3,
    ),
    "trainer.log_every_n_steps": (
        "trainer.log_every_n_steps=7",
        lambda run: run.trainer.log_every_n_steps,
        7,
    ),
    "callbacks": (
        "callbacks.early_stopping.patience=5",
        lambda run: run.callbacks["EarlyStopping"].patience,
        5,
    ),
    "callbacks.early_stopping.min_delta": (
        "callbacks.early_stopping.min_delta=0.125",
        lambda run: run.callbacks["EarlyStopping"].min_delta,
        0.125,
    ),
    "callbacks.checkpoint.save_top_k": (
        "callbacks.checkpoint.save_top_k=3",
        lambda run: run.callbacks["ModelCheckpoint"].save_top_k,
        3,
    ),
    "callbacks.own": (
        FIRST[1].replace("2", "6"),
        lambda run: (run.callbacks["Every"].inner, run.callbacks["Every"].label),
        ({"every": 6}, "a"),
    ),
    "logger": ("logger.tensorboard.name=curves", lambda run: run.trainer.logger.name, "curves"),
}
# what no checkpoint holds: the resumed run is built from the settings, which must have the value
OF_SETTINGS = {
    "format": "json",
    "dataset.path": "LOGS",
    "dataset.val_path": "LOGS",
    "dataset.test_path": "LOGS",
    "dataset.val_share": "1/3",
    "dataset.dense_transform": "log3",
    "dataset.seed": 5,
    "dataset.num_threads": 1,
    "dataset.format": "parquet",
    "dataset.bad_rows": "skip:2",
    "dataset.text.delimiter": "ab",
    "dataset.text.header": True,
    "dataset.text.columns": ["a"],
    "dataset.text.quote": "none",
    "dataset.text.encoding": "cp1252",
    "dataset.text.times": {"a": "iso"},
    "dataset.scale": "1/2",
    "dataset.id_rule": "clamp",
    "tables.data_type": "fp16",
    "tables.pooling": "mean",
    "tables.id_rule": "clamp",
    "trainer.devices": 2,
    "trainer.accelerator": "cpu",
    "trainer.precision": "bf16-mixed",
    "trainer.check_val_every_n_epoch": 2,
    "trainer.enable_progress_bar": True,
    "trainer.average.kind": "swa",
    "engine.backend": "torch",
    "engine.transport": "gloo",
    "engine.payload": "bf16",
    "engine.look_ahead": 0,
    "engine.clip_tables": True,
    "engine.compile": True,
    "engine.graph": "off",
    "engine.keep_freed_memory": False,
    "launch.start_method": "spawn",
    "launch.grace": 7.0,
    "launch.timeout": 99.0,
    "planner.mode": "unique",
    "planner.constraints": {"C1": {"modes": ["unique"]}},
    "topology.hosts": 1,
    "topology.memory_bytes": 10**9,
    "topology.reserve_bytes": 10**6,
    "topology.ranks": 2,
    "plan.name": "mine",
    "plan.rules": [{"type": "table_wise"}],
    "plan.mode": "unique",
    "plan.column_width": 8,
    "plan.tables": {"C1": "row_wise"},
    "plan.row_order": "mixed",
    "snapshots": 2,
    "checkpoints": "/elsewhere",
    "resume_data": "ignore",
    "trust": ["trainer"],
    "task.label_smoothing": 0.1,
    "model.bottom_layers": [8, 16],
    "metrics.names": ["log_loss", "auc"],
    "metrics.group": "C1",
    "metrics.by": ["C2"],
    "metrics.buckets": 5,
    "metrics.bootstrap": 20,
}
BESIDE = ("+plan=row_wise", "trainer.gradient_clip_val=1")  # what some of these need
# what a run that goes on cannot change: (overrides, pattern of the line)
REFUSED = {
    "ensemble": ("ensemble=2", "ensemble"),
    "ckpt_path": ("ckpt_path=nothing.ckpt", "nothing.ckpt"),
    "model": ("model=fm", "the checkpoint has no table wide_C1"),
    "dataset.naming": ("dataset.naming=exact", "dataset.sparse is empty"),
    "dataset.label": ("dataset.label=click", "click"),
    "dataset.weight": ("dataset.weight=nope", "nope"),
    "dataset.buckets": ("dataset.buckets=4", "bucket"),
    "dataset.missing_flags": ("dataset.missing_flags=true", "missing"),
    "dataset.piecewise": ("dataset.piecewise=2", "piece"),
    "dataset.crosses": ("dataset.crosses=[[C1,C2]]", "C1_x_C2"),
    "dataset.min_frequency": ("dataset.min_frequency=2", "vocabulary"),
    "dataset.times": ("dataset.times={seen: s}", "seen"),
    "dataset.periodic": ("dataset.periodic={I1: 7}", "I1_sin"),
    "dataset.vectors": ("dataset.vectors={v: 2}", "no column for v"),
    "dataset.padding": ("dataset.padding=0", "was trained with dataset.padding=null"),
    "dataset.separator": ("dataset.separator={C1: '|'}", "with dataset.separator=null"),
    "dataset.id_weights": ("dataset.id_weights={C1: w}", "with dataset.id_weights=null"),
    "dataset.table_rows": (f"dataset.table_rows=[401,{ROWS}]", "table C1 is 400 x 16"),
    "dataset.cardinality": ("dataset.cardinality=[7]", "cardinality"),
    "dataset.table_dims": ("dataset.table_dims={C1: 8}", "table C1 is"),
    "dataset.generate": ("dataset.generate={rows: 9}", "generated data of other settings"),
    "tables.dynamic": ("tables=dynamic", "table C1 has a fixed number of rows in the checkpoint"),
    "tables.num_embeddings": ("tables.num_embeddings=dynamic", "tables.max_rows"),
    "tables.tables": ("tables=sample", "tables"),
    "tables.dim": ("tables.dim=8", "table C1 is"),
    "tables.dim_rule": ("tables.dim_rule={}", "table C"),
    "tables.max_rows": ("tables.max_rows=3 tables.id_rule=hash", "table C1 is"),
    "tables.sequences": ("tables.sequences=[C1]", "takes no embedding_collection"),
    "tables.shared": ("tables.shared={C2: C1}", "C2"),
    "tables.wide": ("tables.wide=true", "the checkpoint has no table wide_C1"),
    "tables.collections": ("tables.collections={more: {}}", "more"),
    "tables.values": ("tables.values={C1: nothing.parquet}", "is a start value"),
    "tables.init_range": ("tables.init_range=0.5", "tables.init_range=0.5: is a start value"),
    "optimizer.sparse.initial_accumulator": (
        "+optimizer.sparse.initial_accumulator=0.5",
        r"optimizer\.sparse\.initial_accumulator=0\.5: is a start value",
    ),
}
ELSEWHERE = {
    "dataset.follow": "test_following.py begins to follow, and changes the rest",
    "dataset.follow_time": "of dataset.follow",
    "dataset.follow_seconds": "the same",
    "dataset.follow_idle": "the same",
    "dataset.dense": "naming=criteo names the columns",
    "dataset.sparse": "the same",
    "dataset.hex": "the same",
    "dataset.time_features": "of dataset.times",
    "dataset.label_from": "of labels that are ratings",
    "tables.source": "of tables=sample",
    "tables.lookups": "the same",
    "topology.hardware": "a file of measured costs; no run reads it again",
    "plan.sharding_types": "own code",
    "plan.deal": "of table_row_wise",
    "plan.dp_max_rows": "of plan=hugectr",
    "plan.path": "of plan=file",
    "metrics.output": "of tasks with several",
    "metrics.extra": "as metrics.names",
}
"""Settings that need other settings of a checkpoint than FIRST, or have no other value."""


@pytest.fixture(scope="module")
def last(logs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("before")
    fit(compose(logs, *FIRST, f"trainer.max_steps={STOP}"), folder)
    return folder / "checkpoints/last.ckpt"


def changed(last, *overrides):
    return composed("train", [f"ckpt_path={last}", "trust=[trainer]", *overrides])


def test_each_setting_is_walked_through():
    names = [name for name in names_of(Train) if not name.startswith("tables.dynamic.")]
    groups = {name.rpartition(".")[0] for name in names}
    walked = {*LIVE, *OF_SETTINGS, *REFUSED, *ELSEWHERE}
    walked |= {name.rpartition(".")[0] for name in walked}
    left = [name for name in names if name not in groups | walked]
    assert [name for name in left if name.rpartition(".")[0] not in REFUSED] == []


def test_what_objects_with_a_state_have_after_a_resume_is_what_the_settings_say(
    logs, last, tmp_path
):
    recipe = changed(last, *FIRST[:1], *FIRST[4:5], *(override for override, _, _ in LIVE.values()))
    resumed = resumed_run(recipe)
    of_optimizer = changed_optimizer(
        resumed.manifest.config["optimizer"], to_plain(recipe.optimizer)
    )
    extra = [of_optimizer, resumed.changed_callbacks(tmp_path / "checkpoints")]
    _, trainer, _ = fit(recipe, tmp_path, *extra, ckpt_path=last)
    run = SimpleNamespace(
        trainer=trainer,
        data=trainer.datamodule,
        optimizer=trainer.optimizers[0],
        callbacks={type(callback).__name__: callback for callback in trainer.callbacks},
    )
    found = {name: look(run) for name, (_, look, _) in LIVE.items()}
    assert found == {name: value for name, (_, _, value) in LIVE.items()}
    assert run.callbacks["Every"].seen == 4  # it begins anew: two steps of two batches


def test_a_callback_that_watches_another_metric_begins_anew_and_says_so(capsys):
    before = EarlyStopping("val_auc", mode="max")
    now = EarlyStopping("val_log_loss")
    states = {before.state_key: before.state_dict()}
    changes = ChangedCallbacks([("callbacks.early_stopping", now)])
    changes.on_load_checkpoint(SimpleNamespace(is_global_zero=True), None, {"callbacks": states})
    assert now.state_key not in states
    assert "callbacks.early_stopping is another one than the checkpoint's; it begins anew" in (
        capsys.readouterr().err
    )


def test_what_no_checkpoint_holds_is_in_the_settings_of_the_resumed_run(logs, last):
    wanted = {name: str(logs) if value == "LOGS" else value for name, value in OF_SETTINGS.items()}
    overrides = [f"++{name}={as_text(value)}" for name, value in wanted.items()]
    plain = to_plain(changed(last, *BESIDE, *overrides))
    for name, value in wanted.items():
        found = plain
        for key in name.split("."):
            found = found[key]
        assert found == value, name


def as_text(value):
    """As the command line writes it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {as_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(as_text, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


@pytest.mark.parametrize("name", one_of(3, REFUSED))
def test_what_a_run_that_goes_on_cannot_change_is_refused(last, name):
    override, says = REFUSED[name]
    overrides = override.split(" ") if "{" not in override else [override]
    with pytest.raises(RecappError, match=says) as raised:
        recipe = changed(last, *overrides)
        check_data(recipe)
        check_training(recipe)
        check_resumed(recipe, read_manifest(last))
    assert len(str(raised.value).splitlines()) == 1
