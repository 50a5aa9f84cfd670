"""`inference`: measure how fast a trained model scores, for each way to store its tables, each
batch size and each number of threads.

All contenders score the same rows, cut into batches, in the same rounds:

    torch       the model with tables of `torch.nn.EmbeddingBag` in fp32: the baseline of ratios
    eager       recapp.load_model of the artefact: a batch becomes scores
    compiled    the same with the compiled dense part (trust_compiled=true)
    cpp         the program of `recapp/inference/cpp`, by its own clock; one process for each number
                of threads maps the artefact once and waits for lines such as "64 32 40": the size
                of a batch, the number of batches, the steps
    raw_rows    compiled (eager, where nothing is compiled), including the decoding of raw rows in
                Arrow
    torchrec    TorchRec's DLRM after quantize_embeddings, whose lookups are FBGEMM's inference
                kernels, in eager; torchrec_tuned: with its allocator tuned. `torchrec_worker.py`
                gets the shapes of layers and tables, and the rows that each batch looks up

All but raw_rows begin with decoded ids and numbers, and all end with scores. The p99 is taken over
the steps of all rounds. The goal is a p99 at batch 1 below three times p50.

The costs to load each artefact have records of their own (`mapped_memory.py`).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from recapp.benchmarks.line_process import LineProcess
from recapp.benchmarks.mapped_memory import LoadModel, cost_of_loading
from recapp.benchmarks.rivals import Absent, Rival
from recapp.benchmarks.session import Session
from recapp.benchmarks.timing import Contender, Measured, Steps, Times, beside, compared, in_turn
from recapp.dataset.raw_rows import RawTable
from recapp.inference.scorer import Scorer
from recapp.models.published_dlrm import DLRM
from recapp.sparse.batch import Batch
from recapp.stored.artefact_files import example_bytes
from recapp.tables.config import PoolingType
from recapp.tables.unsharded_collection import EmbeddingBagCollection

T = TypeVar("T")
BASELINE = "torch"
NOT_OURS = (BASELINE, "torchrec", "torchrec_tuned")
GOAL = 3.0
"""The limit of p99 / p50 for batches of one sample."""
MOST_STEPS = 2000  # of a turn: a p99 needs many
MOST_BATCHES = 2048  # of a size: more than fit into a cache


@dataclass(frozen=True)
class Served:
    """A trained model in all measured forms.

    Args:
        name: The name of the model in records.
        artefacts: The artefact for each way to store tables.
        rows: The raw rows, from which batches are cut.
        load: The function that loads an artefact.
        plain: The model with tables of torch's modules; None where there is none.
        program: The C++ program; None where it is not built.
    """

    name: str
    artefacts: Mapping[str, Path]
    rows: RawTable
    load: LoadModel
    plain: nn.Module | None
    program: Path | None


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
class Stored:
    """A loaded model with one way to store its tables.

    Args:
        served: The model.
        quantize: The way to store tables.
        path: The artefact.
        eager: The artefact, with the dense part in eager.
        compiled: The artefact with its compiled dense part; None where there is none.
        batches: The batches of each size.
        rows_file: A file with the rows of all batches.
    """

    served: Served
    quantize: str
    path: Path
    eager: Scorer
    compiled: Scorer | None
    batches: list[Batches]
    rows_file: Path

    def contenders(self, of_size: Batches, program: LineProcess | None) -> dict[str, Contender]:
        """Return the contenders for batches of one size, without those of another Python.

        Args:
            of_size: The batches.
            program: The C++ program, started with the threads of the measurement; None to leave it
                out.
        """
        found: dict[str, Contender] = {}
        plain = self.served.plain
        if plain is not None:
            found[BASELINE] = _scoring(lambda b: torch.sigmoid(plain(b)), of_size.decoded)
        found["eager"] = _scoring(self.eager.scores, of_size.decoded)
        if self.compiled is not None:
            found["compiled"] = _scoring(self.compiled.scores, of_size.decoded)
        if program is not None:
            found["cpp"] = CppScores(program, of_size.size, len(of_size.raw))
        found["raw_rows"] = _scoring((self.compiled or self.eager).predict, of_size.raw)
        return found


def _scoring(score: Callable[[T], object], batches: Sequence[T]) -> Steps:
    """Return a contender that scores raw or decoded batches in turn."""
    return Steps({"step": in_turn(score, batches)}, inside=torch.inference_mode)


def run(session: Session, served: Served) -> None:
    """Measure a model with every way to store its tables, batch size and number of threads."""
    for quantize in served.artefacts:
        stored = _stored(session, served, quantize)
        with _torchrec(session, stored) as others:
            for count in session.settings.threads:
                with _program(stored, count) as program:
                    for of_size in stored.batches:
                        _measure(session, stored, of_size, count, program, others)
        session.more.setdefault("loads", []).append(
            {"model": served.name, "quantize": quantize} | cost_of_loading(stored.path, served.load)
        )


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


def _stored(session: Session, served: Served, quantize: str) -> Stored:
    """Load a model with one way to store its tables, and cut its rows into batches."""
    path = served.artefacts[quantize]
    eager = served.load(path, trust_compiled=False)
    compiled = served.load(path, trust_compiled=True) if session.settings.compile else None
    if compiled is not None and not compiled.info["compiled"]:
        compiled = None
    sizes = session.settings.batch_size
    rows = served.rows.take(np.arange(max(served.rows.num_rows, *sizes)) % served.rows.num_rows)
    rows_file = session.folder / f"{served.name}.arrow"
    rows_file.write_bytes(example_bytes(rows))
    batches = [batches_of(eager, rows, size) for size in sizes]
    return Stored(served, quantize, path, eager, compiled, batches, rows_file)


def _program(stored: Stored, threads: int) -> AbstractContextManager[LineProcess | None]:
    """Return a context with the C++ program, or with None where the program is not built or the
    artefact has no compiled dense part.
    """
    program = stored.served.program
    if program is None or stored.compiled is None:
        return nullcontext(None)
    errors = stored.rows_file.with_suffix(".stderr")
    command: list[str | Path] = [
        program,
        stored.path,
        stored.rows_file,
        "--turns",
        f"--threads={threads}",
    ]
    return closing(LineProcess("the C++ program", command, errors))


def _torchrec(session: Session, stored: Stored) -> Any:
    """Return the context of TorchRec's contenders. It is empty, with a note, where TorchRec's DLRM
    cannot do the same work.
    """
    python = session.settings.torchrec_python
    plain = stored.served.plain
    why = no_twin(plain)
    if python is not None and why:
        session.print_note(f"{stored.served.name} is not compared with TorchRec: {why}")
    if python is None or why or plain is None or stored.quantize == "mixed":
        return nullcontext({})
    files = {
        str(of_size.size): session.folder / f"{stored.served.name}_{of_size.size}.npz"
        for of_size in stored.batches
    }
    for of_size in stored.batches:
        write_batches(plain, of_size.decoded, files[str(of_size.size)])
    return session.rivals("torchrec", [torchrec_spec(plain, stored.quantize, files)])


def _measure(
    session: Session,
    stored: Stored,
    of_size: Batches,
    threads: int,
    program: LineProcess | None,
    others: Mapping[str, Rival | Absent],
) -> None:
    """Time all contenders on batches of one size, and add a record for each."""
    for other in others.values():
        other.batches = str(of_size.size)
    contenders = stored.contenders(of_size, program)
    shape = {
        "model": stored.served.name,
        "quantize": stored.quantize,
        "batch_size": of_size.size,
        "threads": threads,
    }
    title = f"{stored.served.name}, {stored.quantize}, batch {of_size.size}, threads: {threads}"
    measured = session.measure(title, {**contenders, **others}, threads, MOST_STEPS)
    for way in measured:
        session.add(shape | {"way": way} | record(way, of_size.size, measured))


def record(way: str, size: int, measured: Mapping[str, Measured]) -> dict[str, Any]:
    """Return the record of a contender.

    Args:
        way: The name of the contender.
        size: The samples of a batch.
        measured: The times of all contenders of the same rounds.
    """
    own = measured[way]
    steps = [ms for of_round in own.rounds["step"] for ms in of_round]
    p99 = float(np.quantile(steps, 0.99))
    tail = p99 / own.median()
    return {
        **compared(own, {BASELINE: measured.get(BASELINE), **beside("torchrec", measured)}),
        "p99_ms": p99,
        "tail_ratio": tail,
        "tail_met": tail < GOAL if size == 1 else None,
        "samples_per_second": size * len(steps) / sum(steps) * 1e3,
        "steps": len(steps),
    }


def goal_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines about the goal: the share of recapp's contenders that meet it, and those
    that miss it.

    Args:
        rows: The records.
    """
    ours = [r for r in rows if r["tail_met"] is not None and r["way"] not in NOT_OURS]
    if not ours:
        return []
    missed = [r for r in ours if not r["tail_met"]]
    word = "missed" if missed else "met"
    share = f"{len(ours) - len(missed)} of {len(ours)}"
    return [f"goal, p99 at batch 1 below {GOAL:g} x p50: {word} ({share})"] + [
        f"  missed by {r['way']}, {r['model']} {r['quantize']}, threads: {r['threads']}: "
        f"{r['tail_ratio']:.1f}"
        for r in missed
    ]


def no_twin(model: nn.Module | None) -> str:
    """Return why no DLRM of TorchRec does the same work as a model; empty where one does.

    Args:
        model: The model with its unsharded collection, or None.
    """
    if not isinstance(model, DLRM):
        return "the model is no DLRM of static tables"
    collection = model.embedding_bag_collection
    if not isinstance(collection, EmbeddingBagCollection) or model.bottom is None:
        return "the model has no bags or no dense features"
    lookups = collection.lookups
    if any(x.pooling is not PoolingType.SUM for x in lookups) or len(model.projections):
        return "some bags are not summed, or the tables have several widths"
    if len({x.feature for x in lookups}) < len(lookups) or collection.is_weighted():
        return "a feature reads several tables, or ids have weights"
    return ""


def torchrec_spec(model: Any, quantize: str, files: Mapping[str, Path]) -> dict[str, Any]:
    """Return the spec from which a process of TorchRec builds the twin of a model.

    Args:
        model: A DLRM with its unsharded collection; `no_twin` gives no reason against it.
        quantize: The way to store tables.
        files: The file of each list of batches.
    """
    collection = model.embedding_bag_collection
    read = {
        t.name: [x.feature for x in collection.lookups if x.table.name == t.name]
        for t in collection.tables()
    }
    return {
        "kind": "inference",
        "quantize": quantize,
        "tables": [
            (t.name, t.num_embeddings, t.embedding_dim, read[t.name]) for t in collection.tables()
        ],
        "features": [x.feature for x in collection.lookups],
        "model": {
            "dense": model.dense_in_features,
            "bottom": _widths(model.bottom),
            "top": _widths(model.top),
        },
        "batches": {name: str(path) for name, path in files.items()},
    }


def write_batches(model: Any, batches: Sequence[Batch], path: Path) -> None:
    """Write the numbers and the rows of batches to a file.

    Args:
        model: The model of `torchrec_spec`.
        batches: The batches, all of one size.
        path: The file.
    """
    found = [model.embedding_bag_collection.id_rules(batch.sparse) for batch in batches]
    np.savez(
        path,
        ids=torch.cat([rows.rows_L.long() for rows in found]).numpy(),
        ids_of_batch=np.array([len(rows.rows_L) for rows in found]),
        lengths=torch.stack([rows.lengths_FB.reshape(-1).int() for rows in found]).numpy(),
        dense=torch.stack([batch.dense_BI for batch in batches]).numpy(),
    )


def _widths(layers: nn.Module) -> list[int]:
    return [m.out_features for m in layers.modules() if isinstance(m, nn.Linear)]


US_OF_MS = 1e3


@dataclass(frozen=True)
class CppScores:
    """Batches that the C++ program scores.

    Args:
        program: The process, which waits for its turns.
        size: The samples of a batch.
        batches: The number of different batches, which steps take in turn.
    """

    program: LineProcess
    size: int
    batches: int

    def run(self, steps: int) -> Times:
        """Score batches, and return the time of each.

        Raises:
            LaunchError: The program has ended.
        """
        self.program.send(f"{self.size} {self.batches} {steps}")
        return {"step": [us / US_OF_MS for us in json.loads(self.program.answer())["us"]]}
