"""Look-ahead: the next batches' host work, copy and input exchange run while a batch computes.

TorchRec calls this the train pipeline, which prefetches the input_dist of a batch.

    look_ahead=1     | step 0 | step 1 | step 2 | step 3 (the last)
    before it, read  |  0, 1  |   2    |   3    |      ids become rows, equal rows are merged;
                                                       then counts are sent
    in its forward   |   1    |   2    |   3    |      counts travel
    in its backward  |   1    |   2    |   3    |      ids travel, while gradients are made and sent
    it computes      |   0    |   1    |   2    |   3  asked for everything it needs already

On a GPU this early work goes to a stream of its own (`recapp/transport/side_stream.py`), where it
runs while the step computes.

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

from recapp.engine.sharded_tables import ShardedTables
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.transport.side_stream import SideStream


@dataclass(frozen=True)
class _Unread:
    """What takes the position of a batch that could not be read."""

    error: Exception


class LookAhead:
    """A loader whose batches are on the device, and their input exchange under way, before their
    turn.

    The ids of a batch (`sparse_of`) go to every collection. A collection that is called with
    something else finds no exchange, starts one in its turn as without look-ahead, and is left out
    once more exchanges wait than batches.

    An error belongs to its batch's turn: ids that no table has, a file that cannot be read. The
    other ranks learn of it with the counts, so none waits for a rank that is about to fail, and the
    step before is trained.

    Args:
        loader: The loader of training batches, the same number on all ranks.
        depth: How many batches to look ahead, at least 1.
        tables: Returns the sharded tables of the model.
        to_device: Moves a batch to the device. What is there already must stay the object it is:
            forward recognises it.
        side: The stream for early work, that of the collections; None where the device has none.
            What the loader itself makes on a device while it is read, it makes there.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        depth: int,
        tables: Callable[[], list[ShardedTables]],
        to_device: Callable[[Any], Any],
        side: SideStream | None = None,
    ) -> None:
        self.loader = loader
        self.depth = depth
        self.tables = tables
        self.to_device = to_device
        self.side = side or SideStream()
        self._fed: list[ShardedTables] = []
        self._has_ids = True

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the loader: Lightning looks for samplers there."""
        if name.startswith("__") or name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        """Return the length of the loader.

        Raises:
            TypeError: The loader has no length.
        """
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches in order.

        Nothing is read or sent before the first `next`, because only then Lightning has settled the
        epoch.
        """
        self.forget()
        self._fed = self.tables()
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
        """End the exchanges of batches that will not be trained. It is collective."""
        for shared in self.tables():
            shared.forget_ahead()

    def _started(self) -> Iterator[tuple[Any, Any]]:
        """Yield each batch once its exchange has begun, and the event of its copy on the side
        stream.

        A batch that cannot be read is one to the other ranks all the same, as are those behind it.
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
        for shared in list(self._fed):
            # Lightning fetches one more where the length is unknown
            if shared.look_ahead(ids) > self.depth + 2:
                shared.forget_ahead()
                self._fed.remove(shared)

    def _failure_ahead(self) -> bool:
        """Return whether a batch that is looked ahead to will fail on some rank.

        All ranks know that, and none reads beyond it, because the rank that fails cannot.
        """
        return any(shared.failure_ahead() for shared in self._fed)


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
