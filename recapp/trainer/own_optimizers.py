"""What a LightningModule says of its tables by its optimisers is obeyed or refused.

    torch.optim.Adam(self.parameters(), 0.01)                    Adam's row rule at this rate
    {"params": self.bags.parameters(), "lr": 0}                  rows that do not move
    HybridOptimizer(dense, self.trainer.strategy.sparse_groups())    the rule named elsewhere

`configure_optimizers` is called twice. The first call, before tables are sharded, tells the row
rules, on which the plan and the stores depend. The second call makes the optimisers. Their param
groups lose the tables; the rates of the groups, which schedules change, are those of the tables.
An optimiser's `step` updates its tables, as it does unsharded.
"""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers
from torch import nn
from torch.optim import Optimizer

from recapp.engine.sharded_collection import change_rules, embedding_collections, sharded_tables
from recapp.engine.sharded_tables import ShardedTables
from recapp.engine.table_weights import UpdatedWeight
from recapp.errors import ConfigError
from recapp.optim.named_rules import Rules, distinct_rules
from recapp.optim.optimizer import HybridOptimizer
from recapp.optim.rules import RowRule, rowwise_adagrad
from recapp.optim.table_rule import describe, numbers_of_rule, rule_over

GROUPS = "return HybridOptimizer(optimizer, self.trainer.strategy.sparse_groups())"


class OptimizerOfTable(NamedTuple):
    """What a module says of a table.

    Args:
        optimizer: The optimiser that has the table.
        number: The number of its param group.
        rule: The row rule that computes the same update.
        numbers: The numbers of the param group, without the rate, that the rule has.
    """

    optimizer: Optimizer
    number: int
    rule: RowRule
    numbers: Mapping[str, Any]

    @property
    def group(self) -> dict[str, Any]:
        """Return the param group, with its current rate."""
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        return groups[self.number]


def rules_of_optimizers(module: LightningModule) -> Rules:
    """Return the row rules that the optimisers of a module give its unsharded tables; row-wise
    Adagrad for tables that no optimiser has.

    An error of `configure_optimizers` itself is left to its second call.

    Raises:
        ConfigError: No row rule computes the update of an optimiser.
    """
    weights = {
        collection.weight(table.name): table.name
        for _, collection in embedding_collections(module)
        for table in collection.tables()
        if collection.weight(table.name).requires_grad
    }
    try:
        optimizers = _init_optimizers_and_lr_schedulers(module)[0] if weights else []
    except Exception:
        optimizers = []
    of_tables = {} if _names_groups(optimizers) else _optimizers_of(optimizers, weights)
    rules = {table: of_table.rule for table, of_table in of_tables.items()}
    if len(rules) < len(set(weights.values())) or not rules:
        rules = {"*": rowwise_adagrad()} | rules
    kinds = distinct_rules(rules.values())
    return kinds[0] if len(kinds) == 1 else rules


def take_tables(
    module: nn.Module,
    optimizers: Sequence[Any],
    named: Rules | None,
) -> list[Any]:
    """Remove the tables from the param groups of a module's optimisers, and let the steps of these
    optimisers update the tables. Every rank calls it.

    Args:
        module: The module, with sharded tables.
        optimizers: The optimisers that `configure_optimizers` has returned, which have tables by
            their weights (`tables_as_parameters`).
        named: The row rules that are named elsewhere; None if only the optimisers say them.

    Returns:
        The optimisers that train. Those that have tables are each in a `HybridOptimizer`.

    Raises:
        ConfigError: The optimisers contradict the named rules or one another, or have not all
            tables.
    """
    in_groups = _names_groups(optimizers)
    tables = [t for shared in sharded_tables(module) for t in shared.updated.values()]
    trained = {t.weight: t.weight.table for t in tables if t.weight.requires_grad}
    of_tables = {} if in_groups else _optimizers_of(optimizers, trained)
    rules = {
        table: rule for shared in sharded_tables(module) for table, rule in shared.rules.items()
    }
    if not in_groups:
        _check_named(of_tables, trained.values(), rules, named)
    for optimizer in optimizers:
        _take_out(optimizer, in_groups)
    if any(rules[table] != of_table.rule for table, of_table in of_tables.items()):
        change_rules(module, {table: of_table.rule for table, of_table in of_tables.items()})
    return [_stepping(optimizer, sharded_tables(module), of_tables) for optimizer in optimizers]


def _names_groups(optimizers: Sequence[Any]) -> bool:
    """Return whether the optimisers have the tables by their param groups."""
    return any(isinstance(optimizer, HybridOptimizer) for optimizer in optimizers)


def _optimizers_of(
    optimizers: Sequence[Any], tables: Mapping[Any, str]
) -> dict[str, OptimizerOfTable]:
    """Return what optimisers say of tables, by table.

    Args:
        optimizers: The optimisers.
        tables: The table of each parameter.
    """
    of_tables: dict[str, OptimizerOfTable] = {}
    for optimizer in optimizers:
        kind = type(optimizer)
        for number, group in enumerate(optimizer.param_groups):
            for table in dict.fromkeys(tables[p] for p in group["params"] if p in tables):
                if table in of_tables:
                    first = type(of_tables[table].optimizer).__name__
                    raise ConfigError(
                        f"table {table} is in two optimizers of configure_optimizers, "
                        f"{first} and {kind.__name__}: give it to one of them"
                    )
                rule = rule_over(kind, group, table)
                of_tables[table] = OptimizerOfTable(
                    optimizer, number, rule, numbers_of_rule(kind, group)
                )
    return of_tables


def _check_named(
    of_tables: Mapping[str, OptimizerOfTable],
    trained: Collection[str],
    rules: Mapping[str, RowRule],
    named: Rules | None,
) -> None:
    """Check that what optimisers say does not contradict named rules, and says all tables where
    none is named.

    Raises:
        ConfigError: It does, or a table is left out.
    """
    for table in trained:
        if table not in of_tables and named is None:
            raise ConfigError(
                f"table {table} is in no optimizer of configure_optimizers, so torch would not "
                "train it: give the optimizer self.parameters(), leave it out of training by "
                "requires_grad_(False), or name the rule of tables by "
                f"EmbeddingShardingStrategy(rule=...) and {GROUPS}"
            )
        if table in of_tables and named is not None and of_tables[table].rule != rules[table]:
            raise ConfigError(
                f"table {table} has {describe(of_tables[table].rule)} by configure_optimizers, but "
                f"{describe(rules[table])} by EmbeddingShardingStrategy(rule=...), its planner or "
                f"apply_optimizer_in_backward: leave that rule out, or keep it and {GROUPS}"
            )


def _take_out(optimizer: Any, in_groups: bool) -> None:
    """Remove the tables from the param groups of an optimiser, which has no state of them.

    Raises:
        ConfigError: A param group is of tables alone, and they are in a `HybridOptimizer` too.
    """
    dense = optimizer.dense if isinstance(optimizer, HybridOptimizer) else optimizer
    several = len(dense.param_groups) > 1  # one group may be that of a model without dense weights
    for group in optimizer.param_groups:
        tables = [p for p in group["params"] if isinstance(p, UpdatedWeight)]
        group["params"] = [p for p in group["params"] if not isinstance(p, UpdatedWeight)]
        for parameter in tables:
            optimizer.state.pop(parameter, None)
        if tables and in_groups and several and not group["params"]:
            raise ConfigError(
                f"table {tables[0].table} is in a param group of configure_optimizers and "
                "in sparse_groups(): set the rate of tables in sparse_groups() alone, or return "
                "the optimizer without HybridOptimizer"
            )


def _stepping(
    optimizer: Any, tables: Sequence[ShardedTables], of_tables: Mapping[str, OptimizerOfTable]
) -> Any:
    """Return an optimiser whose step updates its tables; the same optimiser if it has none.

    Raises:
        ConfigError: Tables that are updated together are in several optimisers.
    """
    trained = {table for table, of_table in of_tables.items() if of_table.optimizer is optimizer}
    if not trained:
        return optimizer
    unnamed = [group for group in optimizer.param_groups if "name" not in group]
    # named like the module's own, which a monitor of rates shows
    kind: type[HybridOptimizer] = type(type(optimizer).__name__, (HybridOptimizer,), {})
    hybrid = kind(optimizer, [])
    for group in unnamed:
        del group["name"]
    for shared in tables:
        names = [t.name for t in shared.tables() if t.name in of_tables]
        others = [name for name in names if name not in trained]
        if len(others) == len(names):
            continue
        if others:
            raise ConfigError(
                f"tables {names[0]} and {others[0]} are in two optimizers of "
                "configure_optimizers, and are updated together: give all tables to one of them, "
                "each with a rate of its own in a param group of its own"
            )
        shared.update.defer(hybrid)
        hybrid.table_gradients.append(shared.update)
        followed = [
            (group, [of_tables[table] for table in group["tables"] if table in of_tables])
            for group in shared.param_groups
        ]
        shared.update.before_update = partial(_follow, followed)
    return hybrid


def _follow(followed: Sequence[tuple[dict[str, Any], Sequence[OptimizerOfTable]]]) -> None:
    """Take the current rates of the optimisers' param groups, before an update of the tables.

    Raises:
        ConfigError: A schedule changes another number, or the rates of tables of one rule differ.
    """
    for group, of_tables in followed:
        for one in of_tables:
            now = numbers_of_rule(type(one.optimizer), one.group)
            changed = [name for name in now if now[name] != one.numbers[name]]
            if changed:
                raise ConfigError(
                    f"tables {', '.join(group['tables'])}: {changed[0]} has changed from "
                    f"{one.numbers[changed[0]]} to {now[changed[0]]}, and a row rule keeps it: "
                    "let schedules change rates alone (OneCycleLR(..., cycle_momentum=False))"
                )
        rates = {float(one.group["lr"]) for one in of_tables}
        if len(rates) > 1:
            raise ConfigError(
                f"tables {', '.join(group['tables'])} began with one rate in several param groups "
                f"and now have the rates {', '.join(map(str, sorted(rates)))}: give their groups "
                "different rates at the start, or put them into one group"
            )
        group["lr"] = rates.pop() if rates else group["lr"]
