"""`train` and `data`: whole training steps of DLRMs on several ranks.

`train` compares plans, and with `compile=true` the dense part under torch.compile, in the same
rounds. A step is forward, loss, backward (which updates tables, while DDP reduces dense gradients)
and Adam for the dense part, on batches in memory.

`data` measures how fast Parquet becomes batches, stage by stage, and how much reading slows
training:

    parquet    decompressed into Arrow's columns
    decoded    + ids, numbers and labels as arrays, checked and transformed
    batches    + shuffled, cut into batches, as a rank gets them

Each stage includes the one before it. Rates are for one process; a MB is a million bytes of the
columns' Parquet on disk. Then DLRMs train on the same stream and, in the same rounds, on batches of
it that are held in memory; a round counts as the mean of its steps.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count, islice
from statistics import mean
from typing import Any

import torch
from torch import nn

from recapp.benchmarks.session import Session, listed
from recapp.benchmarks.timing import Measured, Steps, Times, compared, in_turn
from recapp.benchmarks.workloads import DENSE, MODELS, NamedModel
from recapp.dataset.data_settings import DataSettings
from recapp.dataset.formats import column_bytes
from recapp.dataset.schema import criteo_schema
from recapp.dataset.sequential_rows import arrow_chunks, decoded_chunks
from recapp.dataset.source import Source, open_source
from recapp.dataset.stream import BatchStream, make_loader
from recapp.engine.sharded_collection import sharded_tables
from recapp.errors import ConfigError
from recapp.models.published_dlrm import DLRM
from recapp.optim.optimizer import hybrid
from recapp.parallel import compile_dense, wrap_dense
from recapp.sharding.sharding_plan import ShardingPlan
from recapp.sparse.keyed_jagged_tensor import Batch, KeyedJaggedTensor
from recapp.tables.config import EmbeddingConfig, IdRule
from recapp.transport.communicator import Comm

MOST_ROWS = 100_000  # of a pass through a stage of reading: enough for a rate
# The batches that are held in memory; steps take them in turn. The rows of fewer batches would stay
# in the caches, and the cost of new ids would then count as a cost of reading.
KEPT_BATCHES = 32


class TrainingStep:
    """The training step of recapp: a DLRM under DDP with sharded tables.

    Args:
        session: The ranks, which meet at a barrier before each step, and the backend.
        model: The shape of the DLRM.
        tables: Its tables.
        plan: The plan of the tables.
        comm: The ranks, through the measured transport.
        compiled: Whether the dense part runs under torch.compile.
    """

    def __init__(
        self,
        session: Session,
        model: NamedModel,
        tables: Sequence[EmbeddingConfig],
        plan: ShardingPlan,
        comm: Comm,
        compiled: bool = False,
    ) -> None:
        torch.manual_seed(0)
        collection = session.shard(tables, plan, comm)
        dlrm = DLRM(collection, DENSE, model.bottom_layers, model.top)
        if compiled:
            compile_dense(dlrm)
        self.model = wrap_dense(
            dlrm, comm, static_graph=True, gradient_as_bucket_view=True, broadcast_buffers=False
        )
        dense = [p for p in dlrm.parameters() if p.requires_grad and p.numel()]
        self.optimizer = hybrid(torch.optim.Adam(dense, lr=1e-3, fused=True), sharded_tables(dlrm))
        self.barrier = session.comm

    def in_memory(self, batches: Sequence[Batch]) -> Steps:
        """Return a contender that trains on batches in memory.

        Args:
            batches: The batches of this rank, which steps take in turn.
        """
        return Steps({"step": in_turn(self.step, batches)}, self.barrier.barrier)

    def from_parquet(self, batches: Iterator[Batch]) -> Steps:
        """Return a contender that trains on each batch after reading it. Its part `read` is the
        wait for the next batch.

        Args:
            batches: The endless batches of this rank.
        """
        read: list[Batch] = []
        parts = {
            "read": lambda _: read.append(next(batches)),
            "train": lambda _: self.step(read.pop()),
        }
        return Steps(parts, self.barrier.barrier)

    def step(self, batch: Batch) -> None:
        """Train on one batch."""
        self.optimizer.zero_grad()
        logits_B = self.model(batch)
        loss: Any = nn.functional.binary_cross_entropy_with_logits(logits_B, batch.labels_B)
        loss.backward()
        self.optimizer.step()


def batches_of(model: NamedModel, features: list[KeyedJaggedTensor]) -> list[Batch]:
    """Return batches with the given ids, and with random dense inputs and labels.

    Args:
        model: The shape of the DLRM.
        features: The ids of each batch.
    """
    torch.manual_seed(1)
    return [
        Batch(
            torch.rand(model.batch_size, DENSE), ids, torch.randint(2, (model.batch_size,)).float()
        )
        for ids in features
    ]


def measure_training(session: Session) -> None:
    """Measure every model under every plan."""
    comm = session.transport(session.settings.transport)
    for name in listed(session.settings.models):
        _measure(session, MODELS[name], comm)


def _measure(session: Session, model: NamedModel, comm: Comm) -> None:
    tables = model.workload().tables()
    features = model.workload().batches(comm.rank)
    batches = batches_of(model, features)
    steps: dict[str, Steps] = {}
    for name in session.rules:
        plan = session.plan(name, tables, features)
        for compiled in (False, True)[: 1 + session.settings.compile]:
            step = TrainingStep(session, model, tables, plan, comm, compiled)
            steps[f"{name}, compiled" if compiled else name] = step.in_memory(batches)
    measured = session.measure(model.name, steps)
    fastest = min(measured.values(), key=lambda each: each.median())
    for name, result in measured.items():
        session.add(
            {
                "model": model.name,
                "plan": name,
                "transport": comm.transport,
                "threads": torch.get_num_threads(),
                **compared(result, {"best_plan": fastest}),
                "samples_per_second": model.batch_size * comm.world / result.median() * 1e3,
            }
        )


# ---- reading


class Nothing:
    """A contender on a rank that has no part in a measurement."""

    def run(self, steps: int) -> Times:
        """Run nothing and return no times."""
        return {}


def measure_data(session: Session) -> None:
    """Measure the stages of reading, then training from Parquet and from memory."""
    dataset = session.settings.dataset.scaled
    comm = session.transport(session.settings.transport)
    source = open_source(dataset.path, criteo_schema())
    _measure_stages(session, source.slice(0, MOST_ROWS), dataset)
    for model in listed(session.settings.models):
        for plan in session.rules:
            _measure_reading(session, MODELS[model], source, dataset, plan, comm)


def endless(stream: BatchStream, workers: int) -> Iterator[Batch]:
    """Yield the batches of a stream, epoch after epoch.

    Args:
        stream: The batches of this rank.
        workers: The number of processes that read; 0 for this process.
    """
    loader = make_loader(stream, workers)
    for epoch in count():
        stream.set_position(epoch, 0)
        yield from loader


def stream_of(
    source: Source, dataset: DataSettings, batch_size: int, rank: int, world: int
) -> BatchStream:
    """Return a rank's part of the stream of batches that training reads.

    Args:
        source: The rows.
        dataset: The settings of the data set.
        batch_size: The samples of all ranks together.
        rank: The rank that gets the part.
        world: The number of ranks.
    """
    return BatchStream(
        source,
        criteo_schema(),
        batch_size=batch_size,
        lanes=dataset.lanes,
        shuffle_rows=dataset.shuffle_rows,
        rank=rank,
        world=world,
        dense_transform=dataset.dense_transform,
    )


def _measure_stages(session: Session, source: Source, dataset: DataSettings) -> None:
    schema = criteo_schema()
    batch_size = min(dataset.batch_size, source.rows // dataset.lanes * dataset.lanes)
    stages: dict[str, Callable[[int], object]] = {
        "parquet": lambda _: deque(arrow_chunks(source), 0),
        "decoded": lambda _: deque(decoded_chunks(source, schema, dataset.dense_transform), 0),
        "batches": lambda _: deque(make_loader(stream_of(source, dataset, batch_size, 0, 1)), 0),
    }
    contenders = {
        name: Nothing() if session.comm.rank else Steps({"step": read})
        for name, read in stages.items()
    }
    row_groups = {(segment.file, segment.row_group) for segment in source.segments}
    size = sum(column_bytes(source.files[file], row_group) for file, row_group in row_groups)
    for name, measured in session.measure(f"reading {source.rows:,} rows", contenders).items():
        seconds = measured.median() / 1e3
        session.add(
            {
                "stage": name,
                "rows_per_second": source.rows / seconds,
                "mb_per_second": size / 1e6 / seconds,
                **compared(measured, {"memory": None}),
                "decode_share": None,
            }
        )


def _measure_reading(
    session: Session,
    model: NamedModel,
    source: Source,
    dataset: DataSettings,
    plan_name: str,
    comm: Comm,
) -> None:
    world = session.comm.world
    batch_size = model.batch_size * world
    if source.rows < batch_size:
        raise ConfigError(
            f"dataset.path has {source.rows:,} rows, fewer than a batch of {model.name} on "
            f"{world} ranks: {batch_size:,}"
        )
    id_rule = IdRule(dataset.id_rule)
    tables = [replace(t, id_rule=id_rule) for t in model.workload().tables()]
    batches = endless(
        stream_of(source, dataset, batch_size, session.comm.rank, world), dataset.num_workers
    )
    first_batches = list(islice(batches, KEPT_BATCHES))
    plan = session.plan(plan_name, tables, [batch.sparse for batch in first_batches])
    training = TrainingStep(session, model, tables, plan, comm)
    contenders = {
        "parquet": training.from_parquet(batches),
        "memory": training.in_memory(first_batches),
    }
    measured = {
        name: mean_of_rounds(times)
        for name, times in session.measure(f"training {model.name}", contenders).items()
    }
    for name, result in measured.items():
        reads = name == "parquet"
        session.add(
            {
                "stage": f"{model.name} from {name}",
                "model": model.name,
                "plan": plan_name,
                "rows_per_second": batch_size / result.median() * 1e3,
                "mb_per_second": None,
                **compared(result, {"memory": measured["memory"] if reads else None}),
                "decode_share": result.median("read") / result.median() if reads else None,
            }
        )


def mean_of_rounds(measured: Measured) -> Measured:
    """Return the same rounds with one step each, whose time is the mean over the round's steps.

    Reading comes in bursts: a chunk of a row group serves several batches. A median of steps would
    not show the steps that wait for a chunk.
    """
    return Measured(
        {part: [[mean(steps)] for steps in rounds] for part, rounds in measured.rounds.items()}
    )
