"""`data`: measure how fast Parquet becomes batches, stage by stage, and how much reading slows
training.

    parquet    decompressed into Arrow's columns
    decoded    + ids, numbers and labels as arrays, checked and transformed
    batches    + shuffled, cut into batches, as a rank gets them

Each stage includes the one before it. Rates are for one process; a MB is a million bytes of the
columns' Parquet on disk. Then DLRMs train on the same stream and, in the same rounds, on batches of
it that are held in memory; a round counts as the mean of its steps.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import count, islice, product
from statistics import mean
from typing import Any

from recapp.benchmarks.rivals import Absent
from recapp.benchmarks.session import Session
from recapp.benchmarks.timing import Contender, Measured, Steps, compared
from recapp.benchmarks.whole_step import TrainingStep
from recapp.benchmarks.workloads import MODELS, NamedModel
from recapp.dataset.data_settings import DataSettings
from recapp.dataset.parquet import column_bytes
from recapp.dataset.schema import criteo_schema
from recapp.dataset.sequential_rows import arrow_chunks, decoded_chunks
from recapp.dataset.source import Source, open_source
from recapp.dataset.stream import BatchStream, make_loader
from recapp.errors import ConfigError
from recapp.sparse.batch import Batch
from recapp.tables.config import IdRule
from recapp.transport.communicator import Comm

MOST_ROWS = 100_000  # of a pass through a stage of reading: enough for a rate
# The batches that are held in memory; steps take them in turn. The rows of fewer batches would stay
# in the caches, and the cost of new ids would then count as a cost of reading.
KEPT_BATCHES = 32


def passes(chunks: Callable[[], Iterable[Any]]) -> Steps:
    """Return a contender whose step reads all rows of a source once, up to one stage.

    Args:
        chunks: The function that starts a pass and yields the chunks of the stage.
    """
    return Steps({"step": lambda _: deque(chunks(), maxlen=0)})


def from_parquet(training: TrainingStep, batches: Iterator[Batch]) -> Steps:
    """Return a contender that trains on each batch after reading it. Its part `read` is the wait
    for the next batch.

    Args:
        training: The step.
        batches: The endless batches of this rank.
    """
    read: list[Batch] = []
    parts = {
        "read": lambda _: read.append(next(batches)),
        "train": lambda _: training.step(read.pop()),
    }
    return Steps(parts, training.barrier.barrier)


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


def run(session: Session) -> None:
    """Measure the stages of reading, then training from Parquet and from memory."""
    settings = session.settings
    assert settings.dataset is not None
    dataset = settings.dataset.scaled
    (comm,) = session.open_transports().values()
    source = open_source(dataset.path, criteo_schema())
    _measure_stages(session, source.slice(0, MOST_ROWS), dataset)
    for model, plan in product(settings.model, settings.plans):
        _measure_training(session, MODELS[model], source, dataset, plan, comm)


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
    transform = dataset.dense_transform
    batch_size = min(dataset.batch_size, source.rows // dataset.lanes * dataset.lanes)
    stages: dict[str, Callable[[], Iterable[Any]]] = {
        "parquet": lambda: arrow_chunks(source),
        "decoded": lambda: decoded_chunks(source, schema, transform),
        "batches": lambda: make_loader(stream_of(source, dataset, batch_size, 0, 1)),
    }
    contenders: dict[str, Contender] = {
        name: Absent() if session.comm.rank else passes(chunks) for name, chunks in stages.items()
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


def _measure_training(
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
    kept = list(islice(batches, KEPT_BATCHES))
    plan = session.plan(plan_name, tables, [batch.sparse for batch in kept])
    training = TrainingStep(session, model, tables, plan, comm)
    contenders = {
        "parquet": from_parquet(training, batches),
        "memory": training.in_memory(kept),
    }
    measured = {
        name: mean_of_rounds(times)
        for name, times in session.measure(f"training {model.name}", contenders).items()
    }
    for name, own in measured.items():
        session.add(_record(model, name, plan_name, batch_size, own, measured["memory"]))


def mean_of_rounds(measured: Measured) -> Measured:
    """Return the same rounds with one step each, whose time is the mean over the round's steps.

    Reading comes in bursts: a chunk of a row group serves several batches. A median of steps would
    not show the steps that wait for a chunk.
    """
    return Measured(
        {part: [[mean(steps)] for steps in rounds] for part, rounds in measured.rounds.items()}
    )


def _record(
    model: NamedModel, name: str, plan: str, batch_size: int, own: Measured, memory: Measured
) -> dict[str, Any]:
    reads = name == "parquet"
    return {
        "stage": f"{model.name} from {name}",
        "model": model.name,
        "plan": plan,
        "rows_per_second": batch_size / own.median() * 1e3,
        "mb_per_second": None,
        **compared(own, {"memory": memory if reads else None}),
        "decode_share": own.median("read") / own.median() if reads else None,
    }
