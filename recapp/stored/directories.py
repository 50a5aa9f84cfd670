"""Find stored models: test whether a directory holds a model, list the models below a directory,
and suggest a model for a wrong path.
"""

from contextlib import closing
from itertools import islice
from pathlib import Path

from recapp.errors import RecappError, suggest
from recapp.stored.kinds import ARTEFACT, CHECKPOINT, MANIFEST, Kind
from recapp.stored.model_store import Pinned, checkpoints_in, entry_of, files_at, size_of

LEVELS = 6  # of directories to search: sweeps/DATE/TIME/JOB/checkpoints/NAME.ckpt
MOST_ENTRIES = 20_000  # directory entries to look at: some tenths of a second
HEAD_BYTES = 256  # of a manifest; they name its format


def is_checkpoint(path: str | Path) -> bool:
    """Return whether a path leads to a whole checkpoint; the remains of a killed save are not
    whole.
    """
    path = Path(path)
    return size_of(files_at(path).current(path) / MANIFEST) is not None


def read_manifest_text(path: Path) -> bytes:
    """Return the content of the manifest of a checkpoint or an artefact, unchecked.

    Raises:
        RecappError: The file is too large, or cannot be read.
        OSError: There is no stored model.
    """
    with closing(Pinned(files_at(path).current(path))) as pinned:
        return pinned.read(MANIFEST, CHECKPOINT)


def is_artefact(path: str | Path) -> bool:
    """Return whether the manifest of a directory names the format of artefacts."""
    path = Path(path)
    try:
        with (
            closing(Pinned(files_at(path).current(path))) as pinned,
            pinned.open(MANIFEST, ARTEFACT) as source,
        ):
            return ARTEFACT.format.encode() in source.read(HEAD_BYTES)
    except (RecappError, OSError):
        return False


def find_checkpoints(folder: str | Path) -> list[Path]:
    """Return the checkpoints below a directory, oldest first, without links to other checkpoints.
    The search ends at the depth of sweeps and at `MOST_ENTRIES`, so that a home directory does not
    take minutes.
    """
    folder = Path(folder)
    below = islice(files_at(folder).entries(folder, LEVELS), MOST_ENTRIES)
    names = {
        entry.path.with_suffix("") if entry.path.suffix == ".old" else entry.path
        for entry in below
        if entry.path != folder and entry.path.name.endswith((".ckpt", ".ckpt.old"))
    }
    entries = [entry for name in names if is_checkpoint(name) and (entry := entry_of(name))]
    places = {entry.identity for entry in entries if entry.target is None}
    paths = [one.path for one in entries if one.target is None or one.identity not in places]
    return sorted(paths, key=lambda path: (_written(path), path.name))


def _written(path: Path) -> int:
    """Return the time of the last write to the manifest of a checkpoint."""
    manifest = entry_of(files_at(path).current(path) / MANIFEST)
    return manifest.written if manifest else 0


def why_none(path: Path, kind: Kind) -> str:
    """Return the reason why a path is not a stored model, with the name of a similar one."""
    folder = files_at(path).current(path)
    entry = entry_of(folder)
    if kind is ARTEFACT:
        if entry is None or entry.kind != "folder":
            return f"{path}: there is no such directory: `recapp.export` writes artefacts"
        return f"{folder} is no artefact: {MANIFEST} is missing"
    if entry and entry.kind == "folder":
        try:
            below = [str(p) for p in find_checkpoints(folder)]
        except OSError:  # a directory was deleted meanwhile: give no hint
            below = []
        hint = f"; below it there is {below[-1]}" if below else ""
        return (
            f"{path} is no checkpoint, or an incomplete one: it has no {MANIFEST}, which is "
            f"written last{hint}"
        )
    if entry and entry.kind == "file":
        return f"{path} is a file: a checkpoint of recapp is a directory with a {MANIFEST}"
    beside = [one.path.name for one in checkpoints_in(path.parent)]
    hint = f": {suggest(path.name, beside)}" if beside else ""
    return f"there is no checkpoint {path}{hint}"
