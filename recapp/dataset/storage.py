"""Open files of data, and tell whether they have changed. No other file of the room opens one.

    logs/day_0.parquet              a path of this machine
    s3://bucket/logs/day_0.parquet  a path of another place: s3, gs, abfs and hdfs by pyarrow
    https://host/day_0.parquet      https, hf and all that fsspec knows

A file that is replaced, or appended to, has another stamp. Whoever has read facts of a file, such
as its numbers of rows, keeps the stamp with them. Files of another place are read by ranges of
bytes, and a request that fails by the fault of a server or of the network is made again, with a
line on the console. What other tries cannot mend is an error of one line.

Access is granted by what each place's own tools read (`AWS_PROFILE`, `AWS_ENDPOINT_URL`,
`GOOGLE_APPLICATION_CREDENTIALS`, `~/.netrc`, `HF_TOKEN`, ...). A URI with a password or a query is
refused, because URIs are kept in settings, logs and checkpoints. A process that was forked makes
connections of its own.
"""

import errno
import os
import re
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from glob import has_magic
from hashlib import blake2b
from pathlib import Path
from textwrap import shorten
from typing import Any, BinaryIO, NamedTuple, Protocol, TypeVar

import pyarrow as pa
from pyarrow import fs
from typing_extensions import override

from recapp.console import note
from recapp.errors import DataError
from recapp.settings.uris import URI, UriPath, is_uri, path_to

# Seconds between the tries of a request.
WAITS = (1.0, 2.0, 4.0, 8.0)
ARROW_SCHEMES = ("gs", "gcs", "abfs", "abfss", "hdfs", "viewfs")
CLIENT_SECONDS = 5  # in which a client may ask again by itself, without a line on the console
SECONDS_OF_SILENCE = 30  # after which a server counts as gone
LONGEST_PROBLEM = 300  # letters of a library's words
# What tells one version of a file from another, by the names that places give it.
_VERSION = ("ETag", "Last-Modified", "mtime", "last_modified", "LastModified", "blob_id", "created")
_PART_BYTES = 16 * 2**20  # of one request for a file that is copied to this machine
_PARTS_AT_ONCE = 8
_NOT_THERE = "there is no such file"
_NETWORK = ("aiohttp", "asyncio", "requests", "urllib3", "httpx")
_Result = TypeVar("_Result")
# The hosts that did not answer the last question after all tries: the next one is asked once.
_silent: set[str] = set()


class Stamp(NamedTuple):
    """The size and modification time of a file, which reveal a later write.

    Args:
        size: The size in bytes.
        changed: The time of its last change, in nanoseconds; in another place a digest of the
            version that it tells.
    """

    size: int
    changed: int


def stamp_of(path: str) -> Stamp:
    """Return the current stamp of a file.

    Raises:
        OSError: The file does not exist or cannot be read.
        DataError: The same, in another place.
    """
    if is_uri(path):
        _open_now.pop((path, os.getpid()), None)
        return _stamp(_opened(path))
    status = os.stat(path)
    return Stamp(status.st_size, status.st_mtime_ns)


def open_file(path: str, *, mapped: bool = False) -> pa.NativeFile:
    """Open a file for reading, at any place of it.

    Args:
        path: The file.
        mapped: Whether to map it into memory, which saves a copy; a file that is cut short in the
            meantime then ends the process. A file of another place cannot be mapped.

    Raises:
        OSError: The file does not exist or cannot be read.
        DataError: The same, in another place; also when it is read.
    """
    if is_uri(path):
        return pa.PythonFile(_RemoteFile(path), mode="r")
    try:
        return pa.memory_map(path) if mapped else pa.OSFile(path)
    except OSError as error:  # in Arrow's words, which name the file twice
        number = error.errno or errno.EISDIR
        raise OSError(number, os.strerror(number), path) from error


def located(path: str | Path) -> Path:
    """Return a path or a URI as an object with the methods of paths."""
    place = path_to(path)
    return RemotePath(place) if isinstance(place, UriPath) else place


# ---- other places


class Opened(NamedTuple):
    """An open file of another place.

    Args:
        size: The size in bytes.
        version: What tells this version of the file from a later one.
        read: From the number of the first byte and a number of bytes to these bytes.
    """

    size: int
    version: str
    read: Callable[[int, int], Any]


class Place(Protocol):
    """What recapp asks of another place. Paths are whole URIs."""

    def opened(self, path: str) -> Opened:
        """Open a file; `FileNotFoundError` if it does not exist."""

    def kind(self, path: str) -> str:
        """Return `file` or `folder`, or an empty text for a name that does not exist."""

    def names(self, path: str) -> list[tuple[str, str]]:
        """Return the name and kind of each entry of a directory."""

    def sizes(self, path: str) -> dict[str, int]:
        """Return the bytes of each file in a directory and in those below it, by relative path."""

    def put(self, source: str, path: str) -> None:
        """Write a file of this machine there."""

    def delete(self, path: str) -> None:
        """Delete a file, or a directory with all that is in it, if it exists."""


@dataclass(frozen=True)
class _ArrowPlace(Place):
    """A file system of pyarrow.

    Args:
        files: The file system.
        host: The beginning of its URIs.
        top: What stands for this beginning in the file system's own paths.
    """

    files: fs.FileSystem
    host: str
    top: str

    def _own(self, path: str) -> str:
        return self.top + path.removeprefix(self.host)

    def opened(self, path: str) -> Opened:
        file = self.files.open_input_file(self._own(path))
        known = file.metadata() or {}
        version = [known[name] for name in _VERSION if name in known]
        if not version:
            version = [self.files.get_file_info(self._own(path)).mtime_ns]
        return Opened(file.size(), repr(version), lambda first, size: file.read_at(size, first))

    def kind(self, path: str) -> str:
        return _kind_of(self.files.get_file_info(self._own(path)))

    def names(self, path: str) -> list[tuple[str, str]]:
        inside = self.files.get_file_info(fs.FileSelector(self._own(path)))
        return [(one.base_name, _kind_of(one)) for one in inside]

    def sizes(self, path: str) -> dict[str, int]:
        own = self._own(path)
        every = fs.FileSelector(own, allow_not_found=True, recursive=True)
        inside = self.files.get_file_info(every)
        return {one.path.removeprefix(f"{own}/"): one.size for one in inside if one.is_file}

    def put(self, source: str, path: str) -> None:
        def copy() -> None:  # fs.copy_files is silent about parts that the server has refused
            there = self.files.open_output_stream(self._own(path), compression=None)
            with open(source, "rb") as here, there:
                shutil.copyfileobj(here, there, _PART_BYTES)

        with ThreadPoolExecutor(1) as pool:  # a stream that Ctrl-C closes has its name, in part
            pool.submit(copy).result()

    def delete(self, path: str) -> None:
        kind = self.kind(path)
        if kind:
            (self.files.delete_file if kind == "file" else self.files.delete_dir)(self._own(path))


def _kind_of(info: fs.FileInfo) -> str:
    return {fs.FileType.File: "file", fs.FileType.Directory: "folder"}.get(info.type, "")


@dataclass(frozen=True)
class _FsspecPlace(Place):
    """A file system of fsspec."""

    files: Any

    def opened(self, path: str) -> Opened:
        own = self.files._strip_protocol(path)
        known = self.files.info(own)
        if known["size"] is None:
            raise ValueError("the server does not tell its size")
        version = [known[name] for name in _VERSION if name in known]
        return Opened(
            known["size"],
            repr(version),
            lambda first, size: self.files.cat_file(own, start=first, end=first + size),
        )

    def kind(self, path: str) -> str:
        try:
            known = self.files.info(self.files._strip_protocol(path))
        except FileNotFoundError as error:
            if _status(error) not in (None, 404):
                raise
            return ""
        # a page of a web server lists a directory
        return "folder" if "html" in known.get("mimetype", "") else _kind_in(known)

    def names(self, path: str) -> list[tuple[str, str]]:
        inside = self.files.ls(self.files._strip_protocol(path), detail=True)
        own = str(self.files._strip_protocol(path)).rstrip("/")
        found = [one for one in inside if one["name"].rstrip("/") != own and "?" not in one["name"]]
        return [(one["name"].rstrip("/").rpartition("/")[2], _kind_in(one)) for one in found]

    def sizes(self, path: str) -> dict[str, int]:
        own = str(self.files._strip_protocol(path)).rstrip("/")
        inside = self.files.find(own, detail=True)
        return {name.removeprefix(f"{own}/"): known["size"] for name, known in inside.items()}

    def put(self, source: str, path: str) -> None:
        self.files.put_file(source, self.files._strip_protocol(path))

    def delete(self, path: str) -> None:
        if self.kind(path):
            self.files.rm(self.files._strip_protocol(path), recursive=True)


def _kind_in(known: Any) -> str:
    return "folder" if known["type"] == "directory" else "file"


@lru_cache(64)
def _place(scheme: str, host: str, process: int) -> Place:
    """Return the place of URIs with a scheme and a host. Each process has connections of its
    own.
    """
    if scheme == "s3":
        return _ArrowPlace(_s3(host), f"s3://{host}", host)
    if scheme in ARROW_SCHEMES:
        # the client of Google asks again by itself, for a quarter of an hour
        query = f"?retry_limit_seconds={CLIENT_SECONDS}" if scheme in ("gs", "gcs") else ""
        files, top = fs.FileSystem.from_uri(f"{scheme}://{host}{query}")
        return _ArrowPlace(files, f"{scheme}://{host}", top.rstrip("/"))
    import fsspec  # type: ignore[import-untyped]

    options: dict[str, Any] = {}
    if scheme in ("http", "https"):
        from aiohttp import ClientTimeout

        timeout = ClientTimeout(
            total=None, sock_connect=SECONDS_OF_SILENCE, sock_read=SECONDS_OF_SILENCE
        )
        options = {"client_kwargs": {"trust_env": True, "timeout": timeout}}
    return _FsspecPlace(fsspec.filesystem(scheme, use_listings_cache=False, **options))


def _s3(bucket: str) -> fs.S3FileSystem:
    """Return a client of S3 that asks once, because `_asked` says on the console that it asks
    again.
    """
    address = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if not region and not address:
        region = fs.resolve_s3_region(bucket)
    return fs.S3FileSystem(
        region=region,
        endpoint_override=address,
        connect_timeout=SECONDS_OF_SILENCE,
        request_timeout=SECONDS_OF_SILENCE,
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=1),
    )


def _asked(path: str, question: Callable[[Place], _Result], verb: str = "read") -> _Result:
    """Ask the place of a path, and again after each fault that may pass.

    Args:
        path: The URI.
        question: What is asked.
        verb: What is done with the file, for errors.

    Raises:
        DataError: There is no such file, access is denied, or the last try has failed, too.
    """
    uri = URI.match(path)
    assert uri is not None
    host = f"{uri[1]}://{uri[2]}"
    waits = () if host in _silent else WAITS
    _silent.discard(host)
    for wait in (*waits, None):
        try:
            return question(_place(uri[1].lower(), uri[2], os.getpid()))
        except DataError:
            raise
        except Exception as error:
            problem, passes = _problem(error)
            if not passes or wait is None:
                if passes:
                    _silent.add(host)
                tries = f", {len(waits) + 1} times" if passes and waits else ""
                raise DataError(f"{path}: cannot be {verb}: {problem}{tries}") from error
        note(f"{path}: {problem}; the next try is in {wait:g} s")
        time.sleep(wait)
    raise AssertionError


def _status(error: BaseException) -> int | None:
    """Return the status of HTTP that caused an error."""
    for one in (error, error.__cause__):
        answer = getattr(one, "response", None)
        for holder, name in ((one, "status"), (answer, "status_code")):
            if isinstance(status := getattr(holder, name, None), int):
                return status
    found = re.search(r"HTTP status (\d{3})", str(error))
    return int(found[1]) if found else None


def _problem(error: Exception) -> tuple[str, bool]:
    """Return what is wrong, in words without a secret, and whether it may pass."""
    status = _status(error)
    # addresses of redirects have signatures
    line = next(iter(str(error).strip().splitlines()), type(error).__name__)
    text = shorten(re.sub(r"\?[^\s'\"]*", "", line), LONGEST_PROBLEM)
    if "NO_SUCH_BUCKET" in text or re.search("Bucket '.*' not found", text):
        return "the bucket does not exist", False
    if status in (401, 403) or "ACCESS_DENIED" in text or isinstance(error, PermissionError):
        return "access is denied; give credentials to the place's own client, or check them", False
    cause = error.__cause__ if isinstance(error, FileNotFoundError) else None
    if status == 404 or (isinstance(error, FileNotFoundError) and cause is None):
        return _NOT_THERE, False
    if status is not None:
        return f"the server answers {status}", status >= 500 or status in (408, 429)
    if isinstance(error, ImportError | ValueError | TypeError) or "Unable to load" in text:
        return text, False
    of_network = type(cause or error).__module__.partition(".")[0] in _NETWORK
    return text, of_network or isinstance(error, OSError)


# The files that were opened last, by path and process. Whoever reads one asks for its stamp before
# or behind, which opens it anew; between them no further trip is needed.
_open_now: dict[tuple[str, int], Opened] = {}
_MOST_OPEN = 256


def put_file(source: Path, path: str) -> None:
    """Write a file of this machine to another place, where it gets its name when it is whole.

    Args:
        source: The file.
        path: The URI.

    Raises:
        DataError: It cannot be written.
    """

    def put(place: Place) -> None:
        if path.startswith("http"):
            raise ValueError("a web server takes no files; name a bucket or a disk")
        place.put(str(source), path)
        _open_now.pop((path, os.getpid()), None)
        if place.opened(path).size != source.stat().st_size:
            raise OSError("a part of the file is missing there")

    _asked(path, put, "written")


def read_file(path: str) -> bytes | None:
    """Return the content of a small file of another place; None if it does not exist.

    Raises:
        DataError: It cannot be read.
    """
    _open_now.pop((path, os.getpid()), None)
    try:
        return bytes(_RemoteFile(path).read())
    except DataError as error:
        if str(error).endswith(_NOT_THERE):
            return None
        raise


def fetch_file(path: str, out: BinaryIO) -> None:
    """Copy a file of another place into an open file of this machine, by several requests at once.

    Raises:
        OSError: The disk is full.
        DataError: It cannot be read.
    """
    size = stamp_of(path).size
    source = _RemoteFile(path)

    def fetch(first: int) -> None:
        raw = source.part(first, min(_PART_BYTES, size - first))
        if os.pwrite(out.fileno(), raw, first) < len(raw):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), tempfile.gettempdir())

    with ThreadPoolExecutor(_PARTS_AT_ONCE) as pool:
        deque(pool.map(fetch, range(0, size, _PART_BYTES)), maxlen=0)


def sizes_in(path: str) -> dict[str, int]:
    """Return the bytes of each file in a directory of another place and in those below it.

    Raises:
        DataError: It cannot be listed.
    """
    return _asked(path, lambda place: place.sizes(path), "listed")


def delete_there(path: str) -> None:
    """Delete a file or a whole directory of another place, if it exists.

    Raises:
        DataError: It cannot be deleted.
    """
    _asked(path, lambda place: place.delete(path), "deleted")


def _opened(path: str) -> Opened:
    key = (path, os.getpid())
    opened = _open_now.get(key)
    if opened is None:
        opened = _asked(path, lambda place: place.opened(path))
        if len(_open_now) >= _MOST_OPEN:
            _open_now.clear()
        _open_now[key] = opened
    return opened


def _stamp(opened: Opened) -> Stamp:
    digest = blake2b(opened.version.encode(), digest_size=7).digest()
    return Stamp(opened.size, int.from_bytes(digest, "little"))


class _RemoteFile:
    """A file of another place, as Python's files are, for `pa.PythonFile`.

    Args:
        path: The URI.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._opened = _opened(path)
        self._at = 0
        self.closed = False

    def close(self) -> None:
        self.closed = True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._opened.size}[whence]
        self._at = base + offset
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        left = max(self._opened.size - self._at, 0)
        size = left if size is None or size < 0 else min(size, left)
        raw = self.part(self._at, size) if size else b""
        self._at += size
        return raw

    def part(self, first: int, size: int) -> bytes:
        """Read some bytes; several threads may do so."""
        try:
            return _asked(self._path, lambda _: self._range(first, size))
        except DataError:
            if stamp_of(self._path) != _stamp(self._opened):
                raise changed(self._path) from None
            raise

    def _range(self, first: int, size: int) -> bytes:
        raw = bytes(self._opened.read(first, size))
        if len(raw) > size:
            raise ValueError(
                "the server sends whole files where it is asked for a range of bytes; copy the "
                "file to a disk, or serve it by a server that answers ranges"
            )
        if len(raw) < size:
            raise OSError(f"{size - len(raw):,} of {size:,} bytes are missing from an answer")
        return raw


def changed(path: str) -> DataError:
    """Return the error for a file that is no longer the one that was opened."""
    return DataError(
        f"{path}: has changed since it was opened; start again when its writer is done"
    )


class RemotePath(UriPath):
    """A URI as a path that asks its place, for listings; a directory's entries know their kind."""

    known_kind: str | None = None

    @property
    def is_in_bucket(self) -> bool:
        """Whether its first part is a bucket, which may be asked for, and not a server."""
        return self.parts[1] in ("s3:", "gs:", "gcs:")

    @property
    def top(self) -> "RemotePath":
        """The bucket, or the server."""
        return RemotePath(*self.parts[:3])

    @property
    @override
    def parents(self) -> Sequence["RemotePath"]:
        """The directories above it, up to the bucket or the server."""
        return tuple(RemotePath(*self.parts[:n]) for n in range(len(self.parts) - 1, 2, -1))

    @property
    def kind(self) -> str:
        """`file`, `folder`, or an empty text for a name that does not exist."""
        if self.known_kind is None:
            is_path = is_uri(str(self)) and len(self.parts) > 2
            self.known_kind = (
                _asked(str(self), lambda place: place.kind(str(self))) if is_path else ""
            )
        return self.known_kind

    @override
    def exists(self, **_: Any) -> bool:
        return bool(self.kind)

    @override
    def is_dir(self, **_: Any) -> bool:
        return self.kind == "folder"

    @override
    def is_file(self, **_: Any) -> bool:
        return self.kind == "file"

    @override
    def is_symlink(self) -> bool:
        return False

    @override
    def iterdir(self) -> "Generator[RemotePath, None, None]":
        for name, kind in _asked(str(self), lambda place: place.names(str(self))):
            entry = self / name
            entry.known_kind = kind
            yield entry

    @override
    def glob(self, pattern: str, **_: Any) -> "Generator[RemotePath, None, None]":
        matches: Iterable[RemotePath]
        part, _slash, rest = pattern.partition("/")
        if has_magic(part):
            entries = self.iterdir() if self.is_dir() else ()
            matches = (entry for entry in entries if fnmatchcase(entry.name, part))
        else:
            matches = iter([self / part])
        for match in matches:
            if rest:
                yield from match.glob(rest)
            elif match.exists():
                yield match
