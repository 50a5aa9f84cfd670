"""`bench inference`: measure how fast a trained model scores, for each way to store its tables,
each batch size and each number of threads.

    checkpoint -> an artefact for each way to store its tables; an artefact is measured as it is
    validation rows, else a made-up row -> the batches, the same for all that is timed

    eager       recapp.load_model of the artefact: a decoded batch becomes scores
    compiled    the same with the compiled dense part (trust_compiled=true)
    cpp         the program of `recapp/inference/cpp`, by its own clock: it maps the artefact and
                waits for lines such as "64 32 40": the size of a batch, batches, steps
    raw_rows    compiled (eager, where nothing is compiled), with the decoding of raw Arrow rows

The p99 is taken over the steps of all rounds.
"""

import json
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import torch

from recapp import console
from recapp.benchmarks.session import Session, listed
from recapp.benchmarks.timing import Contender, Measured, Steps, Times, compared, in_turn
from recapp.cli.stored_recipe import recipe_of_stored
from recapp.dataset.collate import RawTable
from recapp.dataset.sequential_rows import example_rows
from recapp.errors import ConfigError, LaunchError
from recapp.inference.build_cpp import build, missing_tools
from recapp.inference.export_settings import Export
from recapp.inference.scorer import Scorer
from recapp.model_export import export_model
from recapp.model_loading import load_model
from recapp.run.model import model_to_shard
from recapp.run.recipe import Recipe
from recapp.run.run_rows import made_up_rows, validation_source
from recapp.run.trained_model import with_columns_of
from recapp.settings.uris import path_to
from recapp.sparse.keyed_jagged_tensor import Batch
from recapp.stored.store import is_artefact
from recapp.stored.stored_model import Artefact
from recapp.tables.collections import embedding_lookups

T = TypeVar("T")
MOST_ROWS = 1 << 16  # rows that batches are cut from, at most
MOST_STEPS = 2000  # of a turn: a p99 needs many
MOST_BATCHES = 2048  # of a size: more than fit into a cache
US_OF_MS = 1e3


@dataclass(frozen=True)
class Batches:
    """Batches of one size.

    Args:
        size: The samples of each batch.
        raw: The raw rows of each batch.
        decoded: The same batches, decoded for a model.
    """

    size: int
    raw: list[RawTable]
    decoded: list[Batch]


@dataclass(frozen=True)
class StoredModel:
    """A loaded model with one way to store its tables.

    Args:
        quantize: The way to store tables.
        path: The artefact.
        eager: The artefact, with the dense part in eager.
        compiled: The artefact with its compiled dense part; None where there is none.
        batches: The batches of each size.
        rows_file: A file with the rows of all batches.
    """

    quantize: str
    path: Path
    eager: Scorer
    compiled: Scorer | None
    batches: list[Batches]
    rows_file: Path

    def contenders(self, of_size: Batches, program: "CppProgram | None") -> dict[str, Contender]:
        """Return what scores batches of one size, by its name.

        Args:
            of_size: The batches.
            program: The C++ program, started with the threads of the measurement; None to leave it
                out.
        """
        ways: dict[str, Contender] = {"eager": scoring(self.eager.scores, of_size.decoded)}
        if self.compiled is not None:
            ways["compiled"] = scoring(self.compiled.scores, of_size.decoded)
        if program is not None:
            ways["cpp"] = CppScores(program, of_size.size, len(of_size.raw))
        ways["raw_rows"] = scoring((self.compiled or self.eager).predict, of_size.raw)
        return ways


def scoring(score: Callable[[T], object], batches: Sequence[T]) -> Steps:
    """Return a contender that scores raw or decoded batches in turn."""
    return Steps({"step": in_turn(score, batches)}, inside=torch.inference_mode)


def measure(session: Session) -> None:
    """Measure the model of the settings in every way."""
    settings = session.settings
    with TemporaryDirectory(prefix="recapp_bench_") as temporary:
        folder = Path(temporary)
        program = cpp_program(folder / "cpp") if settings.compile else None
        for stored in stored_models(path_to(settings.artefact), settings, folder):
            for threads in listed(settings.threads):
                torch.set_num_threads(threads)
                with started(program, stored, threads) as process:
                    for of_size in stored.batches:
                        ways = stored.contenders(of_size, process)
                        measure_ways(session, stored, of_size, threads, ways)


def measure_ways(
    session: Session,
    stored: StoredModel,
    of_size: Batches,
    threads: int,
    ways: Mapping[str, Contender],
) -> None:
    """Time all ways on batches of one size, and add a row of results for each."""
    title = f"{stored.quantize}, batch {of_size.size}, threads: {threads}"
    for way, times in session.measure(title, ways, MOST_STEPS).items():
        session.add(
            {
                "quantize": stored.quantize,
                "batch_size": of_size.size,
                "threads": threads,
                "way": way,
                **latency(times, of_size.size),
            }
        )


def latency(times: Measured, size: int) -> dict[str, Any]:
    """Return the entries of a row of results: median, p99 and rows a second of a size of batch."""
    steps = [ms for of_round in times.rounds["step"] for ms in of_round]
    p99 = float(np.quantile(steps, 0.99))
    return {
        **compared(times, {}),
        "p99_ms": p99,
        "tail_ratio": p99 / times.median(),
        "samples_per_second": size * len(steps) / sum(steps) * 1e3,
        "steps": len(steps),
    }


def stored_models(path: Path, settings: Any, folder: Path) -> Iterator[StoredModel]:
    """Yield a model with each way to store its tables.

    Args:
        path: A checkpoint or an artefact. An artefact is measured as it is.
        settings: The settings, with `quantize`, `batch_size` and `compile`.
        folder: The directory of artefacts and rows.
    """
    artefacts = {}
    if is_artefact(path):
        kinds = {t.storage for t in Artefact.at(path).manifest.tables}
        storage = kinds.pop() if len(kinds) == 1 else "mixed"
        artefacts["none" if storage == "fp32" else storage] = path
    else:
        for width in listed(settings.quantize):
            options = Export(quantize=width, report_rows=0, compile=settings.compile)
            artefacts[width] = folder / width
            export_model(path, artefacts[width], options)
    artefact = Artefact.at(next(iter(artefacts.values())))
    recipe = with_columns_of(recipe_of_stored(artefact.manifest), artefact)
    rows = _rows(recipe, model_to_shard(artefact, recipe))
    sizes = listed(settings.batch_size)
    rows = rows.take(np.arange(max(rows.num_rows, *sizes, 1)) % rows.num_rows)
    rows_file = folder / "rows.arrow"
    with pa.ipc.new_file(rows_file, rows.schema) as writer:
        writer.write_table(rows)
    for width, stored in artefacts.items():
        eager = load_model(stored, trust_compiled=False)
        compiled = load_model(stored, trust_compiled=True) if settings.compile else None
        if compiled is not None and not compiled.info["compiled"]:
            compiled = None
        batches = [batches_of(eager, rows, size) for size in sizes]
        yield StoredModel(width, stored, eager, compiled, batches, rows_file)


def batches_of(scorer: Scorer, rows: RawTable, size: int) -> Batches:
    """Return the batches of a size.

    Args:
        scorer: The scorer that decodes rows.
        rows: The rows, enough for at least one batch.
        size: The samples of a batch.
    """
    count = min(MOST_BATCHES, rows.num_rows // size)
    raw = [rows.slice(number * size, size) for number in range(count)]
    return Batches(size, raw, [scorer.batch(part) for part in raw])


def _rows(recipe: Recipe, model: torch.nn.Module) -> RawTable:
    schema = recipe.schema
    source = validation_source(recipe)
    if source is not None:
        return example_rows(source, schema, min(source.rows, MOST_ROWS))
    console.note("all batches repeat one made-up row, so its vectors stay in the caches")
    return made_up_rows(schema, embedding_lookups(model))


# ---- the C++ program

CppProgram = subprocess.Popen[str]


def cpp_program(folder: Path) -> Path | None:
    """Build the C++ program. If that fails, print why and return None.

    Args:
        folder: The directory of the program.
    """
    if missing := missing_tools():
        console.note(f"the C++ program is left out: {', '.join(missing)} is missing")
        return None
    console.note("building the C++ program (a minute) ...")
    try:
        return build(folder)
    except ConfigError as error:
        console.note(f"the C++ program is left out: {error}")
        return None


@contextmanager
def started(program: Path | None, stored: StoredModel, threads: int) -> Iterator[CppProgram | None]:
    """Run the C++ program inside the `with`; yield None where it is not built or the artefact has
    no compiled dense part.
    """
    if program is None or stored.compiled is None:
        yield None
        return
    options = ("--turns", f"--threads={threads}")
    command: list[str | Path] = [program, stored.path, stored.rows_file, *options]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process


@dataclass(frozen=True)
class CppScores:
    """Batches that the C++ program scores.

    Args:
        program: The process, which waits for its turns.
        size: The samples of a batch.
        batches: The number of different batches, which steps take in turn.
    """

    program: CppProgram
    size: int
    batches: int

    def run(self, steps: int) -> Times:
        """Score batches, and return the time of each.

        Raises:
            LaunchError: The program has ended.
        """
        assert self.program.stdin is not None and self.program.stdout is not None
        self.program.stdin.write(f"{self.size} {self.batches} {steps}\n")
        self.program.stdin.flush()
        line = self.program.stdout.readline()
        if not line:
            raise LaunchError("the C++ program ended without an answer; its error stands above")
        return {"step": [us / US_OF_MS for us in json.loads(line)["us"]]}
