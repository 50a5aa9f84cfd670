"""The next batches' host work, copy and input exchange, while a batch computes.

    look_ahead=1     | step 0 | step 1 | step 2 | step 3 (the last)
    before it, read  |  0, 1  |   2    |   3    |      ids become rows, equal rows meet; then counts
                                                       leave
    in its forward   |   1    |   2    |   3    |      counts travel
    in its backward  |   1    |   2    |   3    |      ids travel, while gradients are made and sent
    it computes      |   0    |   1    |   2    |   3  asked for everything it needs already

On a GPU all that is early goes to a stream of its own (`recapp/transport/side_stream.py`), where
it runs while the step computes.

Only the input exchange is early: it reads no weights, so the numbers are those of a loop that does
not look ahead, to the last bit. Every rank runs the same program, so messages leave in the same
order on all of them; a validation in between has its own, which come later.

What was read ahead and not trained (a limit, a stop) is dropped; the position in the data counts
what was trained.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from itertools import islice
from typing import Any

from recapp.engine.sharded_embedding_bag import ShardedEmbeddingBagCollection
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.transport.side_stream import SideStream


@dataclass(frozen=True)
class _Unread:
    """Stands where a batch would, which could not be read."""

    error: Exception


class LookAhead:
    """A loader whose batches are on the device and under exchange before their turn.

    The ids of a batch (`sparse_of`) go to every collection. One that is called with something else
    finds nothing, exchanges in its turn as if nobody looked ahead, and is left alone once more
    exchanges wait than batches.

    An error belongs to its batch's turn: ids that no table has, a file that cannot be read. The
    other ranks hear of it with the counts, so none waits for a rank that is about to fail, and the
    step before is trained.

    Args:
        loader: of training batches, the same number on all ranks.
        depth: batches to look ahead, at least 1.
        collections: those of the model, when they are asked for.
        to_device: moves a batch. What is there already must stay the object it is: forward knows it
            again.
        side: the stream for what is early, that of the collections; None where the device has none.
            What the loader itself makes on a device while it is read, it makes there.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        depth: int,
        collections: Callable[[], list[ShardedEmbeddingBagCollection]],
        to_device: Callable[[Any], Any],
        side: SideStream | None = None,
    ) -> None:
        self.loader = loader
        self.depth = depth
        self.collections = collections
        self.to_device = to_device
        self.side = side or SideStream()
        self._fed: list[ShardedEmbeddingBagCollection] = []
        self._has_ids = True

    def __getattr__(self, name: str) -> Any:
        """What else the loader has: Lightning looks for samplers."""
        if name.startswith("__") or name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        """The loader's. TypeError where it has none."""
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        """Nothing is read or sent before the first `next`: only then Lightning has settled the
        epoch.
        """
        self.forget()
        self._fed = self.collections()
        self.side.follow()
        started = self._started()
        ahead = deque[tuple[Any, Any]]()
        more = True
        while True:
            while more and (not ahead or (len(ahead) <= self.depth and not self._failure_ahead())):
                count = len(ahead)
                ahead.extend(islice(started, 1))
                more = len(ahead) > count
            if not ahead:
                return
            batch, copied = ahead.popleft()
            if isinstance(batch, _Unread):
                raise batch.error
            self.side.hand_over(batch, copied)
            yield batch

    def forget(self) -> None:
        """End exchanges of batches that will not be trained. Every rank calls it."""
        for collection in self.collections():
            collection.forget_ahead()

    def _started(self) -> Iterator[tuple[Any, Any]]:
        """Batches whose exchange has begun, and when the side stream has copied them.

        One that cannot be read is one still to the other ranks, as are those behind it.
        """
        batches = iter(self.loader)
        while True:
            try:
                with self.side.beside():
                    batch = self.to_device(next(batches))
            except StopIteration:
                return
            except Exception as error:
                unread = _Unread(error)
                break
            copied = self.side.mark()
            ids = sparse_of(batch)
            self._has_ids = ids is not None
            if ids is not None:
                self._start(ids)
            yield batch, copied
        while True:
            if self._has_ids:
                self._start(unread.error)
            yield unread, None

    def _start(self, ids: KeyedJaggedTensor | Exception) -> None:
        for collection in list(self._fed):
            # Lightning fetches one more where the length is unknown
            if collection.look_ahead(ids) > self.depth + 2:
                collection.forget_ahead()
                self._fed.remove(collection)

    def _failure_ahead(self) -> bool:
        """All ranks know of a batch that will fail: none reads beyond it, because the guilty one
        cannot.
        """
        return any(collection.failure_ahead() for collection in self._fed)


def sparse_of(batch: Any) -> KeyedJaggedTensor | None:
    """Return the ids of a batch: the batch itself, or the one KeyedJaggedTensor among the fields of
    a dataclass (`sparse` of a `Batch`) or in a tuple, list or dict; else None.
    """
    parts: Iterable[Any] = [batch]
    if isinstance(batch, dict):
        parts = batch.values()
    elif isinstance(batch, tuple | list):
        parts = batch
    elif is_dataclass(batch):
        parts = [getattr(batch, field.name) for field in fields(batch)]
    found = [part for part in parts if isinstance(part, KeyedJaggedTensor)]
    return found[0] if len(found) == 1 else None
