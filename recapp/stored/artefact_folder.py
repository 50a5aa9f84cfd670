"""Write the directory of an artefact: readers never see a part of it, two commands cannot write the
same one, and no other file is deleted.

    served.recapp-export     while an export writes it, under the kernel's lock (flock)
    served                   when it is whole, by one rename
    served.recapp-replaced   the earlier artefact, between two renames; readers look here, too

Users name their own copies served.old, so these suffixes are unlikely names.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from recapp.errors import ArtefactError, ConfigError
from recapp.stored.directories import is_artefact
from recapp.stored.files import entry_of, files_at
from recapp.stored.local_files import beside

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
