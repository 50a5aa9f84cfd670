"""`data`: how fast Parquet becomes batches, stage by stage, and how much slower training is for it.

    parquet    decompressed into Arrow's columns
    decoded    + ids, numbers and labels as arrays, checked and transformed
    batches    + shuffled, cut into batches, as a rank gets them

Each stage includes the one before it. Rates are those of one process; a MB is a million bytes of
the columns' Parquet on disk. Then DLRMs are trained from the very same stream and, in the same
rounds, from batches of it that are held in memory; a round counts as the mean of its steps.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count, islice
from statistics import mean
from typing import Any

import torch

from recapp.benchmarks.models import MODELS, NamedModel
from recapp.benchmarks.ranks import open_transports
from recapp.benchmarks.rivals import Absent
from recapp.benchmarks.session import Session
from recapp.benchmarks.setup import make_plan
from recapp.benchmarks.timing import Contender, Measured, Times, ratio, spread, time_steps
from recapp.benchmarks.whole_step import InMemory, TrainingStep
from recapp.dataset.data_scale import scaled
from recapp.dataset.schema import criteo_schema
from recapp.dataset.sequential_chunks import arrow_chunks, decoded_chunks, parquet_bytes
from recapp.dataset.source import Source, open_source
from recapp.dataset.stream import BatchStream, make_loader
from recapp.errors import ConfigError
from recapp.sparse.batch import Batch
from recapp.tables.config import EmbeddingBagConfig, IdRule
from recapp.transport.communicator import Comm

MOST_ROWS = 100_000  # of a pass over a stage of reading: enough for a rate
# Batches that are held in memory, taken in turn. The rows of fewer batches would stay in the
# caches; what fresh ids cost would then count as the cost of reading.
KEPT_BATCHES = 32


class Pass:
    """A contender whose step reads all rows of a source once, up to one stage.

    Args:
        chunks: Starts a pass, and yields what the stage makes of the rows.
    """

    def __init__(self, chunks: Callable[[], Iterable[Any]]) -> None:
        self.chunks = chunks

    def run(self, steps: int) -> Times:
        """Time so many passes."""
        return time_steps([("step", self._read)], steps)

    def _read(self) -> None:
        for _ in self.chunks():
            pass


class FromParquet:
    """A contender that trains on batches as they are read; `read` is the wait for the next one.

    Args:
        training: The step.
        batches: The batches of this rank, without an end.
    """

    def __init__(self, training: TrainingStep, batches: Iterator[Batch]) -> None:
        self.training = training
        self.batches = batches
        self.batch = next(batches)

    def run(self, steps: int) -> Times:
        """Time so many training steps, with reading as a part of its own."""
        return time_steps(
            [("read", self._read), ("train", self._train)], steps, self.training.barrier.barrier
        )

    def _read(self) -> None:
        self.batch = next(self.batches)

    def _train(self) -> None:
        self.training.step(self.batch)


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
    dataset = scaled(session.settings["dataset"])
    torch.set_num_threads(settings["threads"][0])
    (comm,) = open_transports(settings["transport"]).values()
    source = open_source(dataset["path"], criteo_schema())
    _measure_stages(session, source.slice(0, MOST_ROWS), dataset)
    for model in settings["model"]:
        for plan_name, plan_settings in settings["plans"].items():
            _measure_training(session, MODELS[model], source, plan_name, plan_settings, comm)


def stream_of(
    source: Source, dataset: Mapping[str, Any], batch_size: int, rank: int, world: int
) -> BatchStream:
    """Return a rank's part of the stream of batches that training reads.

    Args:
        source: The rows.
        dataset: The settings of the data set.
        batch_size: The samples of all ranks together.
        rank: Whose part.
        world: The number of ranks.
    """
    return BatchStream(
        source,
        criteo_schema(),
        batch_size=batch_size,
        lanes=dataset["lanes"],
        shuffle_rows=dataset["shuffle_rows"],
        rank=rank,
        world=world,
        dense_transform=dataset["dense_transform"],
    )


def _measure_stages(session: Session, source: Source, dataset: Mapping[str, Any]) -> None:
    schema = criteo_schema()
    transform = dataset["dense_transform"]
    batch_size = min(dataset["batch_size"], source.rows // dataset["lanes"] * dataset["lanes"])
    stages: dict[str, Callable[[], Iterable[Any]]] = {
        "parquet": lambda: arrow_chunks(source),
        "decoded": lambda: decoded_chunks(source, schema, transform),
        "batches": lambda: make_loader(stream_of(source, dataset, batch_size, 0, 1)),
    }
    contenders: dict[str, Contender] = {
        name: Absent() if session.comm.rank else Pass(chunks) for name, chunks in stages.items()
    }
    size = parquet_bytes(source)
    for name, measured in session.measure(f"reading {source.rows:,} rows", contenders).items():
        seconds = measured.median() / 1e3
        session.add(
            {
                "stage": name,
                "rows_per_second": source.rows / seconds,
                "mb_per_second": size / 1e6 / seconds,
                **spread(measured),
                "memory_ratio": None,
                "memory_ratio_q1": None,
                "memory_ratio_q3": None,
                "decode_share": None,
                "rounds": len(measured.rounds["step"]),
            }
        )


def _measure_training(
    session: Session,
    model: NamedModel,
    source: Source,
    plan_name: str,
    plan_settings: Mapping[str, Any],
    comm: Comm,
) -> None:
    dataset = scaled(session.settings["dataset"])
    world = session.comm.world
    batch_size = model.batch_size * world
    if source.rows < batch_size:
        raise ConfigError(
            f"dataset.path has {source.rows:,} rows, fewer than a batch of {model.name} on "
            f"{world} ranks: {batch_size:,}"
        )
    tables = [
        EmbeddingBagConfig(
            name=t.name,
            num_embeddings=t.num_embeddings,
            embedding_dim=t.embedding_dim,
            feature_names=t.feature_names,
            id_rule=IdRule(dataset["id_rule"]),
        )
        for t in model.workload().tables()
    ]
    batches = endless(
        stream_of(source, dataset, batch_size, session.comm.rank, world), dataset["num_workers"]
    )
    kept = list(islice(batches, KEPT_BATCHES))
    plan = make_plan(
        plan_name, plan_settings, tables, session.comm, [batch.sparse for batch in kept]
    )
    training = TrainingStep(model, tables, plan, comm, session.comm, session.settings["backend"])
    contenders: dict[str, Contender] = {
        "parquet": FromParquet(training, batches),
        "memory": InMemory(training, kept),
    }
    measured = {
        name: mean_of_rounds(times)
        for name, times in session.measure(f"training {model.name}", contenders).items()
    }
    for name, own in measured.items():
        session.add(_record(model, name, plan_name, batch_size, own, measured["memory"]))


def mean_of_rounds(measured: Measured) -> Measured:
    """Return the same rounds with one step each, which takes the mean of the round's steps.

    Reading comes in bursts: a chunk of a row group serves several batches. The median of the steps
    would not show the steps that wait for a chunk.
    """
    return Measured(
        {part: [[mean(steps)] for steps in rounds] for part, rounds in measured.rounds.items()}
    )


def _record(
    model: NamedModel, name: str, plan: str, batch_size: int, own: Measured, memory: Measured
) -> dict[str, Any]:
    from_parquet = name == "parquet"
    return {
        "stage": f"{model.name} from {name}",
        "model": model.name,
        "plan": plan,
        "rows_per_second": batch_size / own.median() * 1e3,
        "mb_per_second": None,
        **spread(own),
        **ratio("memory", memory if from_parquet else None, own),
        "decode_share": own.median("read") / own.median() if from_parquet else None,
        "rounds": len(own.rounds["step"]),
    }
