"""The manifests of the two kinds of stored models: of checkpoints and of artefacts.

The entry `"row_orders": {"C1": {"order": "mixed", "multiplier": m, "shift": s}}` of a checkpoint
lists tables with mixed rows: row r of the R rows of C1 is stored as row (m r + s) mod R.

An artefact holds all that scoring needs; its manifest has a few raw rows and their outputs. Only
its compiled part can run code, and that part needs trust.

    rows/int8_16.bin          the rows of all int8 tables of 16 columns, table by table
    rows/int8_16_dynamic.bin  rows of dynamic tables, and the sorted positions of their keys
    rows/int8_16_dynamic.keys
    derived.bin               the fitted values of derived columns, if there are some
    dense.safetensors         the other parameters and buffers of the model
    compiled/                 the dense part as machine code, read only with trust_compiled

Files hold rows in the layout of the kernels, so readers map a file, and several processes share its
pages. The model is built from the settings in the manifest, after the same check as for a
checkpoint (`recapp/stored/trust.py`).
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Self, cast

from recapp.dataset.schema import DERIVED
from recapp.errors import CheckpointError, PlanError
from recapp.sharding.layout import RAW, WEIGHT
from recapp.sharding.sharding_plan import ShardingPlan
from recapp.stored.block_files import StoredBlock
from recapp.stored.manifest import WRONG, Files, Manifest, TableShape
from recapp.stored.meta_file import is_a
from recapp.stored.store import ARTEFACT, CHECKPOINT
from recapp.tables.config import DataType, EmbeddingConfig
from recapp.tables.dynamic import RUNS
from recapp.tables.row_order import RowOrder

META = "meta.pt"
ROW_ORDERS = "row_orders"
JOINED = "joined"
"""The entry that names the checkpoints whose models are the members of a joined one."""
RUN = "run"
SAVED_AS = "saved_as"
DYNAMIC_COUNTS = {"rows": RUNS, "waiting": RUNS}


@dataclass(frozen=True)
class CheckpointManifest(Manifest):
    """The manifest of a checkpoint: its files, its stored rectangles, and the entries of the
    writer.

    Args:
        blocks: Every stored rectangle.
    """

    kind = CHECKPOINT
    parts = "blocks"
    dense_file = META
    blocks: tuple[StoredBlock, ...]

    @classmethod
    def of_entries(cls, folder: Path, info: dict[str, Any], files: Files, identity: int) -> Self:
        """Make a manifest of its entries, and check that all blocks lie inside of their files."""
        blocks = tuple(StoredBlock.from_dict(block) for block in info.pop("blocks"))
        _check_files(files, blocks)
        return cls(folder, info, files, blocks, identity=identity)

    @cached_property
    def tensors(self) -> dict[tuple[str, str], list[StoredBlock]]:
        """The stored rectangles of each (table, tensor)."""
        blocks_by_tensor: dict[tuple[str, str], list[StoredBlock]] = {}
        for s in self.blocks:
            blocks_by_tensor.setdefault((s.table, s.tensor), []).append(s)
        return blocks_by_tensor

    @property
    def is_averaged(self) -> bool:
        """Whether the weights are averages, and the weights with which training goes on are beside
        them.
        """
        return any(block.tensor == RAW for block in self.blocks)

    @property
    def is_joined(self) -> bool:
        """Whether the models of several checkpoints are the members of an ensemble here."""
        return JOINED in self.info

    @property
    def in_use(self) -> tuple[str, ...]:
        """The plain part if it has fitted values of derived columns; rows are read when tables are
        filled.
        """
        ids = self.info.get("ids")
        return (META,) if isinstance(ids, dict) and ids.get(DERIVED) else ()

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The rectangles as plain values."""
        return [s.to_dict() for s in self.blocks]

    @property
    def shapes(self) -> dict[str, TableShape]:
        """The shape of each stored table, by name."""
        dynamic = self.dynamic
        return {
            table: TableShape(*blocks[0].shape, table in dynamic)
            for (table, tensor), blocks in self.tensors.items()
            if tensor == WEIGHT
        }

    @property
    def config(self) -> dict[str, Any]:
        """The settings of the run that wrote the checkpoint, with current names, as plain data.

        Raises:
            CheckpointError: The writer stored no settings, or the entry is not settings.
        """
        if "config" not in self.info:
            raise CheckpointError(
                f"{self.folder} holds no settings: it was not written by recapp.train, "
                "so give model and data by hand"
            )
        return super().config

    @property
    def step(self) -> int:
        """The number of training steps before the save.

        Raises:
            CheckpointError: The entry is not an integer of at least 0.
        """
        return self.entry("step", int)

    @property
    def run(self) -> str:
        """The identity of the run that wrote the checkpoint (`recapp/stored/checkpoint.py`); empty
        if it is not stored.

        Raises:
            CheckpointError: The entry is not a text.
        """
        return self.entry(RUN, str, "")

    @property
    def position(self) -> dict[str, int]:
        """The position of training: `epoch`, `batches` trained in the epoch, `batch_size`.

        Raises:
            CheckpointError: The run had no data module of recapp, or a value is not an integer.
        """
        position = self.entry("position", dict)
        names = ("epoch", "batches", "batch_size")
        for name in names:
            if not is_a(position.get(name), int):
                raise self.wrong(f"position.{name}")
        return {name: position[name] for name in names}

    @property
    def updates(self) -> list[int]:
        """The number of updates of each collection's tables; empty if it is not stored.

        Raises:
            CheckpointError: The entry is not a list of integers.
        """
        return self.entry("updates", list[int], [])

    @property
    def begun(self) -> dict[str, int]:
        """The number of updates from which those of each table count, by table; tables that are
        missing count from the beginning.

        Raises:
            CheckpointError: The entry is not a mapping of integers.
        """
        return self.entry("begun", dict[str, int], {})

    @property
    def rules(self) -> dict[str, str]:
        """The name of the row rule that trained each table; empty if it is not stored.

        Raises:
            CheckpointError: The entry is not a mapping of names.
        """
        return self.entry("rules", dict[str, str], {})

    @property
    def weights(self) -> dict[str, str]:
        """The table of each sharded weight, by its name in the module's state; empty if it is not
        stored. A table that two parts of a module share has two names.

        Raises:
            CheckpointError: These tables are not the stored tables.
        """
        tables = self.entry("weights", dict[str, str], {})
        if tables and set(tables.values()) != {table for table, _ in self.tensors}:
            raise self.wrong("weights")
        return tables

    @cached_property
    def row_orders(self) -> dict[str, RowOrder]:
        """The stored order of rows, by table; other tables are stored in the order of row numbers.

        Raises:
            CheckpointError: An entry is not a row order, or its table is not stored.
        """
        rows = {s.table: s.shape[0] for s in self.blocks}
        try:
            return {
                table: RowOrder.from_dict(plain, rows[table])
                for table, plain in self.info.get(ROW_ORDERS, {}).items()
            }
        except WRONG:
            raise self.wrong(ROW_ORDERS) from None

    @property
    def dynamic(self) -> dict[str, dict[str, list[int]]]:
        """The number of rows in each of the 64 runs of a dynamic table, and of counted keys without
        a row: `{table: {"rows": [...], "waiting": [...]}}`.

        Raises:
            CheckpointError: The entry does not have these numbers.
        """
        tables = self.entry("dynamic", dict[str, dict[str, list[int]]], {})
        for counts in tables.values():
            if {name: len(count_R) for name, count_R in counts.items()} != DYNAMIC_COUNTS:
                raise self.wrong("dynamic")
        return tables

    @property
    def plan(self) -> ShardingPlan:
        """The sharding plan of the run.

        Raises:
            CheckpointError: The entry is missing, or is not a plan.
        """
        try:
            return ShardingPlan.from_dict(self.info["plan"])
        except (*WRONG, PlanError):
            raise self.wrong("plan") from None


def _check_files(files: Files, blocks: tuple[StoredBlock, ...]) -> None:
    """Check that all blocks lie inside of their files.

    Raises:
        ValueError: A block lies outside, or the name of a file contains another directory.
    """
    bytes_of_blocks = dict.fromkeys(files, 0)
    for s in blocks:
        bytes_of_blocks[s.file] += s.end - s.begin
        if s.end > files[s.file]["bytes"]:
            raise ValueError(f"block {s.key!r} ends behind {s.file}")
    for file, count in bytes_of_blocks.items():
        if Path(file).name != file or count > files[file]["bytes"]:
            raise ValueError(f"the blocks of {file} hold {count:,} bytes")
    if META not in files:
        raise ValueError(f"{META} is not listed")


LARGEST = 1e300  # of the stored outputs
DENSE = "dense.safetensors"
COMPILED = "compiled/"  # the directory of files that are code


@dataclass(frozen=True, kw_only=True)
class StoredTable:
    """A table in an artefact.

    Args:
        name: Its name.
        rows: The number of stored rows.
        dim: The number of columns.
        storage: The data type of the stored rows, a `DataType`.
        file: The file of its rows.
        first_row: Its first row in the file.
        keys: The file of the positions of its keys, which also begin at `first_row`; None for a
            static table.
        id_rule: The rule by which an id becomes a row.
        min_key: The id of row 0.
        start_hash: The hash from which start values of keys without a row are computed.
        start_range: The largest distance of those values from 0.
    """

    name: str
    rows: int
    dim: int
    storage: str
    file: str
    first_row: int
    keys: str | None = None
    id_rule: str = "error"
    min_key: int = 0
    start_hash: int = 0
    start_range: float = 0.0

    def __post_init__(self) -> None:
        DataType(self.storage)
        for f in fields(self):
            kind: Any = f.type
            value = getattr(self, f.name)
            if not isinstance(value, kind) or isinstance(value, bool):
                raise TypeError(f"{f.name}={value!r}")
        if min(self.rows, self.first_row, self.dim - 1) < 0:
            raise ValueError(f"table {self.name} of {self.rows} rows from {self.first_row}")
        if not (0 <= self.start_hash < 2**32 and 0 <= self.start_range < math.inf):
            raise ValueError(f"start values of table {self.name}")

    @property
    def data_type(self) -> DataType:
        """The data type of the stored rows."""
        return DataType(self.storage)


@dataclass(frozen=True)
class ArtefactManifest(Manifest):
    """The manifest of an artefact: its files, its tables, and further entries.

    Args:
        tables: Its tables, in the order of the model.
    """

    kind = ARTEFACT
    parts = "tables"
    dense_file = DENSE
    tables: tuple[StoredTable, ...]

    @classmethod
    def of_entries(cls, folder: Path, info: dict[str, Any], files: Files, identity: int) -> Self:
        """Make a manifest of its entries, and check that all files have a checksum."""
        tables = tuple(StoredTable(**t) for t in info.pop("tables"))
        for t in tables:
            _ = files[t.file], files[t.keys or t.file]
        for entry in files.values():
            _ = entry["crc32"]
        if not info.get("example"):
            raise ValueError("it has no example, as before version 4")
        return cls(folder, info, files, tables, identity=identity)

    @property
    def in_use(self) -> Files:
        """All files."""
        return self.files

    @property
    def data_types(self) -> dict[str, DataType]:
        """The data type of the stored rows of each table."""
        return {t.name: t.data_type for t in self.tables}

    def check_tables(self, tables: Sequence[EmbeddingConfig]) -> None:
        """Check that the tables of the settings are the stored tables.

        Raises:
            ArtefactError: A table differs.
        """
        configs = {t.name: t for t in tables}
        stored = {t.name: t for t in self.tables}
        if configs.keys() != stored.keys():
            odd = ", ".join(sorted(configs.keys() ^ stored.keys())[:5])
            raise self.damaged(f"settings and tables differ: {odd}")
        for name, table in configs.items():
            stored_table = stored[name]
            dynamic = table.dynamic is not None
            rows = stored_table.rows if dynamic else table.num_embeddings
            facts = (rows, table.embedding_dim, str(table.id_rule), table.min_key, dynamic)
            if facts != (
                stored_table.rows,
                stored_table.dim,
                stored_table.id_rule,
                stored_table.min_key,
                stored_table.keys is not None,
            ):
                raise self.damaged(f"table {name} differs from its settings")

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The tables as plain values."""
        return [asdict(t) for t in self.tables]

    def example_outputs(self, names: Sequence[str]) -> dict[str, list[float]]:
        """Return the outputs of the example at the time of the export, by name.

        Args:
            names: The outputs of the task.

        Raises:
            ArtefactError: The outputs are not numbers, or those of another task.
        """
        outputs = self.entry("outputs", dict)
        if outputs.keys() != {*names}:
            raise self.damaged(f"outputs has {', '.join(outputs)}, and the task {', '.join(names)}")
        for values in outputs.values():
            if not isinstance(values, list) or not all(map(_is_number, values)):
                raise self.damaged("outputs are no numbers")
        return outputs

    @property
    def bytes(self) -> int:
        """The bytes of all files."""
        return sum(int(entry["bytes"]) for entry in self.files.values())

    @property
    def shapes(self) -> dict[str, TableShape]:
        """The shape of each stored table, by name."""
        return {t.name: TableShape(t.rows, t.dim, t.keys is not None) for t in self.tables}


def _is_number(value: object) -> bool:
    """Return whether a value of JSON is a number that a float holds."""
    return type(value) in (int, float) and abs(cast(float, value)) < LARGEST
