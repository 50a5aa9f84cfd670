"""Lightning's loop with recorded steps. A recorder takes the place of a CUDA graph, as in
`test_step_graph.py`.
"""

import re
import signal
from collections import Counter
from contextlib import ExitStack

import lightning
import pytest
import torch
import torch.distributed as dist
from gpu_first.recorder import Recorder, captured
from kernels.test_step_graph import B, Model, batch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger
from torch.nn.functional import dropout
from torch.utils.data import DataLoader
from torchmetrics import Metric

from recapp import run_ranks
from recapp.errors import IdError, TrainingError
from recapp.graphs.recorded_batch import WARM_UP
from recapp.optim.rules import rowwise_adagrad
from recapp.processes.stopping import Stopped
from recapp.sharding.sharding_plan import ShardingPlan, tile
from recapp.sharding.sharding_types import CandidateRanks
from recapp.tasks.task import ClickTask
from recapp.trainer.keep_checkpoints import EndTogether
from recapp.trainer.module import TaskModule, in_place
from recapp.trainer.strategy import EmbeddingShardingStrategy
from recapp.transport.communicator import leave_process_group

EPOCH = WARM_UP + 2  # batches: one is recorded, one is repeated


SETTINGS = {
    "accelerator": "cpu",
    "max_epochs": 2,
    "gradient_clip_val": 0.5,
    "log_every_n_steps": 2,
}


class Branches(Model):
    """Draws random numbers, and has a loss more."""

    def forward(self, batch):
        return dropout(super().forward(batch), 0.25, self.training)

    def extra_losses(self, outputs, batch, loss):
        return {"size": outputs.square().mean()}


class Log(Logger):
    name = version = None

    def __init__(self):
        super().__init__()
        self.rows = []

    def log_hyperparams(self, *settings):
        pass

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, metrics))


class Run:
    """A training in epochs of `EPOCH` batches. `captures` counts the recorded steps."""

    def __init__(self, folder, graphs=True, callbacks=(), ranks=1, **settings):
        self.captures = 0
        self.log = Log()
        places = CandidateRanks([*range(ranks)], [[*range(ranks)]])
        kind = "table_wise" if ranks == 1 else "row_wise"
        plan = {t.name: tile(t, kind, places) for t in TABLES}
        self.strategy = EmbeddingShardingStrategy(
            ShardingPlan(plan, ranks), rowwise_adagrad(0.125), backend="triton", graphs=graphs
        )
        self.strategy.capture = self.capture
        self.end = EndTogether(lambda trainer: None)
        self.trainer = lightning.Trainer(
            strategy=self.strategy,
            devices=ranks,
            logger=self.log,
            callbacks=[
                self.end,
                *callbacks,
                ModelCheckpoint(folder, filename="{step}", save_top_k=-1),
            ],
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            **{**SETTINGS, **settings},
        )
        self.module = TaskModule(
            ClickTask(["auc"]),
            Branches,
            # recorded steps read the rate in fp32, which has this number
            lambda parameters: torch.optim.Adam(parameters, 2**-7, fused=True),
            lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        )
        first = 50 * dist.get_rank() if ranks > 1 else 0
        self.batches = [batch(first + seed) for seed in range(EPOCH)]

    def fit(self, ckpt_path=None):
        train, validate = (DataLoader(b, batch_size=None) for b in (self.batches, [batch(99)]))
        self.trainer.fit(self.module, train, validate, ckpt_path=ckpt_path)
        return self

    def capture(self, step):
        value, recorder = captured(step, [*self.tensors(), *self.logged()])
        self.captures += 1
        assert not recorder.counts()["waits"] and not recorder.counts()["pins"]
        return value, recorder.replay

    def tensors(self):
        tables = self.strategy.sharded_tables()
        rows = [b.data for t in tables for store in t.stores for b in store.blocks()]
        state = [x for s in self.trainer.optimizers[0].state.values() for x in s.values()]
        return [*(p.data for p in self.module.parameters()), *rows, *state]

    def logged(self):
        recorded = self.strategy.recorded
        states = [x for m in self.module.train_metrics.values() for x in m.metric_state.values()]
        return [
            *(recorded._graph._verdict.stopped, recorded._norm_G, *states),
            *(*self.module.buffers(), *self.module._logged.values()),
        ]


TABLES = Model().bags.tables()


def test_recorded_steps_train_and_log_as_lightnings_own(interpreted, tmp_path):
    launched = Run(tmp_path / "launched", graphs=False, max_steps=EPOCH + 1).fit()
    recorded = Run(tmp_path / "recorded", max_steps=EPOCH + 1).fit()
    assert (launched.captures, recorded.captures) == (0, 1)
    assert all(map(torch.equal, recorded.tensors(), launched.tensors()))
    assert recorded.log.rows == launched.log.rows
    names = {name for _, row in launched.log.rows for name in row}
    assert names >= {"train_loss", "train_size", "train_auc", "grad_norm", "val_auc"}


@pytest.mark.full
def test_two_ranks_with_recorded_steps_train_and_log_as_lightnings_own(interpreted, tmp_path):
    def work(graphs):
        run = Run(tmp_path / str(graphs), graphs, ranks=2, max_steps=EPOCH + 1).fit()
        return run.captures, [x.clone() for x in run.tensors()], run.log.rows

    leave_process_group()  # that of an earlier test
    for mine, known in zip(run_ranks(work, True), run_ranks(work, False), strict=True):
        assert (mine[0], known[0]) == (1, 0)
        assert all(map(torch.equal, mine[1], known[1]))
        assert mine[2] == known[2]
        names = {name for _, row in mine[2] for name in row}
        assert names >= {"train_auc", "grad_norm"} or not names  # rank 0 logs


@pytest.mark.full
def test_a_run_goes_on_from_a_checkpoint_between_recorded_steps(interpreted, tmp_path):
    unbroken = Run(tmp_path).fit()
    rates = [group["lr"] for group in unbroken.trainer.optimizers[0].param_groups]
    assert all(isinstance(rate, float) for rate in rates), "schedules and checkpoints have numbers"
    resumed = Run(tmp_path).fit(tmp_path / f"step={EPOCH}.ckpt")
    assert (unbroken.captures, resumed.captures) == (1, 1)
    assert all(map(torch.equal, resumed.tensors(), unbroken.tensors()))
    after = [row for row in unbroken.log.rows if row[0] > EPOCH]
    assert resumed.log.rows[-len(after) :] == after


@pytest.mark.full
@pytest.mark.parametrize("fault", ["id", "loss"])
def test_a_fault_of_a_recorded_step_ends_the_run_with_the_weights_before_it(
    interpreted, tmp_path, fault
):
    run = Run(tmp_path / "a")
    if fault == "id":
        run.batches[-1].sparse.values()[B + 2] = 9
    else:
        run.batches[-1].dense_BI[0, 0] = torch.inf
    named = f"feature b has the id 9 (step {EPOCH})" if fault == "id" else f"step {EPOCH}: the loss"
    with pytest.raises(IdError if fault == "id" else TrainingError, match=re.escape(named)):
        run.fit()
    assert run.captures == 1 and not list((tmp_path / "a").glob("*"))
    known = Run(tmp_path / "b", max_steps=EPOCH - 1).fit()
    assert all(map(torch.equal, run.tensors(), known.tensors()))


class Signal(Callback):
    """Reports a signal before the last step of an epoch."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == EPOCH - 1:
            trainer.callbacks[0]._add_to_report(trainer, signal.SIGTERM)


@pytest.mark.full
def test_a_signal_ends_a_run_after_a_recorded_step(interpreted, tmp_path):
    run = Run(tmp_path, callbacks=[Signal()])
    with pytest.raises(Stopped):
        run.fit()
    assert (run.captures, run.trainer.global_step) == (1, EPOCH)


class Count(Callback):
    """Counts what Lightning gives the device from the end of a batch to the end of the next."""

    def __init__(self):
        self.recorder = Recorder()
        self.window = ExitStack()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == WARM_UP:
            self.window.enter_context(self.recorder.recording())
        if batch_idx == WARM_UP + 1:
            self.window.close()


@pytest.mark.full
def test_a_repeated_step_is_one_launch_among_few_small_operations(interpreted, tmp_path):
    count = Count()
    run = Run(tmp_path, callbacks=[count], max_steps=EPOCH, log_every_n_steps=EPOCH + 1)
    run.batches.append(batch(EPOCH))  # is read ahead
    run.fit()
    names = [entry.name for entry in count.recorder.entries if entry.kind == "operation"]
    assert count.recorder.counts()["launches"] == 1
    # the batch, new rates, the loss, which Lightning divides and clones, and two values to log
    made = {"_foreach_copy_": 2, "copy_": 1, "clone": 3, "div": 1}
    assert Counter(names) == made


class Within(Callback):
    """Looks at gradients."""

    def on_after_backward(self, trainer, pl_module):
        pass


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"callbacks": [Within()]}, "callbacks that act within a step (Within)"),
        *(
            pytest.param(*more, marks=pytest.mark.full)
            for more in (
                ({"accumulate_grad_batches": 2}, "trainer.accumulate_grad_batches=2: the host"),
                ({"detect_anomaly": True}, "trainer.detect_anomaly=true: the host"),
            )
        ),
    ],
    ids=lambda case: next(iter(case)) if isinstance(case, dict) else "",
)
def test_a_note_says_why_a_run_is_not_recorded(interpreted, tmp_path, capsys, settings, why):
    run = Run(tmp_path, max_steps=1, limit_val_batches=0, **settings).fit()
    assert not run.captures
    assert f"engine.graph=auto: steps are launched one by one, without a CUDA graph: {why}" in (
        capsys.readouterr().err
    )


def test_on_a_cpu_nothing_is_recorded_and_nothing_is_said(interpreted, tmp_path, capsys):
    run = Run(tmp_path, max_steps=1, limit_val_batches=0)
    run.strategy.capture = None
    run.fit()
    assert run.trainer.global_step == 1 and "CUDA graph" not in capsys.readouterr().err


class Rebinds(Metric):
    def __init__(self):
        super().__init__()
        self.add_state("total", torch.tensor(0.0), "sum")

    def update(self, value):
        self.total = self.total + value

    def compute(self):
        return self.total


def test_the_state_of_a_metric_stays_where_a_recorded_step_adds_to_it():
    metric = Rebinds()
    total = metric.total
    with in_place([metric]):
        metric.update(2.0)
    assert metric.total is total and total == 2
    with pytest.raises(ValueError, match="a capture has failed"), in_place([metric]):
        metric.update(1.0)
        raise ValueError("a capture has failed")
    assert metric.total is total and total == 2
    with in_place([metric]):
        metric.reset()
    assert metric.total is total and total == 0
