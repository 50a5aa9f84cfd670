"""Dynamic batching: one thread computes the waiting requests together.

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
from dataclasses import dataclass
from itertools import groupby

import pyarrow as pa
import torch
from starlette.responses import Response
from torch import Tensor

from recapp.dataset.collate import RawTable, join_batches
from recapp.errors import RankError, RecappError
from recapp.inference.scorer import Scorer, not_finite
from recapp.serving.limits import Refused, bad, busy
from recapp.serving.question import Question
from recapp.serving.served_model import Served
from recapp.sparse.keyed_jagged_tensor import Batch

FAULT = "a fault of the server, which its log tells of; the request was not answered"

Read = Callable[[Served], Question]
"""Reads a request for a model; it holds the body, the headers and the protocol."""

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
