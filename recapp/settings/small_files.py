"""Read small files that a user or a data set brings: text, JSON and YAML.

Such a file may come from another person. So a device, a pipe, an endless or huge file is refused
before it is read, and brackets that would exhaust the stack of a parser are refused as well.
"""

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

MOST_BYTES = 2**26


def read_text(path: str | Path, most: int = MOST_BYTES) -> str:
    """Return the text of a regular file.

    Args:
        path: The file.
        most: The largest size that is allowed, in bytes.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is not regular, is larger, or is not UTF-8.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would wait for a writer
    with os.fdopen(descriptor, "rb", closefd=True) as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is not a regular file")
        if status.st_size > most:
            raise ValueError(f"it has {status.st_size:,} bytes, and {most:,} are allowed")
        return file.read(most).decode()


def read_json(path: str | Path, most: int = MOST_BYTES) -> Any:
    """Return the content of a JSON file.

    Arguments are those of `read_text`.

    Raises:
        OSError: The file cannot be read.
        ValueError: As in `read_text`; or the text is not JSON, or is nested too deeply.
    """
    return _parsed(json.loads, read_text(path, most))


def read_yaml(path: str | Path, most: int = MOST_BYTES) -> Any:
    """Return the content of a YAML file, as plain values.

    Arguments are those of `read_text`.

    Raises:
        OSError: The file cannot be read.
        ValueError: As in `read_text`; or the text is not YAML, or is nested too deeply.
    """
    return _parsed(yaml.safe_load, read_text(path, most))


def _parsed(parse: Callable[[str], Any], text: str) -> Any:
    try:
        return parse(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except yaml.YAMLError as error:
        raise ValueError(f"not YAML: {' '.join(str(error).split())}") from None
