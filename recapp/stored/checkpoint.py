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

A save goes to `best.ckpt.tmp`, which gets its final name when it is whole;
`recapp/stored/local_files.py` says how, and which names a killed save leaves. All ranks save
together. Each rank can load by itself; it opens all files that it needs at once
(`recapp/stored/snapshot.py`). Each loaded block is compared with its checksum.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from recapp.errors import CheckpointError, RankError
from recapp.sharding.layout import Block
from recapp.stored.block_files import NOT_SAVED, is_finite, sources_of, write_blocks
from recapp.stored.checkpoint_manifest import META, ROW_ORDERS, CheckpointManifest
from recapp.stored.directories import is_checkpoint
from recapp.stored.kinds import MANIFEST
from recapp.stored.local_files import TMP, beside, files_at
from recapp.stored.manifest import to_json
from recapp.stored.meta_file import write_meta
from recapp.stored.rectangles import WEIGHT, StoredBlock, check_tiling
from recapp.stored.snapshot import (
    Checkpoint,
    Wanted,
    every_file,
    no_file,
    open_snapshot,
    refuse_together,
)
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
    """Save the tables of all ranks, the plain part and the manifest as one checkpoint.

    Every rank calls it; all return or all raise.

    Args:
        path: The directory to make, on a file system that all ranks share. A checkpoint of that
            name is replaced.
        blocks: The blocks that this rank holds; of several copies the owner's is written.
        comm: The ranks.
        meta: The plain part, rank 0's: anything that `plain` can make plain.
        manifest: Entries of the manifest, rank 0's: anything that `plain` can make plain, but no
            tensors except single numbers. The format's own keys are reserved.
        parameters: The dense parameters by name, rank 0's: they have to be finite, as the tables'
            weights have to.

    Raises:
        CheckpointError: It could not be written, the blocks do not cover their tables, or weights
            are not finite; what was there before is untouched.
        RankError: Another rank could not write.
    """
    path = Path(path).absolute()
    unfinished = beside(path, TMP)
    first = comm.rank == 0
    try:
        _together(
            comm, path, lambda: _prepare(path, unfinished, parameters or {}) if first else None
        )
        written = _together(comm, path, lambda: _write(unfinished, comm.rank, blocks))
        stored = [s for of_rank, _ in written for s in of_rank]
        orders = {table: order for _, of_rank in written for table, order in of_rank.items()}
        info = {**manifest, **({ROW_ORDERS: dict(sorted(orders.items()))} if orders else {})}
        _together(
            comm, path, lambda: _finish(path, unfinished, stored, meta, info) if first else None
        )
    except Exception:
        if first:
            with suppress(OSError):
                files_at(path).remove(unfinished)
        raise


def _write(
    folder: Path, rank: int, blocks: Iterable[Block]
) -> tuple[list[StoredBlock], dict[str, Any]]:
    """Write a rank's blocks, and return them as stored with the orders of tables whose rows are
    mixed, as plain values.
    """
    held = list(blocks)
    stored = write_blocks(folder, f"rank-{rank:05d}.safetensors", held)
    return stored, {b.table: b.order.to_dict() for b in held if b.order}


def _together(comm: Comm, path: Path, do: Callable[[], T]) -> list[T]:
    """Run a function on every rank and return every rank's result; raise on all if it fails on one.

    So no rank goes on to wait for one that has failed.

    Args:
        comm: The ranks.
        path: The checkpoint, for messages.
        do: The function.

    Raises:
        CheckpointError: It failed here.
        RankError: It failed on another rank.
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
    outcomes = comm.all_gather((mine, failure and f"{type(failure).__name__}: {failure}"))
    if failure:
        raise failure
    for rank, (_, error_text) in enumerate(outcomes):
        if error_text:
            raise RankError(f"rank {rank} could not write {path}: {error_text}")
    return [outcome for outcome, _ in outcomes]


def _prepare(path: Path, unfinished: Path, parameters: Mapping[str, Tensor]) -> None:
    """Make an empty directory for a save, and clear what killed saves of that name have left.

    Raises:
        CheckpointError: A parameter is not finite, or something other than a checkpoint has the
            name.
    """
    for name, values in parameters.items():
        if not is_finite(values.detach()):
            raise CheckpointError(f"{name}: {NOT_SAVED}")
    files_at(path).recover(path)
    _check_name(path)
    files_at(path).empty(unfinished)


def _check_name(path: Path) -> None:
    """Check that a name is free or a checkpoint's.

    Raises:
        CheckpointError: Something else has it.
    """
    if files_at(path).taken(path) and not is_checkpoint(path):
        raise CheckpointError(
            f"{path} exists and is no checkpoint: move it away or save under another name"
        )


def _finish(
    path: Path,
    unfinished: Path,
    stored: list[StoredBlock],
    meta: Mapping[str, Any],
    manifest: Mapping[str, Any],
) -> None:
    """Write the plain part and the manifest, and give the save its final name."""
    files: dict[str, dict[str, Any]] = {
        file: {"bytes": files_at(path).size(unfinished / file)}
        for file in sorted({s.file for s in stored})
    }
    files[META] = write_meta(unfinished, META, meta)
    whole = CheckpointManifest(unfinished, dict(manifest), tuple(stored), files)
    for of_tensor in whole.tensors.values():
        check_tiling(of_tensor)
    files_at(path).write(unfinished / MANIFEST, to_json(whole).encode())
    files_at(path).commit(unfinished, path)


def link_checkpoint(path: str | Path, target: str | Path) -> None:
    """Make `path` a link to a checkpoint; an earlier link is replaced in one rename.

    One rank calls it.

    Raises:
        CheckpointError: Something other than a link or a checkpoint has that name.
    """
    path = Path(path)
    if path.absolute() == Path(target).absolute():
        return  # a link to itself would lead nowhere
    if not files_at(path).is_link(path):
        _check_name(path)
    files_at(path).link(path, Path(target))


# ---- reading


def open_checkpoint(
    path: str | Path, wanted: Wanted = no_file, comm: Comm | None = None
) -> Checkpoint:
    """Open a checkpoint; what is open stays whole, even if it is replaced meanwhile.

    Args:
        path: The checkpoint.
        wanted: Selects the files that will be read; by default none beside the manifest.
        comm: Ranks that all call it and are to open the same version; None opens for this rank
            alone.

    Raises:
        CheckpointError: There is no checkpoint, or it is incomplete, damaged or of a later version.
    """
    return open_snapshot(Path(path), Checkpoint, wanted, comm)


def read_manifest(path: str | Path) -> CheckpointManifest:
    """Return the manifest of a checkpoint.

    Of its other files it is only checked that they are there and have their sizes.

    Raises:
        CheckpointError: There is no checkpoint, or it is incomplete, damaged or of a later version.
    """
    with open_checkpoint(path) as snapshot:
        return snapshot.manifest


def read_meta(path: str | Path) -> dict[str, Any]:
    """Return the plain part: dense parameters and Lightning's state, with tensors on the CPU.

    Raises:
        CheckpointError: There is no checkpoint, or its file is damaged or holds other than plain
            types.
    """
    with open_checkpoint(path, lambda manifest: (META,)) as snapshot:
        return snapshot.meta()


def files_of(blocks: Iterable[Block]) -> Wanted:
    """Return a selection of the files that hold parts of these blocks, and of the plain part."""
    held = list(blocks)
    return lambda manifest: (
        META,
        *(s.stored.file for s in sources_of(manifest.tensors, manifest.row_orders, held)),
    )


def load_blocks(path: str | Path, blocks: Iterable[Block]) -> None:
    """Fill blocks of this rank, whatever plan and number of ranks the checkpoint was saved under.

    Any rank can call it by itself.

    Args:
        path: The checkpoint.
        blocks: The blocks to be filled, copies included. Leave optimiser state out where it is not
            wanted.

    Raises:
        CheckpointError: A table, tensor or shape is not the checkpoint's, there is a hole, or a
            file is damaged.
    """
    held = list(blocks)
    with open_checkpoint(path, files_of(held)) as snapshot:
        snapshot.fill(held)


def load_together(
    path: str | Path,
    blocks_of: Callable[[CheckpointManifest], Iterable[Block]],
    parameters: Iterable[str],
    comm: Comm,
) -> tuple[CheckpointManifest, dict[str, Any]]:
    """Load the same version of a checkpoint into the blocks of all ranks.

    Every rank calls it; all return or all raise.

    Args:
        path: The checkpoint.
        blocks_of: Returns the blocks of this rank that a checkpoint is to fill. It is called again
            where the checkpoint was replaced while it was opened.
        parameters: The names of the dense parameters in the plain part's `state_dict`; those that
            it has have to be finite, as tables have to.
        comm: The ranks.

    Returns:
        The manifest and the plain part.

    Raises:
        CheckpointError: As of `load_blocks`; or weights are not finite.
        RankError: Another rank could not load its part.
    """
    held: list[Block] = []

    def wanted(manifest: CheckpointManifest) -> Iterable[str]:
        held[:] = blocks_of(manifest)
        return files_of(held)(manifest)

    with open_checkpoint(path, wanted, comm) as snapshot:
        return snapshot.manifest, fill_together(snapshot, held, parameters, comm)


def fill_together(
    snapshot: Checkpoint, blocks: Sequence[Block], parameters: Iterable[str], comm: Comm
) -> dict[str, Any]:
    """Fill the blocks of all ranks from an open checkpoint, and return the plain part.

    Every rank calls it; all return or all raise. Arguments and errors are those of
    `load_together`.
    """
    meta = dict[str, Any]()
    failure = None
    try:
        snapshot.fill(blocks)
        meta = snapshot.meta()
        _refuse_non_finite(snapshot.path, blocks, meta, parameters)
    except CheckpointError as error:
        failure = error
    refuse_together(snapshot.path, failure, comm.all_gather(failure and str(failure)))
    return meta


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
    """Load a whole logical table, for notebooks: it needs no plan, no ranks and no model.

    Args:
        path: The checkpoint.
        table: The name of the table.
        tensor: "weight" or a state of the optimiser, such as "sum".

    Returns:
        [R, D], or [R, 1] for a state that is kept by row, in the stored dtype. The rows of
        a dynamic table stand in the order of their positions; `static_table` returns their keys.

    Raises:
        CheckpointError: The table or tensor is not in the checkpoint.
    """

    def all_of_it(manifest: CheckpointManifest) -> Iterable[str]:
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
    """Read a whole checkpoint and compare every checksum.

    Returns:
        The number of bytes read.

    Raises:
        CheckpointError: Something is missing or damaged; the text names it.
    """
    with open_checkpoint(path, every_file) as snapshot:
        return snapshot.verify()


# ---- removing


def remove_checkpoint(path: str | Path, instead: str | Path | None = None) -> None:
    """Delete a checkpoint, or a link to one; do nothing if there is none. One rank calls it.

    Args:
        path: The checkpoint or link.
        instead: The checkpoint that links beside it lead to from now on; a link is never left
            without one.

    Raises:
        CheckpointError: Something else has that name, or a link leads to it and no other checkpoint
            is given instead.
    """
    path = Path(path)
    files = files_at(path)
    if files.taken(path) and not files.is_link(path) and not is_checkpoint(path):
        raise CheckpointError(f"{path} is no checkpoint and was not removed")
    files.recover(path)
    if not files.taken(path):
        return
    for name in () if files.is_link(path) else files.links_to(path):
        if instead is None or files.real(Path(instead)) == files.real(path):
            raise CheckpointError(
                f"{path} is what {name} leads to and was not removed: remove {name.name} first"
            )
        files.link(name, Path(instead))
    files.delete(path)
