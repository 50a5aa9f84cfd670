"""What a LightningModule says of its tables by its optimisers is what happens to them, or is
refused. The oracle is the module with tables of its own, trained by torch's optimiser.
"""

import pytest
import torch
from engine.engine_cases import batch_of, make_plan, make_tables, whole_tensors
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, StepLR
from trainer.own_lightning import ITEMS, META, SEEN, Clicks, loader

from recapp import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    EmbeddingShardingPlanner,
    EmbeddingShardingStrategy,
    HybridOptimizer,
    adagrad,
    sgd,
)
from recapp.engine.sharded_collection import shard_model, tables_as_parameters
from recapp.errors import ConfigError
from recapp.optim.rules import adam
from recapp.trainer.step_of_ranks import take_tables

pytestmark = pytest.mark.usefixtures("reference_kernels")


class Own(Clicks):
    """Makes its optimisers by a function of the module."""

    sparse = False

    def __init__(self, make=None):
        LightningModule.__init__(self)
        self.hparams.width = 3
        self.make = make

    def configure_optimizers(self):
        return self.make(self)


class Whole(Own):
    """The same on one process, with tables that are parameters."""

    def configure_model(self):
        if not hasattr(self, "bags"):
            super().configure_model()
            self.bags = EmbeddingBagCollection(tables=[ITEMS], sparse=self.sparse)
            self.sequences = EmbeddingCollection(tables=[SEEN], sparse=self.sparse)


def trainer(strategy=None, **settings):
    torch.set_num_threads(1)
    return Trainer(
        strategy=strategy or EmbeddingShardingStrategy(),
        accelerator="cpu",
        devices=1,
        max_epochs=2,
        limit_train_batches=6,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )


def state_of(module):
    state = module.state_dict().items()
    return {name: v if isinstance(v, torch.Tensor) else v[0][2] for name, v in state}


def trained(module, strategy=None, **settings):
    trainer(strategy, **settings).fit(module, loader())
    return state_of(module)


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)


def dense(module):
    return [*module.hidden.parameters(), *module.score.parameters()]


def by_tables(module, kind=torch.optim.SGD, items=0.5, seen=0.2, **rest):
    return kind(
        [
            {"params": module.bags.parameters(), "lr": items},
            {"params": module.sequences.parameters(), "lr": seen},
            {"params": dense(module)},
        ],
        lr=0.1,
        **rest,
    )


def scheduled(module):
    optimizer = by_tables(module, torch.optim.Adam, 0.02, 0.02)
    return [optimizer], [{"scheduler": StepLR(optimizer, 4, 0.5), "interval": "step"}]


def over(kind, **arguments):
    return lambda module: kind(module.parameters(), **arguments)


SAME = {
    "sgd": over(torch.optim.SGD, lr=0.5),
    "sgd with momentum and decay": over(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adagrad": over(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.1, eps=1e-6),
    "adam": over(torch.optim.Adam, lr=0.01, betas=(0.8, 0.95)),
    "adam with decay": over(torch.optim.Adam, lr=0.01, weight_decay=0.1),
    "adamw without decay": over(torch.optim.AdamW, lr=0.01, weight_decay=0.0),
    "a rate of each table": by_tables,
    "a rate of 0": lambda module: by_tables(module, torch.optim.Adam, 0.0),
    "a schedule": scheduled,
}


@pytest.mark.parametrize("make", SAME.values(), ids=SAME)
def test_an_optimiser_over_tables_is_the_row_rule_that_computes_the_same(make):
    same(trained(Own(make)), trained(Whole(make), "auto"))


def frozen(kind, when):
    """A module whose bags are frozen before sharding or after."""

    class Module(kind):
        def configure_model(self):
            super().configure_model()
            if when == "before":
                self.bags.requires_grad_(False)

        def on_fit_start(self):
            if when == "after":
                self.bags.requires_grad_(False)

    return Module


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("make", [over(torch.optim.Adam, lr=0.02), by_tables])
def test_an_optimiser_over_all_parameters_leaves_frozen_tables(make, when):
    found = trained(frozen(Own, when)(make))
    expected = trained(frozen(Whole, "before")(make), "auto")
    same(found, expected)


def test_a_rate_of_0_moves_no_row():
    module = Own(lambda module: by_tables(module, torch.optim.Adam, 0.0))
    start = EmbeddingBagCollection(tables=[ITEMS]).weight("items")
    assert torch.equal(trained(module)["bags.embedding_bags.items.weight"], start)


@pytest.mark.parametrize(
    "settings", [{"accumulate_grad_batches": 3}, {"gradient_clip_val": 0.05}], ids=str
)
def test_gradients_are_accumulated_and_clipped_as_those_of_the_whole_module(settings):
    make = over(torch.optim.Adam, lr=0.01)
    same(trained(Own(make), **settings), trained(Whole(make), "auto", **settings))


class Sparse(Whole):
    sparse = True


def two(module):
    tables = [*module.bags.parameters(), *module.sequences.parameters()]
    return [torch.optim.SparseAdam(tables, 0.05), torch.optim.Adam(dense(module), 0.01)]


class ByHand:
    """Two optimisers, of which one has the tables and steps half as often."""

    automatic_optimization = False

    def training_step(self, batch, index):
        of_tables, of_dense = self.optimizers()
        of_dense.zero_grad()
        if not index % 2:
            of_tables.zero_grad()
        self.manual_backward(super().training_step(batch, index))
        of_dense.step()
        if index % 2:
            of_tables.step()


class Toggled:
    """Two optimisers, each with a backward of its own; no gradient is dropped by the other."""

    automatic_optimization = False

    def training_step(self, batch, index):
        for optimizer in reversed(self.optimizers()):
            self.toggle_optimizer(optimizer)
            self.manual_backward(super().training_step(batch, index))
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)


@pytest.mark.parametrize("steps", [ByHand, Toggled])
def test_of_two_optimisers_the_one_with_the_tables_updates_them_in_its_step(steps):
    found, expected = (type("Module", (steps, kind), {})(two) for kind in (Own, Sparse))
    same(trained(found), trained(expected, "auto"))


class BuiltAtOnce(Own):
    """Tables on the CPU or the meta device, made in __init__."""

    def __init__(self, make, device=None):
        super().__init__(make)
        torch.manual_seed(0)
        self.bags = EmbeddingBagCollection(tables=[ITEMS], device=device)
        self.sequences = EmbeddingCollection(tables=[SEEN], device=device)
        self.hidden = nn.Linear(12, 3)
        self.score = nn.Linear(3, 1)


def test_where_and_when_tables_are_made_does_not_matter():
    make = over(torch.optim.SGD, lr=0.5)
    expected = trained(BuiltAtOnce(make), "auto")
    same(trained(BuiltAtOnce(make)), expected)
    same(trained(BuiltAtOnce(make, META)), expected)


class Watched(Own):
    def validation_step(self, batch, index):
        self.log("loss", self.training_step(batch, index), batch_size=2)


def test_tables_that_a_validation_has_sharded_get_the_rules_of_the_module():
    module = Watched(scheduled)
    of_both = trainer()
    of_both.validate(module, loader(), verbose=False)
    assert of_both.strategy.rule.name == "rowwise_adagrad"
    of_both.fit(module, loader(), loader())
    same(state_of(module), trained(Whole(scheduled), "auto"))


def test_a_resumed_run_keeps_the_state_and_the_rates_of_its_tables(tmp_path):
    def stopped_after(epochs, **more):
        module = Own(scheduled)
        found = trainer()
        found.fit_loop.max_epochs = epochs
        found.fit(module, loader(), **more)
        return found, module

    first, _ = stopped_after(1)
    first.save_checkpoint(tmp_path / "one.ckpt")
    found, module = stopped_after(2, ckpt_path=tmp_path / "one.ckpt")
    same(state_of(module), trained(Whole(scheduled), "auto"))
    assert [group["lr"] for group in found.optimizers[0].param_groups[:1]] == [0.02 / 2**3]
    assert "name" not in found.optimizers[0].param_groups[0]


class Finetuned(BaseFinetuning):
    """Trains a layer from the second epoch on, by a param group of its own."""

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.hidden)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.hidden, optimizer, lr=0.1)


def of_trained_parameters(module):
    return torch.optim.Adam((p for p in module.parameters() if p.requires_grad), 0.01)


def test_a_param_group_that_finetuning_adds_is_trained_and_resumed(tmp_path):
    def fitted(epochs, strategy=None, **more):
        of_module = trainer(strategy, callbacks=[Finetuned()])
        of_module.fit_loop.max_epochs = epochs
        of_module.fit(BuiltAtOnce(of_trained_parameters), loader(), **more)
        return of_module

    def resumed(name, strategy=None):
        fitted(2, strategy).save_checkpoint(tmp_path / name)
        return fitted(3, strategy, ckpt_path=tmp_path / name)

    expected, found = fitted(2, "auto"), fitted(2)
    same(state_of(found.lightning_module), state_of(expected.lightning_module))
    expected, found = resumed("whole.ckpt", "auto"), resumed("sharded.ckpt")
    same(state_of(found.lightning_module), state_of(expected.lightning_module))
    assert [len(group["params"]) for group in found.optimizers[0].param_groups] == [2, 2]


def test_the_plan_knows_the_rule_that_the_module_says():
    found = trainer()
    found.fit(Own(over(torch.optim.Adam, lr=0.01)), loader())
    assert found.strategy.rule == found.strategy.problem.rule == adam(0.01, l2_all_rows=0.0)


def test_a_rule_that_is_named_twice_alike_follows_the_schedule_of_the_module():
    def make(module):
        optimizer = torch.optim.Adagrad(module.parameters(), 0.05)
        return [optimizer], [StepLR(optimizer, 1, 0.1)]

    strategy = EmbeddingShardingStrategy(rule=adagrad(0.05))
    same(trained(Own(make), strategy), trained(Whole(make), "auto"))


def hybrid(module):
    groups = module.trainer.strategy.sparse_groups()
    return HybridOptimizer(torch.optim.Adam(module.parameters(), 0.01), groups)


def test_tables_of_sparse_groups_have_their_own_rule_whatever_the_dense_optimiser_has():
    def of_dense(module):
        dense_alone = torch.optim.Adam(dense(module), 0.01)
        return HybridOptimizer(dense_alone, module.trainer.strategy.sparse_groups())

    found = trained(Own(hybrid), EmbeddingShardingStrategy(rule=sgd(0.5)))
    same(found, trained(Own(of_dense), EmbeddingShardingStrategy(rule=sgd(0.5))))


def in_two(module):
    tables = by_tables(module)
    return [tables, torch.optim.SGD(module.bags.parameters(), 0.1)]


def tables_apart(module):
    others = [*module.sequences.parameters(), *dense(module)]
    return [torch.optim.SGD(module.bags.parameters(), 0.1), torch.optim.Adam(others, 0.1)]


def with_schedule(schedule):
    def make(module):
        optimizer = by_tables(module, torch.optim.Adam, 0.1, 0.1)
        return [optimizer], [{"scheduler": schedule(optimizer), "interval": "step"}]

    return make


def group_of_tables(module):
    groups = module.trainer.strategy.sparse_groups()
    return HybridOptimizer(by_tables(module, torch.optim.SGD, 0.0), groups)


class Slow(torch.optim.Adam):
    """An optimiser of one's own."""


BETWEEN = "and no row rule computes its update: use SGD, Adagrad, Adam or SparseAdam of torch.optim"
LINE = "and return HybridOptimizer(optimizer, self.trainer.strategy.sparse_groups())"
REFUSED = {
    "decoupled decay": (over(torch.optim.AdamW, lr=0.1), "AdamW with weight_decay=0.01 by"),
    "another class": (
        over(torch.optim.NAdam, lr=0.1),
        f"table items has NAdam by configure_optimizers, {BETWEEN}",
    ),
    "a class of ones own": (over(Slow, lr=0.1), "table items has Slow by"),
    "amsgrad": (over(torch.optim.Adam, lr=0.1, amsgrad=True), "Adam with amsgrad=True by"),
    "nesterov": (over(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True), "nesterov=True by"),
    "dampening": (over(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.1), "dampening=0.1 by"),
    "maximize": (over(torch.optim.SGD, lr=0.1, maximize=True), "maximize=True by"),
    "a decay of the rate": (over(torch.optim.Adagrad, lr=0.1, lr_decay=0.1), "lr_decay=0.1 by"),
    "a table left out": (
        lambda module: torch.optim.Adam([*module.bags.parameters(), *dense(module)]),
        "table seen is in no optimizer of configure_optimizers, so torch would not train it",
    ),
    "no optimiser": (lambda module: None, "table items is in no optimizer"),
    "two optimisers of one table": (in_two, "table items is in two optimizers of configure_opt"),
    "two optimisers of two tables": (tables_apart, "are updated together: give all tables to one"),
    "a schedule of momentum": (
        with_schedule(lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=12)),
        "let schedules change rates alone (OneCycleLR(..., cycle_momentum=False))",
    ),
    "rates that part": (
        with_schedule(lambda o: LambdaLR(o, [lambda i: 1.0, lambda i: 0.5**i, lambda i: 1.0])),
        "began with one rate in several param groups and now have the rates 0.05, 0.1",
    ),
    "a group beside sparse groups": (group_of_tables, "is in a param group of configure_optimi"),
}


@pytest.mark.filterwarnings("ignore:.*configure_optimizers. returned .None:UserWarning")
@pytest.mark.parametrize(("make", "says"), REFUSED.values(), ids=REFUSED)
def test_what_no_row_rule_computes_is_refused_in_one_line(make, says):
    module = Own(make)
    module.automatic_optimization = make not in (in_two, tables_apart)
    with pytest.raises(ConfigError) as refused:
        trained(module)
    (line,) = str(refused.value).splitlines()
    assert says in line
    assert " by configure_optimizers" not in line or LINE in line


@pytest.mark.parametrize(
    "strategy",
    [
        lambda: EmbeddingShardingStrategy(rule=adagrad(0.05)),
        lambda: EmbeddingShardingStrategy(EmbeddingShardingPlanner(rule=adagrad(0.05))),
    ],
)
def test_a_rule_that_is_named_twice_and_differs_is_refused(strategy):
    with pytest.raises(ConfigError, match=r"has sgd\(0.5\) by conf.*, but adagrad\(0.05, 1e-10\)"):
        trained(Own(over(torch.optim.SGD, lr=0.5)), strategy())


def on_ranks(comm, kind, make):
    tables = make_tables()
    torch.manual_seed(0)
    module = EmbeddingBagCollection(tables=tables, device=META, seed=3)
    module = shard_model(module, make_plan(kind, tables, comm.world), comm, sgd(0.1))
    with tables_as_parameters(module):
        optimizer = make(module)
        schedule = StepLR(optimizer, 2, 0.5)
    (optimizer,) = take_tables(module, [optimizer], None)
    for seed in range(5):
        optimizer.zero_grad()
        batch = batch_of(tables, 6, seed * comm.world + comm.rank)
        module(batch).values().square().mean().backward()
        optimizer.step()
        schedule.step()
    assert not [p for p in module.parameters() if p.is_meta]
    return whole_tensors(comm, module)


def of_torch(make, world):
    tables = make_tables()
    module = EmbeddingBagCollection(tables=tables, seed=3)
    optimizer = make(module)
    schedule = StepLR(optimizer, 2, 0.5)
    for seed in range(5):
        optimizer.zero_grad()
        for rank in range(world):
            batch = batch_of(tables, 6, seed * world + rank)
            (module(batch).values().square().mean() / world).backward()
        optimizer.step()
        schedule.step()
    return {table.name: module.weight(table.name).detach() for table in tables}


def momentum(module):
    return torch.optim.SGD(module.parameters(), 0.5, momentum=0.9, weight_decay=0.01)


def all_rows(module):
    return torch.optim.Adam(module.parameters(), 0.05)


@pytest.mark.parametrize("kind", ["row_wise", "column_wise"])
@pytest.mark.parametrize("make", [momentum, all_rows])
def test_two_ranks_train_tables_as_torch_does_under_every_plan(ranks, kind, make):
    found = ranks.run(on_ranks, 2, kind, make)
    expected = of_torch(make, 2)
    for table, value in expected.items():
        torch.testing.assert_close(found[0][table, "weight"], value, rtol=1e-5, atol=1e-6)
