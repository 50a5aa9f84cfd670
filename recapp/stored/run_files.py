"""The checkpoints of a run: how they name each other, and which are an earlier run's.

    manifest.json   "run": "9f3c52..."             made at random by a run, kept by all its resumes
                    "saved_as": "step_000020.ckpt" the name at the save; a user's copy has another
    meta.pt         "best_model_path": "step_000020.ckpt"    relative to the checkpoint's directory

A path alone does not tell whose checkpoint is there: runs are moved and copied, and another run may
write where they were. So a checkpoint that another one names is looked for beside it first, and it
is taken only if it is of the same run. Runs of earlier versions have no identity; they find their
checkpoints in their own directory alone.
"""

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from recapp.errors import CheckpointError
from recapp.stored.checkpoint import read_manifest
from recapp.stored.meta_file import state_must_fit
from recapp.stored.model_manifests import SAVED_AS
from recapp.stored.model_store import (
    checkpoints_in,
    clean_up,
    end_of_links,
    entry_of,
    files_at,
    is_link,
)

CHECKPOINTS = "checkpoints"
"""The directory of checkpoints in the directory of a run."""
LAST = "last.ckpt"
"""The link to the last checkpoint of a run."""
BEST = "best_k_models"
KEPT = "kept"
PATHS = ("dirpath", "best_model_path", "kth_best_model_path", "last_model_path")


def with_paths(states: Mapping[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    """Return the states of callbacks with other paths of checkpoints.

    Args:
        states: The states of `ModelCheckpoint`, `KeepSnapshots` and other callbacks.
        change: Returns the new path.
    """
    changed = dict(states)
    for key, state in states.items():
        if isinstance(state, Mapping) and BEST in state:
            paths = {name: change(state[name]) for name in PATHS if state.get(name)}
            best = {change(path): score for path, score in state[BEST].items()}
            changed[key] = {**state, **paths, BEST: best}
        elif isinstance(state, Mapping) and KEPT in state:
            changed[key] = {**state, KEPT: [change(path) for path in state[KEPT]]}
    return changed


def with_absolute_paths(meta: Mapping[str, Any], checkpoint: str | Path) -> dict[str, Any]:
    """Return the plain part of a checkpoint with absolute paths in the states of callbacks.

    Raises:
        CheckpointError: The states have another form.
    """
    if "callbacks" not in meta:  # only weights were saved
        return dict(meta)
    with state_must_fit("the state of callbacks", "callbacks"):
        folder = folder_of(checkpoint)
        states = with_paths(meta["callbacks"], lambda path: os.path.abspath(folder / path))
        return {**meta, "callbacks": states}


def folder_of(checkpoint: str | Path) -> Path:
    """Return the directory of a checkpoint, also of one to which a link elsewhere leads."""
    path = Path(checkpoint).absolute()
    return end_of_links(path).parent


def find_named(path: str | Path, folder: Path, run: str) -> Path | None:
    """Return the place of a checkpoint that another one names; None if the run's is not there.

    Args:
        path: The path, absolute or relative to `folder`.
        folder: The directory of the checkpoint that names it.
        run: The identity of its run; empty if it has none.
    """
    beside = folder / Path(path).name
    named = Path(os.path.abspath(folder / path))
    for place in (beside, named) if run else (beside,):
        with suppress(CheckpointError):
            if read_manifest(place).run == run:
                return place
    return None


def goes_on_in(folder: Path, resumed: str | Path) -> bool:
    """Return whether a run goes on in its own directory.

    Args:
        folder: The directory of the run.
        resumed: The checkpoint from which it resumes.
    """
    above = map(entry_of, end_of_links(Path(resumed).absolute()).parents)
    home = entry_of(folder)
    if home is None or home.identity not in {one.identity for one in above if one}:
        return False
    with suppress(CheckpointError):
        return read_manifest(folder / CHECKPOINTS / LAST).run == read_manifest(resumed).run
    return True


def remove_earlier(folder: Path, resumed: str | Path | None) -> list[str]:
    """Delete the checkpoints of the run whose `last.ckpt` is in a directory, because another run is
    about to write there. One rank calls it.

    A run that goes on there keeps those up to the step from which it goes on. Other checkpoints
    stay, such as copies under names of the user.

    Args:
        folder: The directory of checkpoints.
        resumed: The checkpoint from which the other run resumes, or None.

    Returns:
        The names of those that are deleted.
    """
    files = files_at(folder)
    last = folder / LAST
    try:
        earlier = read_manifest(last)
    except CheckpointError:
        return []
    start = read_manifest(resumed) if resumed else None
    kept = start.step if start is not None and start.run == earlier.run else -1
    removed = []
    if earlier.step > kept and is_link(last):
        files.remove(last)
        removed.append(LAST)
    for path, *_ in sorted(checkpoints_in(folder)):
        with suppress(CheckpointError):
            held = read_manifest(path)
            own = held.run == earlier.run and held.info.get(SAVED_AS) == path.name
            if own and held.step > kept and not is_link(path):
                files.remove(path)
                removed.append(path.name)
    clean_up(folder)
    return removed
