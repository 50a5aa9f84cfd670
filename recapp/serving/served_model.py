"""The model in service: its metadata, its replacement without losing a request, and the thread
that computes the waiting requests together.

    load (beside the old one) -> check (its example, its features) -> put into service
                              -> or raise an error: the old one stays in service

A server offers its model under the name that the server started with; the version identifies the
model. A new model goes into service only if it scores its own example as at the time of its export,
and reads the same features. Other features would make the server refuse its clients' requests.

Putting into service is one assignment. The old model computes the requests that were read for it,
and is freed after the last of them.

    event loop   arrive ------------------------------------> answer
    worker              read, read, read -> model -> write

The worker takes requests in the order of their arrival and parses each; an error concerns only its
own request. It computes a batch when it has `max_batch` rows, or when the first request has waited
`max_wait_ms`. With `max_wait_ms=0` it never waits: a batch is then the requests that arrived while
the batch before was computed. A request is never split. The other rows of a batch change the score
of a row by float32 rounding only, because matrix products of other sizes add in another order.

If a batch raises an error (a value cannot be read, or an id lies outside of a table whose id rule
is `error`), the worker computes its requests one by one. So only the faulty request gets the error.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import pyarrow as pa
import torch
from starlette.responses import Response
from torch import Tensor

from recapp.console import note
from recapp.dataset.collate import RawTable, join_batches
from recapp.dataset.schema import TextIds
from recapp.dataset.sequential_rows import plain_value
from recapp.errors import ConfigError, RankError, RecappError
from recapp.inference.scorer import Scorer, not_finite
from recapp.processes.process_memory import give_back_unused
from recapp.serving.counts import Counts
from recapp.serving.limits import Refused, bad, busy
from recapp.sparse.keyed_jagged_tensor import Batch

# The tolerance between the scores of the example and those stored with it, relative to max(1,
# |score|).
ROUNDING = 1e-5

EXAMPLE_ROWS = 4  # rows that the page shows


@dataclass(frozen=True, slots=True)
class Served:
    """A model in service.

    Args:
        name: The name that requests call it by.
        scorer: The model.
    """

    name: str
    scorer: Scorer

    @property
    def named(self) -> dict[str, str]:
        """Return the name and the version of the model, as answers have them."""
        return {"model_name": self.name, "model_version": self.scorer.version}

    @property
    def outputs(self) -> tuple[str, ...]:
        """Return the names that a request may ask for: columns of scores, then outputs."""
        return tuple(
            dict.fromkeys([*columns_of(self.scorer), *(o.name for o in self.scorer.task.outputs)])
        )

    def metadata(self) -> dict[str, Any]:
        """Return the model metadata of the Open Inference protocol."""
        schema = self.scorer.schema
        return {
            "name": self.name,
            "versions": [self.scorer.version],
            "platform": "recapp",
            "inputs": [
                {
                    "name": name,
                    "datatype": self.datatype(name),
                    "shape": [-1, schema.vectors[name]] if name in schema.vectors else [-1],
                }
                for name in schema.inputs
            ],
            "outputs": [{"name": name, "datatype": "FP32", "shape": [-1]} for name in self.outputs],
        }

    def datatype(self, feature: str) -> str:
        """Return the native datatype of a feature; requests may use others."""
        schema = self.scorer.schema
        if feature in (*schema.dense, *schema.vectors, *schema.id_weight_columns):
            return "FP32"
        integers = schema.text_ids(feature) is TextIds.INTEGERS or feature in schema.times
        return "INT64" if integers else "BYTES"

    def example(self) -> list[dict[str, Any]]:
        """Return a few raw rows of the example as JSON; synthetic rows if there is no example."""
        if self.scorer.example is None:
            schema = self.scorer.schema
            row: dict[str, Any] = {
                name: {"FP32": 0.0, "INT64": 0}.get(self.datatype(name), "0")
                for name in schema.inputs
            }
            return [row | {name: [0.0] * width for name, width in schema.vectors.items()}]
        columns = self.scorer.schema.resolve(self.scorer.example.schema, "the example")
        some = self.scorer.example.slice(0, EXAMPLE_ROWS)
        named = pa.table({name: some.column(column) for name, column in columns.items()})
        return [
            {key: plain_value(value) for key, value in row.items()} for row in named.to_pylist()
        ]


def features_of(scorer: Scorer) -> Mapping[str, TextIds | str | int | None]:
    """Return the names of a model's columns, each with its rule for ids of texts, its unit of time
    or its length of vectors.
    """
    schema = scorer.schema
    numbers = (*schema.dense, *schema.id_weight_columns)
    rules: dict[str, TextIds | str | int | None] = dict.fromkeys(numbers)
    rules |= {name: schema.text_ids(name) for name in schema.sparse}
    return rules | dict(schema.times) | dict(schema.vectors)


def columns_of(scorer: Scorer) -> list[str]:
    """Return the names of a model's columns of scores."""
    return [output.column for output in scorer.task.outputs]


def check_model(scorer: Scorer, before: Scorer | None = None) -> None:
    """Check that a model may go into service.

    The model scores its example, or a row without ids. This also compiles the kernels, so the first
    request need not wait.

    Args:
        scorer: The model.
        before: The model that it replaces.

    Raises:
        ConfigError: Its scores differ from those stored with the example, or its features or
            columns of scores differ from those of `before`.
        RecappError: The example cannot be scored.
    """
    if before is not None and features_of(scorer) != features_of(before):
        changed = sorted(
            name
            for name in {*features_of(scorer), *features_of(before)}
            if features_of(scorer).get(name, "") != features_of(before).get(name, "")
        )
        raise ConfigError(
            f"model {scorer.version} reads other features than {before.version}, which is in "
            f"service ({', '.join(changed[:5]) or 'their order'}): start another server for it"
        )
    if before is not None and columns_of(scorer) != columns_of(before):
        raise ConfigError(
            f"model {scorer.version} gives the scores {', '.join(columns_of(scorer))}, and "
            f"{before.version}, which is in service, gives {', '.join(columns_of(before))}: start "
            "another server for it"
        )
    if scorer.example is None:
        nothing = pa.table({name: pa.nulls(1) for name in scorer.schema.inputs})
        with suppress(RecappError):  # it may refuse a row without ids
            scorer(scorer.batch(nothing))
        return
    for name, scores_N in scorer.columns(scorer.example).items():
        if scorer.expected is not None:
            expected_N = scorer.expected[name]
            apart_N = (scores_N - expected_N).abs()
            if not bool((apart_N <= ROUNDING * expected_N.abs().clamp(min=1)).all()):
                raise ConfigError(
                    f"model {scorer.version} gives its example scores that differ by "
                    f"{float(apart_N.max()):.2g} from the stored ones: export it again"
                )


class ModelInService:
    """The model in service, and the loader of its successor.

    Args:
        load: Loads the model from the path that the server was started with.
        name: The name under which the server offers the model; None takes the model's own name.
        counts: The counters of the server; reloads are counted there.

    Attributes:
        loads: Whether a reload is running.

    Raises:
        ConfigError: The name cannot be a part of a URL path.
        RecappError: The first model cannot be loaded, or fails its check.
    """

    def __init__(self, load: Callable[[], Scorer], name: str | None, counts: Counts) -> None:
        self._load = load
        self._counts = counts
        self.loads = False
        scorer = load()
        check_model(scorer)
        name = name or scorer.name
        if "/" in name or name in (".", "..") or not name.isprintable():
            raise ConfigError(
                f"name={name}: the name of a model is part of the paths of requests: "
                "choose a name of printable letters without a slash"
            )
        self._put(Served(name, scorer))

    def _put(self, served: Served) -> None:
        self._served = served
        self._counts.model.info({"name": served.name, "version": served.scorer.version})

    def current(self) -> Served:
        """Return the model in service."""
        return self._served

    async def reload(self) -> Served:
        """Load the model again and put it into service; the old model answers meanwhile.

        Raises:
            Refused: The model cannot be loaded or fails its check, so the old model stays; or
                another reload is running.
        """
        if self.loads:
            raise Refused(409, "a model is being loaded already: wait for it")
        self.loads = True
        before = self._served
        try:
            scorer = await asyncio.to_thread(self._loaded)
        except Exception as error:
            self._counts.reloads.labels("refused").inc()
            kind = "" if isinstance(error, RecappError) else f"{type(error).__name__}: "
            text = (
                f"not loaded, version {before.scorer.version} stays in service: "
                f"{kind}{' '.join(str(error).split())}"
            )
            note(text)
            raise (busy(text) if isinstance(error, RankError) else bad(text)) from error
        finally:
            self.loads = False
        self._put(Served(before.name, scorer))
        self._counts.reloads.labels("loaded").inc()
        note(f"version {scorer.version} is in service instead of {before.scorer.version}")
        del before
        await asyncio.to_thread(give_back_unused)
        return self._served

    def _loaded(self) -> Scorer:
        scorer = self._load()
        check_model(scorer, self._served.scorer)
        return scorer


# ---- batches

FAULT = "a fault of the server, which its log tells of; the request was not answered"


@dataclass(frozen=True, slots=True)
class Question:
    """The rows of a request, and the writer of its answer.

    Args:
        table: The rows, with the column names of the model's schema.
        write: Writes the answer from the outputs of the rows by name, each [B] on the CPU.
    """

    table: RawTable
    write: Callable[[Mapping[str, Tensor]], Response]


# Reads a request for a model; it holds the body, the headers and the protocol.
Read = Callable[[Served], Question]

log = logging.getLogger(__name__)


@dataclass
class QueuedRequest:
    """A request in the worker's queue or batch.

    Args:
        read: Reads the request for a model.
        arrived: The time of its arrival, by `time.perf_counter`.
        answer: The future that its handler awaits.
    """

    read: Read
    arrived: float
    answer: "asyncio.Future[Response]"
    dropped: bool = False  # its handler no longer awaits the answer
    served: Served | None = None
    question: Question | None = None
    read_s: float = 0.0  # to parse its body
    waited_s: float = 0.0  # from its arrival until it was read
    model_s: float = 0.0  # to compute its batch

    @property
    def rows(self) -> int:
        """Return the number of rows of the request; 0 before it is read."""
        return self.question.table.num_rows if self.question else 0

    def finish(self, result: Response | Exception) -> None:
        """Hand the answer, or the error that takes its place, to the event loop, which may have
        ended.
        """
        answer = _refusal(result) if isinstance(result, Exception) else result

        def done() -> None:
            if self.dropped:
                return
            if isinstance(answer, Refused):
                self.answer.set_exception(answer)
            else:
                self.answer.set_result(answer)

        try:
            self.answer.get_loop().call_soon_threadsafe(done)
        except RuntimeError:  # the loop has ended
            log.debug("an answer came after the end")


class Batcher:
    """The worker thread and its queue.

    Args:
        current: Returns the model in service.
        max_batch: The most rows of a batch; one request may have more.
        max_wait_ms: The time for which the first request of a batch waits for others.
        observe: A callback; the worker calls it with the rows and the seconds of each batch.
    """

    def __init__(
        self,
        current: Callable[[], Served],
        max_batch: int,
        max_wait_ms: float,
        observe: Callable[[int, float], None],
    ) -> None:
        self._current = current
        self._max_batch = max_batch
        self._max_wait = max_wait_ms / 1e3
        self._observe = observe
        self._queue: deque[QueuedRequest] = deque()
        self._changed = threading.Condition()
        self._ends = False
        self._carried: QueuedRequest | None = None  # read already, for the next batch
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)

    def start(self) -> None:
        """Start the worker."""
        self._thread.start()

    def stop(self) -> None:
        """Let the worker empty the queue and end, and wait for its end."""
        with self._changed:
            self._ends = True
            self._changed.notify()
        self._thread.join()

    @property
    def waiting(self) -> int:
        """Return the number of requests in the queue."""
        return len(self._queue)

    def submit(self, work: QueuedRequest) -> None:
        """Put a request into the queue."""
        with self._changed:
            self._queue.append(work)
            self._changed.notify()

    def _run(self) -> None:
        while (works := self._gather()) is not None:
            if works:
                self._compute(works)

    def _gather(self) -> list[QueuedRequest] | None:
        """Read and return the requests of the next batch; return None after `stop`."""
        first = self._carried or self._next(None)
        self._carried = None
        if first is None:
            return None
        if not (first.question or self._read(first)):
            return []
        until = time.perf_counter() + self._max_wait
        works = [first]
        rows = first.rows
        while rows < self._max_batch and (work := self._next(until)) is not None:
            if not self._read(work):
                continue
            if rows + work.rows > self._max_batch or work.served is not first.served:
                self._carried = work
                break
            works.append(work)
            rows += work.rows
        return works

    def _next(self, until: float | None) -> QueuedRequest | None:
        """Return the next request; return None when the time is over, or after `stop`.

        Args:
            until: The end of the wait, by `time.perf_counter`; None waits without a limit.
        """
        with self._changed:
            while not self._queue:
                left = None if until is None else until - time.perf_counter()
                if self._ends or (left is not None and left <= 0):
                    return None
                self._changed.wait(left)
            return self._queue.popleft()

    def _read(self, work: QueuedRequest) -> bool:
        """Read a request; return whether its rows must be computed."""
        if work.dropped:
            return False
        start = time.perf_counter()
        work.waited_s = start - work.arrived
        try:
            work.served = self._current()
            work.question = work.read(work.served)
        except Exception as error:
            work.finish(error)
        work.read_s = time.perf_counter() - start
        return work.question is not None

    def _compute(self, works: Sequence[QueuedRequest]) -> None:
        works = [work for work in works if not work.dropped]
        if not works:
            return
        served = works[0].served
        assert served is not None
        tables = [work.question.table for work in works if work.question]
        start = time.perf_counter()
        try:
            batch = _batch_of(tables, served.scorer)
            read = time.perf_counter()
            outputs = {name: x_B.cpu() for name, x_B in served.scorer.outputs(batch).items()}
        except Exception as error:
            if len(works) > 1:
                for work in works:
                    self._compute([work])
                return
            works[0].finish(error)
            return
        took = time.perf_counter() - read
        self._observe(batch.rows, took)
        rows = [work.rows for work in works]
        parts = {name: torch.split(x_B, rows) for name, x_B in outputs.items()}
        for number, work in enumerate(works):
            work.read_s += read - start
            work.model_s = took
            _answer(work, {name: of_works[number] for name, of_works in parts.items()})


def _batch_of(tables: Sequence[RawTable], scorer: Scorer) -> Batch:
    """Return the rows of several tables, in their order, as one batch.

    A batch has a fixed cost of a good half of a millisecond (39 columns are found, checked and
    decoded). So requests whose columns have the same types, usually those of one kind of client,
    are joined before they are decoded, not after.

    Raises:
        DataError: A value cannot be read.
    """
    alike = (list(group) for _, group in groupby(tables, key=lambda table: table.schema))
    return join_batches(
        [scorer.batch(group[0] if len(group) == 1 else pa.concat_tables(group)) for group in alike]
    )


def _refusal(error: Exception) -> Refused:
    """Return the answer to a failed request, with a status that blames the client or the server."""
    if isinstance(error, Refused):
        return error
    text = " ".join(str(error).split())
    if isinstance(error, RankError):
        return busy(f"this server cannot compute any more, and ends: {text}")
    if isinstance(error, RecappError):
        return bad(text)
    log.error("a request could not be answered", exc_info=error)
    return Refused(500, FAULT)


def _answer(work: QueuedRequest, outputs: Mapping[str, Tensor]) -> None:
    assert work.question is not None
    try:
        if fault := not_finite(outputs):
            raise Refused(500, fault)
        work.finish(work.question.write(outputs))
    except Exception as error:
        work.finish(error)
