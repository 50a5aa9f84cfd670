"""Measure how fast rows are read, in the forms that logs have, and as training sees it.

    raw           the columns as Arrow reads them, on one thread
    N threads     batches, made a while ahead by a thread for which N more decode; 0 makes each
                  batch when it is asked for
    a model       training steps that wait for batches of the data set itself

The first rows of the data set are written in each form. A pass reads all of them, with the opening
of files. Reading comes in bursts, because a chunk of a row group serves many batches: what a step
of training waits for on average, and its longest step, tell whether threads hide them.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count, islice
from shutil import rmtree
from statistics import mean, median

from recapp.benchmarks.session import Session, listed
from recapp.benchmarks.steps import TrainingStep
from recapp.benchmarks.timing import Measured, Steps, compared
from recapp.benchmarks.workloads import MODELS, NamedModel
from recapp.dataset.data_settings import DataSettings
from recapp.dataset.log_forms import FORMS, typed_rows
from recapp.dataset.schema import criteo_schema
from recapp.dataset.source import Source, arrow_chunks, open_source
from recapp.dataset.stream import BatchStream
from recapp.errors import ConfigError
from recapp.sparse.keyed_jagged_tensor import Batch
from recapp.tables.config import IdRule
from recapp.trainer.datamodule import reading_threads
from recapp.transport.communicator import Comm

MOST_ROWS = 100_000  # in a pass
GROUPS_OF_LANE = 2  # row groups that a lane reads, one after the other
KEPT_BATCHES = 4  # of which plans count ids


def measure_data(session: Session) -> None:
    """Measure reading in each form, then training from the data set."""
    dataset = session.settings.dataset.scaled
    comm = session.transport(session.settings.transport)
    source = open_source(dataset.path, criteo_schema())
    folder = session.directory / "forms"
    alone = session.comm.rank == 0  # the others have no part in a measurement of one process
    table = typed_rows(source.slice(0, MOST_ROWS)) if alone else None
    for form, write in FORMS.items():
        if table is not None:
            (folder / form).mkdir(parents=True)
            rows = max(1, table.num_rows // (dataset.lanes * GROUPS_OF_LANE))
            write(table, folder / form / "rows", rows)
        session.comm.barrier()
        _measure_form(session, form, open_source(str(folder / form), criteo_schema()), dataset)
    if alone:
        rmtree(folder)
    for model in listed(session.settings.models):
        for plan in session.rules:
            _measure_training(session, MODELS[model], source, dataset, plan, comm)


def _measure_form(session: Session, form: str, source: Source, dataset: DataSettings) -> None:
    batch_size = min(dataset.batch_size, source.rows // dataset.lanes * dataset.lanes)
    stages: dict[str, Callable[[], Iterable[object]]] = {"raw": partial(arrow_chunks, source)}
    for threads in sorted({0, 1, 2, reading_threads(dataset)}):
        ways = source, dataset, batch_size, 0, 1, threads
        stages[f"{threads} threads"] = partial(stream_of, *ways)
    alone = session.comm.rank == 0
    contenders = {
        name: Steps({"step": partial(_read_all, read if alone else tuple)})
        for name, read in stages.items()
    }
    found = session.measure(f"reading {source.rows:,} rows, {form}", contenders)
    for name, measured in found.items():
        session.add(
            {
                "form": form,
                "stage": name,
                "rows_per_second": source.rows / measured.median() * 1e3,
                **compared(measured, {"raw": None if name == "raw" else found["raw"]}),
                "longest_ratio": None,
                "wait_share": None,
            }
        )


def _read_all(read: Callable[[], Iterable[object]], step: int) -> None:
    deque(read(), 0)


def endless(stream: BatchStream) -> Iterator[Batch]:
    """Yield the batches of a stream, epoch after epoch.

    Args:
        stream: The batches of this rank.
    """
    for epoch in count():
        stream.set_position(epoch, 0)
        yield from stream


def stream_of(
    source: Source, dataset: DataSettings, batch_size: int, rank: int, world: int, threads: int
) -> BatchStream:
    """Return a rank's part of the stream of batches that training reads.

    Args:
        source: The rows.
        dataset: The settings of the data set.
        batch_size: The samples of all ranks together.
        rank: The rank that gets the part.
        world: The number of ranks.
        threads: The threads that decode ahead.
    """
    stream = BatchStream(
        source,
        criteo_schema(),
        batch_size=batch_size,
        lanes=dataset.lanes,
        shuffle_rows=dataset.shuffle_rows,
        rank=rank,
        world=world,
        dense_transform=dataset.dense_transform,
    )
    stream.num_threads = threads
    return stream


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
    batches = {
        threads: endless(stream_of(source, dataset, batch_size, session.comm.rank, world, threads))
        for threads in sorted({0, reading_threads(dataset)})
    }
    first_batches = [batch.sparse for batch in islice(batches[0], KEPT_BATCHES)]
    plan = session.plan(plan_name, tables, first_batches)
    training = TrainingStep(session, model, tables, plan, comm)
    contenders = {
        f"{model.name}, {threads} threads": training.from_parquet(some)
        for threads, some in batches.items()
    }
    for name, times in session.measure(f"training {model.name}", contenders).items():
        steps = [step for of_round in times.rounds["step"] for step in of_round]
        # Reading comes in bursts: a chunk of a row group serves several batches. A median of steps
        # would not show the steps that wait for a chunk, so a round counts as the mean of its
        # steps.
        means = Measured({part: [[mean(one)] for one in r] for part, r in times.rounds.items()})
        session.add(
            {
                "form": plan_name,
                "stage": name,
                "model": model.name,
                "plan": plan_name,
                "rows_per_second": batch_size / means.median() * 1e3,
                **compared(means, {"raw": None}),
                "longest_ratio": max(steps) / median(steps),
                "wait_share": means.median("read") / means.median(),
            }
        )
