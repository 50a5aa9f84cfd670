"""Sharding is a function on a finished model: it replaces every collection of tables by its sharded
twin. Two other functions wrap the rest of the model, the dense part, in DDP, or compile it.

Lightning's strategy (`recapp/trainer/strategy.py`) and `DistributedModelParallel`
(`recapp/engine/model_parallel.py`) call these functions.
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
from recapp.optim.named_rules import Rules, rules_of
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
    """Return every unsharded collection in a model, with its path. A collection with two paths is
    listed twice.
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
    """Return the sharded tables of a model's collections, without duplicates."""
    return [m for m in module.modules() if isinstance(m, ShardedTables)]


def weight_names(module: nn.Module) -> dict[str, str]:
    """Return the table of each weight, by the weight's name in the state dict of the unsharded
    model.
    """
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
    """Replace every unsharded collection in a model, in place. Sharded collections stay.

    The collections of a model share one exchange, so they send no more messages than one
    collection.

    Args:
        module: The model.
        plan: The sharding plan of the model's tables.
        comm: Communicator of the ranks.
        rule: Optimiser of the rows, or rules by table name or glob; None for read-only tables.
        backend: As for `ShardedTables`.
        payload: As for `ShardedTables`.
        trains: As for `ShardedTables`.
        make_store: As for `ShardedTables`.

    The rows of a collection on a real device are copied. A collection on the meta device has no
    rows: its twin gets start values from the collection's seed, the same under every plan.

    Returns:
        The model; or its twin, where the model itself is a collection.

    Raises:
        PlanError: The plan does not cover the tables of the model, or is for another number of
            ranks.
        ConfigError: Another optimiser was applied in backward to the tables, or rules name tables
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
    for collections in together.values():  # only vectors of one dtype can share a buffer
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
    """Return the sharded twins of collections. The twins share one exchange. Arguments as for
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
    """Check that collections with a common table have one compute type.

    Raises:
        ConfigError: They have several; the text names the table.
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
    """Copy the rows of a collection on a real device to its twin."""
    dynamic = {t.name for t in collection.tables() if t.dynamic is not None}  # no rows to copy
    for block in twin.blocks():
        if block.table in dynamic:
            continue
        whole = collection.weight(block.table)
        if block.tensor == "weight" and whole.device.type != "meta":
            rows, cols = map(range, whole.shape)
            copy_rows(block, whole.detach(), rows, cols, None)


def wrap_dense(module: nn.Module, comm: Comm, **settings: Any) -> nn.Module:
    """Wrap a model with sharded tables in DDP for its dense part. Return the module itself where no
    gradient needs a reduction.

    DDP ignores the tables: shards are neither parameters nor buffers, and the gradients of tables
    that are parameters are already reduced. On CPUs dense gradients use the transport of the tables
    and are added in rank order (`recapp/transport/dense_gradients.py`). On GPUs they use DDP's
    all-reduce.

    Raises:
        ConfigError: Dense parameters have an optimiser in backward, on several CPU ranks.
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
    # torch 2.13 renames broadcast_buffers; 2.11 has only the old name
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*broadcast_buffers.*", FutureWarning)
        wrapped = DistributedDataParallel(module, **settings)
    if comm.device.type == "cpu":
        wrapped.register_comm_hook(None, AverageOverRanks(comm.twin()))
    return wrapped


def _table_parameter_names(module: nn.Module) -> list[str]:
    """Return the names of the parameters that are tables of the plan."""
    return [
        f"{path}.weight".lstrip(".")
        for path, part in module.named_modules(remove_duplicate=False)
        if isinstance(part, TableParameter)
    ]


def compile_dense(module: nn.Module) -> list[str]:
    """Compile every part of a model without tables by `torch.compile`, in place. Names and start
    values stay. Metrics are not compiled.

    Call this function after sharding and before DDP. torch compiles a part at its first call, which
    takes minutes for a large part.

    Returns:
        The paths of the compiled parts.

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
