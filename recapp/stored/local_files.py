"""Names of checkpoints: given in one rename, never lost, and cleared of what killed saves have
left.

    step_000020.ckpt/                a checkpoint
    last.ckpt -> step_000020.ckpt    a link to one, replaced in one rename
    last.ckpt -> last.ckpt.000027    a link to a state that has no other name
    a.ckpt.tmp                       is being written or deleted
    a.ckpt.old                       had the name a.ckpt until a moment ago; readers look here, too

A directory cannot be replaced in one rename, so a directory that has the name already is renamed to
`.old` first. It is not lost if the process is killed between those two renames.
"""

import os
import re
import shutil
from pathlib import Path

MANIFEST = "manifest.json"  # of a checkpoint; written last
# more than a million blocks need; a file of any size must not fill the memory
MANIFEST_BYTES = 2**30
OLD = "old"
_LEFT_BEHIND = re.compile(r".+\.ckpt\.(?:tmp|old|\d+(?:-\d+)?(?:\.tmp|\.old)?)")


def beside(path: Path, suffix: str) -> Path:
    """Return the name of a checkpoint while it is written ("tmp") or replaced ("old")."""
    return path.with_name(f"{path.name}.{suffix}")


def current_path(path: Path, old: str = OLD) -> Path:
    """Return where a checkpoint is, also when its writer was killed between two renames.

    Args:
        path: Its name.
        old: What its name ends in between those renames.
    """
    named = [p for p in (Path(os.path.abspath(path)), Path(os.path.realpath(path))) if p.name]
    asides = [beside(p, old) for p in named]  # a path such as "." has a name only when it is whole
    return next((p for p in (path, *asides) if p.exists()), path)


def recover(path: Path, old: str = OLD) -> None:
    """Give a checkpoint its name back that a killed writer has left as `.old`, or delete that."""
    aside = beside(path, old)
    if not os.path.lexists(path) and os.path.lexists(aside):
        aside.rename(path)
    remove(aside)


def take_name(new: Path, path: Path, old: str = OLD) -> None:
    """Give a directory or a link the name `path`; what had that name is deleted afterwards.

    A link replaces a link in one rename. Anything else is renamed to `.old` for a moment.
    """
    aside = beside(path, old)
    if os.path.lexists(path) and not (path.is_symlink() and new.is_symlink()):
        path.rename(aside)
    new.rename(path)
    sync_folder(path.parent)
    remove(aside)


def link(path: Path, target: Path) -> None:
    """Make `path` a link to a checkpoint of the same file system, over an earlier link."""
    recover(path)
    new = beside(path, "tmp")
    remove(new)
    new.symlink_to(os.path.relpath(target, path.parent))
    take_name(new, path)


def links_to(path: Path) -> list[Path]:
    """Return the links to a checkpoint that lie beside it."""
    names = [p for p in path.parent.glob("*.ckpt") if p.is_symlink()]
    return [p for p in names if os.path.realpath(p) == os.path.realpath(path)]


def new_version(path: Path, number: int) -> Path:
    """Return a free name for the directory that `path` is going to be a link to.

    Args:
        path: The name of the link.
        number: The training step, which the new name contains.
    """
    names = (
        beside(path, f"{number:06d}{again}") for again in ("", *(f"-{i}" for i in range(1, 1000)))
    )
    return next(name for name in names if not os.path.lexists(name))


def clean_up(folder: Path) -> None:
    """Delete what killed saves have left in a directory, and versions that no link leads to."""
    for path in sorted(folder.glob("*.ckpt.old")):
        recover(path.with_suffix(""))
    needed = {os.path.realpath(p) for p in folder.glob("*.ckpt") if p.is_symlink()}
    here = Path(os.path.realpath(folder))
    for path in here.glob("*.ckpt.*"):
        if _LEFT_BEHIND.fullmatch(path.name) and str(path) not in needed:
            remove(path)


def sync_folder(folder: Path) -> None:
    """Write a directory's names to disk: files that are synced may still lose a rename with the
    power.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove(path: Path) -> None:
    """Delete a directory, a file, a link or nothing."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
