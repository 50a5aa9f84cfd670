"""Open a stored model of either kind, as a snapshot that stays whole when its name changes.

    name -> directory handle -> manifest.json -> the wanted files, all opened at once

Callers read settings, tables, dense part and example in the same way for both kinds. A writer gives
a name to another directory by a rename, and then deletes the earlier directory. Open files stay
readable to their end. So a reader opens its directory once, and opens all wanted files by that
handle. If the directory was deleted meanwhile, the reader starts again from the name.
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from recapp.errors import RecappError
from recapp.stored.artefact_manifest import ArtefactManifest
from recapp.stored.checkpoint_manifest import CheckpointManifest
from recapp.stored.directories import is_artefact, why_none
from recapp.stored.files import Pinned, entry_of, files_at
from recapp.stored.kinds import MANIFEST
from recapp.stored.snapshot import Artefact, Checkpoint
from recapp.transport.communicator import Comm, raise_together

ATTEMPTS = 100  # to open a model while writers replace it again and again

StoredModel = Checkpoint | Artefact
S = TypeVar("S", Checkpoint, Artefact)
Wanted = Callable[[Any], Iterable[str]]
"""A function from a manifest to the names of the files that a reader opens."""


def every_file(manifest: CheckpointManifest | ArtefactManifest) -> Iterable[str]:
    """Select all files of a stored model."""
    return manifest.files


def files_in_use(manifest: CheckpointManifest | ArtefactManifest) -> Iterable[str]:
    """Select the files that stay open while the model is used."""
    return manifest.in_use


def open_stored(
    path: str | Path, comm: Comm | None = None, wanted: Wanted = files_in_use
) -> StoredModel:
    """Open a checkpoint or an artefact; its open files stay readable when a writer replaces it.

    Args:
        path: The model.
        comm: The ranks that open the same version together; None opens for this rank alone.
        wanted: Selects the files to open.

    Raises:
        CheckpointError: The checkpoint does not exist, is incomplete or damaged, or has a later
            version.
        ArtefactError: The artefact is incomplete or damaged, or has a later version.
        RankError: Another rank could not open the model.
    """
    if is_artefact(path):
        return open_as(Artefact, path, comm, wanted)
    return open_as(Checkpoint, path, comm, wanted)


def open_artefact(path: str | Path) -> Artefact:
    """Open an artefact with all its files.

    Raises:
        ArtefactError: The artefact does not exist, is incomplete or damaged, or is of a later
            version.
    """
    return open_as(Artefact, path)


def read_stored(path: str | Path) -> CheckpointManifest | ArtefactManifest:
    """Return the manifest of a checkpoint or an artefact.

    This checks only the existence and the size of the other files.

    Raises:
        CheckpointError: The checkpoint does not exist, is incomplete or damaged, or has a later
            version.
        ArtefactError: The artefact is incomplete or damaged, or has a later version.
    """
    with open_stored(path, wanted=lambda manifest: ()) as stored:
        return stored.manifest


def open_as(
    kind: type[S], path: str | Path, comm: Comm | None = None, wanted: Wanted = files_in_use
) -> S:
    """Open the version of a stored model of one kind to which its name leads now.

    Arguments and errors are those of `open_stored`. A model of the other kind is an error, too.
    """
    path = Path(path)
    if comm is not None:
        return _open_together(kind, path, comm, wanted)

    def version() -> tuple[int, ...]:
        entry = entry_of(files_at(path).current(path))
        return entry.version if entry else ()

    attempts = ATTEMPTS
    while True:
        before = version()
        attempts = attempts - 1
        try:
            return _open_now(kind, path, wanted)
        except (RecappError, FileNotFoundError) as error:
            if attempts and version() != before:
                continue
            if isinstance(error, RecappError):
                raise
            raise kind.kind.error(why_none(path, kind.kind)) from error


def _open_now(kind: type[S], path: Path, wanted: Wanted) -> S:
    """Open the directory to which a name leads now.

    Raises:
        FileNotFoundError: The directory has no manifest, so it is not a stored model.
        RecappError: The model is incomplete, damaged or of a later version.
    """
    folder = files_at(path).current(path)
    try:
        pinned = Pinned(folder)
    except OSError as error:
        raise FileNotFoundError(path) from error
    with ExitStack() as undo:
        undo.callback(pinned.close)
        raw = pinned.read(MANIFEST, kind.kind)
        manifest: Any = kind.manifest_type.from_json(raw, folder)
        files = {*wanted(manifest)}
        undo.pop_all()
    return kind(path, pinned, manifest, files)


def _open_together(kind: type[S], path: Path, comm: Comm, wanted: Wanted) -> S:
    """Open the same version of a stored model on all ranks, even if it is replaced meanwhile."""
    for _ in range(ATTEMPTS):
        mine: S | None = None
        failure: RecappError | None = None
        try:
            mine = open_as(kind, path, wanted=wanted)
        except RecappError as error:
            failure = error
        seen = comm.all_gather((mine and mine.manifest.identity, failure and str(failure)))
        if mine and len({identity for identity, _ in seen}) == 1:
            return mine
        if mine:
            mine.__exit__()
        raise_together(failure, [text for _, text in seen], f"could not read {path}")
    raise kind.kind.error(
        f"the ranks do not see one {kind.kind.name} at {path}: is it on one file system?"
    )
