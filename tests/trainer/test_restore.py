"""States of a checkpoint that cannot be read: one line each, and what was written loads."""

import math
from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from torch.optim import SGD, Adafactor, Adam, lr_scheduler
from trainer.runs import compose, fit

from recapp.errors import CheckpointError
from recapp.optim.optimizer import HybridOptimizer
from recapp.stored.plain_parts import check_state
from recapp.stored.stored_model import read_meta
from recapp.trainer.keep_checkpoints import KeepSnapshots
from recapp.trainer.restore import restore_in_one_line

SETTINGS = (
    "callbacks=early_stopping",
    "optimizer/schedule=plateau",
    "optimizer.restart_tables=['*']",
    "trainer.average={kind: ema, every: 4}",
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
    yield from (((name,), (GONE, 5, "x", None)) for name in ("callbacks", "loops", "lr_schedulers"))
    yield ("state_dict",), (GONE, [], {}, {"x": 1})
    yield ("pytorch-lightning_version",), (GONE, "x", None)
    yield ("optimizer_states",), (GONE, 5, [], [5], [{}], [{"dense": {}, "sparse": []}])
    yield ("epoch",), ("x", None, -5)
    yield ("ClickData",), (5, [], "x")
    yield ("callbacks", "AverageWeights", "updates"), (GONE, "x")
    yield ("callbacks", "RestartTables", "epoch"), ("x",)
    yield ("callbacks", "KeepSnapshots", "kept"), (GONE, 5, [5], ["a\0b"])
    yield ("callbacks", "Counts"), ({"steps": "x"}, {"steps": math.inf}, {"step": 1})
    yield FIT, (GONE, 5)
    yield (*FIT, "epoch_progress"), (5, {}, {"total": 5})
    yield PLATEAU, (5,)
    yield (*DENSE, "param_groups"), (GONE, 5, [])
    yield (*DENSE, "state"), (GONE, 5)
    yield ("optimizer_states", 0, "sparse"), (GONE, 5, [5])
    yield ("weight_average",), (5, {}, {"raw": {}, "average": {}}, {"raw": 5, "average": 5})
    yield ("weight_average", "raw", "model.bottom.0.weight"), (GONE, 5, torch.zeros(1))


def changed(meta, path, value):
    copy = deepcopy(meta)
    part = copy
    for key in path[:-1]:
        part = part[key]
    if value is GONE:
        part.pop(path[-1])
    else:
        part[path[-1]] = value
    return copy


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


@pytest.fixture(scope="module")
def first(logs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("first")
    snapshots = KeepSnapshots(folder / "checkpoints", 2)
    fit(compose(logs, *SETTINGS, "trainer.max_epochs=1"), folder, Counts(), snapshots)
    return folder / "checkpoints/last.ckpt"


def test_a_state_that_cannot_be_read_is_one_line_and_the_right_one_loads(logs, first, tmp_path):
    config = compose(logs, *SETTINGS, "trainer.max_epochs=2")
    judged = Judged(read_meta(first))
    runs = []
    for name, more in (("plain", []), ("judged", [judged])):
        snapshots = KeepSnapshots(tmp_path / name / "checkpoints", 2)
        seen, _, _ = fit(config, tmp_path / name, Counts(), snapshots, *more, ckpt_path=first)
        runs.append(seen.losses)
    taken = [case for case, line in judged.lines.items() if line == "nothing was refused"]
    assert len(judged.lines) > 40 and not taken, "\n".join(map(str, taken))
    assert all(len(line.splitlines()) == 1 for line in judged.lines.values())
    assert "Counts" in judged.lines["callbacks", "Counts", "{'steps': 'x'}"]
    assert len(runs[0]) > 10 and runs[0] == runs[1]


def restore_of(part, stored, schedules=(), optimizers=()):
    """What restores a part of a checkpoint into schedules and optimisers of one's own."""
    trainer = SimpleNamespace(
        lr_scheduler_configs=[SimpleNamespace(scheduler=schedule) for schedule in schedules],
        optimizers=optimizers,
        callbacks=[],
        ckpt_path="last.ckpt",
    )
    trainer._checkpoint_connector = _CheckpointConnector(trainer)
    trainer._checkpoint_connector._loaded_checkpoint = stored
    restore_in_one_line(trainer)
    return getattr(trainer._checkpoint_connector, f"restore_{part}")


def steps(size=10):
    return lr_scheduler.StepLR(SGD([torch.zeros(1)], 0.1), size)


def test_a_schedule_goes_on_or_begins_anew():
    last, now = steps(), steps()
    last.optimizer.step()
    last.step()
    restore_of("lr_schedulers", {"lr_schedulers": []}, [now])()
    assert now.last_epoch == 0
    restore_of("lr_schedulers", {"lr_schedulers": [last.state_dict()]}, [now])()
    assert now.last_epoch == 1


def test_an_optimizer_does_not_take_the_hyper_parameters_of_another_class():
    stored, now = (HybridOptimizer(kind([torch.zeros(1)]), []) for kind in (Adam, Adafactor))
    checkpoint = {"optimizer_states": [stored.state_dict()]}
    with pytest.raises(CheckpointError, match=r"eps=1e-08 is of another class of optimizer"):
        restore_of("optimizers", checkpoint, optimizers=[now])()


def cosine():
    return lr_scheduler.CosineAnnealingLR(SGD([torch.zeros(1)], 0.1), 100)


@pytest.mark.parametrize(
    ("stored", "now", "says"),
    [
        ([steps()], [cosine()], "CosineAnnealingLR has no T_max"),
        ([steps()], [steps(), steps(5)], "there are 1 states and 2 schedules"),
        ([steps(), steps(5)], [steps()], "there are 2 states and 1 schedules"),
        ([steps()], [], "there are 1 states and 0 schedules"),
    ],
)
def test_schedules_take_states_of_their_own_classes_alone(stored, now, says):
    states = [schedule.state_dict() for schedule in stored]
    with pytest.raises(CheckpointError, match=f"set optimizer.schedule as it was .*{says}"):
        restore_of("lr_schedulers", {"lr_schedulers": states}, now)()
