"""Sharding is a function applied to a finished model: every collection of tables in it is
replaced by its sharded twin. What is left of the model, its dense part, is wrapped in DDP or
compiled by functions of their own.

Lightning's strategy (`recapp/trainer/strategy.py`) and `DistributedModelParallel`
(`recapp/engine/model_parallel.py`) call these.
"""

import os
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from recapp.engine.outputs import Member
from recapp.engine.row_store import RowStore, StoredGroup
from recapp.engine.sharded_collection import (
    ShardedCollection,
    ShardedEmbeddingBagCollection,
    ShardedEmbeddingCollection,
)
from recapp.engine.sharded_tables import ShardedTables
from recapp.engine.table_parameter import TableParameter
from recapp.errors import ConfigError
from recapp.optim.rules_by_table import Rules, rules_of
from recapp.optim.table_rule import check_same_rule, rule_in_backward
from recapp.sharding.layout import copy_rows
from recapp.sharding.sharding_plan import ShardingPlan
from recapp.tables.collections import embedding_tables
from recapp.tables.config import EmbeddingConfig
from recapp.tables.embedding import EmbeddingCollection
from recapp.tables.embedding_bag import EmbeddingBagCollection
from recapp.tables.unsharded_collection import UnshardedCollection
from recapp.transport.communicator import Comm
from recapp.transport.dense_gradients import AverageOverRanks


def embedding_collections(module: nn.Module) -> list[tuple[str, UnshardedCollection]]:
    """Return every unsharded collection in a model, by path; one that a model holds twice is listed
    twice.
    """
    return [
        (path, m)
        for path, m in module.named_modules(remove_duplicate=False)
        if isinstance(m, UnshardedCollection)
    ]


def sharded_collections(module: nn.Module) -> list[ShardedCollection]:
    """Return every sharded collection in a model."""
    return [m for m in module.modules() if isinstance(m, ShardedCollection)]


def sharded_tables(module: nn.Module) -> list[ShardedTables]:
    """Return the tables of a model's sharded collections: once where collections share them."""
    return [m for m in module.modules() if isinstance(m, ShardedTables)]


def weight_names(module: nn.Module) -> dict[str, str]:
    """Return the table of each weight by the name that it has in the unsharded model's state."""
    return {
        f"{path}.{part.weight_name(table.name)}".lstrip("."): table.name
        for path, part in module.named_modules(remove_duplicate=False)
        if isinstance(part, ShardedCollection)
        for table in part.tables()
    }


def shard_model(
    module: nn.Module,
    plan: ShardingPlan,
    comm: Comm,
    rule: Rules | None,
    backend: str = "auto",
    payload: torch.dtype | None = None,
    trains: bool = True,
    make_store: Callable[[StoredGroup], RowStore] | None = None,
) -> nn.Module:
    """Replace every collection in a model, in place. What is sharded already stays.

    Collections of a model share their exchange, so they cost no more messages than one.

    Args:
        module: The model.
        plan: Where its tables lie.
        comm: Communicator of the ranks.
        rule: Optimiser of the rows, or rules by table name or glob; None for tables that are only
            read.
        backend: As of the sharded tables.
        payload: As of the sharded tables.
        trains: As of the sharded tables.
        make_store: As of the sharded tables.

    Rows of a collection that was built on a real device are taken over; on the meta device there
    are none, and the start values are those of the collection's seed, the same under every plan.

    Returns:
        The model; where it is a collection itself, its twin.

    Raises:
        PlanError: The plan does not cover the model's tables or is for another number of ranks.
        ConfigError: Another optimiser was applied in backward to its tables, or rules name tables
            that the model does not have.
    """
    found = embedding_collections(module)
    in_backward = rule_in_backward(module)
    if in_backward and rule:
        check_same_rule(in_backward, rule, "the rule that shards them")
    if found:
        tables = embedding_tables(module)
        plan.check(tables)
        rule = rules_of(rule, [t.name for t in tables]) or None
    together: dict[torch.dtype, list[UnshardedCollection]] = {}
    for collection in dict.fromkeys(collection for _, collection in found):
        together.setdefault(collection.dtype, []).append(collection)
    _check_shared(together)
    twins: dict[UnshardedCollection, ShardedCollection] = {}
    for collections in together.values():  # vectors of one type share a buffer
        made = sharded_twins(collections, plan, comm, rule, backend, payload, trains, make_store)
        twins |= zip(collections, made, strict=True)
    for path, collection in found:
        parent, _, name = path.rpartition(".")
        if path:
            setattr(module.get_submodule(parent), name, twins[collection])
        else:
            module = twins[collection]
    return module


def sharded_twins(
    collections: Sequence[UnshardedCollection],
    plan: ShardingPlan,
    comm: Comm,
    rule: Rules | None,
    backend: str = "auto",
    payload: torch.dtype | None = None,
    trains: bool = True,
    make_store: Callable[[StoredGroup], RowStore] | None = None,
) -> list[ShardedCollection]:
    """Return the sharded twins of collections, which share an exchange; other arguments as of
    `shard_model`.
    """
    tables: dict[str, tuple[EmbeddingConfig, int]] = {}
    for c in collections:
        for t in c.tables():
            tables.setdefault(t.name, (t, c.seed))
    shared = ShardedTables(
        [t for t, _ in tables.values()],
        plan.part(list(tables)),
        comm,
        rule,
        {name: seed for name, (_, seed) in tables.items()},
        backend,
        payload,
        trains,
        make_store,
        members=[Member(c.lookups, c.is_weighted(), c.own_ids) for c in collections],
        dtype=collections[0].dtype,
    )
    twins = [_twin(c, shared, number) for number, c in enumerate(collections)]
    for twin, collection in zip(twins, collections, strict=True):
        _take_over_rows(twin, collection)
    return twins


def _check_shared(together: Mapping[torch.dtype, Sequence[UnshardedCollection]]) -> None:
    """Check that collections that share a table compute in one type.

    Raises:
        ConfigError: They do not; it names the table.
    """
    dtype_of: dict[str, torch.dtype] = {}
    for dtype, collections in together.items():
        for name in (t.name for c in collections for t in c.tables()):
            if dtype_of.setdefault(name, dtype) != dtype:
                raise ConfigError(
                    f"table {name} is shared by collections that compute in {dtype_of[name]} and "
                    f"{dtype}: give the tables of both collections one data_type"
                )


def _twin(collection: UnshardedCollection, shared: ShardedTables, number: int) -> ShardedCollection:
    if isinstance(collection, EmbeddingCollection):
        return ShardedEmbeddingCollection(shared, number, collection.need_indices())
    assert isinstance(collection, EmbeddingBagCollection)
    twin = ShardedEmbeddingBagCollection(shared, number)
    twin.leave_room(collection.room)
    return twin


def _take_over_rows(twin: ShardedCollection, collection: UnshardedCollection) -> None:
    """Copy the rows of a collection that was built on a real device."""
    dynamic = {t.name for t in collection.tables() if t.dynamic is not None}  # they have no rows
    for block in twin.blocks():
        if block.table in dynamic:
            continue
        whole = collection.weight(block.table)
        if block.tensor == "weight" and whole.device.type != "meta":
            rows, cols = map(range, whole.shape)
            copy_rows(block, whole.detach(), rows, cols, None)


def wrap_dense(module: nn.Module, comm: Comm, **settings: Any) -> nn.Module:
    """Wrap everything that is not sharded in DDP; return the module itself where nothing has to be
    reduced.

    Shards are neither parameters nor buffers, and the gradients of tables that are parameters are
    reduced already, so DDP leaves both alone. On CPUs gradients travel as the tables' messages do
    and are added in rank order (`recapp/transport/dense_gradients.py`), on GPUs by DDP's
    all-reduce.

    Raises:
        ConfigError: Dense parameters of several CPU ranks have an optimiser in backward.
    """
    tables = _table_parameter_names(module)
    dense = {
        name: p for name, p in module.named_parameters() if p.requires_grad and name not in tables
    }
    if comm.world == 1 or not dense:
        return module
    in_backward = [name for name, p in dense.items() if hasattr(p, "_in_backward_optimizers")]
    if in_backward and comm.device.type == "cpu":
        raise ConfigError(
            f"{in_backward[0]} has an optimizer by apply_optimizer_in_backward, which torch's DDP "
            "runs on GPUs only: give the dense parameters an optimizer that is stepped, and apply "
            "it "
            "to the tables alone"
        )
    if tables:
        ignore: Any = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
        ignore(module, tables)
    # torch 2.13 renames broadcast_buffers; 2.11 knows no other name
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*broadcast_buffers.*", FutureWarning)
        wrapped = DistributedDataParallel(module, **settings)
    if comm.device.type == "cpu":
        wrapped.register_comm_hook(None, AverageOverRanks(comm.twin()))
    return wrapped


def _table_parameter_names(module: nn.Module) -> list[str]:
    """Return the names of the parameters that are tables."""
    return [
        f"{path}.weight".lstrip(".")
        for path, part in module.named_modules(remove_duplicate=False)
        if isinstance(part, TableParameter)
    ]


def compile_dense(module: nn.Module) -> list[str]:
    """Compile every part of a model that holds no table with `torch.compile`, in place; names and
    start values stay. Metrics are no part.

    Call it once the tables are sharded and before DDP. A part is compiled when it is first called,
    for minutes where it is large.

    Returns:
        The paths of those parts.

    Raises:
        ConfigError: There is no C++ compiler, which torch needs for the CPU.
    """
    from torchmetrics import Metric, MetricCollection

    device = next((p.device.type for p in module.parameters()), "cpu")
    compiler = os.environ.get("CXX", "g++")
    if device == "cpu" and shutil.which(compiler) is None:
        raise ConfigError(
            f"engine.compile=true: torch.compile needs a C++ compiler and there is no {compiler} "
            "here: install one, name "
            "yours in CXX, or leave engine.compile=false"
        )
    chosen: list[str] = []
    for path, child in module.named_children():
        if isinstance(child, ShardedCollection | Metric | MetricCollection):
            continue
        if sharded_collections(child):
            chosen += [f"{path}.{below}" for below in compile_dense(child)]
        else:
            child.compile()
            chosen.append(path)
    return chosen
