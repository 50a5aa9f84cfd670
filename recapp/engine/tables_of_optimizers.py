"""Sharded tables in the optimisers of a module's own.

    with tables_as_parameters(module) as held:
        optimizer = torch.optim.Adam(module.parameters())    # has a parameter for each table
    held[parameter].table, held[parameter].shared            # which of the sharded tables it is

A sharded table is no parameter: its rows lie on several ranks, and have no gradient. So that a
module can say how it trains its tables as any module does, each table is a parameter on the meta
device, with the name of the unsharded model, while the module makes its optimisers.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn

from recapp.engine.sharded_collection import sharded_collections, sharded_tables
from recapp.engine.sharded_tables import ShardedTables
from recapp.errors import ConfigError
from recapp.optim.rules import FROZEN, RowRule
from recapp.sharding.layout import copy_rows
from recapp.tables.module_by_name import ModuleByName


class HeldTable(NamedTuple):
    """A sharded table, for which a parameter stands.

    Args:
        table: The name of the table.
        shared: The sharded tables that hold its rows.
    """

    table: str
    shared: ShardedTables


class _Table(nn.Module):
    """A table as a parameter."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


@contextmanager
def tables_as_parameters(module: nn.Module) -> Iterator[dict[nn.Parameter, HeldTable]]:
    """Let every sharded table of a model be one of its parameters, inside the context. A table
    that is frozen, or without a row rule, is a parameter that requires no gradient.

    Yields:
        The table of each parameter.
    """
    parameters: dict[HeldTable, nn.Parameter] = {}
    collections = sharded_collections(module)
    for collection in collections:
        modules: dict[str, nn.Module] = {}
        for t in collection.tables():
            rows = 0 if t.dynamic is not None else t.num_embeddings
            shape = (rows, t.embedding_dim)
            weight = torch.empty(shape, dtype=t.data_type.dtype, device="meta")
            held = HeldTable(t.name, collection.shared)
            trained = collection.shared.rules.get(t.name, FROZEN) != FROZEN
            parameter = parameters.setdefault(held, nn.Parameter(weight, requires_grad=trained))
            modules[t.name] = _Table(parameter)
        setattr(collection, collection.tables_of, ModuleByName(modules))
    try:
        yield {parameter: held for held, parameter in parameters.items()}
    finally:
        for collection in collections:
            delattr(collection, collection.tables_of)


def change_rules(module: nn.Module, rules: Mapping[str, RowRule]) -> None:
    """Give the sharded tables of a model other row rules, with new state. The rows and the plan
    stay. Every rank calls it.

    Args:
        module: The model.
        rules: The new row rules by table; other tables keep theirs.

    Raises:
        ConfigError: A table is dynamic, and its rows cannot be moved.
    """
    collections = sharded_collections(module)
    for old in sharded_tables(module):
        names = [t.name for t in old.tables()]
        if any(t.dynamic is not None for t in old.tables()):
            raise ConfigError(
                f"tables {', '.join(names)} were sharded with another row rule, and some of them "
                "are dynamic: call fit of a new module, or name their rule by "
                "EmbeddingShardingStrategy(rule=...)"
            )
        new = ShardedTables(
            old.tables(),
            old.plan,
            old.comm,
            {name: rule for name, rule in {**old.rules, **rules}.items() if name in names},
            old.seeds,
            old.state.backend.name,
            old.state.payload,
            members=old.members,
            dtype=old.dtype,
        )
        rows = [block for block in old.blocks() if block.tensor == "weight"]
        for block in new.blocks():
            for held in rows if block.tensor == "weight" else ():
                if held.table == block.table:
                    copy_rows(block, held.data, held.rows, held.cols, held.order)
        for collection in collections:
            if collection.shared is old:
                collection.shared = new
