"""The manifest of a checkpoint: its stored rectangles, and the state of the run that saved it.

    {"table": "C1", "tensor": "weight", "rows": [0, 600], ...}      a line per rectangle

The entry `"row_orders": {"C1": {"order": "mixed", "multiplier": m, "shift": s}}` lists tables with
mixed rows: row r of the R rows of C1 is stored as row (m r + s) mod R.

Version 1 has no checksum; it is read with a note. A reader of version 2 does not know row orders,
so a manifest with row orders has version 3. A reader of version 3 knows neither derived columns nor
`dataset.vectors`, `dataset.padding`, `dataset.separator`, `tables.dim_rule`, `tables.wide`,
`tables.collections`, `ensemble` and averages of weights, so a manifest with one of them has
version 4.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from recapp.dataset.schema import DERIVED
from recapp.errors import CheckpointError, PlanError
from recapp.sharding.layout import RAW, WEIGHT
from recapp.sharding.sharding_plan import ShardingPlan
from recapp.stored.kinds import CHECKPOINT
from recapp.stored.manifest import WRONG, Files, Manifest, TableShape
from recapp.stored.rectangles import StoredBlock
from recapp.tables.dynamic import RUNS
from recapp.tables.row_order import RowOrder

WITHOUT_ROW_ORDERS = 2
WITH_ROW_ORDERS = 3
META = "meta.pt"
MOST_EXAMPLE_ROWS = 4096
ROW_ORDERS = "row_orders"
JOINED = "joined"
"""The entry that names the checkpoints whose models are the members of a joined one."""
RUN = "run"
SAVED_AS = "saved_as"


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
        found: dict[tuple[str, str], list[StoredBlock]] = {}
        for s in self.blocks:
            found.setdefault((s.table, s.tensor), []).append(s)
        return found

    @property
    def version(self) -> int:
        """The version of the format: 4 with what the module docstring lists, else 3 with row
        orders, else 2.
        """
        if self.derives or self._has_later_settings or self.is_averaged:
            return self.kind.version
        return WITH_ROW_ORDERS if ROW_ORDERS in self.info else WITHOUT_ROW_ORDERS

    @property
    def derives(self) -> bool:
        """Whether the model reads derived columns, whose fitted values the plain part has."""
        ids = self.info.get("ids")
        return isinstance(ids, dict) and bool(ids.get(DERIVED))

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
    def _has_later_settings(self) -> bool:
        """Whether the model has tables or columns by settings that a reader of version 3 drops."""
        config = self.info.get("config")
        found = config if isinstance(config, dict) else {}
        set_up = {
            group: value if isinstance(value := found.get(group), dict) else {}
            for group in ("tables", "dataset")
        }
        further = [set_up["tables"].get(name) for name in ("wide", "collections", "dim_rule")]
        further += [set_up["dataset"].get(name) for name in ("vectors", "separator")]
        padded = set_up["dataset"].get("padding") is not None
        return any((*further, padded, found.get("ensemble", 1) != 1))

    @property
    def in_use(self) -> tuple[str, ...]:
        """The plain part if it has fitted values of derived columns; rows are read when tables are
        filled.
        """
        return (META,) if self.derives else ()

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
        return self._count(self.info.get("step"), "step")

    @property
    def run(self) -> str:
        """The identity of the run that wrote the checkpoint (`recapp/stored/run_files.py`); empty
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
        found = self.entry("position", dict)
        names = ("epoch", "batches", "batch_size")
        return {name: self._count(found.get(name), f"position.{name}") for name in names}

    @property
    def example(self) -> list[dict[str, Any]]:
        """Some rows of the data as plain values, to try the model with; empty if none are stored.

        Raises:
            CheckpointError: The entry is not rows, or has more than `MOST_EXAMPLE_ROWS`.
        """
        found = self.info.get("example") or []
        is_some = isinstance(found, list) and len(found) <= MOST_EXAMPLE_ROWS
        if not is_some or not all(isinstance(row, dict) for row in found):
            raise self.wrong("example")
        return found

    @property
    def updates(self) -> list[int]:
        """The number of updates of each collection's tables; empty if it is not stored.

        Raises:
            CheckpointError: The entry is not a list of integers.
        """
        return [self._count(count, "updates") for count in self.entry("updates", list, [])]

    @property
    def begun(self) -> dict[str, int]:
        """The number of updates from which those of each table count, by table; tables that are
        missing count from the beginning.

        Raises:
            CheckpointError: The entry is not a mapping of integers.
        """
        found = self.entry("begun", dict, {})
        return {table: self._count(number, "begun") for table, number in found.items()}

    @property
    def rules(self) -> dict[str, str]:
        """The name of the row rule that trained each table; empty if it is not stored.

        Raises:
            CheckpointError: The entry is not a mapping of names.
        """
        found = self.entry("rules", dict, {})
        if not all(type(name) is str for name in found.values()):
            raise self.wrong("rules")
        return found

    @property
    def weights(self) -> dict[str, str]:
        """The table of each sharded weight, by its name in the module's state; empty if it is not
        stored. A table that two parts of a module share has two names.

        Raises:
            CheckpointError: These tables are not the stored tables.
        """
        found = self.info.get("weights") or {}
        if not isinstance(found, dict) or not all(type(name) is str for name in found.values()):
            raise self.wrong("weights")
        if found and set(found.values()) != {table for table, _ in self.tensors}:
            raise self.wrong("weights")
        return found

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
        found = self.entry("dynamic", dict, {})
        for counts in found.values():
            if not isinstance(counts, dict) or sorted(counts) != ["rows", "waiting"]:
                raise self.wrong("dynamic")
            for count_R in counts.values():
                if not isinstance(count_R, list) or len(count_R) != RUNS:
                    raise self.wrong("dynamic")
                for count in count_R:
                    self._count(count, "dynamic")
        return found

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

    def _count(self, value: Any, name: str) -> int:
        if type(value) is not int or not 0 <= value < 2**63:
            raise self.wrong(name)
        return value


def _check_files(files: Files, blocks: tuple[StoredBlock, ...]) -> None:
    """Check that all blocks lie inside of their files.

    Raises:
        ValueError: A block lies outside, or the name of a file contains another directory.
    """
    held = dict.fromkeys(files, 0)
    for s in blocks:
        held[s.file] += s.end - s.begin
        if s.end > files[s.file]["bytes"]:
            raise ValueError(f"block {s.key!r} ends behind {s.file}")
    for file, count in held.items():
        if Path(file).name != file or count > files[file]["bytes"]:
            raise ValueError(f"the blocks of {file} hold {count:,} bytes")
    if META not in files:
        raise ValueError(f"{META} is not listed")
