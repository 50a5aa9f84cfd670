"""URIs as values of settings, such as s3://bucket/logs. Settings are kept in logs, checkpoints and
artefacts, so that a URI with a secret is refused before any of them is written.
"""

import os
import re
from pathlib import Path, PosixPath

from typing_extensions import override

from recapp.errors import DataError

URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://([^/]*)(.*)", re.DOTALL)  # scheme, host, the rest
_AS_PATH = re.compile(r"/[A-Za-z][A-Za-z0-9+.-]+:/|[A-Za-z][A-Za-z0-9+.-]+://")
# One in a value of a command line.
IN_TEXT = re.compile(r"[A-Za-z][\w+.-]*://[^\s,'\"\]\[{}]+")


def is_uri(path: str) -> bool:
    """Return whether a path is a URI."""
    return URI.match(path) is not None


class UriPath(PosixPath):
    """A URI as a path, which is absolute wherever paths are: s3://bucket/key is /s3:/bucket/key for
    `os.path` and Lightning, and s3://bucket/key for people. It asks no file system.
    """

    @override
    def __str__(self) -> str:
        return super().__str__()[1:].replace(":/", "://", 1)

    @override
    def __fspath__(self) -> str:
        return super().__str__()


def leads_elsewhere(path: str | Path) -> bool:
    """Return whether a path is a URI, or one as `os.fspath` gives it."""
    return _AS_PATH.match(os.fspath(path)) is not None


def path_to(place: str | Path) -> Path:
    """Return a path of this machine or a URI, in either form, as a path."""
    text = os.fspath(place)
    if uri := URI.match(text):
        text = f"/{uri[1]}:/{uri[2]}{uri[3]}"
    return UriPath(text) if leads_elsewhere(text) else Path(text)


def refuse_secrets(text: str, setting: str) -> None:
    """Refuse a URI that may hold a password, a key or a signature. The error does not show it.

    Args:
        text: A path, a URI, or another text.
        setting: The setting's name, for the message.

    Raises:
        DataError: The URI names a user's password, or has a query.
    """
    if not (uri := URI.match(text)):
        return
    if not uri[2]:
        raise DataError(f"{setting}={text}: the URI names no host or bucket")
    user, at, host = uri[2].rpartition("@")
    shown = f"{setting}={uri[1]}://{host}{uri[3].partition('?')[0]}"
    if at and (":" in user or uri[1].lower() in ("s3", "http", "https")):
        raise DataError(
            f"{shown}: the URI names a user or a password, which settings and checkpoints would "
            "keep: leave it out, and give it to the place's own client (AWS_PROFILE or "
            "AWS_ACCESS_KEY_ID, ~/.netrc for https)"
        )
    if "?" in uri[3] and "=" in uri[3].partition("?")[2]:
        raise DataError(
            f"{shown}: the URI has a query (?name=value), which may hold a key or a signature that "
            "settings and checkpoints would keep: leave it out; variables such as AWS_REGION and "
            "AWS_ENDPOINT_URL configure the client"
        )
