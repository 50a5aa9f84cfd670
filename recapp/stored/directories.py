"""Where stored models are: whether a directory holds one, which ones lie below a directory, and
what was probably meant by a path that leads to none.
"""

from pathlib import Path

from recapp.errors import RecappError, suggest
from recapp.stored.kinds import ARTEFACT, MANIFEST, Kind
from recapp.stored.local_files import files_at

LEVELS = 6  # of directories that are looked through: sweeps/DATE/TIME/JOB/checkpoints/NAME.ckpt
MOST_ENTRIES = 20_000  # that are looked at on the way: some tenths of a second
HEAD_BYTES = 256  # of a manifest, among which its format is named


def is_checkpoint(path: str | Path) -> bool:
    """Return whether a path leads to a whole checkpoint; a killed save leaves none."""
    path = Path(path)
    files = files_at(path)
    return files.size(files.current(path) / MANIFEST) is not None


def is_artefact(path: str | Path) -> bool:
    """Return whether a directory says that it is an artefact."""
    path = Path(path)
    files = files_at(path)
    try:
        pinned = files.pin(files.current(path, ARTEFACT.old))
    except OSError:
        return False
    try:
        with pinned.open(MANIFEST, ARTEFACT) as source:
            return ARTEFACT.format.encode() in source.read(HEAD_BYTES)
    except (RecappError, OSError):
        return False
    finally:
        pinned.close()


def find_checkpoints(folder: str | Path) -> list[Path]:
    """Return the checkpoints below a directory, oldest first; links to others are left out. It
    looks as deep as sweeps write, and at `MOST_ENTRIES`, so that a home directory takes no minutes.
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
    """Return why a path is no stored model, with the name of one that may have been meant."""
    files = files_at(path)
    folder = files.current(path, kind.old)
    if kind is ARTEFACT:
        if not files.is_folder(folder):
            return f"{path}: there is no such directory: `recapp.export` writes artefacts"
        return f"{folder} is no artefact: {MANIFEST} is missing"
    if files.is_folder(folder):
        try:
            below = [str(p) for p in find_checkpoints(folder)]
        except OSError:  # a directory has gone meanwhile: there is no hint
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
