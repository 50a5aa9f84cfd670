"""States of a checkpoint that no run has written: one line each, and what was written loads."""

import math
import shutil
from copy import deepcopy

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import Timer
from trainer.runs import compose, fit

from recapp.errors import CheckpointError
from recapp.optim.optimizer import HybridOptimizer
from recapp.stored.checkpoint import read_manifest, read_meta
from recapp.stored.manifest import to_json
from recapp.stored.meta_file import check_state, write_meta
from recapp.stored.model_manifests import META, CheckpointManifest
from recapp.trainer.keep_checkpoints import KeepSnapshots
from recapp.trainer.restore import check_groups

SETTINGS = (
    "callbacks=early_stopping",
    "optimizer/schedule=plateau",
    "optimizer.restart_tables=['*']",
    "trainer.average={kind: ema, every: 4}",
)
STOPPING = "EarlyStopping{'monitor': 'val_auc', 'mode': 'max'}"
KEPT = (
    "ModelCheckpoint{'monitor': 'val_auc', 'mode': 'max', 'every_n_train_steps': 0, "
    "'every_n_epochs': 1, 'train_time_interval': None}"
)
FIT = ("loops", "fit_loop")
PLATEAU = ("lr_schedulers", 0)
DENSE = ("optimizer_states", 0, "dense")
GONE = ...


class Counts(Callback):
    """A callback of a user's own, which trusts its state."""

    def __init__(self):
        self.steps = 0

    def on_train_batch_end(self, *_):
        self.steps += 1

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state_dict):
        self.steps = int(state_dict["steps"])


def cases():
    """(path in the plain part, wrong values)"""
    odd = ("x", None, [], {}, True, 1.5, -5, 2**70, math.nan)
    yield from (((name,), (GONE, 5, "x", None)) for name in ("callbacks", "loops", "lr_schedulers"))
    yield ("state_dict",), (GONE, [], {}, {"x": 1})
    yield ("pytorch-lightning_version",), (GONE, "x", None)
    yield ("optimizer_states",), (GONE, 5, [], [5], [{}], [{"dense": {}, "sparse": []}])
    yield ("epoch",), odd
    yield ("global_step",), odd
    yield ("ClickData",), (5, [], "x")
    yield ("ClickData", "batches"), odd
    yield ("callbacks", STOPPING), (5, "x", [1])
    yield ("callbacks", STOPPING, "wait_count"), (GONE, *odd)
    yield ("callbacks", STOPPING, "patience"), (GONE, *odd)
    yield ("callbacks", STOPPING, "best_score"), (GONE, 5, None, "x", torch.zeros(3))
    yield ("callbacks", STOPPING, "stopping_reason"), (77, "x")
    yield ("callbacks", KEPT, "best_k_models"), (5, [1], {5: 1})
    yield ("callbacks", KEPT, "best_model_path"), (5, None)
    for key in ("updates", "epoch"):
        yield ("callbacks", "AverageWeights", key), (GONE, *odd)
    yield ("callbacks", "AverageWeights", "updates"), (0,)
    yield ("callbacks", "RestartTables", "epoch"), (GONE, *odd)
    yield ("callbacks", "KeepSnapshots", "kept"), (GONE, 5, "x", [5], ["a\0b"], ["x" * 5000])
    yield ("callbacks", "Timer", "time_elapsed"), (5, {"train": "x"}, {"train": math.inf})
    yield ("callbacks", "Counts"), (5, {"steps": "x"}, {"steps": math.inf}, {"step": 1})
    yield FIT, (GONE, 5, [])
    yield (*FIT, "epoch_progress"), (5, {}, {"total": 5})
    yield (*FIT, "epoch_progress", "current", "completed"), (GONE, *odd)
    yield (*FIT, "epoch_loop.batch_progress", "is_last_batch"), (5, "x", None)
    yield PLATEAU, (5, [], {})
    yield (*PLATEAU, "last_epoch"), (GONE, *odd)
    yield (*PLATEAU, "mode"), (GONE, 5, None, "x")
    yield (*PLATEAU, "best"), (GONE, "x", None, math.nan)
    yield (*PLATEAU, "min_lrs"), (GONE, 5, [], ["x", 0.0])
    yield (*DENSE, "param_groups"), (GONE, 5, [], [{}])
    yield (*DENSE, "param_groups", 0, "lr"), (GONE, "x", None, [], math.nan, math.inf)
    yield (*DENSE, "state"), (GONE, 5, {0: 5}, {10**6: {}})
    yield (*DENSE, "state", 0, "exp_avg"), (5, torch.zeros(3), [])
    yield ("optimizer_states", 0, "sparse"), (GONE, 5, [5])  # [] where all were frozen
    yield ("optimizer_states", 0, "sparse", 0, "lr"), ("x", None, math.nan)
    yield ("weight_average",), (5, {}, {"raw": {}, "average": {}}, {"raw": 5, "average": 5})
    yield ("weight_average", "raw", "model.bottom.0.weight"), (GONE, 5, torch.zeros(1))


def changed(meta, path, value):
    found = deepcopy(meta)
    held = found
    for key in path[:-1]:
        held = held[key]
    if value is GONE:
        held.pop(path[-1])
    else:
        held[path[-1]] = value
    return found


class Judged(Callback):
    """When training begins, restores states that are none, and then the right one once more."""

    def __init__(self, meta):
        self.meta = meta
        self.lines = {}

    def on_train_start(self, trainer, pl_module):
        for path, values in cases():
            for value in values:
                try:
                    self.restore(trainer, changed(self.meta, path, value))
                    line = "nothing was refused"
                except CheckpointError as error:
                    line = str(error)
                self.lines[(*path, repr(value)[:40])] = line
                if line == "nothing was refused":
                    self.restore(trainer, deepcopy(self.meta))
        self.restore(trainer, deepcopy(self.meta))

    def restore(self, trainer, meta):
        connector = trainer._checkpoint_connector
        check_state(meta, "x.ckpt", trains=True)
        connector._loaded_checkpoint = trainer.strategy.weight_average.loaded(meta)
        connector.restore_model()
        connector.restore_datamodule()
        connector.restore_callbacks()
        connector.restore_training_state()


def extra():
    return [Timer(), Counts()]


@pytest.fixture(scope="module")
def first(logs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("first")
    snapshots = KeepSnapshots(folder / "checkpoints", 2)
    fit(compose(logs, *SETTINGS, "trainer.max_epochs=1"), folder, *extra(), snapshots)
    return folder / "checkpoints/last.ckpt"


def test_each_state_that_no_run_has_written_is_one_line_and_the_right_one_loads(
    logs, first, tmp_path
):
    config = compose(logs, *SETTINGS, "trainer.max_epochs=2")
    judged = Judged(read_meta(first))
    runs = []
    for name, more in (("plain", []), ("judged", [judged])):
        snapshots = KeepSnapshots(tmp_path / name / "checkpoints", 2)
        seen, _, _ = fit(config, tmp_path / name, *extra(), snapshots, *more, ckpt_path=first)
        runs.append(seen.losses)
    taken = [case for case, line in judged.lines.items() if line == "nothing was refused"]
    assert len(judged.lines) > 150 and not taken, "\n".join(map(str, taken))
    assert all(len(line.splitlines()) == 1 for line in judged.lines.values())
    assert "Counts" in judged.lines["callbacks", "Counts", "{'steps': 'x'}"]
    assert len(runs[0]) > 10 and runs[0] == runs[1]


def test_no_param_groups_of_tables_are_right_only_if_all_were_frozen(logs, first, tmp_path):
    damaged = tmp_path / "damaged.ckpt"
    shutil.copytree(first, damaged)
    manifest = read_manifest(damaged)
    meta = changed(read_meta(damaged), ("optimizer_states", 0, "sparse"), [])
    files = manifest.files | {META: write_meta(damaged, META, meta)}
    (damaged / "manifest.json").write_text(
        to_json(CheckpointManifest(damaged, manifest.info, files, manifest.blocks))
    )
    with pytest.raises(CheckpointError, match="it has no param group of table C1, which it has tr"):
        fit(compose(logs, *SETTINGS, "trainer.max_epochs=2"), tmp_path, *extra(), ckpt_path=damaged)
    frozen = dict.fromkeys(manifest.rules, "frozen")
    optimizer = HybridOptimizer(
        torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))]), [{"name": "", "tables": ["C1"]}]
    )
    check_groups([optimizer], meta, frozen)
