"""Look-ahead: the next batches' host work, copy and input exchange run while a batch computes.

TorchRec calls this the train pipeline; it prefetches the input_dist of a batch.

    look_ahead=1     | step 0 | step 1 | step 2 | step 3 (the last)
    read before      |  0, 1  |   2    |   3    |      ids become rows, equal rows are merged;
                                                       then counts are sent
    in its forward   |   1    |   2    |   3    |      counts travel
    in its backward  |   1    |   2    |   3    |      ids travel, while gradients are made and sent
    computes         |   0    |   1    |   2    |   3  its ids have been exchanged already

On a GPU this early work goes to a stream of its own (`recapp/transport/communicator.py`), where it
runs while the step computes.

Only the input exchange is early. It reads no weights, so the results equal the results without
look-ahead, to the last bit. Every rank runs the same program, so messages leave in the same order
on all ranks. A validation in between sends its own messages later.

Batches that were read ahead and not trained (because of a limit or a stop) are dropped; the
position in the data counts trained batches only.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from itertools import islice
from typing import Any

from recapp.engine.sharded_tables import ShardedTables
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.transport.communicator import SideStream


@dataclass(frozen=True)
class _Unread:
    error: Exception


class LookAhead:
    """A loader that copies batches to the device, and starts their input exchange, before their
    step.

    The ids of a batch (`sparse_of`) go to every collection. If the model calls a collection with
    other ids, the collection finds no early exchange, and starts one in the step, as without
    look-ahead. Look-ahead skips the collection as soon as more exchanges wait than batches.

    An error, such as ids beyond a table or a file that cannot be read, is raised in the step of its
    batch. The other ranks get the error with the counts, so no rank waits for a rank that will
    fail, and the step before is trained.

    Args:
        loader: The loader of training batches, with the same number of batches on all ranks.
        depth: The number of batches to look ahead, at least 1.
        tables: Returns the sharded tables of the model.
        to_device: Moves a batch to the device. It must keep objects that are on the device already,
            because forward recognises the ids by identity.
        side: The stream for early work, which the collections use too; None if the device has no
            streams. If the loader creates tensors on the device, it creates them on this stream.
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
        """Return an attribute of the loader, because Lightning looks for samplers there."""
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

        The first `next` reads and sends the first batches, because Lightning settles the epoch just
        before it. It ends early exchanges that an epoch has left.
        """
        for shared in self.tables():
            shared.forget_ahead()
        self._fed = self.tables()
        self.side.follow()
        started = self._started()
        ahead = deque[tuple[Any, Any]]()
        more = True
        while True:
            # all ranks know a failure ahead; the rank that fails can read no further
            while more and (
                not ahead
                or (
                    len(ahead) <= self.depth
                    and not any(shared.failure_ahead() for shared in self._fed)
                )
            ):
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

    def _started(self) -> Iterator[tuple[Any, Any]]:
        """Start the exchange of each batch, then yield the batch and the event of its copy on the
        side stream.

        If a batch cannot be read, yield a place holder for this batch and for each later batch, so
        that the other ranks still find a batch here.
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
            # Lightning fetches one more batch if the length is unknown
            if shared.look_ahead(ids) > self.depth + 2:
                shared.forget_ahead()
                self._fed.remove(shared)


def sparse_of(batch: Any) -> KeyedJaggedTensor | None:
    """Return the ids of a batch: the batch itself, or the only KeyedJaggedTensor among the fields
    of a dataclass (`sparse` of a `Batch`) or in a tuple, list or dict; else None.
    """
    parts: Iterable[Any] = [batch]
    if isinstance(batch, dict):
        parts = batch.values()
    elif isinstance(batch, tuple | list):
        parts = batch
    elif is_dataclass(batch):
        parts = [getattr(batch, field.name) for field in fields(batch)]
    ids = [part for part in parts if isinstance(part, KeyedJaggedTensor)]
    return ids[0] if len(ids) == 1 else None
