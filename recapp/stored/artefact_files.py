"""The small files of an artefact, and its directory: the dense part as safetensors, the example as
an Arrow file. Readers never see a part of an artefact, two commands cannot write the same one, and
no other file is deleted.

    served.recapp-export     while an export writes it, under the kernel's lock (flock)
    served                   when it is whole, by one rename
    served.recapp-replaced   the earlier artefact, between two renames; readers look here, too

Users name their own copies served.old, so these suffixes are unlikely names.
"""

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import safetensors.torch
import torch
from torch import Tensor

from recapp.dataset.arrow_messages import sizes_of
from recapp.dataset.collate import RawTable
from recapp.errors import ArtefactError, ConfigError
from recapp.stored.directories import is_artefact
from recapp.stored.local_files import beside
from recapp.stored.model_store import entry_of, files_at

EXAMPLE_ROWS = 16
MOST_EXAMPLE_ROWS = 4096
VALUES_PER_BYTE = 8  # the most of an example's file: a value takes at least a bit
_ARROW = b"ARROW1\0\0"  # the start of an Arrow file, before its messages


def dense_bytes(state: Mapping[str, Tensor]) -> bytes:
    """Return dense parameters and buffers as a safetensors file."""
    own = {name: values.detach().cpu().contiguous().clone() for name, values in state.items()}
    raw: bytes = safetensors.torch.save(own)
    return raw


def dense_state(raw: bytes) -> dict[str, Tensor]:
    """Read the dense part from the bytes of a safetensors file.

    Raises:
        ValueError: The bytes are not a safetensors file, or a value is not finite.
    """
    try:
        state: dict[str, Tensor] = safetensors.torch.load(raw)
    except (ValueError, KeyError, safetensors.SafetensorError) as error:
        raise ValueError(str(error)) from error
    for name, values in state.items():
        wide = values.float() if values.element_size() == 1 else values  # isfinite lacks float8
        if values.is_floating_point() and not bool(torch.isfinite(wide).all()):
            raise ValueError(f"{name} has values that are not finite")
    return state


def example_bytes(rows: RawTable) -> bytes:
    """Return raw rows as an Arrow file."""
    out = io.BytesIO()
    with pa.ipc.new_file(out, rows.schema) as writer:
        writer.write_table(rows)
    return out.getvalue()


def example_table(raw: bytes) -> RawTable:
    """Read raw rows from the bytes of an Arrow file.

    This compares the counts that the file declares with its size before it reads rows. So a small
    file cannot expand to many rows. Compressed files are refused.

    Raises:
        ValueError: The bytes are not such a file.
    """
    if not raw.startswith(_ARROW):
        raise ValueError("it is no Arrow file")
    try:
        _check_sizes(raw[len(_ARROW) :])
        # reads the messages in order, because the footer could name other messages
        with pa.ipc.open_stream(raw[len(_ARROW) :]) as reader:
            rows = reader.read_all()
        rows.validate(full=True)
    except (ValueError, OSError, pa.ArrowException) as error:
        raise ValueError(" ".join(str(error).split())[:200]) from error
    return rows


def _check_sizes(raw: bytes) -> None:
    """Check the counts that an Arrow stream declares.

    Raises:
        ValueError: The stream has too many rows, more values than its bytes can hold, or compressed
            values.
    """
    rows = 0
    values = 0
    for sizes in sizes_of(raw):
        if sizes.compressed:
            raise ValueError("it has compressed values")
        rows += sizes.rows
        values += sizes.values
        if rows > MOST_EXAMPLE_ROWS:
            raise ValueError(f"it declares {rows:,} rows")
        if values > VALUES_PER_BYTE * len(raw):
            raise ValueError(f"it declares {values:,} values in {len(raw):,} bytes")


UNFINISHED = "recapp-export"


@contextmanager
def unfinished(output: Path, overwrite: bool) -> Iterator[Path]:
    """Yield an empty directory; rename it to `output` on success, and remove it after an error.

    Args:
        output: The name of the artefact's directory.
        overwrite: Whether to replace an artefact of that name.

    Raises:
        ConfigError: The name is taken, or another export is writing it.
        ArtefactError: The directory cannot be written.
    """
    if not output.name:
        raise ConfigError(f"output={output}: is no name of a new directory: choose another name")
    files = files_at(output)
    folder = beside(output, UNFINISHED)
    try:
        _check_name(output, overwrite)
        with files.locked(folder) as alone:
            if not alone:
                raise ConfigError(
                    f"output={output}: another export is writing it: wait, or choose another name"
                )
            try:
                _check_name(output, overwrite)  # another export may have ended since
                yield folder
                files.publish(folder, output)
            except BaseException:
                files.remove(folder)
                raise
    except OSError as error:
        why = error.strerror or " ".join(str(error).split())
        raise ArtefactError(f"output={output} cannot be written: {why}") from error


def _check_name(output: Path, overwrite: bool) -> None:
    """Check that a name is free, or is the name of an artefact that may be replaced.

    Raises:
        ConfigError: The name is taken.
    """
    if entry_of(output) is None:
        return
    if not is_artefact(output):
        raise ConfigError(f"output={output}: exists and is no artefact: choose another name")
    if not overwrite:
        raise ConfigError(
            f"output={output}: there is an artefact: set overwrite=true, or choose another name"
        )
