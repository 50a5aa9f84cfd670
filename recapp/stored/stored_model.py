"""Open a stored model of either kind, as a snapshot that stays whole when its name changes.

    name -> directory handle -> manifest.json -> the wanted files, all opened at once

Both kinds answer the same questions: manifest, dense part, example, name and facts. A writer gives
a name to another directory by a rename, and then deletes the earlier directory. Open files stay
readable to their end. So a reader opens its directory once, and opens all wanted files by that
handle. If the directory was deleted meanwhile, the reader starts again from the name.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar, Generic, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from recapp.dataset.data_settings import DerivedColumn
from recapp.dataset.schema import DERIVED
from recapp.errors import CheckpointError, DataError, RecappError, suggest
from recapp.kernels.row_memory import is_finite
from recapp.settings.uris import path_to
from recapp.sharding.layout import OF_WEIGHTS, WEIGHT, Block
from recapp.stored.block_files import check_bytes, check_tiling, fill_blocks, sources_of
from recapp.stored.manifest import (
    COMPILED,
    DENSE,
    META,
    ArtefactManifest,
    CheckpointManifest,
    Manifest,
    from_json,
)
from recapp.stored.operations import MANIFEST
from recapp.stored.plain_parts import (
    DERIVED_FILE,
    Values,
    check_state,
    dense_state,
    dense_values,
    meta_of,
    read_values,
    values_in,
)
from recapp.stored.store import Pinned, crc32_of, entry_of, files_at, is_artefact, why_none
from recapp.transport.communicator import Comm, raise_together, together

if TYPE_CHECKING:  # checks of a path do not import pyarrow
    from recapp.dataset.collate import RawRows, RawTable


T = TypeVar("T")
M = TypeVar("M", bound=Manifest)
ATTEMPTS = 100  # to open a model while writers replace it again and again
Wanted = Callable[[Any], Iterable[str]]  # from a manifest to the files that a reader opens


class Snapshot(Generic[M]):
    """One version of a stored model, open for reading until its `with` ends or it is deleted.

    Args:
        path: The model, by the name that the caller uses.
        pinned: The open directory of the model; closed together with the snapshot.
        manifest: Its manifest.
        names: The files to open.

    Raises:
        RecappError: The model is incomplete, or a file cannot be read.
    """

    manifest_type: ClassVar[type[Manifest]]

    def __init__(self, path: Path, pinned: Pinned, manifest: M, names: Iterable[str]) -> None:
        self.path = path
        self.manifest = manifest
        self._stack = ExitStack()
        weakref.finalize(self, self._stack.close)
        with ExitStack() as undo:
            undo.push(self._stack)
            self._stack.callback(pinned.close)
            for file, entry in manifest.files.items():
                size = pinned.folder.size(file)
                if size != entry["bytes"]:
                    has = (
                        "is missing"
                        if size is None
                        else f"has {size:,} of {entry['bytes']:,} bytes"
                    )
                    raise self.manifest.kind.error(
                        f"{self.manifest.kind.name} {path} is incomplete: {file} {has}"
                    )
            self._files = {
                file: self._stack.enter_context(pinned.open(file, self.manifest.kind))
                for file in sorted({*names})
            }
            undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @classmethod
    def at(
        cls,
        path: str | Path,
        comm: Comm | None = None,
        selector: Wanted = lambda manifest: manifest.in_use,
    ) -> Self:
        """Open the version of a stored model of this kind to which its name leads now.

        Arguments and errors are those of `open_stored`. A model of the other kind is an error, too.
        """
        path = path_to(path)
        if comm is not None:
            return cls._open_together(path, comm, selector)

        def version() -> tuple[int, ...]:
            entry = entry_of(files_at(path).current(path))
            return entry.version if entry else ()

        attempts = ATTEMPTS
        while True:
            before = version()
            attempts = attempts - 1
            try:
                return cls._open_now(path, selector)
            except (RecappError, FileNotFoundError) as error:
                if attempts and version() != before:
                    continue
                if isinstance(error, RecappError):
                    raise
                raise cls.manifest_type.kind.error(
                    why_none(path, cls.manifest_type.kind)
                ) from error

    @classmethod
    def _open_now(cls, path: Path, selector: Wanted) -> Self:
        folder = files_at(path).current(path)
        try:
            pinned = Pinned(folder)
        except OSError as error:
            raise FileNotFoundError(path) from error
        with ExitStack() as undo:
            undo.callback(pinned.close)
            raw = pinned.read(MANIFEST, cls.manifest_type.kind)
            manifest: Any = from_json(cls.manifest_type, raw, folder)
            files = {*selector(manifest)}
            undo.pop_all()
        return cls(path, pinned, manifest, files)

    @classmethod
    def _open_together(cls, path: Path, comm: Comm, selector: Wanted) -> Self:
        """Open the same version on all ranks, even if it is replaced meanwhile."""
        for _ in range(ATTEMPTS):
            mine: Self | None = None
            failure: RecappError | None = None
            try:
                mine = cls.at(path, selector=selector)
            except RecappError as error:
                failure = error
            seen = comm.all_gather((mine and mine.manifest.identity, failure and str(failure)))
            if mine and len({identity for identity, _ in seen}) == 1:
                return mine
            if mine:
                mine.__exit__()
            raise_together(failure, [text for _, text in seen], f"could not read {path}")
        raise cls.manifest_type.kind.error(
            f"the ranks do not see one {cls.manifest_type.kind.name} at {path}: is it on one file "
            "system?"
        )

    @classmethod
    def of(cls, manifest: M) -> Self:
        """Open all files of a model before its manifest is written.

        Raises:
            RecappError: The model is incomplete, or a file cannot be read.
        """
        folder = manifest.folder
        return cls(folder, Pinned(folder), manifest, manifest.files)

    def example(self, raw_rows: "RawRows") -> "RawTable | None":
        """Return the example rows of the model; None if none are stored.

        Args:
            raw_rows: Decodes the rows.

        Raises:
            RecappError: `raw_rows` cannot decode the rows.
        """
        from recapp.dataset.sequential_rows import table_of

        try:
            table = table_of(rows, raw_rows.schema) if (rows := self.manifest.example) else None
            if table is not None:
                raw_rows.batch(table)
        except (DataError, ValueError, KeyError, TypeError, OverflowError) as error:
            raise self.manifest.kind.error(
                f"{self.manifest.kind.name} {self.manifest.folder}: its example is no row of its "
                f"data: {error}; {self.manifest.kind.fix}"
            ) from error
        return table

    def opened(self, file: str) -> BinaryIO:
        """Return one of the open files, at its beginning."""
        stream = self._files[file]
        stream.seek(0)
        return stream

    def check(self, file: str) -> int:
        """Read an open file, compare its checksum, and return its size in bytes.

        Raises:
            RecappError: The file is damaged.
        """
        entry = self.manifest.files.get(file)
        if entry is None:
            raise self.manifest.damaged(f"{file} is not listed")
        if crc32_of(self.opened(file)) != entry.get("crc32"):
            raise self.manifest.kind.error(
                f"{self.manifest.folder / file} is damaged: its bytes are not those that were "
                f"{self.manifest.kind.written}; {self.manifest.kind.fix}"
            )
        return int(entry["bytes"])

    def read(self, file: str) -> bytes:
        """Return the content of a small open file.

        Raises:
            RecappError: The file is damaged.
        """
        size = self.check(file)
        return self.opened(file).read(size)


class Checkpoint(Snapshot[CheckpointManifest]):
    """One version of a checkpoint, open for reading."""

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
        return {
            "path": str(self.path.absolute()),
            "step": self.manifest.step,
            "metrics": self.manifest.metrics,
        }

    def meta(self) -> dict[str, Any]:
        """Return the plain part: dense parameters and Lightning's state, with tensors on the CPU.

        Raises:
            CheckpointError: The file is damaged, or holds other types than plain ones.
        """
        self.check(META)
        return meta_of(self.opened(META), self.manifest.folder / META)

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
        return self._made(DENSE, dense_values)

    def derived_values(self, columns: Sequence[DerivedColumn]) -> Mapping[str, Values]:
        """Return the fitted values of the derived columns of a model, by key.

        Raises:
            ArtefactError: The artefact has none, or they are damaged.
        """
        lines = self.manifest.entry("features", dict).get(DERIVED)
        return self._made(DERIVED_FILE, lambda raw: read_values(raw, lines, columns))

    def _made(self, file: str, make: Callable[[bytes], T]) -> T:
        raw = self.read(file)
        try:
            return make(raw)
        except ValueError as error:
            raise self.manifest.damaged(f"{file} cannot be read: {error}") from error

    def verify(self) -> int:
        """Compare the checksums of all files except code, which is read only with trust; return the
        number of bytes read.

        Raises:
            ArtefactError: A file is damaged.
        """
        files = self.manifest.files
        return sum(self.check(file) for file in files if not file.startswith(COMPILED))


StoredModel = Checkpoint | Artefact


def open_stored(
    path: str | Path, comm: Comm | None = None, selector: Wanted = lambda manifest: manifest.in_use
) -> StoredModel:
    """Open a checkpoint or an artefact; its open files stay readable when a writer replaces it.

    Args:
        path: The model.
        comm: The ranks that open the same version together; None opens for this rank alone.
        selector: Selects the files to open.

    Raises:
        CheckpointError: The checkpoint does not exist, is incomplete or damaged, or has a later
            version.
        ArtefactError: The artefact is incomplete or damaged, or has a later version.
        RankError: Another rank could not open the model.
    """
    kind: type[StoredModel] = Artefact if is_artefact(path) else Checkpoint
    return kind.at(path, comm, selector)


def read_stored(path: str | Path) -> CheckpointManifest | ArtefactManifest:
    """Return the manifest of a checkpoint or an artefact.

    This checks only the existence and the size of the other files.

    Raises:
        CheckpointError: The checkpoint does not exist, is incomplete or damaged, or has a later
            version.
        ArtefactError: The artefact is incomplete or damaged, or has a later version.
    """
    with open_stored(path, selector=lambda manifest: ()) as stored:
        return stored.manifest


# ---- read a checkpoint


def read_manifest(path: str | Path) -> CheckpointManifest:
    """Return the manifest of a checkpoint.

    This checks only the existence and the size of the other files.

    Raises:
        CheckpointError: The checkpoint does not exist, is incomplete or damaged, or has a later
            version.
    """
    with Checkpoint.at(path) as snapshot:
        return snapshot.manifest


def read_meta(path: str | Path) -> dict[str, Any]:
    """Return the plain part: dense parameters and Lightning's state, with tensors on the CPU.

    Raises:
        CheckpointError: The checkpoint does not exist, or its file is damaged or holds other types
            than plain ones.
    """
    with Checkpoint.at(path, selector=lambda manifest: (META,)) as snapshot:
        return snapshot.meta()


def files_of(manifest: CheckpointManifest, blocks: Iterable[Block]) -> Iterable[str]:
    """Return the files that hold parts of some blocks or the plain part."""
    sources = sources_of(manifest.tensors, manifest.row_orders, blocks)
    return (META, *(one.stored.file for one in sources))


def load_blocks(path: str | Path, blocks: Iterable[Block]) -> None:
    """Fill blocks of this rank from a checkpoint of any plan and any number of ranks.

    A rank can call this alone.

    Args:
        path: The checkpoint.
        blocks: The blocks to fill, copies included. Omit blocks of optimiser state to skip it.

    Raises:
        CheckpointError: A table, tensor or shape differs from the checkpoint's, the stored blocks
            leave a hole, or a file is damaged.
    """
    block_list = list(blocks)
    with Checkpoint.at(path, selector=partial(files_of, blocks=block_list)) as snapshot:
        snapshot.fill(block_list)


def load_together(
    path: str | Path,
    blocks_of: Callable[[CheckpointManifest], Iterable[Block]],
    parameters: Iterable[str],
    comm: Comm,
) -> tuple[Checkpoint, dict[str, Any]]:
    """Load the same version of a checkpoint into the blocks of all ranks.

    Every rank calls it; all return or all raise.

    Args:
        path: The checkpoint.
        blocks_of: Returns the blocks of this rank to fill from a checkpoint. It is called again if
            a save replaced the checkpoint while this opened it.
        parameters: The names of the dense parameters in the plain part's `state_dict`. Their values
            must be finite, like those of tables; a name may be absent.
        comm: The ranks.

    Returns:
        The version that was loaded, with closed files, and its plain part.

    Raises:
        CheckpointError: As for `load_blocks`; or weights or states of optimisers are not finite.
        RankError: Another rank could not load its part.
    """
    blocks: list[Block] = []

    def selector(manifest: CheckpointManifest) -> Iterable[str]:
        blocks[:] = blocks_of(manifest)
        return files_of(manifest, blocks)

    with Checkpoint.at(path, comm, selector) as snapshot:

        def fill() -> dict[str, Any]:
            snapshot.fill(blocks)
            meta = snapshot.meta()
            _refuse_non_finite(snapshot.path, blocks, meta, parameters)
            return meta

        return snapshot, together(comm, fill, f"could not read {snapshot.path}")


def _refuse_non_finite(
    path: str | Path, blocks: Iterable[Block], meta: Mapping[str, Any], parameters: Iterable[str]
) -> None:
    fix = "that are not finite (NaN or infinity): use an earlier checkpoint"
    for b in blocks:
        if not is_finite(b.data):
            what = "weights" if b.tensor in OF_WEIGHTS else f"states of the optimiser ({b.tensor})"
            rows = f"rows {b.rows.start}-{b.rows.stop}"
            raise CheckpointError(f"table {b.table}, {rows} of checkpoint {path} has {what} {fix}")
    state = meta.get("state_dict")
    dense: dict[str, Any] = state if isinstance(state, dict) else {}
    for name in parameters:
        if isinstance(values := dense.get(name), Tensor) and not is_finite(values):
            raise CheckpointError(f"{name} of checkpoint {path} has weights {fix}")


def load_table(path: str | Path, table: str, tensor: str = WEIGHT) -> Tensor:
    """Load a whole logical table without a plan, ranks or a model, for notebooks.

    Args:
        path: The checkpoint.
        table: The name of the table.
        tensor: "weight" or a state of the optimiser, such as "sum".

    Returns:
        [R, D], or [R, 1] for a state with one value per row, in the stored dtype. Rows of a dynamic
            table are in the order of their positions; `static_table` returns their keys.

    Raises:
        CheckpointError: The table or tensor is not in the checkpoint.
    """

    with Checkpoint.at(
        path,
        selector=lambda manifest: {s.file for s in manifest.tensors.get((table, tensor), ())},
    ) as snapshot:
        stored = snapshot.manifest.tensors.get((table, tensor), [])
        if stored:
            check_tiling(stored)  # before the table is allocated
        shape, dtype = (
            (stored[0].shape, getattr(torch, stored[0].dtype))
            if stored
            else ((1, 1), torch.float32)
        )
        data = torch.empty(shape, dtype=dtype)
        snapshot.fill([Block(table, tensor, shape, range(shape[0]), range(shape[1]), data, True)])
    return data


class StaticTable(NamedTuple):
    """Rows in the order of their keys.

    Args:
        keys_R: The key of each row, ascending, int64; `torch.searchsorted(keys_R, ids)` finds rows.
        tensor_RD: The rows.
    """

    keys_R: Tensor
    tensor_RD: Tensor


def static_table(path: str | Path, table: str, tensor: str = WEIGHT) -> StaticTable:
    """Load a dynamic table without a plan, ranks or a model, for notebooks and exports.

    A table trained with the ids 0 .. R - 1 gives the rows of a static table of R rows, in the same
    order.

    Args:
        path: The checkpoint.
        table: The name of the table.
        tensor: "weight" or a state of the optimiser, such as "sum".

    Returns:
        The keys and rows of the table; both are empty before training.

    Raises:
        CheckpointError: The checkpoint has no dynamic table of this name.
    """
    manifest = read_manifest(path)
    stored = manifest.dynamic
    if table not in stored:
        hint = suggest(table, list(stored)) if stored else "it has none"
        raise CheckpointError(f"checkpoint {path} has no dynamic table {table}: {hint}")
    if not sum(stored[table]["rows"]):
        columns = max(shard.cols.stop for shard in manifest.plan.tables[table].shards)
        return StaticTable(torch.zeros(0, dtype=torch.int64), torch.zeros(0, columns))
    keys_R = load_table(path, table, "keys")[:, 0]
    order_R = keys_R.argsort()
    return StaticTable(keys_R[order_R], load_table(path, table, tensor)[order_R])


def verify(path: str | Path) -> int:
    """Read a whole checkpoint, and compare all checksums.

    Returns:
        The number of bytes read.

    Raises:
        CheckpointError: A file or block is missing or damaged; the text names it.
    """
    with Checkpoint.at(path, selector=lambda manifest: manifest.files) as snapshot:
        return snapshot.verify()
