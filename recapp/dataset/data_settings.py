"""Which rows of a data set come in which order, as far as settings decide it."""

from collections.abc import Sequence
from dataclasses import dataclass

from recapp.errors import ConfigError

Paths = str | Sequence[str]


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """The settings of a data set that decide which rows come in which order.

    Args:
        path: Training logs: a directory, a glob, a `_file_list.txt`, a file, or a list of those.
        val_path: Validation logs; None cuts them off the end of `path`.
        test_path: Test logs; None where there are none.
        val_share: The part of `path` that validates, as a fraction such as "1/7".
        batch_size: The rows of a GLOBAL training batch, a multiple of `lanes`.
        val_batch_size: The rows of a GLOBAL validation batch; None takes `batch_size`.
        lanes: V of the data order (`recapp/dataset/order.py`); at least the number of ranks.
        shuffle_rows: The number of consecutive rows within which the order is shuffled.
        num_workers: The reader processes of each rank; 0 reads in the rank's own process.
        dense_transform: The function applied to dense columns.
    """

    path: Paths
    val_path: Paths | None = None
    test_path: Paths | None = None
    val_share: str = "1/7"
    batch_size: int = 1024
    val_batch_size: int | None = None
    lanes: int = 16
    shuffle_rows: int = 4096
    num_workers: int = 0
    dense_transform: str = "log1p"

    def __post_init__(self) -> None:
        size = self.val_batch_size
        if size is not None and self.lanes > 0 and (size < 1 or size % self.lanes):
            raise ConfigError(
                f"dataset.val_batch_size={size}: lanes share it equally, so a multiple of "
                f"dataset.lanes={self.lanes} "
                f"is allowed; set {max(size // self.lanes, 1) * self.lanes}"
            )
