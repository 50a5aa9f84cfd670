"""Find stored models: test whether a directory holds a model, list the models below a directory,
and suggest a model for a wrong path.
"""

from contextlib import closing
from pathlib import Path

from recapp.errors import RecappError, suggest
from recapp.stored.kinds import ARTEFACT, CHECKPOINT, MANIFEST, Kind
from recapp.stored.local_files import files_at

LEVELS = 6  # of directories to search: sweeps/DATE/TIME/JOB/checkpoints/NAME.ckpt
MOST_ENTRIES = 20_000  # directory entries to look at: some tenths of a second
HEAD_BYTES = 256  # of a manifest; they name its format


def is_checkpoint(path: str | Path) -> bool:
    """Return whether a path leads to a whole checkpoint; the remains of a killed save are not
    whole.
    """
    path = Path(path)
    files = files_at(path)
    return files.size(files.current(path) / MANIFEST) is not None


def read_manifest_text(path: Path) -> bytes:
    """Return the content of the manifest of a checkpoint or an artefact, unchecked.

    Raises:
        RecappError: The file is too large, or cannot be read.
        OSError: There is no stored model.
    """
    files = files_at(path)
    with closing(files.pin(files.current(path))) as pinned:
        return pinned.read(MANIFEST, CHECKPOINT)


def is_artefact(path: str | Path) -> bool:
    """Return whether the manifest of a directory names the format of artefacts."""
    path = Path(path)
    files = files_at(path)
    try:
        with (
            closing(files.pin(files.current(path, ARTEFACT.old))) as pinned,
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
    files = files_at(folder)
    found = {
        p.with_suffix("") if p.suffix == ".old" else p
        for p in files.below(folder, LEVELS, MOST_ENTRIES)
        if p.name.endswith((".ckpt", ".ckpt.old"))
    }
    held = {p: files.real(files.current(p)) for p in found if is_checkpoint(p)}
    own = {real for p, real in held.items() if not files.is_link(p)}
    named = [p for p, real in held.items() if not files.is_link(p) or real not in own]
    return sorted(named, key=lambda p: (files.written(held[p] / MANIFEST), p.name))


def why_none(path: Path, kind: Kind) -> str:
    """Return the reason why a path is not a stored model, with the name of a similar one."""
    files = files_at(path)
    folder = files.current(path, kind.old)
    if kind is ARTEFACT:
        if not files.is_folder(folder):
            return f"{path}: there is no such directory: `recapp.export` writes artefacts"
        return f"{folder} is no artefact: {MANIFEST} is missing"
    if files.is_folder(folder):
        try:
            below = [str(p) for p in find_checkpoints(folder)]
        except OSError:  # a directory was deleted meanwhile: give no hint
            below = []
        hint = f"; below it there is {below[-1]}" if below else ""
        return (
            f"{path} is no checkpoint, or an incomplete one: it has no {MANIFEST}, which is "
            f"written last{hint}"
        )
    if files.size(folder) is not None:
        return f"{path} is a file: a checkpoint of recapp is a directory with a {MANIFEST}"
    beside = [p.name for p in files.checkpoints_in(path.parent)]
    hint = f": {suggest(path.name, beside)}" if beside else ""
    return f"there is no checkpoint {path}{hint}"
