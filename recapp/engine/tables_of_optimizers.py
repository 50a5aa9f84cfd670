"""Sharded tables in the optimisers of a module's own.

with tables_as_parameters(module):
    optimizer = torch.optim.Adam(module.parameters())    # has a weight for each table
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import nn

from recapp.engine.sharded_collection import sharded_collections, sharded_tables
from recapp.engine.sharded_tables import ShardedTables
from recapp.errors import ConfigError
from recapp.optim.rules import RowRule
from recapp.sharding.layout import copy_rows


@contextmanager
def tables_as_parameters(module: nn.Module) -> Iterator[None]:
    """Let every sharded table of a model be one of its parameters, inside the context, with the
    name of the unsharded model. A table that is frozen, or without a row rule, requires no
    gradient.
    """
    tables = [t for shared in sharded_tables(module) for t in shared.updated.values()]
    for table in tables:
        table.offer(True)
    try:
        yield
    finally:
        for table in tables:
            table.offer(False)


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
                collection.attach(new)
        new.freeze(old.frozen)
