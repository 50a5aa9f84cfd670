"""An artefact: a directory with everything that scoring needs, and nothing that can run code unless
it is trusted.

    manifest.json             what is below, with sizes and checksums; written last
    rows/int8_16.bin          the rows of all int8 tables of 16 columns, table by table
    rows/int8_16_dynamic.bin  those of dynamic tables, with the sorted positions of their keys
    rows/int8_16_dynamic.keys
    dense.safetensors         the other parameters and buffers of the model
    example.arrow             a few raw rows, whose logits stand in the manifest
    compiled/                 the dense part as machine code: read where it is trusted

Rows lie as kernels read them, so a file is mapped and several processes share its pages. The model
is built of the settings that the manifest has, which are judged as a checkpoint's are.

Nothing in a manifest is trusted: each value is checked where it is read, and what does not hold
ends in one `ArtefactError`.
"""

import json
import math
import os
import stat
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from recapp.errors import ArtefactError
from recapp.stored.local_files import MANIFEST, current_path
from recapp.stored.manifest import is_sealed, sealed
from recapp.stored.stored_file import stored_file
from recapp.tables.config import DataType

FORMAT = "recapp-artefact"
VERSION = 1  # a reader refuses a later one
DENSE = "dense.safetensors"
EXAMPLE = "example.arrow"
REPLACED = "recapp-replaced"  # what the name of an earlier artefact ends in while it is replaced
MANIFEST_BYTES = 2**28
READ_BYTES = 1 << 20
_WRONG = (AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError)

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class StoredTable:
    """A table in an artefact.

    Args:
        name: Its name.
        rows: Rows that are stored; of a dynamic table those that exist.
        dim: Columns.
        storage: How they are stored, a `DataType`.
        file: The file of its rows.
        first_row: Its first row in the file.
        keys: The file of the positions of its keys, in which they begin at `first_row` as well;
            None where rows have numbers.
        id_rule: How an id becomes a row.
        min_key: The id of row 0.
        start_hash: What goes into the start values of keys without a row.
        start_range: How far those are from 0 at most.
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
        """How its rows are stored."""
        return DataType(self.storage)


@dataclass(frozen=True)
class Artefact:
    """An artefact's manifest, read and checked.

    Args:
        folder: The directory.
        info: All entries that have no place of their own here.
        tables: Its tables, in the order of the model.
        files: The bytes and the checksum of each file, by its path in the directory.
        identity: The CRC-32 of the manifest, in which versions of an artefact differ.
    """

    folder: Path
    info: Mapping[str, Any]
    tables: tuple[StoredTable, ...]
    files: Mapping[str, Mapping[str, Any]]
    identity: int = 0

    def entry(self, name: str, kind: type[T]) -> T:
        """Return an entry of the manifest.

        Raises:
            ArtefactError: It is missing or of another kind.
        """
        value = self.info.get(name)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise self.damaged(f"{name}={str(value)[:80]}")
        return value

    def damaged(self, why: str) -> ArtefactError:
        """Return the error of a manifest that cannot be."""
        return ArtefactError(
            f"the manifest of artefact {self.folder} is damaged: {why}; export it again"
        )

    def open(self, file: str) -> BinaryIO:
        """Open a file of the artefact for reading.

        Raises:
            ArtefactError: It is missing, or its size is another.
        """
        found = _open(self.folder, file)
        wanted = self.files[file]["bytes"] if file in self.files else -1
        held = os.fstat(found.fileno()).st_size
        if held != wanted:
            found.close()
            raise ArtefactError(
                f"artefact {self.folder} is incomplete: {file} has {held:,} of {wanted:,} bytes"
            )
        return found

    def read(self, file: str) -> bytes:
        """Return what a small file holds.

        Raises:
            ArtefactError: It is missing or damaged.
        """
        with self.open(file) as source:
            raw = source.read()
        self._check(file, zlib.crc32(raw))
        return raw

    def verify(self, file: str) -> int:
        """Read a file and compare its checksum, and return its bytes.

        Raises:
            ArtefactError: It is missing or damaged.
        """
        found = 0
        with self.open(file) as source:
            while raw := source.read(READ_BYTES):
                found = zlib.crc32(raw, found)
        self._check(file, found)
        return int(self.files[file]["bytes"])

    def verify_all(self) -> None:
        """Compare the checksums of all files but the compiled part, which nobody reads who does not
        trust it.

        Raises:
            ArtefactError: A file is damaged.
        """
        for file in self.files:
            if not file.startswith("compiled/"):
                self.verify(file)

    @property
    def numbered_rows(self) -> dict[str, int]:
        """The rows of the tables whose rows have numbers, by name."""
        return {t.name: t.rows for t in self.tables if t.keys is None}

    def _check(self, file: str, found: int) -> None:
        if f"{found:08x}" != self.files[file]["crc32"]:
            raise ArtefactError(
                f"{self.folder / file} is damaged: its bytes are not those that were exported; "
                "export it again"
            )


def is_artefact(path: str | Path) -> bool:
    """Return whether a directory says that it is an artefact."""
    try:
        with _open(current_path(Path(path), REPLACED), MANIFEST) as source:
            return FORMAT.encode() in source.read(256)
    except (ArtefactError, OSError):
        return False


def read_artefact(path: str | Path) -> Artefact:
    """Read the manifest of an artefact, and check that its files are there.

    Raises:
        ArtefactError: There is none, or it is incomplete, damaged or of a later version.
    """
    folder = current_path(Path(path), REPLACED)
    if not folder.is_dir():
        raise ArtefactError(f"{path}: there is no such directory: `recapp.export` writes artefacts")
    with _open(folder, MANIFEST) as source:
        raw = source.read(MANIFEST_BYTES)
    found = _parsed(raw, folder)
    for file in found.files:
        found.open(file).close()
    return found


def to_json(
    info: Mapping[str, Any],
    tables: tuple[StoredTable, ...],
    files: Mapping[str, Mapping[str, Any]],
) -> str:
    """Return a manifest as text, a line for each entry and table."""
    entries = {"format": FORMAT, "version": VERSION, **info, "files": files}
    lines = [f"{json.dumps(k)}: {json.dumps(v, allow_nan=False)}" for k, v in entries.items()]
    rows = ",\n ".join(json.dumps(asdict(t)) for t in tables)
    return sealed("{\n" + ",\n".join([*lines, f'"tables": [\n {rows}]']))


def _parsed(raw: bytes, folder: Path) -> Artefact:
    try:
        info: dict[str, Any] = json.loads(raw.decode())
        name = info.pop("format")
        version = info.pop("version")
        if name == "recapp":
            raise ArtefactError(
                f"{folder} is a checkpoint: `python -m recapp.export ckpt_path={folder} "
                "output=DIR` makes an artefact of it"
            )
        if name != FORMAT or type(version) is not int or version < 1:
            raise ValueError(f"format {str(name)[:40]!r} {str(version)[:40]!r}")
        if version > VERSION:
            raise ArtefactError(
                f"artefact {folder} has version {version}, but this recapp reads version "
                f"{VERSION}: use a later recapp, or export the checkpoint with this one"
            )
        if not is_sealed(raw):
            raise ValueError("its bytes are not those that were written")
        info.pop("checksum")
        files = {file: _file_entry(file, e) for file, e in info.pop("files").items()}
        tables = tuple(StoredTable(**t) for t in info.pop("tables"))
        for t in tables:
            _ = files[t.file], files[t.keys or t.file]
    except _WRONG as error:
        raise ArtefactError(
            f"the manifest of artefact {folder} is damaged: {type(error).__name__} "
            f"{' '.join(str(error).split())[:80]}; export it again"
        ) from error
    return Artefact(folder, info, tables, files, zlib.crc32(raw))


def _file_entry(file: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is said of a file, checked.

    Raises:
        ValueError: It leads out of the directory, or is said to have no number of bytes.
    """
    parts = Path(file).parts
    if not file.isprintable() or Path(file).is_absolute() or ".." in parts or not parts:
        raise ValueError(f"file {file[:80]!r}")
    size = entry["bytes"]
    if type(size) is not int or size < 0 or not isinstance(entry["crc32"], str):
        raise ValueError(f"file {file[:80]!r} of {str(size)[:40]} bytes")
    return {"bytes": size, "crc32": entry["crc32"]}


def _open(folder: Path, file: str) -> BinaryIO:
    """Open a regular file; a pipe would wait for a writer."""
    try:
        descriptor = os.open(folder / file, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        what = "is no artefact" if file == MANIFEST else "is an incomplete artefact"
        raise ArtefactError(f"{folder} {what}: {file} is missing") from None
    except OSError as error:
        raise ArtefactError(f"{folder / file} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ArtefactError(f"{folder / file} is no file of an artefact")
    return stored_file(descriptor, folder / file, ArtefactError)
