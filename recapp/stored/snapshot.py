"""One version of a stored model, open for reading: a checkpoint or an artefact.

Both kinds answer the same questions: manifest, dense part, example, name and facts. Open files stay
readable when a writer replaces the model (`recapp/stored/stored_model.py`).
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar, Generic, Self, TypeVar

from torch import Tensor

from recapp.dataset.derived_columns import DerivedColumn
from recapp.dataset.schema import DERIVED
from recapp.errors import DataError, RecappError
from recapp.sharding.layout import Block
from recapp.stored.artefact_manifest import COMPILED, DENSE, EXAMPLE, ArtefactManifest
from recapp.stored.block_files import check_bytes, fill_blocks, sources_of
from recapp.stored.checkpoint_manifest import META, CheckpointManifest
from recapp.stored.derived_values import DERIVED_FILE, Values, read_values, values_in
from recapp.stored.files import Pinned, crc32_of
from recapp.stored.kinds import ARTEFACT, CHECKPOINT, Kind
from recapp.stored.manifest import Manifest
from recapp.stored.meta_file import read_meta
from recapp.stored.rectangles import check_tiling
from recapp.stored.training_state import check_state, dense_state

if TYPE_CHECKING:  # checks of a path do not import pyarrow
    from recapp.dataset.raw_rows import RawRows, RawTable
    from recapp.dataset.schema import Schema

T = TypeVar("T")
M = TypeVar("M", bound=Manifest)


class Snapshot(ABC, Generic[M]):
    """One version of a stored model, open for reading until its `with` ends or it is deleted.

    Args:
        path: The model, by the name that the caller uses.
        pinned: The open directory of the model; closed together with the snapshot.
        manifest: Its manifest.
        wanted: The files to open.

    Raises:
        RecappError: The model is incomplete, or a file cannot be read.
    """

    kind: ClassVar[Kind]
    manifest_type: ClassVar[type[Manifest]]

    def __init__(self, path: Path, pinned: Pinned, manifest: M, wanted: Iterable[str]) -> None:
        self.path = path
        self.manifest = manifest
        self._stack = ExitStack()
        weakref.finalize(self, self._stack.close)
        with ExitStack() as undo:
            undo.push(self._stack)
            self._stack.callback(pinned.close)
            for file, entry in manifest.files.items():
                self._check_size(pinned, file, entry["bytes"])
            self._files = {
                file: self._stack.enter_context(pinned.open(file, self.kind))
                for file in sorted({*wanted})
            }
            undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @classmethod
    def of(cls, manifest: M) -> Self:
        """Open all files of a model before its manifest is written.

        Raises:
            RecappError: The model is incomplete, or a file cannot be read.
        """
        folder = manifest.folder
        return cls(folder, Pinned(folder), manifest, manifest.files)

    def _check_size(self, pinned: Pinned, file: str, wanted: int) -> None:
        found = pinned.folder.size(file)
        if found != wanted:
            state = "is missing" if found is None else f"has {found:,} of {wanted:,} bytes"
            raise self.kind.error(f"{self.kind.name} {self.path} is incomplete: {file} {state}")

    def damaged(self, why: str) -> RecappError:
        """Return the error for an invalid manifest."""
        return self.manifest.damaged(why)

    def example(self, raw_rows: "RawRows") -> "RawTable | None":
        """Return the example rows of the model; None if none are stored.

        Args:
            raw_rows: Decodes the rows.

        Raises:
            RecappError: `raw_rows` cannot decode the rows.
        """
        try:
            table = self._example(raw_rows.schema)
            if table is not None:
                raw_rows.batch(table)
        except (DataError, ValueError, KeyError, TypeError, OverflowError) as error:
            raise self.kind.error(
                f"{self.kind.name} {self.manifest.folder}: its example is no row of its data: "
                f"{error}; {self.kind.fix}"
            ) from error
        return table

    @abstractmethod
    def _example(self, schema: "Schema") -> "RawTable | None":
        """Return the stored rows."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of the model, for people and servers."""

    @abstractmethod
    def dense(self) -> dict[str, Tensor]:
        """Return the parameters and buffers of the model beside its tables.

        Raises:
            RecappError: The file is damaged.
        """

    @abstractmethod
    def derived_values(self, columns: Sequence[DerivedColumn]) -> Mapping[str, Values]:
        """Return the fitted values of the derived columns of a model, by key.

        Raises:
            RecappError: The model has none, or they are damaged.
        """

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Return plain facts about the model, for people and servers."""

    @abstractmethod
    def verify(self) -> int:
        """Compare all checksums, and return the number of bytes read."""

    def opened(self, file: str) -> BinaryIO:
        """Return one of the open files, at its beginning."""
        found = self._files[file]
        found.seek(0)
        return found

    def check(self, file: str) -> int:
        """Read an open file, compare its checksum, and return its size in bytes.

        Raises:
            RecappError: The file is damaged.
        """
        entry = self.manifest.files[file]
        if crc32_of(self.opened(file)) != entry.get("crc32"):
            raise self.kind.error(
                f"{self.manifest.folder / file} is damaged: its bytes are not those that were "
                f"{self.kind.written}; {self.kind.fix}"
            )
        return int(entry["bytes"])

    def read(self, file: str) -> bytes:
        """Return the content of a small open file.

        Raises:
            RecappError: The file is damaged.
        """
        self.check(file)
        return self.opened(file).read()


class Checkpoint(Snapshot[CheckpointManifest]):
    """One version of a checkpoint, open for reading."""

    kind = CHECKPOINT
    manifest_type = CheckpointManifest

    def fill(self, blocks: Iterable[Block]) -> None:
        """Fill blocks from a checkpoint of any plan and any order of rows.

        Raises:
            CheckpointError: A table, tensor or shape differs from the checkpoint's, the stored
                blocks leave a hole, or a file is damaged.
        """
        sources = sources_of(self.manifest.tensors, self.manifest.row_orders, blocks)
        fill_blocks(self.manifest.folder, sources, self.opened)

    @property
    def name(self) -> str:
        """The name of the model, for people and servers."""
        return self.path.absolute().name.partition(".")[0]

    def facts(self) -> dict[str, Any]:
        """Return plain facts about the model, for people and servers."""
        found = self.manifest
        path = str(self.path.absolute())
        return {"path": path, "step": found.step, "metrics": found.metrics}

    def _example(self, schema: "Schema") -> "RawTable | None":
        from recapp.dataset.sequential_rows import table_of

        return table_of(self.manifest.example, schema) if self.manifest.example else None

    def meta(self) -> dict[str, Any]:
        """Return the plain part: dense parameters and Lightning's state, with tensors on the CPU.

        Raises:
            CheckpointError: The file is damaged, or holds other types than plain ones.
        """
        self.check(META)
        return read_meta(self.opened(META), self.manifest.folder / META)

    def dense(self) -> dict[str, Tensor]:
        """Return the parameters and buffers of the model beside its tables.

        Raises:
            CheckpointError: The file is damaged, or holds no training state.
        """
        meta = self.meta()
        check_state(meta, self.path)
        return dense_state(meta)

    def derived_values(self, columns: Sequence[DerivedColumn]) -> Mapping[str, Values]:
        """Return the fitted values of the derived columns of a model, by key.

        Raises:
            CheckpointError: The checkpoint has none, or they are damaged.
        """
        return values_in(self.meta(), columns, self.path)

    def verify(self) -> int:
        """Compare all checksums, and return the number of bytes read; all files must be open.

        Raises:
            CheckpointError: A file or block is damaged; the text names it.
        """
        for of_tensor in self.manifest.tensors.values():
            check_tiling(of_tensor)
        self.meta()
        read = check_bytes(self.manifest.folder, self.manifest.blocks, self.opened)
        return read + int(self.manifest.files[META]["bytes"])


class Artefact(Snapshot[ArtefactManifest]):
    """One version of an artefact, open for reading."""

    kind = ARTEFACT
    manifest_type = ArtefactManifest

    @property
    def name(self) -> str:
        """The name of the model, for people and servers."""
        return self.manifest.entry("name", str)

    def facts(self) -> dict[str, Any]:
        """Return plain facts about the model, for people and servers."""
        return {
            "path": str(self.manifest.folder.absolute()),
            "metrics": self.manifest.entry("metrics", dict),
            "made": self.manifest.entry("made", dict),
            "tables": [
                {
                    "name": t.name,
                    "rows": t.rows,
                    "dim": t.dim,
                    "storage": t.storage,
                    "dynamic": t.keys is not None,
                }
                for t in self.manifest.tables
            ],
            "bytes": self.manifest.bytes,
            "compiled": False,
        }

    def dense(self) -> dict[str, Tensor]:
        """Return the parameters and buffers of the model beside its tables.

        Raises:
            ArtefactError: The file is damaged.
        """
        from recapp.stored.artefact_files import dense_state

        return self._made(DENSE, dense_state)

    def derived_values(self, columns: Sequence[DerivedColumn]) -> Mapping[str, Values]:
        """Return the fitted values of the derived columns of a model, by key.

        Raises:
            ArtefactError: The artefact has none, or they are damaged.
        """
        lines = self.manifest.entry("features", dict).get(DERIVED)
        if DERIVED_FILE not in self.manifest.files:
            raise self.damaged(f"{DERIVED_FILE} is not listed")
        return self._made(DERIVED_FILE, lambda raw: read_values(raw, lines, columns))

    def _example(self, schema: "Schema") -> "RawTable":
        from recapp.stored.artefact_files import example_table

        return self._made(EXAMPLE, example_table)

    def _made(self, file: str, make: Callable[[bytes], T]) -> T:
        """Read a file, and convert its bytes with `make`."""
        raw = self.read(file)
        try:
            return make(raw)
        except ValueError as error:
            raise self.damaged(f"{file} cannot be read: {error}") from error

    def verify(self) -> int:
        """Compare the checksums of all files except code, which is read only with trust; return the
        number of bytes read.

        Raises:
            ArtefactError: A file is damaged.
        """
        files = self.manifest.files
        return sum(self.check(file) for file in files if not file.startswith(COMPILED))
