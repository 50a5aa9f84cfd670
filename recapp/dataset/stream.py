"""The stream of a rank's training batches, and its DataLoader.

    global batch k  [ lane 0 | lane 1 | lane 2 | lane 3 | lane 4 | lane 5 ]   B/V rows each
    ranks           [      rank 0     |              rank 1               ]   W = 2: lanes
                                                                              [rV/W, (r+1)V/W)
    workers of 1                      [     worker 0    |    worker 1     ]   their parts joined
                                                                              by the rank

For any number of ranks and workers, the concatenation of the ranks' batches has the same rows in
the same order.
"""

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from recapp.dataset.collate import Collate, check_transform, join_batches
from recapp.dataset.order import batches, check_order, deal, permutation, rank_lanes
from recapp.dataset.reader import Reader
from recapp.dataset.rows import Rows
from recapp.dataset.schema import Schema
from recapp.dataset.source import Source
from recapp.errors import ConfigError, DataError
from recapp.sparse.batch import Batch


class BatchStream(IterableDataset[Any]):
    """The batches of one rank, in the order that `recapp.dataset.order` defines.

    Iteration yields the `Batch`es from the last position of `set_position` (by default epoch 0,
    batch 0). Inside a worker of a DataLoader it yields the parts of the worker's own lanes;
    `make_loader` returns a loader that joins these. Unusable values raise DataError during the
    iteration.

    Args:
        source: The rows of all ranks.
        schema: The columns of the rows.
        batch_size: The rows of a GLOBAL batch, a multiple of `lanes`.
        lanes: The number of lanes V, at least `world`.
        shuffle_rows: The rows within which the order is shuffled, over all lanes; 0 keeps file
            order within a lane.
        seed: The seed of the order.
        rank: The number of this rank.
        world: The number of ranks.
        training: Whether to skip the short last batch. Otherwise each row is yielded once, and all
            ranks yield the same number of batches, with empty batches at the end of a rank without
            further rows.
        dense_transform: A key of `collate.DENSE_TRANSFORMS`.

    Raises:
        ConfigError: The numbers do not fit together.
    """

    def __init__(
        self,
        source: Source,
        schema: Schema,
        *,
        batch_size: int,
        lanes: int = 16,
        shuffle_rows: int = 4096,
        seed: int = 1,
        rank: int = 0,
        world: int = 1,
        training: bool = True,
        dense_transform: str = "log1p",
    ) -> None:
        check_order(batch_size, lanes, world, shuffle_rows)
        check_transform(dense_transform)
        if training and source.rows < batch_size:
            most = source.rows // lanes * lanes
            fewer = f"dataset.lanes and dataset.batch_size to {source.rows} or less"
            allowed = (
                f"at most {most} is allowed"
                if most
                else (
                    f"it is a multiple of dataset.lanes={lanes}, so give at least {lanes} rows"
                    + (f", or set {fewer}" if source.rows >= world else "")
                )
            )
            raise ConfigError(
                f"dataset.batch_size={batch_size}: larger than the {source.rows} rows there are to "
                f"train on, so an epoch would have no batch; {allowed}"
            )
        self.source = source
        self.schema = schema
        self.seed = seed
        self.training = training
        self.batch_size = batch_size
        self.shuffle_rows = shuffle_rows
        self.lanes = rank_lanes(rank, world, lanes)
        self.epoch = 0
        self.first_batch = 0
        self._share = batch_size // lanes
        self._deal = deal([segment.rows for segment in source.segments], lanes, shuffle_rows)
        self._collate = Collate(schema, source.bags, dense_transform)

    def __len__(self) -> int:
        """Return the number of global batches of a whole epoch, independent of the position."""
        return batches(self.source.rows, self.batch_size, self.training)

    def set_position(self, epoch: int, batches: int) -> None:
        """Start the next iteration in `epoch`, after its first `batches` global batches."""
        self.epoch = epoch
        self.first_batch = batches

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        if worker is None:
            return self._batches(self.lanes)
        own = rank_lanes(worker.id, worker.num_workers, len(self.lanes))
        return _with_failures(self._batches(self.lanes[own.start : own.stop]))

    def _batches(self, lanes: range) -> Iterator[Batch]:
        """Yield the parts of batches from some lanes, from the position on."""
        begin = self.first_batch * self._share // self._block * self._block
        reader = Reader(self.source, self._deal, lanes, begin, self._collate)
        shares = [self._shares(reader, lane) for lane in lanes]
        for _ in range(self.first_batch, len(self)):
            yield self._collate.batch([part for share in shares for part in next(share, ())])

    @property
    def _block(self) -> int:
        """The number of rows of a lane that are shuffled together."""
        return (
            max(1, self.shuffle_rows // len(self._deal.lanes)) if self.shuffle_rows else self._share
        )

    def _shares(self, reader: Reader, lane: int) -> Iterator[list[Rows]]:
        """Yield a lane's share of each batch, in pieces.

        A share has `_share` rows, or fewer in the last batch.
        """
        total = self._deal.rows(lane)
        position = self.first_batch * self._share
        blocks = self._blocks(reader, lane, total)
        held = next(blocks).skip(position % self._block) if position < total else None
        while position < total:
            parts = []
            wanted = min(self._share, total - position)
            position += wanted
            while wanted:
                held = held if held else next(blocks)
                part = held.slice(0, wanted)
                held = held.skip(wanted)
                wanted -= len(part)
                parts.append(part)
            yield parts

    def _blocks(self, reader: Reader, lane: int, total: int) -> Iterator[Rows]:
        """Yield a lane's shuffled blocks, from the block that contains the position."""
        block = self.first_batch * self._share // self._block
        for first in range(block * self._block, total, self._block):
            rows = reader.take(lane, min(self._block, total - first))
            if self.shuffle_rows:
                rows = rows.take(
                    permutation(self.seed, self.epoch, lane, first // self._block, len(rows))
                )
            yield rows


class _Failure(str):
    """The one line of an error, sent from a worker to its rank.

    DataLoader would wrap an exception in the worker's traceback.
    """


def _with_failures(batches: Iterator[Batch]) -> Iterator[Batch | _Failure]:
    """Yield batches; after a DataError, yield its one line as the last item."""
    try:
        yield from batches
    except DataError as error:
        yield _Failure(error)


class BatchLoader(DataLoader[Any]):
    """A DataLoader over a `BatchStream`; each worker reads some lanes.

    The loader joins the workers' parts to the rank's batch.
    """

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch.

        This asks the stream, because DataLoader would compare its length with the workers' parts.
        """
        return len(self.dataset)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        # A generator: the stream's position is read (and pickled to the workers) at the first
        # next(), not at iter().
        items = super().__iter__()
        workers = max(1, self.num_workers)
        try:
            for first in items:
                parts = [first, *(next(items) for _ in range(workers - 1))]
                for part in parts:
                    if isinstance(part, _Failure):
                        raise DataError(str(part))
                yield join_batches(parts)
        finally:
            # End the workers now: an error's traceback would keep them alive until its garbage
            # collection.
            del items


def make_loader(stream: BatchStream, num_workers: int = 0) -> BatchLoader:
    """Return a loader of `stream`.

    `stream.set_position` before an iteration's first batch takes effect in the workers as well.

    Args:
        stream: The batches of this rank.
        num_workers: The number of worker processes, at most one for each lane of the rank; 0 reads
            in this process.

    Raises:
        ConfigError: The number of workers is negative.
    """
    if num_workers < 0:
        raise ConfigError(
            f"dataset.num_workers={num_workers}: 0 (read in the rank's own process) or more is "
            "allowed"
        )
    return BatchLoader(stream, batch_size=None, num_workers=min(num_workers, len(stream.lanes)))
