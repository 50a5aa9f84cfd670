"""The first bytes of a file, decompressed, and what a library's error says in one line.

A compression is known by the first bytes of a file, never by its name: gzip, bz2 and zstd.
"""

import re

import pyarrow as pa

from recapp.dataset.storage import open_file
from recapp.settings.uris import is_uri

FIRST_BYTES = 65_536  # at the beginning of a file, to search for its first lines
STREAMED_BYTES = 2**23  # of a request, where compressed text of another place is read
# The compressions by the first bytes of a file.
CODECS = {b"\x1f\x8b": "gzip", b"BZh": "bz2", b"\x28\xb5\x2f\xfd": "zstd"}
# bytes of text in ASCII, UTF-8 or Latin-1, and Hive's ^A between columns
PRINTED = b"\x01\t\n\f\r" + bytes(range(0x20, 0x7F)) + bytes(range(0x80, 0x100))
# UnicodeDecodeError comes from names in a damaged footer.
UNREADABLE = (pa.ArrowException, OSError, UnicodeDecodeError)


def begin_of(path: str) -> tuple[bytes, str | None]:
    """Return the first bytes of a file, decompressed if that is possible, and its compression.
    There are none if it cannot be read.
    """
    codec = None
    begin = b""
    try:
        with open_file(path) as file:
            begin = file.read(FIRST_BYTES)
        codec = next((name for magic, name in CODECS.items() if begin.startswith(magic)), None)
        if codec:
            with open_stream(path, codec) as stream:
                begin = stream.read(FIRST_BYTES)
    except (OSError, pa.ArrowException):
        pass  # whoever reads the file names what is wrong
    return begin, codec


def open_stream(path: str, codec: str | None) -> pa.NativeFile:
    """Open a file for reading from its beginning, decompressed.

    Args:
        path: The file.
        codec: Its compression; None without one.

    Raises:
        OSError: The file does not exist or cannot be read.
    """
    file = open_file(path)
    if not codec:
        return file
    if is_uri(path):
        file = pa.BufferedInputStream(file, STREAMED_BYTES)
    return pa.CompressedInputStream(file, codec)


def is_prose(begin: bytes) -> bool:
    """Return whether the first bytes of a file are lines of text, and no JSON."""
    printed = b"\n" in begin and not begin.translate(None, PRINTED)
    return printed and not re.match(rb"\s*(\{|\[\s*\{)", begin)


def ends_of(path: str) -> bytes:
    """Return the first and the last bytes of a file, which change if rows are added or removed.

    Raises:
        OSError: The file cannot be read.
    """
    with open_file(path) as file:
        begin: bytes = file.read(FIRST_BYTES)
        file.seek(max(file.size() - FIRST_BYTES, 0))
        end: bytes = file.read()
        return begin + end
