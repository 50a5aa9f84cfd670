"""A checkpoint open for reading: what was opened stays whole, whatever happens to its name
afterwards.

    name -> directory handle -> manifest.json -> the files that are wanted, all opened at once

A writer gives a name to another directory in one rename and then deletes the earlier one. A file
that is open can be read to its end all the same, so a reader opens its directory once, and by that
handle every file it will want. Where the directory was deleted meanwhile, it starts again from the
name.
"""

import os
import stat
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, BinaryIO

from recapp.errors import CheckpointError, RankError
from recapp.sharding.layout import Block
from recapp.stored.block_files import Sources, check_bytes, fill_blocks, sources_of
from recapp.stored.local_files import MANIFEST, MANIFEST_BYTES, current_path
from recapp.stored.manifest import META, Manifest, from_json
from recapp.stored.meta_file import crc32_of, read_meta
from recapp.stored.rectangles import check_tiling
from recapp.stored.stored_file import stored_file
from recapp.transport.communicator import Comm

ATTEMPTS = 100  # to open a checkpoint whose name is given to other directories again and again

Wanted = Callable[[Manifest], Iterable[str]]
"""A function that returns the names of the checkpoint's files that a reader wants to open."""


class Snapshot:
    """One version of a checkpoint, open for reading; a context manager.

    Args:
        path: The checkpoint, by the name that the caller uses.
        wanted: Selects the files to be opened.

    Raises:
        CheckpointError: There is no checkpoint, or it is incomplete, damaged or of a later version.
    """

    def __init__(self, path: Path, wanted: Wanted) -> None:
        self.path = path
        self._files = dict[str, BinaryIO]()
        self._stack = ExitStack()
        with ExitStack() as undo:
            undo.push(self._stack)
            folder = current_path(path)
            self._handle = self._opened_directory(folder)
            raw = self._open(MANIFEST, MANIFEST_BYTES).read()
            self.manifest = from_json(raw, folder)
            for file, entry in self.manifest.files.items():
                self._check_size(file, entry["bytes"])
            self._files = {file: self._open(file) for file in sorted({*wanted(self.manifest)})}
            undo.pop_all()

    def __enter__(self) -> "Snapshot":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _opened_directory(self, folder: Path) -> int:
        try:
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise NoCheckpoint(f"{self.path}: {error.strerror}") from error
        self._stack.callback(os.close, handle)
        return handle

    def _open(self, file: str, most: int | None = None) -> BinaryIO:
        """Open a regular file; a pipe would wait for a writer."""
        try:
            descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK, dir_fd=self._handle)
        except FileNotFoundError as error:
            absent = f"checkpoint {self.path} is incomplete: {file} is missing"
            raise (NoCheckpoint(absent) if file == MANIFEST else CheckpointError(absent)) from error
        except OSError as error:
            unreadable = f"{self.path / file} cannot be read: {error.strerror}"
            raise CheckpointError(unreadable) from error
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or (most and found.st_size > most):
            os.close(descriptor)
            raise CheckpointError(f"{self.path / file} is no file of a checkpoint")
        return self._stack.enter_context(stored_file(descriptor, self.path / file, CheckpointError))

    def _check_size(self, file: str, wanted: int) -> None:
        found = None
        with suppress(OSError):
            found = os.stat(file, dir_fd=self._handle)
        if found is None or not stat.S_ISREG(found.st_mode) or found.st_size != wanted:
            state = "is missing" if found is None else f"has {found.st_size:,} of {wanted:,} bytes"
            raise CheckpointError(f"checkpoint {self.path} is incomplete: {file} {state}")

    def opened(self, file: str) -> BinaryIO:
        """Return one of the files that were opened."""
        return self._files[file]

    def sources(self, blocks: Iterable[Block]) -> Sources:
        """Return the stored rectangles that fill held ones
        (`recapp.stored.block_files.sources_of`).
        """
        return sources_of(self.manifest.tensors, self.manifest.row_orders, blocks)

    def fill(self, blocks: Iterable[Block]) -> None:
        """Fill held rectangles, whatever plan and order of rows the checkpoint was saved under.

        Raises:
            CheckpointError: A table, tensor or shape is not the checkpoint's, there is a hole, or a
                file is damaged.
        """
        fill_blocks(self.manifest.folder, self.sources(blocks), self.opened)

    def meta(self) -> dict[str, Any]:
        """Return the plain part: dense parameters and Lightning's state, with tensors on the CPU.

        Raises:
            CheckpointError: The file is damaged, or holds other than plain types.
        """
        file = self.manifest.folder / META
        if crc32_of(self.opened(META)) != self.manifest.files[META].get("crc32"):
            raise CheckpointError(
                f"{file} is damaged: its bytes are not those that were saved; use another "
                "checkpoint"
            )
        return read_meta(self.opened(META), file)

    def verify(self) -> int:
        """Read the whole checkpoint and compare every checksum; all files have to be open.

        Returns:
            The number of bytes read.

        Raises:
            CheckpointError: Something is damaged; the text names it.
        """
        for of_tensor in self.manifest.tensors.values():
            check_tiling(of_tensor)
        self.meta()
        read = check_bytes(self.manifest.folder, self.manifest.blocks, self.opened)
        return read + int(self.manifest.files[META]["bytes"])


class NoCheckpoint(CheckpointError):
    """An error for a path without a manifest, which is no checkpoint at all."""


def open_snapshot(path: Path, wanted: Wanted) -> Snapshot:
    """Open the version of a checkpoint that its name leads to now.

    Args:
        path: The checkpoint, or a link to one.
        wanted: Selects the files that will be read.

    Raises:
        NoCheckpoint: There is no checkpoint.
        CheckpointError: It is incomplete, damaged or of a later version.
    """
    attempts = ATTEMPTS
    while True:
        before = _identity(path)
        attempts = attempts - 1
        try:
            return Snapshot(path, wanted)
        except CheckpointError:
            if not attempts or _identity(path) == before:
                raise


def _identity(path: Path) -> tuple[int, ...]:
    """Return numbers that are equal while a name leads to one directory that nobody changes."""
    with suppress(OSError):
        found = os.stat(current_path(path))
        return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns
    return ()


def open_together(path: Path, wanted: Wanted, comm: Comm) -> Snapshot:
    """Open the same version of a checkpoint on all ranks, even if it is replaced meanwhile.

    Every rank calls it.

    Args:
        path: The checkpoint, or a link to one.
        wanted: Selects the files that this rank will read.
        comm: The ranks.

    Raises:
        NoCheckpoint: There is no checkpoint.
        CheckpointError: As of `open_snapshot`; or the ranks see different checkpoints at that path.
        RankError: Another rank could not open it.
    """
    for _ in range(ATTEMPTS):
        mine: Snapshot | None = None
        failure: CheckpointError | None = None
        try:
            mine = open_snapshot(path, wanted)
        except CheckpointError as error:
            failure = error
        seen = comm.all_gather((mine and mine.manifest.identity, failure and str(failure)))
        if mine and len({identity for identity, _ in seen}) == 1:
            return mine
        if mine:
            mine.__exit__()
        refuse_together(path, failure, [text for _, text in seen])
    raise CheckpointError(
        f"the ranks do not see one checkpoint at {path}: is it on one file system?"
    )


def refuse_together(path: Path, mine: Exception | None, error_W: Sequence[str | None]) -> None:
    """Raise an error if any rank cannot use a checkpoint; return if all can.

    Args:
        path: The checkpoint.
        mine: This rank's own error, if it has one.
        error_W: The text of every rank's error; None where there is none.

    Raises:
        Exception: This rank's own error.
        RankError: Another rank has an error and this one has none.
    """
    if mine:
        raise mine
    for rank, text in enumerate(error_W):
        if text:
            raise RankError(f"rank {rank} could not read {path}: {text}")
