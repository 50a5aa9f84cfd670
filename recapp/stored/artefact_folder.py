"""The directory of an artefact while it is written: nobody sees half of it, two commands do not
write the same one, and nothing that is somebody else's is deleted.

    served.recapp-export     is being written, under the kernel's lock (flock)
    served                   all of it, in one rename
    served.recapp-replaced   had the name until a moment ago; readers look here, too

People give their own directories names like served.old, so these are called what nobody calls his.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from recapp.errors import ArtefactError, ConfigError
from recapp.stored.artefact import REPLACED, is_artefact
from recapp.stored.local_files import beside, recover, remove, sync_folder, take_name

UNFINISHED = "recapp-export"


@contextmanager
def unfinished(output: Path, overwrite: bool) -> Iterator[Path]:
    """Yield an empty directory that gets its name where nothing fails, and is removed otherwise.

    Args:
        output: Its name.
        overwrite: Whether an artefact of that name is replaced.

    Raises:
        ConfigError: The name is taken, or another export is writing it.
        ArtefactError: It cannot be written.
    """
    if not output.name:
        raise ConfigError(f"output={output}: is no name of a new directory: choose another name")
    try:
        recover(output, REPLACED)
        _check_name(output, overwrite)
        folder = beside(output, UNFINISHED)
        with _locked(folder, output):
            try:
                _check_name(output, overwrite)  # another export may have ended since
                yield folder
                sync_folder(folder)
                take_name(folder, output, REPLACED)
            except BaseException:
                remove(folder)
                raise
    except OSError as error:
        why = error.strerror or " ".join(str(error).split())
        raise ArtefactError(f"output={output} cannot be written: {why}") from error


def _check_name(output: Path, overwrite: bool) -> None:
    """Check that a name is free, or an artefact's that may be replaced.

    Raises:
        ConfigError: It is not.
    """
    if not os.path.lexists(output):
        return
    if not is_artefact(output):
        raise ConfigError(f"output={output}: exists and is no artefact: choose another name")
    if not overwrite:
        raise ConfigError(
            f"output={output}: there is an artefact: set overwrite=true, or choose another name"
        )


@contextmanager
def _locked(folder: Path, output: Path) -> Iterator[None]:
    """Make a directory, empty it, and hold it for this process inside of the `with`.

    Raises:
        ConfigError: Another process holds it.
        OSError: It cannot be made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    held = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            alone = folder.exists() and os.path.samestat(os.fstat(held), folder.stat())
        except BlockingIOError:
            alone = False
        except OSError:  # some network file systems have no locks
            alone = True
        if not alone:
            raise ConfigError(
                f"output={output}: another export is writing it: wait, or choose another name"
            )
        for path in folder.iterdir():
            remove(path)
        yield
    finally:
        os.close(held)
