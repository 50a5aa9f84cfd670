"""Under Lightning every batch is trained exactly once however far one looks ahead, and a run on
ranks is the same run to the last bit.
"""

import csv

import pytest
import torch
from engine.engine_cases import batch_of, make_tables
from jobs import metrics_of, small, validation
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader, IterableDataset
from trainer.runs import compose, fit

from recapp.errors import IdError
from recapp.optim.rules import sgd
from recapp.planner.plan_rules import plan_by_rules
from recapp.planner.planner_settings import PlanRule
from recapp.stored.stored_model import read_manifest, read_meta
from recapp.tables.collections import EmbeddingBagCollection
from recapp.trainer.lookahead import LookAhead
from recapp.trainer.strategy import EmbeddingShardingStrategy

EPOCH = 18  # batches


class StopAfter(Callback):
    """As a callback of the user's would end a run."""

    def __init__(self, steps):
        self.steps = steps

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.should_stop |= trainer.global_step == self.steps


class Reads(Callback):
    """That batches are read ahead, and that nothing is under way once training is over."""

    def on_train_start(self, trainer, pl_module):
        self.ahead = isinstance(trainer.train_dataloader, LookAhead)

    def on_fit_end(self, trainer, pl_module):
        self.left = [c.waiting_ahead for c in trainer.strategy.sharded_tables()]


LIMITS = {
    "two epochs": ["trainer.max_epochs=2"],
    "a limit": ["trainer.max_epochs=2", "trainer.limit_train_batches=7"],
    "a share": ["trainer.max_epochs=2", "trainer.limit_train_batches=0.5"],
    "steps": [f"trainer.max_steps={EPOCH + 5}"],
    "validation in between": [
        "trainer.max_epochs=2",
        "trainer.val_check_interval=5",
        "trainer.limit_val_batches=2",
    ],
    "no validation": ["trainer.max_steps=5", "trainer.limit_val_batches=0"],
    "threads": ["dataset.num_threads=2", "trainer.max_steps=6"],
}


@pytest.mark.parametrize(
    "limit",
    [
        *(
            limit if limit == "two epochs" else pytest.param(limit, marks=pytest.mark.full)
            for limit in LIMITS
        ),
        "a stop",
    ],
)
def test_every_batch_is_trained_once_and_in_order(logs, tmp_path, limit):
    seen = {}
    for depth in (0, 3):
        reads = Reads()
        extra = [reads, *([StopAfter(4)] if limit == "a stop" else [])]
        seen[depth], trainer, _ = fit(
            compose(logs, *LIMITS.get(limit, []), f"engine.look_ahead={depth}"),
            tmp_path / str(depth),
            *extra,
        )
        assert reads.ahead == (depth > 0) and reads.left == [0]
    assert len(seen[0].batches) == trainer.global_step
    assert seen[3].batches == seen[0].batches and seen[3].losses == seen[0].losses
    assert seen[3].validations == seen[0].validations


def test_a_position_counts_what_was_trained_not_what_was_read(logs, tmp_path):
    positions = []

    class Watch(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            positions.append(
                (trainer.datamodule.position.epoch, trainer.datamodule.position.batches)
            )

    config = compose(logs, "trainer.max_steps=3", "engine.look_ahead=2")
    fit(config, tmp_path, Watch())
    assert positions == [(0, 1), (0, 2), (0, 3)]


def test_an_id_outside_its_table_stops_the_run_in_its_own_step(logs, tmp_path):
    sizes = "400,90,60,50,40,4,30,20,9,300,70,60,11,20,30,10,4,9,5,200,150,90,60,30,7,4"
    done = {}
    for depth in (0, 2):
        steps = []

        class Count(Callback):
            def on_train_batch_end(
                self, trainer, pl_module, outputs, batch, batch_idx, steps=steps
            ):
                steps.append(batch_idx)

        with pytest.raises(IdError, match="table C26"):
            fit(
                compose(logs, f"engine.look_ahead={depth}", f"dataset.table_rows=[{sizes}]"),
                tmp_path,
                Count(),
            )
        done[depth] = steps
    assert done[0] == done[2]


# ---- modules and loaders of others


class Theirs(LightningModule):
    """A module with a batch of its own: ids and labels in a tuple."""

    def configure_model(self):
        tables = make_tables()
        torch.manual_seed(0)
        self.tables = EmbeddingBagCollection(tables=tables, device=torch.device("meta"), seed=1)
        self.head = torch.nn.Linear(sum(t.embedding_dim * len(t.feature_names) for t in tables), 1)
        self.losses = []

    def training_step(self, batch, batch_idx):
        ids, labels_B = batch
        loss = torch.nn.functional.mse_loss(self.head(self.tables(ids).values())[:, 0], labels_B)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.head.parameters(), 0.1)


class Stream(IterableDataset):
    """Its length is not known."""

    def __iter__(self):
        for i in range(7):
            yield batch_of(make_tables(), 4, i), torch.arange(4.0)


class Resumable(Stream):
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def whole_tables(problem):
    return plan_by_rules(problem.tables, problem.topology, [PlanRule("table_wise")], name="whole")


def losses_of_others(loader, depth):
    strategy = EmbeddingShardingStrategy(whole_tables, sgd(0.1), look_ahead=depth)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Theirs()
    reads = Reads()
    trainer.callbacks.append(reads)
    trainer.fit(module, loader)
    assert reads.left == [0]
    return module.losses, reads.ahead


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Stream(), batch_size=None),
        lambda: DataLoader(list(Stream()), batch_size=None),
    ],
)
def test_modules_and_loaders_of_others_train_the_same(make):
    (plain, _), (ahead, wrapped), (far, _) = (
        losses_of_others(make(), depth) for depth in (0, 1, 2)
    )
    assert wrapped and len(plain) == 14
    assert plain == ahead == far


def test_a_loader_that_keeps_its_own_position_is_not_read_ahead():
    losses, wrapped = losses_of_others(Resumable(), 1)
    assert len(losses) == 14 and not wrapped


# ---- on ranks


SHOWN = (
    "epoch",
    "step",
    "train_loss",
    "train_auc",
    "val_auc",
    "val_log_loss",
    "val_normalized_entropy",
    "val_calibration",
)


def curve(directory):
    with open(next(directory.rglob("*.csv"))) as file:
        return [[row.get(name) for name in SHOWN] for row in csv.DictReader(file)]


def weights(directory):
    """Of tables and their optimiser, and of the dense part."""
    path = directory / "checkpoints/last.ckpt"
    rows = {(b.table, b.tensor, b.rows, b.cols): b.crc32 for b in read_manifest(path).blocks}
    return rows, {name: value.tolist() for name, value in read_meta(path)["state_dict"].items()}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tmp_path_factory.mktemp("base")


@pytest.fixture(scope="module")
def train(jobs, base):
    def run(name, depth, *overrides, data=True):
        given = small(base / "logs", 4000) if data else []
        more = [
            "trainer.log_every_n_steps=1",
            "trainer.val_check_interval=5",
            f"engine.look_ahead={depth}",
            "logger=csv",
        ]
        return jobs.train(base / name, *given, *more, *overrides)

    return run


@pytest.fixture(scope="module")
def plain(train, base):
    return (
        validation(train("plain", 0, "+plan=mixed")),
        curve(base / "plain"),
        weights(base / "plain"),
    )


@pytest.mark.full
@pytest.mark.parametrize(("depth", "transport"), [(1, "shared_memory"), (2, "gloo")])
def test_a_run_on_ranks_is_the_same_run_to_the_last_bit(train, base, plain, depth, transport):
    found = train(f"ahead{depth}", depth, "+plan=mixed", f"engine.transport={transport}")
    assert (
        validation(found),
        curve(base / f"ahead{depth}"),
        weights(base / f"ahead{depth}"),
    ) == plain
    assert (
        found["collectives_per_step"] == 4
        and 0 < found["input_wait_ms"] < found["exchange_wait_ms"]
    )
    hidden = {
        key.removeprefix("hidden_share_"): share
        for key, share in found.items()
        if key.startswith("hidden_share_")
    }
    assert set(hidden) == {"counts", "ids", "vectors", "gradients", "dense"} and all(
        0 < share < 1 for share in hidden.values()
    )


@pytest.mark.full
def test_so_is_one_that_goes_on_from_a_step_between_validations(train, base, plain):
    train("first", 2, "+plan=mixed", "trainer.max_steps=8")
    found = train(
        "rest",
        1,
        f"ckpt_path={base / 'first'}/checkpoints/last.ckpt",
        "trainer.max_steps=null",
        data=False,
    )
    assert (validation(found), weights(base / "rest")) == (plain[0], plain[2])
    assert metrics_of(base / "rest")["steps"] == metrics_of(base / "plain")["steps"]
