"""The store of stored models in other places, such as s3://bucket/run, as whole files: they are
put, read, listed and deleted, and nothing is renamed, locked or replaced in part.

    step_000020.ckpt/recapp-1/...        the files of a version, the manifest last
    step_000020.ckpt/link.recapp         the name of its version; put when the version is whole
    last.ckpt/link.recapp                ../step_000020.ckpt: a link to another name
    served/recapp-2/..., link.recapp     a later version: it takes the name that is free
    copied/manifest.json, ...            a model that was copied there as a plain directory

A name leads to a version from the put of one small file on, so what a killed writer leaves is never
read; the next writer of the name, or of the run, deletes it. Files are written and read by way of a
temporary file of this machine (`TMPDIR`), because rows are mapped, and because a put that fails is
tried again.
"""

import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from socket import gethostname
from typing import BinaryIO, cast
from zlib import crc32

from typing_extensions import override

from recapp.dataset.storage import (
    RemotePath,
    Stamp,
    delete_there,
    fetch_file,
    put_file,
    read_file,
    sizes_in,
    stamp_of,
)
from recapp.errors import DataError
from recapp.stored.operations import EXPORTED, MANIFEST, TMP, Entry, Files, beside

LINK = "link.recapp"
VERSIONS = ("recapp-1", "recapp-2")
UNFINISHED = (f".{TMP}", f".{EXPORTED}")  # suffixes of the names that writers use
LOCK_SECONDS = 3600  # after which a killed export does not keep others from its name


class RemoteFiles(Files):
    """The files of other places (a `recapp.stored.operations.Files`)."""

    @override
    def entries(self, path: Path, inside: bool = False) -> Iterator[Entry]:
        place = RemotePath(path)
        if not inside:
            yield from filter(None, [_entry(place)])
        elif place.is_dir():
            for name in place.iterdir():
                yield _entry(name) or Entry(beside(name, TMP), "folder", 0, None, (), ())

    @override
    def current(self, name: Path) -> Path:
        return name

    @override
    def open_folder(self, folder: Path) -> "_Folder":
        place, _ = _resolved(folder)
        sizes = sizes_in(str(place))
        if place.is_in_bucket and not sizes and not place.top.exists():
            raise DataError(f"{folder}: the bucket does not exist")
        if not sizes:
            raise FileNotFoundError(str(folder))
        return _Folder(place, sizes)

    @override
    @contextmanager
    def create(self, file: Path) -> Iterator[BinaryIO]:
        with tempfile.NamedTemporaryFile() as out:
            yield cast(BinaryIO, out.file)
            out.flush()
            put_file(Path(out.name), str(_resolved(file)[0]))

    @override
    def publish(self, folder: Path, name: Path, *, link: bool = False) -> None:
        target = folder if link else _resolved(folder)[0]
        with self.create(name / LINK) as out:
            out.write(os.path.relpath(target, name).encode())
        for earlier in RemotePath(name).iterdir():
            if earlier.name not in (LINK, target.name):
                delete_there(str(earlier))

    @override
    def remove(self, path: Path) -> None:
        place = RemotePath(path) if _name_of(path) is None else _resolved(path)[0]
        for first in (LINK, MANIFEST):  # without these, the rest is no model
            delete_there(str(place / first))
        delete_there(str(place))

    @override
    @contextmanager
    def locked(self, folder: Path) -> Iterator[bool]:
        lock = RemotePath(folder).with_suffix(".recapp-lock")
        held = read_file(str(lock))
        if held is not None and float(held.split()[-1]) > time.time() - LOCK_SECONDS:
            yield False
            return
        with self.create(lock) as out:
            out.write(f"{gethostname()} {os.getpid()} {time.time()}".encode())
        try:
            self.remove(folder)
            yield True
        finally:
            delete_there(str(lock))


REMOTE = RemoteFiles()


@dataclass(frozen=True)
class _Folder:
    """A version of a stored model.

    Args:
        place: Where it is.
        sizes: The bytes of its files.
    """

    place: RemotePath
    sizes: Mapping[str, int]

    def close(self) -> None: ...

    def size(self, file: str) -> int | None:
        return self.sizes.get(file)

    def descriptor(self, file: str) -> int:
        if file not in self.sizes:
            raise FileNotFoundError(file)
        with tempfile.TemporaryFile() as local:
            fetch_file(str(self.place / file), local)
            return os.dup(local.fileno())


def _name_of(path: Path) -> Path | None:
    """Return the name that a directory will have whose writer names this path; None if no writer
    does.
    """
    places = (path, *path.parents)
    return next((one.with_suffix("") for one in places if one.suffix in UNFINISHED), None)


def _led(name: Path) -> RemotePath | None:
    """Return where the link of a name leads; None if it has none."""
    text = read_file(str(name / LINK))
    return None if text is None else RemotePath(os.path.normpath(name / text.decode()))


def _resolved(path: Path) -> tuple[RemotePath, RemotePath | None]:
    """Return where the files of a path are, and where the link of this name itself leads."""
    place = RemotePath(path)
    name = _name_of(place)
    if name is not None:
        version = VERSIONS[_led(name) == name / VERSIONS[0]]
        return RemotePath(name, version, *place.parts[len(name.parts) :]), None
    if place.name == MANIFEST:
        return _resolved(place.parent)[0] / MANIFEST, None
    led = _led(place)
    if led is None or led.name in VERSIONS:
        return led or place, led
    return _resolved(led)[0], led


def _entry(path: RemotePath) -> Entry | None:
    """Return what is known of a path; None for what a killed writer has left."""
    place, led = _resolved(path)
    target = None if led is None or led.parent == path else led
    kind = place.kind
    inside = {one.name for one in place.iterdir()} if kind == "folder" else {""}
    if target is None and (not kind or inside <= {*VERSIONS}):
        return None
    file = place if kind == "file" else place / MANIFEST
    stamp = stamp_of(str(file)) if kind == "file" or MANIFEST in inside else Stamp(0, 0)
    identity = (crc32(os.fspath(place).encode()),)
    return Entry(path, kind or "other", stamp.size, target, identity, (*identity, *stamp))
