"""The LightningDataModule: where a run's rows come from, and where in them it is.

Lightning counts batches but skips no data on resume, and fetches batches before they are trained.
So the position is kept here, as (epoch, batches trained in it), written by a callback after each
step; the train loader reads it at its first `next()`, when Lightning has settled the epoch. It is
the same on all ranks and holds for any number of ranks and workers.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule

from recapp.checkpoints.directory import read_manifest
from recapp.console import note
from recapp.dataset.first_rows import table_rows
from recapp.dataset.prediction_input import (
    PredictionInput,
    RankInput,
    ScoringSettings,
    open_input,
)
from recapp.dataset.schema import NO_LABEL, Schema
from recapp.dataset.source import Source, open_source, split
from recapp.dataset.stream import BatchLoader, BatchStream, make_loader
from recapp.errors import ConfigError, IdError
from recapp.planner.initial_plan import from_rank_0
from recapp.sparse.batch import Batch
from recapp.tables.config import EmbeddingConfig
from recapp.tables.lookups import TableLookup
from recapp.tables.statistics import TableStatistics, measured_statistics
from recapp.tables.statistics_cache import read_cached, write_cached
from recapp.trainer.data_protocols import Position

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


# rows that id statistics are measured on: it takes a fraction of a second and covers the ids of
# several ranks' batches
STATISTICS_SAMPLES = 32_768


@dataclass
class EpochLoader:
    """The loader of a training epoch from the position on.

    Its length is that of the full epoch, because Lightning continues its count after a resume.

    Args:
        loader: What reads the batches.
        stream: What `loader` reads; the position is set in it.
        position: How far training has come.
        current_epoch: Returns the epoch that Lightning is in.
    """

    loader: BatchLoader
    stream: BatchStream
    position: Position
    current_epoch: Callable[[], int]

    def __len__(self) -> int:
        return len(self.stream)

    def __iter__(self) -> Iterator[Batch]:
        epoch = self.current_epoch()
        start = self.position.batches if self.position.epoch == epoch else 0
        self.stream.set_position(epoch, start)
        yield from self.loader


class ClickData(LightningDataModule):
    """The data module that streams Parquet click logs to this rank.

    Args:
        settings: Which rows come in which order.
        schema: The columns.
        seed: The seed of the order.
        prepare: Writes the data where they are generated; called once per host before any rank
            reads.
        set_table_rows: Called before training with the rows that the hashed table of each sparse
            feature should have (`recapp/dataset/first_rows.py`), the same on all ranks; None where
            sizes are known.
        max_table_rows: The largest number of rows that such a table may have; None where tables
            grow, and rows are those that are expected.
        scoring: The rows that `Trainer.predict` scores; None where nothing is predicted.
    """

    def __init__(
        self,
        settings: DataSettings,
        schema: Schema,
        seed: int = 1,
        prepare: Callable[[], None] | None = None,
        *,
        set_table_rows: Callable[[list[int]], None] | None = None,
        max_table_rows: int | None = None,
        scoring: ScoringSettings | None = None,
    ) -> None:
        super().__init__()
        self.settings = settings
        self.schema = schema
        self.seed = seed
        self._prepare = prepare
        self._take_table_rows = set_table_rows
        self._max_table_rows = max_table_rows
        self.position = Position()
        self._train: Source | None = None
        self._val: Source | None = None
        self._scoring = scoring
        self._prediction_input: PredictionInput | None = None
        self.find_finished: Callable[[], Sequence[int]] | None = None
        """Returns the score parts that need not be scored; every rank calls it, once the model is
        loaded."""

    def prepare_data(self) -> None:
        """Generate the data, if they are generated; Lightning calls it on one rank a host.

        A prediction needs none of them.
        """
        predicting = self.trainer is not None and self.trainer.predicting
        if self._prepare is not None and not predicting:
            self._prepare()

    def setup(self, stage: str) -> None:
        """Read the footers of the files, cut training from validation rows, and size tables where
        that is wanted.

        Args:
            stage: Lightning's "fit", "validate", "test" or "predict".

        For a prediction only the rows that are to be scored have to be there.

        Raises:
            ConfigError: The rows have no labels, so only predictions can be made of them; or
                nothing says which rows are to be scored.
        """
        if stage == "predict":
            self._open_prediction_input()
            return
        if self.schema.label is None:
            raise ConfigError(NO_LABEL)
        if self._train is None:
            everything = open_source(_paths(self.settings.path), self.schema)
            if self.settings.val_path is None:
                share = self.settings.val_share
                self._train, self._val = split(everything, _share(share), share)
            else:
                self._train = everything
                self._val = open_source(
                    _paths(self.settings.val_path), self.schema, setting="dataset.val_path"
                )
        if self._take_table_rows is not None and stage == "fit":
            if self.trainer is None:
                self._take_table_rows(self._count())
            else:
                rank = self.trainer.global_rank
                self._take_table_rows(
                    from_rank_0(self._count, rank, self.trainer.strategy.broadcast)
                )

    def _open_prediction_input(self) -> None:
        if self._scoring is None:
            raise ConfigError(
                "ClickData does not know which rows to score: give it "
                "scoring=ScoringSettings(input=...)"
            )
        transform = self.settings.dense_transform
        self._prediction_input = open_input(self._scoring, self.schema, transform)

    def _count(self) -> list[int]:
        assert self._train is not None
        return table_rows(self._train, self.schema, self._max_table_rows)

    @property
    def batch_size(self) -> int:
        """Return the rows of a training batch over all ranks."""
        return self.settings.batch_size

    def id_encoding(self) -> dict[str, Any]:
        """Return how text becomes ids, as a checkpoint keeps it."""
        return self.schema.id_encoding()

    def check_ids(self, checkpoint: str | Path) -> None:
        """Check that a checkpoint was trained on ids made of text in the same way.

        A checkpoint of an earlier recapp does not say how; it read all text as hexadecimal. Where
        this run does not, that is noted.

        Raises:
            CheckpointError: Text of a column became other ids.
        """
        info = read_manifest(checkpoint).info
        schema = self.schema
        is_rank_0 = self.trainer is None or self.trainer.is_global_zero
        if info.get("ids") is not None:
            schema.check_id_encoding(info["ids"], str(checkpoint))
        elif "ids" not in info and set(schema.hex) != set(schema.sparse) and is_rank_0:
            note(
                f"{checkpoint} does not say how text ids were read: it was as hexadecimal, for "
                "which Schema(hex=...) names the columns"
            )

    @property
    def rows(self) -> tuple[int, int]:
        """Return the numbers of rows to train on and to validate on; known after `setup`."""
        assert self._train is not None and self._val is not None
        return self._train.rows, self._val.rows

    def train_dataloader(self) -> EpochLoader:
        """Return the loader of this rank's part of every global batch, from the position on."""
        assert self._train is not None and self.trainer is not None
        stream = self._stream(self._train, training=True)
        trainer = self.trainer
        return EpochLoader(
            make_loader(stream, self.settings.num_workers),
            stream,
            self.position,
            lambda: trainer.current_epoch,
        )

    def sample(self, batches: int) -> list[Batch]:
        """Return this rank's first training batches of the first epoch, whatever the position is.

        The modes of tables are decided by what these batches exchange.

        Args:
            batches: How many to return.
        """
        assert self._train is not None
        stream = self._stream(self._train, training=True)
        stream.set_position(0, 0)
        return list(islice(make_loader(stream, 0), batches))

    def statistics(
        self,
        tables: Sequence[EmbeddingConfig],
        lookups: Sequence[TableLookup] | None = None,
    ) -> dict[str, TableStatistics]:
        """Return id statistics of the tables, by table, from the first training rows of the first
        epoch.

        They do not depend on the rank or the number of ranks. They are cached beside the data
        (`recapp/tables/statistics_cache.py`), so the rows are read once.

        Args:
            tables: The tables whose ids are counted.
            lookups: What reads them; None takes what they declare.
        """
        assert self._train is not None
        if self.trainer is not None:
            # refuses an impossible order before anything is written
            self._stream(self._train, training=True)
        files = [file.path for file in self._train.files]
        least = min(STATISTICS_SAMPLES, self._train.rows // 2)
        if known := read_cached(files, tables, least, lookups):
            return known
        stream = self._stream(self._train, training=True, alone=True)
        batches = list(
            islice(make_loader(stream, 0), max(1, STATISTICS_SAMPLES // self.settings.batch_size))
        )
        try:
            found = measured_statistics(tables, [b.sparse for b in batches], lookups)
        except IdError:
            return {}  # training will raise it, with the rank
        write_cached(files, tables, found, sum(b.rows for b in batches), lookups)
        return found

    @property
    def val_rows(self) -> int:
        """Return the number of rows to validate on."""
        assert self._val is not None
        return self._val.rows

    @property
    def val_source(self) -> Source:
        """Return the rows to validate on."""
        assert self._val is not None
        return self._val

    def val_dataloader(self) -> BatchLoader:
        """Return the loader of every validation row once, in file order; a rank that has none left
        gets empty batches.
        """
        assert self._val is not None
        return make_loader(self._stream(self._val, training=False), self.settings.num_workers)

    def test_dataloader(self) -> BatchLoader:
        """Return the loader of every test row once.

        Raises:
            ConfigError: `dataset.test_path` is not set.
        """
        if self.settings.test_path is None:
            raise ConfigError(
                "dataset.test_path is not set: split=test needs it (a directory, a glob, a "
                "_file_list.txt or a list of them)"
            )
        source = open_source(
            _paths(self.settings.test_path), self.schema, setting="dataset.test_path"
        )
        return make_loader(self._stream(source, training=False), self.settings.num_workers)

    @property
    def prediction_input(self) -> PredictionInput:
        """Return the rows that are to be scored; known after `setup("predict")`."""
        assert self._prediction_input is not None
        return self._prediction_input

    def predict_dataloader(self) -> RankInput:
        """Return the batches that this rank scores, in the order of the input."""
        assert self.trainer is not None
        done = set(self.find_finished() if self.find_finished is not None else ())
        unscored = [n for n in range(self.prediction_input.parts) if n not in done]
        return RankInput(
            self.prediction_input, unscored, self.trainer.global_rank, self.trainer.world_size
        )

    def _stream(self, source: Source, *, training: bool, alone: bool = False) -> BatchStream:
        s = self.settings
        rank = 0
        world = 1
        if not alone:
            assert self.trainer is not None
            rank = self.trainer.global_rank
            world = self.trainer.world_size
        return BatchStream(
            source,
            self.schema,
            batch_size=s.batch_size if training else s.val_batch_size or s.batch_size,
            lanes=s.lanes,
            shuffle_rows=s.shuffle_rows if training else 0,
            seed=self.seed,
            rank=rank,
            world=world,
            training=training,
            dense_transform=s.dense_transform,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and the batch size in which it is counted."""
        return {
            "epoch": self.position.epoch,
            "batches": self.position.batches,
            "batch_size": self.settings.batch_size,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the position of a checkpoint; under another batch size that of the same row, rounded
        down to a batch.
        """
        self.position.epoch = int(state_dict.get("epoch", 0))
        rows = int(state_dict.get("batches", 0)) * int(
            state_dict.get("batch_size", self.settings.batch_size)
        )
        self.position.batches = rows // self.settings.batch_size


def _paths(paths: Paths) -> str | list[str]:
    return paths if isinstance(paths, str) else list(paths)


def _share(text: str) -> Fraction:
    try:
        return Fraction(str(text))
    except (ValueError, ZeroDivisionError):
        raise ConfigError(
            f"dataset.val_share={text}: write a fraction such as 1/7 or 0.1"
        ) from None
