"""Several ranks that hold a model's tables together and answer for one of them, the leader.

    rank 0, the leader     tell(COMPUTE, 3)    model 3 on the rows of its requests
    the other ranks        follow()            model 3 on no rows: they answer the leader's ids

A word of the leader says what all ranks do next. While it has nothing to say it sends a beat now
and then, so that waiting for a word never takes as long as a process group has patience. Whether
the followers run the leader sees by their pulses (`recapp/transport/pulse.py`): one that is stopped
would let it wait for as long. Models have numbers, because requests that were read for an earlier
model are answered by that one.
"""

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum

import torch
from torch import Tensor, nn

from recapp.errors import RankError, RecappError
from recapp.inference.scorer import Scorer
from recapp.sparse.batch import Batch
from recapp.tasks.task import only_output
from recapp.transport.communicator import Comm
from recapp.transport.pulse import Pulses

BEAT_SECONDS = 60.0  # process groups wait for half an hour


class Word(IntEnum):
    """What the leader says, with the number of a model."""

    BEAT = 0
    COMPUTE = 1
    LOAD = 2
    DROP = 3
    END = 4


class Leader:
    """The rank that requests come to.

    Args:
        comm: The ranks, for words alone: those of batches have messages of their own.
        lost: Called once with the reason, when the ranks have lost each other and nothing can be
            computed any more. A thread may still wait for one of them then.
        beat_seconds: How often it sends a beat.
        pulses: By which a follower is noticed that is stopped; None where that does not matter.

    Attributes:
        failure: Why nothing can be computed any more; None where it can.
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
        """Return a model that all ranks have loaded; batches wait meanwhile.

        Args:
            load: Loads this rank's part; the followers call theirs.

        Raises:
            RecappError: It could not be loaded, on any rank.
        """
        with self._turn:
            number = next(self._numbers)
            self._tell(Word.LOAD, number)
            scorer = load()
        scorer.model = _Led(scorer.model, self, number)
        weakref.finalize(scorer.model, self._gone.append, number)
        return scorer

    def compute(self, number: int, model: nn.Module, batch: Batch) -> Tensor:
        """Return the logits of a batch, [B].

        Raises:
            RecappError: As of the model.
            RankError: The ranks have lost each other.
        """
        with self._turn:
            self._tell(Word.COMPUTE, number)
            try:
                logits_B = only_output(model(batch))
            except RankError as error:
                raise self._failed(error) from error
            except RecappError:
                raise  # all ranks raise it
            except Exception as error:  # where others are is not known
                raise self._failed(error) from error
            return logits_B

    def obstacle(self) -> str:
        """Return why a request should not be waited for; empty where nothing is in its way."""
        if self.failure is not None:
            return f"this server cannot compute any more, and ends: {_lost(self.failure)}"
        return self._pulses.obstacle() if self._pulses is not None else ""

    def end(self) -> None:
        """Have the followers end, unless they are lost: a thread that waits for one has the turn
        for ever.
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
        """Note that nothing can be computed any more, and return why."""
        found = RankError(_lost(error))
        if self.failure is None:
            self.failure = error
            self._lost(found)
        return found

    def _beat(self) -> None:
        while not self._ended.wait(self._beat_seconds):
            with self._turn, suppress(RankError):
                if not self._ended.is_set():  # while this thread waited for its turn
                    self._tell(Word.BEAT)


def _lost(error: Exception) -> str:
    return f"the ranks have lost each other: {' '.join(str(error).split())}"


class _Led(nn.Module):
    """A model of which every rank computes its part when the leader does."""

    def __init__(self, model: nn.Module, leader: Leader, number: int) -> None:
        super().__init__()
        self.model = model
        self._leader = leader
        self._number = number

    def forward(self, batch: Batch) -> Tensor:
        return self._leader.compute(self._number, self.model, batch)


def follow(comm: Comm, load: Callable[[], Scorer]) -> None:
    """Do what the leader says until it ends.

    Args:
        comm: The ranks, for words alone.
        load: Loads this rank's part of a model.

    Raises:
        RankError: The leader has gone.
    """
    models: dict[int, Scorer] = {}
    while True:
        word, number = _heard(comm)
        if word is Word.END:
            return
        if word is Word.LOAD:
            with suppress(RecappError):  # the leader says why
                models[number] = load()
        elif word is Word.DROP:
            models.pop(number, None)
        elif word is Word.COMPUTE:
            _answer(models[number])


def _answer(scorer: Scorer) -> None:
    """Compute on no rows. Whatever is wrong with those of the leader, it says so itself; where it
    has gone, the next word will not come.
    """
    with suppress(RecappError):
        scorer(scorer.raw_rows.no_rows())


def _heard(comm: Comm) -> tuple[Word, int]:
    buffer = torch.zeros(2, dtype=torch.int64)
    from_W = [(0, 2) if rank == 0 else (0, 0) for rank in range(comm.world)]
    try:
        comm.swap(buffer, [(0, 0)] * comm.world, from_W)()
    except RuntimeError as error:
        raise RankError(f"rank 0 has gone: {' '.join(str(error).split())}") from error
    word, number = buffer.tolist()
    return Word(word), number
