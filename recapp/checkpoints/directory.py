"""A checkpoint is a directory of logical tables: it loads under any plan and on any number of
ranks, and nothing in it is run as code.

    best.ckpt/
      manifest.json             written last; config, plan, schema, metrics, position, and per
                                stored block: table, tensor, rectangle, dtype, file, byte range,
                                checksum
      meta.pt                   the dense part and Lightning's state, plain types (torch.load with
                                weights_only=True)
      rank-00000.safetensors    blocks of the tables and of their optimiser state, as rank 0 held
                                them
      rank-00001.safetensors

A save goes to `best.ckpt.tmp` and takes its name when it is whole; how names are taken, and what is
left of a save that was killed, is told in `recapp/checkpoints/names.py`. Saving is for all ranks
together; loading is each rank's own business, and whoever loads has opened all that is wanted at
once (`recapp/checkpoints/snapshot.py`). What is loaded has been compared with its checksum.
"""

import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from recapp.checkpoints.block_files import NOT_SAVED, WEIGHT, is_finite, sources_of, write_blocks
from recapp.checkpoints.manifest import META, Manifest, to_json
from recapp.checkpoints.meta_file import crc32_of, write_meta
from recapp.checkpoints.names import (
    MANIFEST,
    beside,
    link,
    links_to,
    remove,
    settle,
    settled,
    sync_folder,
    take_name,
)
from recapp.checkpoints.rectangles import Stored, check_tiling
from recapp.checkpoints.snapshot import (
    Absent,
    Snapshot,
    Wanted,
    open_snapshot,
    open_together,
    refuse_together,
)
from recapp.errors import CheckpointError, RankError, suggest
from recapp.sharding.layout import Block
from recapp.transport.communicator import Comm

T = TypeVar("T")


# ---- writing


def write_checkpoint(
    path: str | Path,
    blocks: Iterable[Block],
    *,
    comm: Comm,
    meta: Mapping[str, Any],
    manifest: Mapping[str, Any],
    parameters: Mapping[str, Tensor] | None = None,
) -> None:
    """Save the tables of all ranks and what else belongs to a checkpoint. Every rank calls it; all
    return or all raise.

    Args:
        path: the directory to make; one file system for all ranks. A checkpoint of that name is
            replaced.
        blocks: what this rank holds; of several copies the owner's is written.
        comm: the ranks.
        meta: of rank 0; anything that `plain` can make plain.
        manifest: of rank 0; the same, and no tensors but numbers. Keys of the format itself are
            taken.
        parameters: of rank 0; weights beside the tables that have to be finite, as the tables' own.

    Raises:
        CheckpointError: it could not be written, the blocks do not cover their tables, or weights
            are not finite; what was there before is untouched.
        RankError: another rank could not write.
    """
    path = Path(path).absolute()
    unfinished = beside(path, "tmp")
    first = comm.rank == 0
    try:
        _together(
            comm, path, lambda: _prepare(path, unfinished, parameters or {}) if first else None
        )
        written = _together(
            comm,
            path,
            lambda: write_blocks(unfinished, f"rank-{comm.rank:05d}.safetensors", blocks),
        )
        stored = [s for of_rank in written for s in of_rank]
        _together(
            comm, path, lambda: _finish(path, unfinished, stored, meta, manifest) if first else None
        )
    except Exception:
        if first:
            shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _together(comm: Comm, path: Path, do: Callable[[], T]) -> list[T]:
    """Do something on every rank and learn every rank's outcome: nobody waits for a rank that has
    failed.
    """
    mine: T | None = None
    failure: Exception | None = None
    try:
        mine = do()
    except OSError as error:
        failure = CheckpointError(f"{path} could not be written: {error.strerror or error}")
        failure.__cause__ = error
    except Exception as error:
        failure = error
    outcomes = comm.gather((mine, failure and f"{type(failure).__name__}: {failure}"))
    if failure:
        raise failure
    for rank, (_, said) in enumerate(outcomes):
        if said:
            raise RankError(f"rank {rank} could not write {path}: {said}")
    return [outcome for outcome, _ in outcomes]


def _prepare(path: Path, unfinished: Path, parameters: Mapping[str, Tensor]) -> None:
    """Room for a save: nothing left of killed ones, nothing in its place that is not ours."""
    for name, values in parameters.items():
        if not is_finite(values.detach()):
            raise CheckpointError(f"{name}: {NOT_SAVED}")
    settle(path)
    if os.path.lexists(path) and not is_checkpoint(path):
        raise CheckpointError(
            f"{path} exists and is no checkpoint: move it away or save under another name"
        )
    remove(unfinished)
    unfinished.mkdir(parents=True)


def _finish(
    path: Path,
    unfinished: Path,
    stored: list[Stored],
    meta: Mapping[str, Any],
    manifest: Mapping[str, Any],
) -> None:
    write_meta(unfinished / META, meta)
    files: dict[str, dict[str, Any]] = {
        file: {"bytes": (unfinished / file).stat().st_size}
        for file in sorted({s.file for s in stored})
    }
    with open(unfinished / META, "rb") as source:
        files[META] = {"bytes": (unfinished / META).stat().st_size, "crc32": crc32_of(source)}
    whole = Manifest(unfinished, dict(manifest), tuple(stored), files)
    for of_tensor in whole.tensors.values():
        check_tiling(of_tensor)
    _write_synced(unfinished / MANIFEST, to_json(whole).encode())
    sync_folder(unfinished)
    take_name(unfinished, path)


def _write_synced(file: Path, content: bytes) -> None:
    with open(file, "wb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())


def link_checkpoint(path: str | Path, target: str | Path) -> None:
    """Make `path` a link to a checkpoint; one rank calls it. An earlier link is replaced in one
    rename.

    Raises:
        CheckpointError: something else lies there.
    """
    path = Path(path)
    if path.absolute() == Path(target).absolute():
        return  # a link to itself would lead nowhere
    if os.path.lexists(path) and not path.is_symlink() and not is_checkpoint(path):
        raise CheckpointError(
            f"{path} exists and is no checkpoint: move it away or save under another name"
        )
    link(path, Path(target))


# ---- reading


def open_checkpoint(
    path: str | Path, wanted: Wanted = lambda manifest: (), comm: Comm | None = None
) -> Snapshot:
    """Open a checkpoint: what is open stays whole, whoever replaces it meanwhile.

    Args:
        path: the checkpoint.
        wanted: which of its files will be read; by default none beside the manifest.
        comm: ranks that all call it, and that are to open one version of it.

    Raises:
        CheckpointError: no checkpoint, an incomplete or damaged one, one of a later version.
    """
    try:
        return (
            open_together(Path(path), wanted, comm) if comm else open_snapshot(Path(path), wanted)
        )
    except Absent as error:
        raise CheckpointError(_why_none(Path(path), settled(Path(path)))) from error


def read_manifest(path: str | Path) -> Manifest:
    """What a checkpoint says of itself; its files are there and have their sizes, which is all that
    is read of them.

    Raises:
        CheckpointError: no checkpoint, an incomplete or damaged one, one of a later version.
    """
    with open_checkpoint(path) as snapshot:
        return snapshot.manifest


def _why_none(path: Path, folder: Path) -> str:
    if folder.is_dir():
        below = [str(p) for p in find_checkpoints(folder)]
        hint = f"; below it there is {below[-1]}" if below else ""
        return (
            f"{path} is no checkpoint, or an incomplete one: it has no {MANIFEST}, which is "
            f"written last{hint}"
        )
    if folder.is_file():
        return f"{path} is a file: a checkpoint of recapp is a directory with a {MANIFEST}"
    beside = [p.name for p in path.parent.glob("*.ckpt")] if path.parent.is_dir() else []
    return f"there is no checkpoint {path}" + (f": {suggest(path.name, beside)}" if beside else "")


def read_meta(path: str | Path) -> dict[str, Any]:
    """The plain part: dense parameters, Lightning's state; tensors on the CPU.

    Raises:
        CheckpointError: no checkpoint, a damaged file, or one that holds more than plain types.
    """
    with open_checkpoint(path, lambda manifest: (META,)) as snapshot:
        return snapshot.meta()


def files_of(blocks: Iterable[Block]) -> Wanted:
    """The files that hold some of these blocks, and the plain part."""
    held = list(blocks)
    return lambda manifest: (
        META,
        *(s.file for _, parts in sources_of(manifest.tensors, held) for s in parts),
    )


def load_blocks(path: str | Path, blocks: Iterable[Block]) -> None:
    """Fill what this rank holds, whatever plan and number of ranks the checkpoint was saved under.
    Ranks call it by themselves.

    Args:
        path: the checkpoint.
        blocks: to be filled, copies and all. Leave optimiser state out where it is not wanted.

    Raises:
        CheckpointError: a table, tensor or shape that is not the checkpoint's, a hole, a damaged
            file.
    """
    held = list(blocks)
    with open_checkpoint(path, files_of(held)) as snapshot:
        snapshot.fill(held)


def load_together(
    path: str | Path, blocks: Iterable[Block], parameters: Iterable[str], comm: Comm
) -> tuple[Manifest, dict[str, Any]]:
    """Load one version of a checkpoint into the blocks of all ranks. Every rank calls it; all
    return or all raise.

    Args:
        path: the checkpoint.
        blocks: to be filled.
        parameters: names of the dense parameters in the plain part's `state_dict`; those that it
            has have to be finite, as tables have to.
        comm: the ranks.

    Returns:
        The manifest and the plain part.

    Raises:
        CheckpointError: as `load_blocks`; or weights are not finite.
        RankError: another rank could not load its part.
    """
    held = list(blocks)
    meta = dict[str, Any]()
    failure = None
    with open_checkpoint(path, files_of(held), comm) as snapshot:
        try:
            snapshot.fill(held)
            meta = snapshot.meta()
            _refuse_non_finite(path, held, meta, parameters)
        except CheckpointError as error:
            failure = error
        refuse_together(Path(path), failure, comm.gather(failure and str(failure)))
        return snapshot.manifest, meta


def _refuse_non_finite(
    path: str | Path, blocks: Iterable[Block], meta: Mapping[str, Any], parameters: Iterable[str]
) -> None:
    said = (
        f"of checkpoint {path} has weights that are not finite (NaN or infinity): use an earlier "
        "checkpoint"
    )
    for b in blocks:
        if b.tensor == WEIGHT and not is_finite(b.data):
            raise CheckpointError(f"table {b.table}, rows {b.rows.start}-{b.rows.stop} {said}")
    found = meta.get("state_dict")
    dense: dict[str, Any] = found if isinstance(found, dict) else {}
    for name in parameters:
        if isinstance(values := dense.get(name), Tensor) and not is_finite(values):
            raise CheckpointError(f"{name} {said}")


def load_table(path: str | Path, table: str, tensor: str = WEIGHT) -> Tensor:
    """A whole logical table, for notebooks: no plan, no ranks, no model.

    Args:
        path: the checkpoint.
        table: its name.
        tensor: "weight" or a state of the optimiser, such as "sum".

    Returns:
        [R, D], or [R, 1] for a state that is kept by row, in the stored dtype.

    Raises:
        CheckpointError: a table or tensor that is not in the checkpoint.
    """

    def all_of_it(manifest: Manifest) -> Iterable[str]:
        return {s.file for s in manifest.tensors.get((table, tensor), ())}

    with open_checkpoint(path, all_of_it) as snapshot:
        stored = snapshot.manifest.tensors.get((table, tensor), [])
        if stored:
            check_tiling(stored)  # before so much memory is asked for
        shape, dtype = (
            (stored[0].shape, getattr(torch, stored[0].dtype))
            if stored
            else ((1, 1), torch.float32)
        )
        data = torch.empty(shape, dtype=dtype)
        snapshot.fill([Block(table, tensor, shape, range(shape[0]), range(shape[1]), data, True)])
    return data


def verify(path: str | Path) -> int:
    """Read all of a checkpoint and compare every checksum.

    Returns:
        The bytes read.

    Raises:
        CheckpointError: naming what is missing or damaged.
    """
    with open_checkpoint(path, lambda manifest: manifest.files) as snapshot:
        return snapshot.verify()


# ---- directories


def is_checkpoint(path: str | Path) -> bool:
    """Whether a whole checkpoint lies there (a killed save leaves none)."""
    return (settled(Path(path)) / MANIFEST).is_file()


def find_checkpoints(folder: str | Path) -> list[Path]:
    """The checkpoints below a directory, oldest first; links to others of them are left out."""
    found = {
        *Path(folder).rglob("*.ckpt"),
        *(p.with_suffix("") for p in Path(folder).rglob("*.ckpt.old")),
    }
    held = {p: os.path.realpath(settled(p)) for p in found if is_checkpoint(p)}
    own = {real for p, real in held.items() if not p.is_symlink()}
    named = [p for p, real in held.items() if not p.is_symlink() or real not in own]
    return sorted(named, key=lambda p: ((settled(p) / MANIFEST).stat().st_mtime_ns, p.name))


def remove_checkpoint(path: str | Path, instead: str | Path | None = None) -> None:
    """Delete a checkpoint, or a link to one; nothing there is fine. One rank calls it.

    Args:
        path: its name.
        instead: where links beside it lead from now on; a link is never left without a checkpoint.

    Raises:
        CheckpointError: something else lies there, or a link leads to it and nothing is given
            instead.
    """
    path = Path(path)
    if os.path.lexists(path) and not path.is_symlink() and not is_checkpoint(path):
        raise CheckpointError(f"{path} is no checkpoint and was not removed")
    settle(path)
    if not os.path.lexists(path):
        return
    for name in () if path.is_symlink() else links_to(path):
        if instead is None or os.path.realpath(instead) == os.path.realpath(path):
            raise CheckpointError(
                f"{path} is what {name} leads to and was not removed: remove {name.name} first"
            )
        link(name, Path(instead))
    # first out of the way at once: half of a directory must not be taken for a whole one
    aside = beside(path, "tmp")
    remove(aside)
    path.rename(aside)
    remove(aside)
