"""Compute scores on several ranks that share a model's tables, led by the rank with the requests.

    rank 0, the leader     tell(COMPUTE, 3)    model 3 on the rows of its requests
    the other ranks        follow()            model 3 on no rows; they answer the leader's lookups

The leader sends a command (`Word`) that all ranks execute. Without requests it sends a beat from
time to time, so that the followers never wait as long as the timeout of a process group. The leader
detects a stopped follower by its pulse (`recapp/transport/pulse.py`); otherwise it would
wait until that timeout. Models have numbers, because an earlier model computes the requests that
were read for it.
"""

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from typing import Any

import torch
from torch import nn

from recapp.errors import RankError, RecappError
from recapp.inference.scorer import Scorer
from recapp.sparse.keyed_jagged_tensor import Batch
from recapp.transport.communicator import Comm
from recapp.transport.pulse import Pulses

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
