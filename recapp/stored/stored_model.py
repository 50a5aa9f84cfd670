"""A stored model of either kind: nobody who wants its settings, tables, dense part or example asks
which.

    path -> read_stored -> its manifest: settings, tables, metrics       milliseconds
         -> open_stored -> Checkpoint or Artefact: its files, pinned
"""

from pathlib import Path

from recapp.stored.artefact_manifest import ArtefactManifest
from recapp.stored.checkpoint_manifest import CheckpointManifest
from recapp.stored.directories import is_artefact
from recapp.stored.snapshot import Artefact, Checkpoint, Wanted, every_file, no_file, open_snapshot
from recapp.transport.communicator import Comm

StoredModel = Checkpoint | Artefact


def open_stored(
    path: str | Path, comm: Comm | None = None, wanted: Wanted = every_file
) -> StoredModel:
    """Open a checkpoint or an artefact, whose files stay readable when it is replaced.

    Args:
        path: The model.
        comm: Ranks that all call it and are to open the same version; None opens for this rank
            alone.
        wanted: Selects the files that will be read; by default all of them.

    Raises:
        CheckpointError: There is no model, or it is incomplete, damaged or of a later version.
        ArtefactError: As of a checkpoint, of an artefact.
    """
    if is_artefact(path):
        return open_snapshot(Path(path), Artefact, wanted, comm)
    return open_snapshot(Path(path), Checkpoint, wanted, comm)


def open_artefact(path: str | Path) -> Artefact:
    """Open an artefact with all its files.

    Raises:
        ArtefactError: There is none, or it is incomplete, damaged or of a later version.
    """
    return open_snapshot(Path(path), Artefact, every_file)


def read_stored(path: str | Path) -> CheckpointManifest | ArtefactManifest:
    """Return the manifest of a checkpoint or an artefact.

    Of its other files it is only checked that they are there and have their sizes.

    Raises:
        CheckpointError: There is no model, or it is incomplete, damaged or of a later version.
        ArtefactError: As of a checkpoint, of an artefact.
    """
    with open_stored(path, wanted=no_file) as stored:
        return stored.manifest
