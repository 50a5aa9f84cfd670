"""The step of a Lightning Strategy with sharded tables: ranks with batches of different sizes, and
steps of several batches, train like one process with the global batch.

    setup_optimizers    let the module's optimisers train the tables, and obey or refuse what they
                        say of them
    backward            weight the loss by this rank's share of the global batch; update the tables,
                        unless the optimiser's step does
    optimizer_step      forward, backward, and the step; average running statistics

Lightning's clipping of gradients clips those of table rows, too.

    torch.optim.Adam(self.parameters(), 0.01)                    Adam's row rule at this rate
    {"params": self.bags.parameters(), "lr": 0}                  rows that do not move
    HybridOptimizer(dense, self.trainer.strategy.sparse_groups())    the rule named elsewhere

`configure_optimizers` is called twice. The first call, before tables are sharded, tells the row
rules, on which the plan and the stores depend. The second call makes the optimisers. Their param
groups lose the tables; the rates of the groups, which schedules change, are those of the tables.
An optimiser's `step` updates its tables, as it does unsharded.

Where steps are recorded (`recapp/trainer/recorded_steps.py`), `training_step` is the whole step.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from recapp.engine.sharded_collection import (
    change_rules,
    embedding_collections,
    sharded_collections,
    sharded_tables,
    tables_as_parameters,
)
from recapp.engine.sharded_tables import ShardedTables
from recapp.engine.table_weights import UpdatedWeight
from recapp.errors import ConfigError
from recapp.graphs.recorded_batch import Capture
from recapp.optim.named_rules import Rules, distinct_rules
from recapp.optim.optimizer import HybridOptimizer, clip_norm, clip_value
from recapp.optim.rules import RowRule, rowwise_adagrad
from recapp.optim.table_rule import describe, numbers_of_rule, rule_over
from recapp.trainer.recorded_steps import RecordedSteps
from recapp.transport.communicator import Comm, average_over_ranks
from recapp.transport.step_messages import AverageOverRanks


class StepOfRanks(DDPStrategy):
    """The steps of `EmbeddingShardingStrategy`.

    Args:
        settings: Arguments of DDPStrategy.

    `comm` is the communicator of the ranks, `gradient_average` the average of dense gradients where
    it is not DDP's own. `named_rule` is the row rule of tables, or the rules by table, that are not
    named by the module's optimisers; None if these name them. `recorded` has the steps of a
    training that are CUDA graphs; None where they are launched one by one. `capture` records such a
    step; None records a CUDA graph.
    """

    clip_tables = False
    restore_checkpoint_after_setup = True  # which makes the shards that rows are read into
    named_rule: Rules | None = None
    recorded: RecordedSteps | None = None
    capture: Capture | None = None

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.comm = Comm()
        self.gradient_average: AverageOverRanks | None = None
        self._accumulation: Accumulation | None = None
        self._statistics: list[Tensor] = []

    @abstractmethod
    def sharded_tables(self) -> list[ShardedTables]:
        """Return the sharded tables of the module."""

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Make the module's optimisers, and let those that have tables train the tables.

        Raises:
            ConfigError: What they say of tables cannot be obeyed.
        """
        assert self.lightning_module is not None
        with tables_as_parameters(self.lightning_module):
            super().setup_optimizers(trainer)
        self.optimizers = take_tables(self.lightning_module, self.optimizers, self.named_rule)

    def update_in_step(self, trainer: Trainer) -> None:
        """Let the optimiser's step update the tables instead of backward, where it must know all
        gradients first; those of several backwards add up until then. Lightning's precision plugin
        then clips the gradients of their rows, too.

        Raises:
            ConfigError: `clip_tables` is set and `gradient_clip_val` is not, or the optimisers are
                not one `HybridOptimizer`.
        """
        batches = trainer.accumulate_grad_batches
        self._accumulation = Accumulation(batches) if batches > 1 else None
        if self.clip_tables and not trainer.gradient_clip_val:
            raise ConfigError(
                f"clip_tables=True: Trainer(gradient_clip_val={trainer.gradient_clip_val}) clips "
                "nothing: set it, or leave clip_tables out"
            )
        tables = self.sharded_tables()
        waiting = any(shared.update.deferred for shared in tables)
        if self.clip_tables or (batches > 1 and not waiting):
            hybrids = [one for one in self.optimizers if isinstance(one, HybridOptimizer)]
            if len(hybrids) != 1 or len(self.optimizers) != 1:
                names = ", ".join(type(one).__name__ for one in self.optimizers) or "none"
                setting = f"accumulate_grad_batches={batches}"
                raise ConfigError(
                    f"{'clip_tables=True' if self.clip_tables else setting}: the module's "
                    f"optimizers are {names}, and tables are updated in the step of one "
                    "HybridOptimizer: return HybridOptimizer(dense, strategy.sparse_groups()) from "
                    "configure_optimizers"
                )
            hybrids[0].table_gradients = [shared.update for shared in tables]
            for gradients in hybrids[0].table_gradients:
                gradients.defer(hybrids[0])
        if self.clip_tables or waiting:
            trainer.precision_plugin.clip_gradients = _clip  # type: ignore[method-assign]

    def training_step(self, *arguments: Any, **named: Any) -> STEP_OUTPUT:
        """Return the loss of a batch. A recorded step trains on the batch before that."""
        if self.recorded is not None:
            return self.recorded(*arguments, **named)
        return super().training_step(*arguments, **named)

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Weight the loss and run its backward. By the weight, ranks with batches of different
        sizes train like one process with the global batch; and a step of several batches of
        different sizes trains like one with a large batch.
        """
        if self.recorded is not None:
            return closure_loss
        share = self.share()
        if self._accumulation is not None:
            share *= self._accumulation.add(sum(self._rows_of_ranks()))
        if share != 1:
            closure_loss = closure_loss * share
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    def share(self) -> float:
        """Return this rank's share of the rows of the last batch, times the number of ranks."""
        rows_W = self._rows_of_ranks()
        return rows_W[self.comm.rank] * self.comm.world / sum(rows_W)

    def _rows_of_ranks(self) -> list[int]:
        # the messages of tables tell; one row for each rank if the model has no tables
        known = (shared.header.rows_W for shared in self.sharded_tables())
        return next((each for each in known if each and sum(each)), [1] * self.comm.world)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Leave the dense gradients of a rank as they are, because the step adds up those of later
        batches.

        DDP's own `no_sync` fails on a static graph. On GPUs every batch is averaged, which gives
        the same sums.
        """
        with nullcontext() if self.gradient_average is None else self.gradient_average.held():
            yield

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run forward and backward, and step. Gradients of several batches are those of one large
        batch before they are clipped. Running statistics are averaged over ranks.
        """
        if self.recorded is not None:
            loss = closure()
            average_over_ranks(self._statistics)
            return loss
        if self._accumulation is not None:
            closure = partial(self._accumulation.end, closure, optimizer, self.sharded_tables())
        loss = super().optimizer_step(optimizer, closure, model, **kwargs)
        average_over_ranks(self._statistics)
        return loss


class Accumulation:
    """Gradients of several batches that one step adds up (`Trainer(accumulate_grad_batches=k)`).

    A step trains as with one batch of all rows of its k batches: each batch counts by its rows.

        Lightning    loss of each batch / k
        here         times rows of the batch / rows of the first one; before the step, gradients
                     times k rows of the first one / rows of all

    Both factors are 1 where all batches have as many rows, so then nothing is rounded but the sums:
    the gradients of a row, and of a dense weight, are added in the order of the batches. The last
    step of an epoch may have fewer batches, and a smaller last one.

    Args:
        batches: The number of batches of a step, k.
    """

    def __init__(self, batches: int) -> None:
        self.batches = batches
        self._rows: list[int] = []

    def add(self, rows: int) -> float:
        """Add a batch, and return the factor of its loss: its rows over those of the step's first
        batch, so that each row has the same weight. `end` divides by the rows of all.

        Args:
            rows: The rows of the batch over all ranks.
        """
        self._rows.append(rows)
        return rows / max(self._rows[0], 1)

    def end(
        self, closure: Callable[[], Any], optimizer: Optimizer, tables: Sequence[ShardedTables]
    ) -> Any:
        """Run forward and backward of the last batch of a step, and return the loss. Scale the
        gradients of the dense part and of tables to those of one batch, before they are clipped.

        Args:
            closure: Runs forward and backward, and returns the loss.
            optimizer: The optimiser with the dense part.
            tables: The tables, whose gradients wait.
        """
        loss = closure()
        first = max(self._rows[0], 1) if self._rows else 1
        factor = self.batches * first / max(sum(self._rows), 1)
        self._rows = []
        if factor == 1:
            return loss
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        for shared in tables:
            shared.update.scale(factor)
        return loss


def _clip(
    optimizer: Optimizer,
    clip_val: int | float = 0.0,
    gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
) -> None:
    if clip_val <= 0:
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    tables = optimizer.table_gradients if isinstance(optimizer, HybridOptimizer) else []
    if gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
        clip_value(parameters, tables, clip_val)
    else:
        clip_norm(parameters, tables, clip_val)


def running_statistics(module: nn.Module) -> list[Tensor]:
    """Return the running statistics of the dense part of a model.

    Those are the buffers of torch's batch norms, means and variances by which an evaluation
    normalises, and the buffers that another layer names in `running_statistics`.

    Each rank sees its own rows, so its statistics are its own, and the ranks average them after
    every step: the average of their running means is the running mean of their averages, because
    both are linear. DDP's `broadcast_buffers` would take the statistics of rank 0 alone.
    """
    collections = sharded_collections(module)
    inside = {id(part) for collection in collections for part in collection.modules()}
    statistics: list[Tensor] = []
    for part in module.modules():
        names = getattr(part, "running_statistics", ())
        names = ("running_mean", "running_var") if isinstance(part, _BatchNorm) else names
        buffers = [] if id(part) in inside else [getattr(part, name, None) for name in names]
        statistics += [buffer for buffer in buffers if isinstance(buffer, Tensor)]
    return statistics


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
    in_groups = any(isinstance(optimizer, HybridOptimizer) for optimizer in optimizers)
    of_tables = {} if in_groups else _optimizers_of(optimizers, weights)
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
    in_groups = any(isinstance(optimizer, HybridOptimizer) for optimizer in optimizers)
    tables = [t for shared in sharded_tables(module) for t in shared.updated.values()]
    trained = {t.weight: t.weight.table for t in tables if t.weight.requires_grad}
    of_tables = {} if in_groups else _optimizers_of(optimizers, trained)
    rules = {
        table: rule for shared in sharded_tables(module) for table, rule in shared.rules.items()
    }
    for table in () if in_groups else trained.values():
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
    for optimizer in optimizers:
        _take_out(optimizer, in_groups)
    if any(rules[table] != of_table.rule for table, of_table in of_tables.items()):
        change_rules(module, {table: of_table.rule for table, of_table in of_tables.items()})
    return [_stepping(optimizer, sharded_tables(module), of_tables) for optimizer in optimizers]


def _optimizers_of(
    optimizers: Sequence[Any], tables: Mapping[Any, str]
) -> dict[str, OptimizerOfTable]:
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


def _take_out(optimizer: Any, in_groups: bool) -> None:
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
            now = numbers_of_rule(type(one.optimizer), one.optimizer.param_groups[one.number])
            changed = [name for name in now if now[name] != one.numbers[name]]
            if changed:
                raise ConfigError(
                    f"tables {', '.join(group['tables'])}: {changed[0]} has changed from "
                    f"{one.numbers[changed[0]]} to {now[changed[0]]}, and a row rule keeps it: "
                    "let schedules change rates alone (OneCycleLR(..., cycle_momentum=False))"
                )
        rates = {float(one.optimizer.param_groups[one.number]["lr"]) for one in of_tables}
        if len(rates) > 1:
            raise ConfigError(
                f"tables {', '.join(group['tables'])} began with one rate in several param groups "
                f"and now have the rates {', '.join(map(str, sorted(rates)))}: give their groups "
                "different rates at the start, or put them into one group"
            )
        group["lr"] = rates.pop() if rates else group["lr"]
