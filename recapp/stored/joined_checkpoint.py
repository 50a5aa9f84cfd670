"""Join checkpoints of one model into the checkpoint of an ensemble, whose mean output predicts.

    epoch_6.ckpt   tables C1, C2          -> member 1   C1, C2            joined.ckpt
    epoch_7.ckpt   tables C1, C2          -> member 2   C1__2, C2__2      ensemble=2, to score
    epoch_8.ckpt   tables C1, C2 ...      -> ...                          and not to resume

A joined checkpoint has the weights and no state of optimisers, of callbacks or of Lightning's
loops. The weights of one model at a time are in memory.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from recapp.errors import CheckpointError
from recapp.sharding.layout import WEIGHT, Block
from recapp.sharding.sharding_plan import ShardingPlan
from recapp.stored.block_files import DTYPES, StoredBlock, write_blocks
from recapp.stored.checkpoint import (
    finish_save,
    prepare_save,
    read_manifest,
    together,
    write_error,
)
from recapp.stored.manifest import JOINED, RUN, SAVED_AS, CheckpointManifest
from recapp.stored.plain_parts import DERIVED_VALUES, OF_MODEL, check_state
from recapp.stored.store import TMP, beside, files_at
from recapp.stored.stored_model import Checkpoint, every_file
from recapp.tables.table_settings import MOST_MEMBERS, member_name
from recapp.transport.communicator import Comm

SAME = ("model", "tables", "task")
"""The groups of settings that the models of a joined checkpoint share."""
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
        """Return the plan of all tables."""
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
        """Return the name of a parameter: that of its member."""
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
    output = Path(output).absolute()
    unfinished = beside(output, TMP)
    try:
        prepare_save(output, unfinished, {}, {})
        joined = _Joined(unfinished)
        for path in paths:
            with Checkpoint.at(path, selector=every_file) as stored:
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
            "config": _config_of(first.config, joined.members),
            "step": joined.step,
            "plan": joined.plan().to_dict(),
            "metrics": {},
            JOINED: [str(path) for path in paths],
        }
        finish_save(output, unfinished, joined.blocks, joined.meta, info)
    except Exception as error:
        with suppress(OSError):
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

    def join() -> int:
        return 0 if comm.rank else join_checkpoints(paths, output, read_manifest(paths[-1]).run)

    return together(comm, output, join)[0]


def _config_of(config: Mapping[str, Any], members: int) -> dict[str, Any]:
    """Return the settings of the ensemble: those of a model, but for a plan file, which knows
    nothing of the other members' tables.
    """
    entries = {**config, "ensemble": members, "snapshots": 1}
    if (entries.get("plan") or {}).get("path"):
        del entries["plan"]
    return entries


def _check_same(
    manifest: CheckpointManifest,
    meta: Mapping[str, Any],
    first: CheckpointManifest,
    first_meta: Mapping[str, Any],
) -> None:
    """Check that a checkpoint has the model, the columns and the derived values of the first.

    Raises:
        CheckpointError: It differs, or has a dynamic table.
    """
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
