"""Write, join and remove checkpoints. A checkpoint is a directory of logical tables: it loads under
any plan and on any number of ranks, and loading it runs no code from it.

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

Checkpoints of one model can be joined into the checkpoint of an ensemble, whose mean output
predicts. It has the weights and no state of optimisers, of callbacks or of Lightning's loops. The
weights of one model at a time are in memory.

    epoch_6.ckpt   tables C1, C2          -> member 1   C1, C2            joined.ckpt
    epoch_7.ckpt   tables C1, C2          -> member 2   C1__2, C2__2      ensemble=2, to score
    epoch_8.ckpt   tables C1, C2 ...      -> ...                          and not to resume
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from recapp.errors import CheckpointError, RecappError
from recapp.kernels.row_memory import is_finite
from recapp.processes.faults import FULL, full_disk_error
from recapp.settings.uris import path_to
from recapp.sharding.layout import WEIGHT, Block
from recapp.sharding.sharding_plan import ShardingPlan
from recapp.stored.block_files import (
    DTYPES,
    NOT_SAVED,
    STATE_NOT_SAVED,
    StoredBlock,
    check_tiling,
    link_blocks,
    write_blocks,
)
from recapp.stored.manifest import (
    JOINED,
    META,
    ROW_ORDERS,
    RUN,
    SAVED_AS,
    CheckpointManifest,
    to_json,
)
from recapp.stored.operations import LAST, MANIFEST, TMP, beside
from recapp.stored.plain_parts import (
    DERIVED_VALUES,
    OF_MODEL,
    check_state,
    state_must_fit,
    write_meta,
)
from recapp.stored.store import (
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
from recapp.stored.stored_model import Checkpoint, read_manifest
from recapp.tables.table_settings import MOST_MEMBERS, member_name
from recapp.transport.communicator import Comm, together

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
    path = path_to(path).absolute()
    unfinished = beside(path, TMP)
    first = comm.rank == 0
    try:
        written_together(
            comm,
            path,
            lambda: (
                prepare_save(path, unfinished, parameters or {}, states or {}) if first else None
            ),
        )
        written = written_together(comm, path, lambda: _write(unfinished, comm.rank, blocks, saved))
        stored = [s for of_rank, _ in written for s in of_rank]
        orders = {table: order for _, of_rank in written for table, order in of_rank.items()}
        info = {**manifest, **({ROW_ORDERS: dict(sorted(orders.items()))} if orders else {})}
        written_together(
            comm, path, lambda: finish_save(path, unfinished, stored, meta, info) if first else None
        )
    except Exception:
        if first:
            with suppress(OSError, RecappError):
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


def written_together(comm: Comm, path: Path, do: Callable[[], T]) -> list[T]:
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

    def of_rank() -> T:
        try:
            return do()
        except OSError as error:
            raise write_error(path, error) from error

    return comm.all_gather(together(comm, of_rank, f"could not write {path}"))


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
        write_file(path_to(path) / MANIFEST, to_json(whole).encode())
    except OSError as error:
        raise write_error(path, error) from error


def link_checkpoint(path: str | Path, target: str | Path) -> None:
    """Make `path` a link to a checkpoint; replace an earlier link in one rename.

    One rank calls it.

    Raises:
        CheckpointError: The name belongs to something that is neither a link nor a checkpoint.
    """
    path = path_to(path)
    if path.absolute() == path_to(target).absolute():
        return  # a link to itself would lead nowhere
    if not is_link(path):
        _check_name(path)
    files_at(path).publish(path_to(target), path, link=True)


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
    path = path_to(path)
    files = files_at(path)
    if entry_of(path) and not is_link(path) and not is_checkpoint(path):
        raise CheckpointError(f"{path} is no checkpoint and was not removed")
    entry = entry_of(path)
    if entry is None:
        return
    other = entry_of(path_to(instead)) if instead is not None else None
    for name in () if entry.target else links_to(path):
        if instead is None or other is None or other.identity == entry.identity:
            raise CheckpointError(
                f"{path} was not removed, because {name} leads to it: remove {name.name} first"
            )
        files.publish(path_to(instead), name, link=True)
    files.remove(path)


# ---- of a run

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
    return end_of_links(path_to(checkpoint).absolute()).parent


def find_named(path: str | Path, folder: Path, run: str) -> Path | None:
    """Return the place of a checkpoint that another one names; None if the run's is not there.

    Args:
        path: The path, absolute or relative to `folder`.
        folder: The directory of the checkpoint that names it.
        run: The identity of its run; empty if it has none.
    """
    beside = folder / path_to(path).name
    named = path_to(os.path.abspath(folder / path_to(path)))
    for place in (beside, named) if run else (beside,):
        with suppress(CheckpointError):
            if read_manifest(place).run == run:
                return place
    return None


def goes_on_in(folder: Path, checkpoints: Path, resumed: str | Path) -> bool:
    """Return whether a run goes on in its own directory.

    Args:
        folder: The directory of the run.
        checkpoints: The directory of its checkpoints.
        resumed: The checkpoint from which it resumes.
    """
    above = map(entry_of, end_of_links(path_to(resumed).absolute()).parents)
    homes = {one.identity for one in map(entry_of, (folder, checkpoints)) if one}
    if homes.isdisjoint(one.identity for one in above if one):
        return False
    with suppress(CheckpointError):
        return read_manifest(checkpoints / LAST).run == read_manifest(resumed).run
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


# ---- joined

SAME = ("model", "tables", "task")  # settings that the models of a joined checkpoint share
OF_MEMBERS = f"{OF_MODEL}members."
VERSION = "pytorch-lightning_version"


@dataclass
class _Joined:
    """What the joined checkpoint has of the checkpoints so far."""

    folder: Path
    first: CheckpointManifest | None = None
    step: int = 0
    meta: dict[str, Any] = field(default_factory=dict)
    members: int = 0
    blocks: list[StoredBlock] = field(default_factory=list)
    plans: list[ShardingPlan] = field(default_factory=list)
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)
    ids: Mapping[str, Any] | None = None

    def add(self, stored: Checkpoint) -> None:
        """Write the weights of a checkpoint into a file of its own, and take over its dense part.

        Raises:
            CheckpointError: The checkpoint is damaged, has another model than the first, or has a
                dynamic table.
        """
        manifest = stored.manifest
        meta = stored.meta()
        check_state(meta, stored.path)
        if self.first is None:
            self.first = manifest
            self.meta = {n: meta[n] for n in (VERSION, DERIVED_VALUES) if n in meta}
            self.meta["state_dict"] = {}
        _check_same(manifest, meta, self.first, self.meta)
        if manifest.info.get("ids") is not None:  # the first one may lack the lists
            self.ids = {**manifest.info["ids"], **(self.ids or {})}
        self.step = manifest.step
        names = _Names(manifest, self.members)
        file = f"from-{len(self.plans):05d}.safetensors"
        self.blocks += write_blocks(self.folder, file, _weights(stored, names.tables))
        plan = manifest.plan
        tables = {names.tables[name]: table_plan for name, table_plan in plan.tables.items()}
        self.plans.append(replace(plan, tables=tables, reasons={}, modules={}, made_for=None))
        dense = {names.of(name): value for name, value in meta["state_dict"].items()}
        self.meta["state_dict"] |= dense
        rules = {names.tables[table]: rule for table, rule in manifest.rules.items()}
        self.entries["rules"] = self.entries.get("rules", {}) | rules
        self.entries["weights"] = self.entries.get("weights", {}) | names.weights
        self.members += names.members

    def plan(self) -> ShardingPlan:
        tables = {
            name: table_plan for plan in self.plans for name, table_plan in plan.tables.items()
        }
        ranks = max(plan.world_size for plan in self.plans)
        return replace(self.plans[0], tables=tables, world_size=ranks)


class _Names:
    """The names of a checkpoint's tables and parameters in the joined one.

    Args:
        manifest: The manifest of the checkpoint.
        before: The number of members before it.
    """

    def __init__(self, manifest: CheckpointManifest, before: int) -> None:
        self.members = int(manifest.config.get("ensemble", 1))
        self.before = before
        self.tables: dict[str, str] = {}
        self.weights: dict[str, str] = {}
        for name, table in manifest.weights.items():
            number = self._number(name)
            base = table.removesuffix(f"__{number + 1}") if number else table
            joined = member_name(base, before + number)
            self.tables[table] = joined
            at, _, rest = self.of(name).rpartition(f".{table}.")
            self.weights[f"{at}.{joined}.{rest}"] = joined

    def of(self, name: str) -> str:
        if not name.startswith(OF_MODEL):
            return name
        rest = name.removeprefix(OF_MODEL)
        if self.members > 1:
            rest = rest.removeprefix("members.").partition(".")[2]
        return f"{OF_MEMBERS}{self.before + self._number(name)}.{rest}"

    def _number(self, name: str) -> int:
        """Return the number of the member that a parameter belongs to, from 0 on."""
        number = name.removeprefix(OF_MEMBERS).partition(".")[0]
        return int(number) if self.members > 1 else 0


def join_checkpoints(paths: Sequence[str | Path], output: str | Path, run: str = "") -> int:
    """Write a checkpoint whose model is the ensemble of the models of several checkpoints.

    The members of an ensemble among them become members of the joined one.

    Args:
        paths: The checkpoints, of one model and one data set: they differ in their weights.
        output: The directory to make; a checkpoint of that name is replaced.
        run: The identity of the run whose models they are, for a file of this run.

    Returns:
        The number of models in the joined checkpoint.

    Raises:
        CheckpointError: A checkpoint does not exist or is damaged, has another model than the
            first, or a dynamic table; there are too many models; or `output` cannot be written.
    """
    output = path_to(output).absolute()
    unfinished = beside(output, TMP)
    try:
        prepare_save(output, unfinished, {}, {})
        joined = _Joined(unfinished)
        for path in paths:
            with Checkpoint.at(path, selector=lambda manifest: manifest.files) as stored:
                joined.add(stored)
        first = joined.first
        if first is None or not 1 < joined.members <= MOST_MEMBERS:
            raise CheckpointError(
                f"{joined.members} models: an ensemble has 2 to {MOST_MEMBERS}: name other "
                "checkpoints"
            )
        info: dict[str, Any] = {
            **({"ids": joined.ids} if "ids" in first.info else {}),
            **({"example": first.info["example"]} if "example" in first.info else {}),
            **joined.entries,
            **({RUN: run, SAVED_AS: output.name} if run else {}),
            "config": {**first.config, "ensemble": joined.members, "snapshots": 1},
            "step": joined.step,
            "plan": joined.plan().to_dict(),
            "metrics": {},
            JOINED: [str(path) for path in paths],
        }
        if (first.config.get("plan") or {}).get("path"):  # it has one member alone
            del info["config"]["plan"]
        finish_save(output, unfinished, joined.blocks, joined.meta, info)
    except Exception as error:
        with suppress(OSError, RecappError):
            files_at(output).remove(unfinished)
        if isinstance(error, OSError):
            raise write_error(output, error) from error
        raise
    return joined.members


def join_together(paths: Sequence[Path], output: Path) -> int:
    """Join checkpoints of a run as `join_checkpoints` does, on all ranks; the first one writes.

    Returns:
        The number of models in the joined checkpoint.

    Raises:
        CheckpointError: As `join_checkpoints`.
    """
    comm = Comm()
    return written_together(
        comm,
        output,
        lambda: 0 if comm.rank else join_checkpoints(paths, output, read_manifest(paths[-1]).run),
    )[0]


def _check_same(
    manifest: CheckpointManifest,
    meta: Mapping[str, Any],
    first: CheckpointManifest,
    first_meta: Mapping[str, Any],
) -> None:
    here = f"{manifest.folder} cannot be joined with {first.folder}"
    if manifest.dynamic:
        table = next(iter(manifest.dynamic))
        raise CheckpointError(
            f"{manifest.folder}: table {table} is dynamic, and checkpoints of dynamic tables "
            "cannot be joined: give tables a number of rows"
        )
    for group in SAME:
        if manifest.config.get(group) != first.config.get(group):
            raise CheckpointError(f"{here}: their settings {group} differ")
    ids, first_ids = (each.info.get("ids") or {} for each in (manifest, first))
    if ids != first_ids:
        raise CheckpointError(f"{here}: they read other columns, or ids in another way")
    values: Mapping[str, Any] = meta.get(DERIVED_VALUES, {})
    others: Mapping[str, Any] = first_meta.get(DERIVED_VALUES, {})
    same = values.keys() == others.keys() and all(values[key].equal(others[key]) for key in values)
    if not same:
        raise CheckpointError(f"{here}: the fitted values of their derived columns differ")


def _weights(stored: Checkpoint, names: Mapping[str, str]) -> Iterator[Block]:
    for table, joined in names.items():
        blocks = stored.manifest.tensors[table, WEIGHT]
        shape = blocks[0].shape
        data = torch.empty(shape, dtype=DTYPES[blocks[0].dtype])
        whole = (shape, range(shape[0]), range(shape[1]), data, True)
        stored.fill([Block(table, WEIGHT, *whole)])
        yield Block(joined, WEIGHT, *whole)
