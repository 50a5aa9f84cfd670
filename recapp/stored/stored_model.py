"""A stored model of either kind: nobody who wants its settings, tables, dense part or example asks
which.

    path -> read_stored -> its manifest: settings, tables, metrics       milliseconds
         -> open_stored -> Checkpoint or Artefact: its files, pinned
"""

from pathlib import Path

from recapp.stored.artefact_manifest import ArtefactManifest
from recapp.stored.checkpoint_manifest import CheckpointManifest
from recapp.stored.directories import is_artefact
from recapp.stored.snapshot import (
    Artefact,
    Checkpoint,
    S,
    every_file,
    no_file,
    open_snapshot,
    open_together,
)
from recapp.transport.communicator import Comm

StoredModel = Checkpoint | Artefact


def open_stored(path: str | Path, comm: Comm | None = None) -> StoredModel:
    """Open a checkpoint or an artefact with all its files, which stay readable when it is replaced.

    Args:
        path: The model.
        comm: Ranks that all call it and are to open the same version; None opens for this rank
            alone.

    Raises:
        CheckpointError: There is no model, or it is incomplete, damaged or of a later version.
        ArtefactError: As of a checkpoint, of an artefact.
    """
    return open_artefact(path, comm) if is_artefact(path) else _opened(path, Checkpoint, comm)


def open_artefact(path: str | Path, comm: Comm | None = None) -> Artefact:
    """Open an artefact with all its files, as `open_stored`.

    Raises:
        ArtefactError: There is none, or it is incomplete, damaged or of a later version.
    """
    return _opened(path, Artefact, comm)


def read_stored(path: str | Path) -> CheckpointManifest | ArtefactManifest:
    """Return the manifest of a checkpoint or an artefact.

    Of its other files it is only checked that they are there and have their sizes.

    Raises:
        CheckpointError: There is no model, or it is incomplete, damaged or of a later version.
        ArtefactError: As of a checkpoint, of an artefact.
    """
    path = Path(path)
    if is_artefact(path):
        with open_snapshot(path, Artefact, no_file) as artefact:
            return artefact.manifest
    with open_snapshot(path, Checkpoint, no_file) as checkpoint:
        return checkpoint.manifest


def _opened(path: str | Path, kind: type[S], comm: Comm | None) -> S:
    if comm is None:
        return open_snapshot(Path(path), kind, every_file)
    return open_together(Path(path), kind, every_file, comm)
