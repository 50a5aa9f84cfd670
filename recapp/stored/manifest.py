"""The manifest of a stored model: `manifest.json`, for people and programs of any language.

    {"format": "recapp", "version": 4, "files": {...},         the size of each file; its checksum
    "config": {...}, "plan": {...}, "metrics": {...}, ...      the writer's entries, a line each
    "blocks": [{"table": "C1", "tensor": "weight",             a line per rectangle; an artefact has
                "rows": [0, 600], ...}, ...]                   "tables", a line each
    "checksum": "0b1c2d3e"}                                    CRC-32 of all bytes above its line

A manifest is not trusted. Each value is checked when it is read, and a wrong value raises the error
class of its kind of stored model.

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

import json
import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self, TypeVar, cast

from torch import Tensor
from typing_extensions import override

from recapp.dataset.schema import DERIVED
from recapp.errors import CheckpointError, PlanError, RecappError, one_line
from recapp.settings.values import typed
from recapp.sharding.layout import WEIGHT
from recapp.sharding.sharding_plan import ShardingPlan
from recapp.stored.block_files import StoredBlock
from recapp.stored.plain_parts import is_a, plain
from recapp.stored.store import ARTEFACT, CHECKPOINT, Kind
from recapp.tables.config import DataType, EmbeddingConfig
from recapp.tables.positions import STRETCHES, RowOrder

MOST_EXAMPLE_ROWS = 4096
_FOOT = b',\n"checksum": "%08x"\n}\n'
WRONG = (  # that reading a damaged entry may raise
    AttributeError,
    KeyError,
    TypeError,
    ValueError,
    OverflowError,
    RecursionError,
    MemoryError,
)

T = TypeVar("T")
M = TypeVar("M", bound="Manifest")
Files = Mapping[str, Mapping[str, Any]]


class TableShape(NamedTuple):
    """Rows and columns of a stored table.

    Args:
        rows: The number of its rows; for a dynamic table, of existing rows.
        dim: The number of its columns.
        dynamic: Whether the table is dynamic.
    """

    rows: int
    dim: int
    dynamic: bool


@dataclass(frozen=True)
class Manifest(ABC):
    """The manifest of a stored model of either kind.

    Args:
        folder: The directory of its files.
        info: All entries without an attribute of their own.
        files: The size of each file by its path in the directory, and its checksum unless it holds
            blocks.
        identity: The CRC-32 of the manifest's bytes; it differs between versions of a model.
    """

    kind: ClassVar[Kind]
    folder: Path
    info: dict[str, Any]
    files: Files
    identity: int = field(default=0, kw_only=True)

    @classmethod
    @abstractmethod
    def of_entries(cls, folder: Path, info: dict[str, Any], files: Files, identity: int) -> Self:
        """Make a manifest of its entries; any exception of `WRONG` stands for a damaged entry."""

    @property
    @abstractmethod
    def shapes(self) -> Mapping[str, TableShape]:
        """The shape of each stored table, by name."""

    @property
    @abstractmethod
    def in_use(self) -> Iterable[str]:
        """The files that stay open while the model is used, because its rows are mapped."""

    @property
    def data_types(self) -> dict[str, DataType]:
        """The data type of the stored rows of each table that is only read; empty if all tables are
        stored in the data types of the settings.
        """
        return {}

    def check_tables(self, tables: Sequence[EmbeddingConfig]) -> None:
        """Check that the settings make all stored tables. Others are compared when their rows are
        read.

        Raises:
            RecappError: The settings do not make a table.
        """
        self.check_left_out({table.name for table in tables})

    def check_left_out(self, tables: Container[str]) -> None:
        """Check that no stored table is left out, which would change the scores.

        Args:
            tables: The names of the tables that the settings make.

        Raises:
            RecappError: The settings do not make a table.
        """
        for name in self.shapes:
            if name not in tables:
                raise self.kind.error(
                    f"the {self.kind.name} has a table {name}, which the settings do not make: set "
                    "dataset, tables and model as they were when it was saved"
                )

    @property
    def config(self) -> dict[str, Any]:
        """The settings of the run that made the model.

        The settings are plain data: their `_target_` names must be checked before a call.

        `recapp.cli.stored_recipe` checks the names.

        Raises:
            RecappError: The entry is not settings.
        """
        return self.entry("config", dict)

    @property
    def metrics(self) -> dict[str, float]:
        """The validation metrics at the time of the save. A metric that the rows do not determine
        is NaN, such as AUC for rows of one class.

        Raises:
            RecappError: A metric is not a number.
        """
        values = self.entry("metrics", dict, {})
        if not all(type(v) in (int, float, type(None)) for v in values.values()):
            raise self.wrong("metrics")
        return {name: math.nan if value is None else value for name, value in values.items()}

    @property
    def example(self) -> list[dict[str, Any]]:
        """Some rows of the data as plain values, to try the model with; empty if none are stored.

        Raises:
            RecappError: The entry is not rows, or has more than `MOST_EXAMPLE_ROWS`.
        """
        if self.info.get("example") is None:  # what data of one's own may have given
            return []
        rows = self.entry("example", list[dict[str, Any]])
        if len(rows) > MOST_EXAMPLE_ROWS:
            raise self.wrong("example")
        return rows

    def example_outputs(self, names: Sequence[str]) -> Mapping[str, Sequence[float]] | None:
        """Return the outputs of the example at the time of storing, by name; None if they are not
        stored.

        Args:
            names: The outputs of the task.
        """
        return None

    def entry(self, name: str, kind: type[T], default: T | None = None) -> T:
        """Return an entry of the writer.

        Args:
            name: Its name.
            kind: Its type, of which `is_a` knows.
            default: The value of an entry that is missing.

        Raises:
            RecappError: The entry is of another type, or is missing and has no default.
        """
        value = self.info.get(name, default)
        if not is_a(value, kind):
            raise self.wrong(name)
        return cast(T, value)

    def wrong(self, name: str) -> RecappError:
        """Return the error for a missing or invalid entry; `name` is its dotted name."""
        value: Any = self.info
        for key in name.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        problem = "is missing" if value is None else f"is {short(value)}, which it cannot be"
        return self.damaged(f"{name} {problem}")

    def damaged(self, why: str) -> RecappError:
        """Return the error for an invalid manifest."""
        return _damaged(self.kind, self.folder, why)


def _damaged(kind: Kind, folder: Path, why: str) -> RecappError:
    return kind.error(f"the manifest of {kind.name} {folder} is damaged: {why}; {kind.fix}")


def to_json(manifest: Manifest) -> str:
    """Return a manifest as JSON text with a line for each entry and part, so that people can read
    and compare manifests.

    Raises:
        CheckpointError: An entry is neither plain nor a single number.
    """
    kind = manifest.kind
    head = {"format": kind.format, "version": kind.version, "files": manifest.files}
    clashes = {*head, kind.parts, "checksum"} & set(manifest.info)
    assert not clashes, f"{sorted(clashes)}: a name of the format itself"
    entries = {**head, **manifest.info}
    if isinstance(entries.get("metrics"), dict):  # JSON has no NaN
        entries["metrics"] = {k: _finite(v) for k, v in entries["metrics"].items()}
    try:
        lines = [
            f"{json.dumps(str(k))}: "
            + json.dumps(plain(v, f"manifest.{k}"), default=_number, allow_nan=kind is CHECKPOINT)
            for k, v in entries.items()
        ]
    except TypeError as error:
        raise CheckpointError(f"manifest: {error}") from error
    parts = ",\n ".join(json.dumps(part.to_dict()) for part in getattr(manifest, kind.parts))
    return sealed("{\n" + ",\n".join([*lines, f'"{kind.parts}": [\n {parts}]']))


def sealed(body: str) -> str:
    """Append the checksum of its bytes, and a brace, to a JSON object without its last brace."""
    return body + (_FOOT % zlib.crc32(body.encode())).decode()


def _finite(value: Any) -> Any:
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    return None if isinstance(number, float) and not math.isfinite(number) else value


def _number(value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    raise TypeError(f"a {type(value).__name__} is no number, text, list or dict")


@lru_cache(maxsize=1)  # a run reads one manifest a dozen times, and a large one takes a second
def from_json(of: type[M], raw: bytes, folder: Path) -> M:
    """Read a manifest from the text that `to_json` has made.

    Args:
        of: The class of the kind.
        raw: The bytes of the file.
        folder: The directory of the file.

    Raises:
        RecappError: The text is not a manifest, or the manifest is damaged, of the other kind or of
            a later version.
    """
    kind = of.kind
    try:
        info: dict[str, Any] = json.loads(raw.decode())
        name = info.pop("format")
        version = info.pop("version")
        if name != kind.format and name in (CHECKPOINT.format, ARTEFACT.format):
            named = typed("ckpt_path", folder)
            raise kind.error(kind.mistaken.format(folder=folder, ckpt_path=named))
        if name != kind.format or type(version) is not int or version < 1:
            raise ValueError(f"format {short(name)} {short(version)}")
        if version > kind.version:
            raise kind.error(
                f"{kind.name} {folder} has format {name} {version}, but this recapp reads format "
                f"{name} {kind.version}: {kind.newer}"
            )
        info.pop("checksum", None)
        body = raw[: -len(_FOOT % 0)]
        if raw != body + _FOOT % zlib.crc32(body):
            raise ValueError(f"its bytes are not those that were {kind.written}")
        files = {file: _file_entry(file, entry) for file, entry in info.pop("files").items()}
        return of.of_entries(folder, info, files, zlib.crc32(raw))
    except WRONG as error:
        why = f"{type(error).__name__} {one_line(str(error))}"
        raise _damaged(kind, folder, why) from error


def _file_entry(file: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    parts = Path(file).parts
    if not file.isprintable() or Path(file).is_absolute() or ".." in parts or not parts:
        raise ValueError(f"file {short(file)}")
    size = entry["bytes"]
    if type(size) is not int or size < 0 or not isinstance(entry.get("crc32", ""), str):
        raise ValueError(f"file {short(file)} of {short(size)} bytes")
    return dict(entry)


def short(value: Any) -> str:
    """Return a value of a file as one line of at most 80 characters."""
    try:
        return one_line(json.dumps(value))
    except WRONG:
        return f"a {type(value).__name__}"


# ---- the two kinds

META = "meta.pt"
ROW_ORDERS = "row_orders"
JOINED = "joined"  # the entry that names the checkpoints whose models are members here
RUN = "run"
SAVED_AS = "saved_as"
DYNAMIC_COUNTS = {"rows": STRETCHES, "waiting": STRETCHES}


@dataclass(frozen=True)
class CheckpointManifest(Manifest):
    """The manifest of a checkpoint: its files, its stored rectangles, and the entries of the
    writer.

    Args:
        blocks: Every stored rectangle.
    """

    kind = CHECKPOINT
    blocks: tuple[StoredBlock, ...]

    @override
    @classmethod
    def of_entries(cls, folder: Path, info: dict[str, Any], files: Files, identity: int) -> Self:
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
    @override
    def in_use(self) -> tuple[str, ...]:
        # rows are read when tables are filled, fitted values of derived columns when rows are
        ids = self.info.get("ids")
        return (META,) if isinstance(ids, dict) and ids.get(DERIVED) else ()

    @property
    @override
    def shapes(self) -> dict[str, TableShape]:
        dynamic = self.dynamic
        return {
            table: TableShape(*blocks[0].shape, table in dynamic)
            for (table, tensor), blocks in self.tensors.items()
            if tensor == WEIGHT
        }

    @property
    @override
    def config(self) -> dict[str, Any]:
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
        """The number of rows in each of the 64 stretches of a dynamic table, and of counted keys
        without a row: `{table: {"rows": [...], "waiting": [...]}}`.

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
            value = getattr(self, f.name)
            if not isinstance(value, cast(Any, f.type)) or isinstance(value, bool):
                raise TypeError(f"{f.name}={value!r}")
        if min(self.rows, self.first_row, self.dim - 1) < 0:
            raise ValueError(f"table {self.name} of {self.rows} rows from {self.first_row}")
        if not (0 <= self.start_hash < 2**32 and 0 <= self.start_range < math.inf):
            raise ValueError(f"start values of table {self.name}")

    def to_dict(self) -> dict[str, Any]:
        """Return the table as an entry of the manifest, in plain types."""
        return asdict(self)

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
    tables: tuple[StoredTable, ...]

    @override
    @classmethod
    def of_entries(cls, folder: Path, info: dict[str, Any], files: Files, identity: int) -> Self:
        tables = tuple(StoredTable(**t) for t in info.pop("tables"))
        for t in tables:
            _ = files[t.file], files[t.keys or t.file]
        for entry in files.values():
            _ = entry["crc32"]
        if not info.get("example"):
            raise ValueError("it has no example, as before version 4")
        return cls(folder, info, files, tables, identity=identity)

    @property
    @override
    def in_use(self) -> Files:
        return self.files

    @property
    @override
    def data_types(self) -> dict[str, DataType]:
        return {t.name: t.data_type for t in self.tables}

    @override
    def check_tables(self, tables: Sequence[EmbeddingConfig]) -> None:
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

    @override
    def example_outputs(self, names: Sequence[str]) -> dict[str, list[float]]:
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
    @override
    def shapes(self) -> dict[str, TableShape]:
        return {t.name: TableShape(t.rows, t.dim, t.keys is not None) for t in self.tables}


def _is_number(value: object) -> bool:
    """Return whether a value of JSON is a number that a float holds."""
    return type(value) in (int, float) and abs(cast(float, value)) < LARGEST
