"""The manifest of a stored model: `manifest.json`, for people and programs of any language.

    {"format": "recapp", "version": 4, "files": {...},         the size of each file; its checksum
    "config": {...}, "plan": {...}, "metrics": {...}, ...      the writer's entries, a line each
    "blocks": [{"table": "C1", "tensor": "weight",             a line per rectangle; an artefact has
                "rows": [0, 600], ...}, ...]                   "tables", a line each
    "checksum": "0b1c2d3e"}                                    CRC-32 of all bytes above its line

A manifest is not trusted. Each value is checked when it is read, and a wrong value raises the error
class of its kind of stored model.
"""

import json
import math
import re
import zlib
from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self, TypeVar, cast

from torch import Tensor

from recapp.errors import CheckpointError, RecappError
from recapp.settings.values import typed
from recapp.stored.meta_file import is_a, plain
from recapp.stored.store import FORMATS, Kind
from recapp.tables.config import DataType, EmbeddingConfig

MOST_EXAMPLE_ROWS = 4096
_FOOT = b',\n"checksum": "%08x"\n}\n'
WRONG = (
    AttributeError,
    KeyError,
    TypeError,
    ValueError,
    OverflowError,
    RecursionError,
    MemoryError,
)
"""The exceptions that reading a damaged entry may raise."""

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
    parts: ClassVar[str]
    """The name of the entry that has a line for each item."""
    dense_file: ClassVar[str]
    """The name of the file with the dense parameters."""
    folder: Path
    info: dict[str, Any]
    files: Files
    identity: int = field(default=0, kw_only=True)

    @classmethod
    def from_json(cls, raw: bytes, folder: Path) -> Self:
        """Read a manifest from the text that `to_json` has made.

        Args:
            raw: The bytes of the file.
            folder: The directory of the file.

        Raises:
            RecappError: The text is not a manifest, or the manifest is damaged, of the other kind
                or of a later version.
        """
        manifest: Self = _read(cls, raw, folder)
        return manifest

    @classmethod
    @abstractmethod
    def of_entries(cls, folder: Path, info: dict[str, Any], files: Files, identity: int) -> Self:
        """Make a manifest of its entries; any exception of `WRONG` stands for a damaged entry."""

    @property
    @abstractmethod
    def lines(self) -> Sequence[Mapping[str, Any]]:
        """The items of the entry `parts`, as plain values."""

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
    clashes = {*head, manifest.parts, "checksum"} & set(manifest.info)
    assert not clashes, f"{sorted(clashes)}: a name of the format itself"
    entries = {**head, **manifest.info}
    if isinstance(entries.get("metrics"), dict):  # JSON has no NaN
        entries["metrics"] = {k: _finite(v) for k, v in entries["metrics"].items()}
    try:
        lines = [
            f"{json.dumps(str(k))}: "
            + json.dumps(plain(v, f"manifest.{k}"), default=_number, allow_nan=kind.has_nan)
            for k, v in entries.items()
        ]
    except TypeError as error:
        raise CheckpointError(f"manifest: {error}") from error
    parts = ",\n ".join(json.dumps(part) for part in manifest.lines)
    return sealed("{\n" + ",\n".join([*lines, f'"{manifest.parts}": [\n {parts}]']))


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
def _read(of: type[M], raw: bytes, folder: Path) -> M:
    kind = of.kind
    try:
        info: dict[str, Any] = json.loads(raw.decode())
        name = info.pop("format")
        version = info.pop("version")
        if name != kind.format and name in FORMATS:
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
        why = f"{type(error).__name__} {short(str(error), quoted=False)}"
        raise _damaged(kind, folder, why) from error


def _file_entry(file: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Check the entry of a file, and return it.

    Raises:
        ValueError: The file lies outside of the directory, or its size or checksum is invalid.
    """
    parts = Path(file).parts
    if not file.isprintable() or Path(file).is_absolute() or ".." in parts or not parts:
        raise ValueError(f"file {short(file)}")
    size = entry["bytes"]
    if type(size) is not int or size < 0 or not isinstance(entry.get("crc32", ""), str):
        raise ValueError(f"file {short(file)} of {short(size)} bytes")
    return dict(entry)


def short(value: Any, *, quoted: bool = True) -> str:
    """Return a value as one line of at most 80 characters."""
    try:
        text = json.dumps(value) if quoted else value
    except WRONG:
        text = f"a {type(value).__name__}"
    text = re.sub(r"[^ -~]+", " ", text)
    return text if len(text) <= 80 else text[:77] + "..."
