"""Open a stored model of either kind. Callers read its settings, tables, dense part and example in
the same way for both kinds.

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
    """Open a checkpoint or an artefact; its files stay readable when a writer replaces it.

    Args:
        path: The model.
        comm: The ranks that open the same version together; None opens for this rank alone.
        wanted: Selects the files to open; by default all files.

    Raises:
        CheckpointError: The checkpoint does not exist, is incomplete or damaged, or has a later
            version.
        ArtefactError: The artefact is incomplete or damaged, or has a later version.
    """
    if is_artefact(path):
        return open_snapshot(Path(path), Artefact, wanted, comm)
    return open_snapshot(Path(path), Checkpoint, wanted, comm)


def open_artefact(path: str | Path) -> Artefact:
    """Open an artefact with all its files.

    Raises:
        ArtefactError: The artefact does not exist, is incomplete or damaged, or is of a later
            version.
    """
    return open_snapshot(Path(path), Artefact, every_file)


def read_stored(path: str | Path) -> CheckpointManifest | ArtefactManifest:
    """Return the manifest of a checkpoint or an artefact.

    This checks only the existence and the size of the other files.

    Raises:
        CheckpointError: The checkpoint does not exist, is incomplete or damaged, or has a later
            version.
        ArtefactError: The artefact is incomplete or damaged, or has a later version.
    """
    with open_stored(path, wanted=no_file) as stored:
        return stored.manifest
