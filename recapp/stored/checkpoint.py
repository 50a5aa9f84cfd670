"""Write and load checkpoints. A checkpoint is a directory of logical tables: it loads under any
plan and on any number of ranks, and loading it runs no code from it.

    best.ckpt/
      manifest.json             written last; config, plan, schema, metrics, position, and per
                                stored block: table, tensor, rectangle, dtype, file, byte range,
                                checksum
      meta.pt                   the dense part and Lightning's state, plain types (torch.load with
                                weights_only=True)
      rank-00000.safetensors    blocks of tables and of their optimiser state, from rank 0
      rank-00001.safetensors

A save writes `best.ckpt.tmp` and renames it when it is whole; `recapp/stored/store.py`
describes the renames and the names that a killed save leaves. All ranks save together. Each rank
can load by itself; it opens all files that it needs at once (`recapp/stored/stored_model.py`), and
compares each loaded block with its checksum.

The checkpoints of a run name each other:

    manifest.json   "run": "9f3c52..."             made at random by a run, kept by all its resumes
                    "saved_as": "step_000020.ckpt" the name at the save; a user's copy has another
    meta.pt         "best_model_path": "step_000020.ckpt"    relative to the checkpoint's directory

A path alone does not tell whose checkpoint is there: runs are moved and copied, and another run may
write where they were. So a checkpoint that another one names is looked for beside it first, and it
is taken only if it is of the same run.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from recapp.errors import CheckpointError, suggest
from recapp.kernels.row_memory import is_finite
from recapp.processes.faults import FULL, full_disk_error
from recapp.sharding.layout import OF_WEIGHTS, WEIGHT, Block
from recapp.stored.block_files import (
    NOT_SAVED,
    STATE_NOT_SAVED,
    StoredBlock,
    check_tiling,
    link_blocks,
    sources_of,
    write_blocks,
)
from recapp.stored.manifest import META, ROW_ORDERS, SAVED_AS, CheckpointManifest, to_json
from recapp.stored.plain_parts import state_must_fit, write_meta
from recapp.stored.store import (
    MANIFEST,
    TMP,
    beside,
    checkpoints_in,
    clean_up,
    end_of_links,
    entry_of,
    files_at,
    is_checkpoint,
    is_link,
    links_to,
    size_of,
    write_file,
)
from recapp.stored.stored_model import Checkpoint, Wanted, every_file
from recapp.transport.communicator import Comm, raise_together

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
    states: Mapping[str, Tensor] | None = None,
    saved: Path | None = None,
) -> None:
    """Save the tables of all ranks, the plain part and the manifest as one checkpoint.

    Every rank calls it; all return or all raise.

    Args:
        path: The directory to make, on a file system that all ranks share. This replaces a
            checkpoint of that name.
        blocks: The blocks that this rank holds; of several copies only the owner's is written.
        comm: The ranks.
        meta: The plain part, from rank 0: any value that `plain` can convert.
        manifest: Entries of the manifest, from rank 0: any value that `plain` can convert, but no
            tensors except single numbers. The format's own keys are reserved.
        parameters: The dense parameters by name, from rank 0. They must be finite, like the weights
            of tables.
        states: The state of the dense part's optimisers by name, from rank 0. It must be finite,
            too.
        saved: A checkpoint of the same step. Ranks whose blocks are the same share its files.

    Raises:
        CheckpointError: The checkpoint could not be written, the blocks do not cover their tables,
            or weights or states of optimisers are not finite; an earlier checkpoint stays
            untouched.
        RankError: Another rank could not write its blocks.
    """
    path = Path(path).absolute()
    unfinished = beside(path, TMP)
    first = comm.rank == 0
    try:
        together(
            comm,
            path,
            lambda: (
                prepare_save(path, unfinished, parameters or {}, states or {}) if first else None
            ),
        )
        written = together(comm, path, lambda: _write(unfinished, comm.rank, blocks, saved))
        stored = [s for of_rank, _ in written for s in of_rank]
        orders = {table: order for _, of_rank in written for table, order in of_rank.items()}
        info = {**manifest, **({ROW_ORDERS: dict(sorted(orders.items()))} if orders else {})}
        together(
            comm, path, lambda: finish_save(path, unfinished, stored, meta, info) if first else None
        )
    except Exception:
        if first:
            with suppress(OSError):
                files_at(path).remove(unfinished)
        raise


def _write(
    folder: Path, rank: int, blocks: Iterable[Block], saved: Path | None
) -> tuple[list[StoredBlock], dict[str, Any]]:
    """Write a rank's blocks, or share their file. Return the stored blocks, and as plain values the
    row orders of tables with mixed rows.
    """
    block_list = list(blocks)
    file = f"rank-{rank:05d}.safetensors"
    stored: list[StoredBlock] = []
    with suppress(CheckpointError):  # deleted since
        stored = [s for s in read_manifest(saved).blocks if s.file == file] if saved else []
    if saved is None or not link_blocks(folder, file, block_list, saved, stored):
        stored = write_blocks(folder, file, block_list)
    return stored, {b.table: b.order.to_dict() for b in block_list if b.order}


def write_error(path: str | Path, error: OSError) -> CheckpointError:
    """Return the error for a checkpoint that could not be written."""
    if error.errno in FULL:
        return CheckpointError(f"{path} could not be written: {full_disk_error(Path(path).parent)}")
    return CheckpointError(f"{path} could not be written: {error.strerror or error}")


def together(comm: Comm, path: Path, do: Callable[[], T]) -> list[T]:
    """Run a function on every rank and return all results; raise on all ranks if it fails on one.

    So no rank waits for a rank that has failed.

    Args:
        comm: The ranks.
        path: The checkpoint, for messages.
        do: The function.

    Raises:
        CheckpointError: The function failed on this rank.
        RankError: The function failed on another rank.
    """
    mine: T | None = None
    failure: Exception | None = None
    try:
        mine = do()
    except OSError as error:
        failure = write_error(path, error)
        failure.__cause__ = error
    except Exception as error:
        failure = error
    outcomes = comm.all_gather((mine, failure and f"{type(failure).__name__}: {failure}"))
    raise_together(failure, [text for _, text in outcomes], f"could not write {path}")
    return [outcome for outcome, _ in outcomes]


def prepare_save(
    path: Path,
    unfinished: Path,
    parameters: Mapping[str, Tensor],
    states: Mapping[str, Tensor],
) -> None:
    """Make an empty directory for a save, and delete the remains of killed saves of that name.

    Raises:
        CheckpointError: A parameter or a state is not finite, or the name belongs to something that
            is not a checkpoint.
    """
    for name, values in parameters.items():
        if not is_finite(values.detach()):
            raise CheckpointError(f"{name}: {NOT_SAVED}")
    for name, values in states.items():
        if not is_finite(values):
            parameter, _, state = name.rpartition(", ")
            raise CheckpointError(f"{parameter}: {STATE_NOT_SAVED.format(state=state)}")
    _check_name(path)
    files_at(path).remove(unfinished)


def _check_name(path: Path) -> None:
    """Check that a name is free or is the name of a checkpoint.

    Raises:
        CheckpointError: The name belongs to something else.
    """
    if entry_of(path) and not is_checkpoint(path):
        raise CheckpointError(
            f"{path} exists and is no checkpoint: move it away or save under another name"
        )


def finish_save(
    path: Path,
    unfinished: Path,
    stored: list[StoredBlock],
    meta: Mapping[str, Any],
    manifest: Mapping[str, Any],
) -> None:
    """Write the plain part and the manifest, and give the save its final name."""
    files: dict[str, dict[str, Any]] = {
        file: {"bytes": size_of(unfinished / file)} for file in sorted({s.file for s in stored})
    }
    files[META] = write_meta(unfinished, META, meta)
    whole = CheckpointManifest(unfinished, dict(manifest), files, tuple(stored))
    for of_tensor in whole.tensors.values():
        check_tiling(of_tensor)
    write_file(unfinished / MANIFEST, to_json(whole).encode())
    files_at(path).publish(unfinished, path)


def name_metrics(path: str | Path, metrics: Mapping[str, float]) -> None:
    """Write the validation metrics of a checkpoint that was measured after its save into its
    manifest. One rank calls it.

    Raises:
        CheckpointError: The checkpoint does not exist, or cannot be written.
    """
    manifest = read_manifest(path)
    whole = replace(manifest, info={**manifest.info, "metrics": dict(metrics)})
    try:
        write_file(Path(path) / MANIFEST, to_json(whole).encode())
    except OSError as error:
        raise write_error(path, error) from error


def link_checkpoint(path: str | Path, target: str | Path) -> None:
    """Make `path` a link to a checkpoint; replace an earlier link in one rename.

    One rank calls it.

    Raises:
        CheckpointError: The name belongs to something that is neither a link nor a checkpoint.
    """
    path = Path(path)
    if path.absolute() == Path(target).absolute():
        return  # a link to itself would lead nowhere
    if not is_link(path):
        _check_name(path)
    files_at(path).publish(Path(target), path, link=True)


# ---- reading


def read_manifest(path: str | Path) -> CheckpointManifest:
    """Return the manifest of a checkpoint.

    This checks only the existence and the size of the other files.

    Raises:
        CheckpointError: The checkpoint does not exist, is incomplete or damaged, or has a later
            version.
    """
    with Checkpoint.at(path) as snapshot:
        return snapshot.manifest


def read_meta(path: str | Path) -> dict[str, Any]:
    """Return the plain part: dense parameters and Lightning's state, with tensors on the CPU.

    Raises:
        CheckpointError: The checkpoint does not exist, or its file is damaged or holds other types
            than plain ones.
    """
    with Checkpoint.at(path, selector=lambda manifest: (META,)) as snapshot:
        return snapshot.meta()


def files_of(blocks: Iterable[Block]) -> Wanted:
    """Return a selector of the files that hold parts of these blocks or the plain part."""
    block_list = list(blocks)
    return lambda manifest: (
        META,
        *(s.stored.file for s in sources_of(manifest.tensors, manifest.row_orders, block_list)),
    )


def load_blocks(path: str | Path, blocks: Iterable[Block]) -> None:
    """Fill blocks of this rank from a checkpoint of any plan and any number of ranks.

    A rank can call this alone.

    Args:
        path: The checkpoint.
        blocks: The blocks to fill, copies included. Omit blocks of optimiser state to skip it.

    Raises:
        CheckpointError: A table, tensor or shape differs from the checkpoint's, the stored blocks
            leave a hole, or a file is damaged.
    """
    block_list = list(blocks)
    with Checkpoint.at(path, selector=files_of(block_list)) as snapshot:
        snapshot.fill(block_list)


def load_together(
    path: str | Path,
    blocks_of: Callable[[CheckpointManifest], Iterable[Block]],
    parameters: Iterable[str],
    comm: Comm,
) -> tuple[Checkpoint, dict[str, Any]]:
    """Load the same version of a checkpoint into the blocks of all ranks.

    Every rank calls it; all return or all raise.

    Args:
        path: The checkpoint.
        blocks_of: Returns the blocks of this rank to fill from a checkpoint. It is called again if
            a save replaced the checkpoint while this opened it.
        parameters: The names of the dense parameters in the plain part's `state_dict`. Their values
            must be finite, like those of tables; a name may be absent.
        comm: The ranks.

    Returns:
        The version that was loaded, with closed files, and its plain part.

    Raises:
        CheckpointError: As for `load_blocks`; or weights or states of optimisers are not finite.
        RankError: Another rank could not load its part.
    """
    blocks: list[Block] = []

    def selector(manifest: CheckpointManifest) -> Iterable[str]:
        blocks[:] = blocks_of(manifest)
        return files_of(blocks)(manifest)

    meta = dict[str, Any]()
    failure = None
    with Checkpoint.at(path, comm, selector) as snapshot:
        try:
            snapshot.fill(blocks)
            meta = snapshot.meta()
            _refuse_non_finite(snapshot.path, blocks, meta, parameters)
        except CheckpointError as error:
            failure = error
        error_W = comm.all_gather(failure and str(failure))
        raise_together(failure, error_W, f"could not read {snapshot.path}")
    return snapshot, meta


def _refuse_non_finite(
    path: str | Path, blocks: Iterable[Block], meta: Mapping[str, Any], parameters: Iterable[str]
) -> None:
    fix = "that are not finite (NaN or infinity): use an earlier checkpoint"
    for b in blocks:
        if not is_finite(b.data):
            what = "weights" if b.tensor in OF_WEIGHTS else f"states of the optimiser ({b.tensor})"
            rows = f"rows {b.rows.start}-{b.rows.stop}"
            raise CheckpointError(f"table {b.table}, {rows} of checkpoint {path} has {what} {fix}")
    state = meta.get("state_dict")
    dense: dict[str, Any] = state if isinstance(state, dict) else {}
    for name in parameters:
        if isinstance(values := dense.get(name), Tensor) and not is_finite(values):
            raise CheckpointError(f"{name} of checkpoint {path} has weights {fix}")


def load_table(path: str | Path, table: str, tensor: str = WEIGHT) -> Tensor:
    """Load a whole logical table without a plan, ranks or a model, for notebooks.

    Args:
        path: The checkpoint.
        table: The name of the table.
        tensor: "weight" or a state of the optimiser, such as "sum".

    Returns:
        [R, D], or [R, 1] for a state with one value per row, in the stored dtype. Rows of a dynamic
            table are in the order of their positions; `static_table` returns their keys.

    Raises:
        CheckpointError: The table or tensor is not in the checkpoint.
    """

    def all_of_it(manifest: CheckpointManifest) -> Iterable[str]:
        return {s.file for s in manifest.tensors.get((table, tensor), ())}

    with Checkpoint.at(path, selector=all_of_it) as snapshot:
        stored = snapshot.manifest.tensors.get((table, tensor), [])
        if stored:
            check_tiling(stored)  # before the table is allocated
        shape, dtype = (
            (stored[0].shape, getattr(torch, stored[0].dtype))
            if stored
            else ((1, 1), torch.float32)
        )
        data = torch.empty(shape, dtype=dtype)
        snapshot.fill([Block(table, tensor, shape, range(shape[0]), range(shape[1]), data, True)])
    return data


class StaticTable(NamedTuple):
    """Rows in the order of their keys.

    Args:
        keys_R: The key of each row, ascending, int64; `torch.searchsorted(keys_R, ids)` finds rows.
        tensor_RD: The rows.
    """

    keys_R: Tensor
    tensor_RD: Tensor


def static_table(path: str | Path, table: str, tensor: str = WEIGHT) -> StaticTable:
    """Load a dynamic table without a plan, ranks or a model, for notebooks and exports.

    A table trained with the ids 0 .. R - 1 gives the rows of a static table of R rows, in the same
    order.

    Args:
        path: The checkpoint.
        table: The name of the table.
        tensor: "weight" or a state of the optimiser, such as "sum".

    Returns:
        The keys and rows of the table; both are empty before training.

    Raises:
        CheckpointError: The checkpoint has no dynamic table of this name.
    """
    manifest = read_manifest(path)
    stored = manifest.dynamic
    if table not in stored:
        hint = suggest(table, list(stored)) if stored else "it has none"
        raise CheckpointError(f"checkpoint {path} has no dynamic table {table}: {hint}")
    if not sum(stored[table]["rows"]):
        columns = max(shard.cols.stop for shard in manifest.plan.tables[table].shards)
        return StaticTable(torch.zeros(0, dtype=torch.int64), torch.zeros(0, columns))
    keys_R = load_table(path, table, "keys")[:, 0]
    order_R = keys_R.argsort()
    return StaticTable(keys_R[order_R], load_table(path, table, tensor)[order_R])


def verify(path: str | Path) -> int:
    """Read a whole checkpoint, and compare all checksums.

    Returns:
        The number of bytes read.

    Raises:
        CheckpointError: A file or block is missing or damaged; the text names it.
    """
    with Checkpoint.at(path, selector=every_file) as snapshot:
        return snapshot.verify()


# ---- removing


def remove_checkpoint(path: str | Path, instead: str | Path | None = None) -> None:
    """Delete a checkpoint or a link to one; do nothing if the name is free. One rank calls it.

    Args:
        path: The checkpoint or link.
        instead: The new target of links to the checkpoint in the same directory; no link is left
            without a target.

    Raises:
        CheckpointError: The name belongs to something else, or a link leads to the checkpoint and
            `instead` names no other.
    """
    path = Path(path)
    files = files_at(path)
    if entry_of(path) and not is_link(path) and not is_checkpoint(path):
        raise CheckpointError(f"{path} is no checkpoint and was not removed")
    entry = entry_of(path)
    if entry is None:
        return
    other = entry_of(Path(instead)) if instead is not None else None
    for name in () if entry.target else links_to(path):
        if instead is None or other is None or other.identity == entry.identity:
            raise CheckpointError(
                f"{path} was not removed, because {name} leads to it: remove {name.name} first"
            )
        files.publish(Path(instead), name, link=True)
    files.remove(path)


# ---- of a run

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
    start_step = start.step if start is not None and start.run == earlier.run else -1
    removed = []
    if earlier.step > start_step and is_link(last):
        files.remove(last)
        removed.append(LAST)
    for path, *_ in sorted(checkpoints_in(folder)):
        with suppress(CheckpointError):
            manifest = read_manifest(path)
            of_same_run = manifest.run == earlier.run and manifest.info.get(SAVED_AS) == path.name
            if of_same_run and manifest.step > start_step and not is_link(path):
                files.remove(path)
                removed.append(path.name)
    clean_up(folder)
    return removed
