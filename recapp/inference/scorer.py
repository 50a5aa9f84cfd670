"""A trained model for applications: raw rows in, scores out.

    raw rows (Arrow) --batch--> Batch --model--> outputs by name --task--> scores by column

A scorer is an ordinary `nn.Module` on one device, without a process group. It decodes rows as
training did (`recapp/dataset/collate.py`) and looks them up with the same engine, so its scores
are those of the sharded model. Threads may share it. A task of one output gives tensors; a task of
several gives mappings of names to tensors.

Several ranks may share a model's tables, led by the rank with the requests:

    rank 0, the leader     tell(COMPUTE, 3)    model 3 on the rows of its requests
    the other ranks        follow()            model 3 on no rows; they answer the leader's lookups

The leader sends a command (`Word`) that all ranks execute. Without requests it sends a beat from
time to time, so that the followers never wait as long as the timeout of a process group. The leader
detects a stopped follower by its pulse (`recapp/transport/join_ranks.py`); otherwise it would
wait until that timeout. Models have numbers, because an earlier model computes the requests that
were read for it.
"""

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import deepcopy
from enum import IntEnum
from pickle import PicklingError
from typing import Any

import torch
from torch import Tensor, nn

from recapp.dataset.collate import RawRows, RawTable, as_table
from recapp.dataset.schema import Schema
from recapp.engine.sharded_collection import sharded_tables
from recapp.errors import ConfigError, DataError, RankError, RecappError
from recapp.sparse.keyed_jagged_tensor import Batch
from recapp.tasks.task import ClickTask, Task, one_or_all
from recapp.transport.communicator import Comm
from recapp.transport.join_ranks import Pulses

# Rows of a batch in `predict`; larger batches are not faster (measured).
ROWS_AT_ONCE = 4096


class Scorer(nn.Module):
    """Score raw rows with a trained model.

    Args:
        model: Computes the outputs of a `Batch`; its tables are those of one rank.
        raw_rows: Decodes raw rows as training did; None if the columns are unknown.
        name: The name of the model, for people and servers.
        version: A value that differs between versions of the model.
        info: Plain facts about the model: tables, bytes, metrics, origin.
        example: A few raw rows to try the model with; None if none are stored.
        expected: The scores of the example by column, each [N]; None if none are stored.
        task: Names the outputs and makes scores of them; None is a logit of a click.
    """

    def __init__(
        self,
        model: nn.Module,
        raw_rows: RawRows | None,
        name: str,
        version: str,
        info: Mapping[str, Any],
        example: RawTable | None = None,
        expected: Mapping[str, Tensor] | None = None,
        task: Task | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self._raw_rows = raw_rows
        self.name = name
        self.version = version
        self.info = dict(info)
        self.example = example
        self.expected = expected
        self.task = task or ClickTask()
        self._turn = threading.Lock()
        self.eval()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Scorer":
        return Scorer(
            deepcopy(self.model, memo),
            self._raw_rows,
            self.name,
            self.version,
            self.info,
            self.example,
            self.expected,
            self.task,
        )

    def __reduce_ex__(self, protocol: object) -> Any:
        raise PicklingError(
            f"model {self.name} is not pickled, because its rows may be mapped files: load it with "
            "recapp.load_model(path) in every process"
        )

    @property
    def raw_rows(self) -> RawRows:
        """Return the decoder of raw rows.

        Raises:
            ConfigError: The model was loaded without a description of its columns.
        """
        if self._raw_rows is None:
            raise ConfigError(
                f"model {self.name} does not know its columns: load it with "
                "load_model(path, module=..., data=ClickData(...)), or score batches"
            )
        return self._raw_rows

    @property
    def schema(self) -> Schema:
        """Return the schema of the model's columns, without labels."""
        return self.raw_rows.schema

    @property
    def device(self) -> torch.device:
        """Return the device of the model."""
        dense = next(self.model.parameters(), None)
        # a model with only tables has no parameters
        return sharded_tables(self.model)[0].comm.device if dense is None else dense.device

    def batch(self, rows: Any) -> Batch:
        """Return raw rows as a batch on the CPU (`RawRows.batch`).

        Raises:
            DataError: `rows` is not a table, a column is missing, or a value cannot be read; the
                error names the column and the row.
        """
        return self.raw_rows.batch(rows)

    @torch.no_grad()
    def outputs(self, batch: Any) -> dict[str, Tensor]:
        """Return the outputs of the model by name, each [B]. Only one thread computes at a time,
        because tables reuse memory from batch to batch.

        Raises:
            IdError: An id is outside a table whose rule is `error`.
            ConfigError: The model returns other outputs or shapes.
        """
        with self._turn:
            result = self.model(batch.to(self.device))
        name = type(self.model).__name__
        if not isinstance(batch, Batch):  # a user's module may read batches of another type
            return self.task.picked(result, name)
        return self.task.named(result, batch.rows, name)

    def forward(self, batch: Batch) -> Tensor | dict[str, Tensor]:
        """Return the outputs of a batch: a logit for each sample, [B]; several outputs by name.

        Raises:
            IdError: An id is outside a table whose rule is `error`.
        """
        return one_or_all(self.outputs(batch))

    def scores(self, batch: Batch) -> Tensor | dict[str, Tensor]:
        """Return the scores of a batch, float32 [B]: probabilities of logits; several by column.

        Raises:
            IdError: An id is outside a table whose rule is `error`.
        """
        return one_or_all(self.task.scores(self.outputs(batch)))

    def predict(self, rows: Any) -> Tensor | dict[str, Tensor]:
        """Return the scores of any number of raw rows, float32 [N] on the CPU; several by column.

        Args:
            rows: An Arrow table, such as `pyarrow.parquet.read_table` returns; a data frame of
                pandas or polars; or a mapping of names to columns, where NaN in lists and arrays is
                a missing value. Columns that are not features are ignored.

        Raises:
            DataError: As for `batch`; or an output of a row is not finite.
            IdError: As for `outputs`.
        """
        return one_or_all(self.columns(as_table(rows)))

    def columns(self, table: RawTable) -> dict[str, Tensor]:
        """Return the scores of a table of raw rows by column, as `predict` does for any task."""
        parts = []
        for first in range(0, max(table.num_rows, 1), ROWS_AT_ONCE):
            outputs = self.outputs(self.batch(table.slice(first, ROWS_AT_ONCE)))
            if fault := not_finite(outputs, first):
                raise DataError(fault)
            parts.append(self.task.scores(outputs))
        return {name: torch.cat([part[name].cpu() for part in parts]) for name in parts[0]}


def not_finite(outputs: Mapping[str, Tensor], first: int = 0) -> str:
    """Return a line about the first row whose output is not finite; empty where all are finite.

    Args:
        outputs: The outputs of rows by name, each [B].
        first: The number of the first row.
    """
    for name, values_B in outputs.items():
        if not bool(values_B.isfinite().all()):
            row = first + int((~values_B.isfinite()).nonzero()[0])
            return f"row {row}: the model gives a {name} that is no finite number"
    return ""


# ---- on several ranks

BEAT_SECONDS = 60.0  # process groups wait for half an hour


class Word(IntEnum):
    """The commands of the leader; each is sent with the number of a model."""

    BEAT = 0
    COMPUTE = 1
    LOAD = 2
    DROP = 3
    END = 4


class Leader:
    """The rank that receives the requests.

    Args:
        comm: The ranks, for commands only; batches use another communicator.
        lost: A callback; called once with the reason, when the ranks have lost each other and
            cannot compute any more. A thread may still wait for a rank then.
        beat_seconds: The time between two beats.
        pulses: The pulses of the followers, which reveal a stopped follower; None does not check.

    Attributes:
        failure: The error after which the ranks cannot compute any more; None before.
    """

    def __init__(
        self,
        comm: Comm,
        lost: Callable[[RankError], None] = lambda error: None,
        beat_seconds: float = BEAT_SECONDS,
        pulses: Pulses | None = None,
    ) -> None:
        self.comm = comm
        self.failure: Exception | None = None
        self._lost = lost
        self._beat_seconds = beat_seconds
        self._pulses = pulses
        self._turn = threading.RLock()
        self._gone: deque[int] = deque()
        self._numbers = itertools.count()
        self._ended = threading.Event()
        threading.Thread(target=self._beat, name="beat", daemon=True).start()
        if pulses is not None:
            pulses.watch(self._failed)

    def load(self, load: Callable[[], Scorer]) -> Scorer:
        """Load a model on all ranks and return it; batches wait meanwhile.

        Args:
            load: Loads this rank's part; the followers call their own `load`.

        Raises:
            RecappError: A rank could not load the model.
        """
        with self._turn:
            number = next(self._numbers)
            self._tell(Word.LOAD, number)
            scorer = load()
        scorer.model = _Led(scorer.model, self, number)
        weakref.finalize(scorer.model, self._gone.append, number)
        return scorer

    def compute(self, number: int, model: nn.Module, batch: Batch) -> Any:
        """Return the outputs of a batch, as the model returns them.

        Raises:
            RecappError: The model raised it.
            RankError: The ranks have lost each other.
        """
        with self._turn:
            self._tell(Word.COMPUTE, number)
            try:
                return model(batch)
            except RankError as error:
                raise self._failed(error) from error
            except RecappError:
                raise  # all ranks raise it
            except Exception as error:  # the state of the other ranks is unknown
                raise self._failed(error) from error

    def obstacle(self) -> str:
        """Return the reason why a request would not be answered; empty if there is none."""
        if self.failure is not None:
            return f"this server cannot compute any more, and ends: {_lost(self.failure)}"
        return self._pulses.obstacle() if self._pulses is not None else ""

    def end(self) -> None:
        """End the followers, unless they are lost: then a thread that waits for a follower holds
        the lock for ever.
        """
        self._ended.set()
        if self.failure is None:
            with self._turn:
                self._tell(Word.END)
        if self._pulses is not None:
            self._pulses.end()

    def _tell(self, word: Word, number: int = 0) -> None:
        if self.failure is not None:
            raise RankError(_lost(self.failure))
        while self._gone:
            self._send(Word.DROP, self._gone.popleft())
        self._send(word, number)

    def _send(self, word: Word, number: int) -> None:
        buffer = torch.tensor([int(word), number])
        to_W = [(0, 2)] * self.comm.world
        try:
            self.comm.swap(buffer, to_W, [(0, 0)] * self.comm.world)()
        except RuntimeError as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> RankError:
        """Record that the ranks cannot compute any more, and return the error to raise."""
        lost = RankError(_lost(error))
        if self.failure is None:
            self.failure = error
            self._lost(lost)
        return lost

    def _beat(self) -> None:
        while not self._ended.wait(self._beat_seconds):
            with self._turn, suppress(RankError):
                if not self._ended.is_set():  # `end` may have had the lock before
                    self._tell(Word.BEAT)


def _lost(error: Exception) -> str:
    return f"the ranks have lost each other: {' '.join(str(error).split())}"


class _Led(nn.Module):
    """A model that all ranks compute when the leader calls it."""

    def __init__(self, model: nn.Module, leader: Leader, number: int) -> None:
        super().__init__()
        self.model = model
        self._leader = leader
        self._number = number

    def forward(self, batch: Batch) -> Any:
        return self._leader.compute(self._number, self.model, batch)


def follow(comm: Comm, load: Callable[[], Scorer]) -> None:
    """Execute the leader's commands until it ends.

    Args:
        comm: The ranks, for commands only.
        load: Loads this rank's part of a model.

    Raises:
        RankError: The leader is lost.
    """
    models: dict[int, Scorer] = {}
    nothing_W = [(0, 0)] * comm.world
    from_W = [(0, 2), *nothing_W[1:]]
    while True:
        buffer = torch.zeros(2, dtype=torch.int64)
        try:
            comm.swap(buffer, nothing_W, from_W)()
        except RuntimeError as error:
            raise RankError(f"rank 0 has gone: {' '.join(str(error).split())}") from error
        word, number = buffer.tolist()
        if word == Word.END:
            return
        if word == Word.LOAD:
            with suppress(RecappError):  # the leader reports the reason
                models[number] = load()
        elif word == Word.DROP:
            models.pop(number, None)
        elif word == Word.COMPUTE:
            # the leader reports an error in its rows itself, and if the leader is lost, receiving
            # the next command fails
            with suppress(RecappError):
                models[number](models[number].raw_rows.no_rows())
