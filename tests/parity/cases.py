"""Random models, plans and batches, and the unsharded run that sharded runs are compared with.

A case is a function of its seed alone, so every rank builds the same one. fp64 throughout:
what differs is the order of sums, so the tolerance is tight (1e-9) and catches every wrong row.
Tables and strips have few widths, each a kernel to compile; tests/kernels/test_backends.py has all.
"""

import random
from dataclasses import dataclass, replace

import torch
from optim.dense_rules import DenseRule
from torch import nn

from recapp.engine.sharded_collection import shard_bags
from recapp.optim import rules
from recapp.optim.named_rules import Rules, rule_of
from recapp.planner.rank_memory import bytes_per_rank
from recapp.sharding.sharding_plan import Shard, ShardingPlan, TableSharding, tile
from recapp.sharding.sharding_types import CandidateRanks, ShardingType
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.tables.collections import EmbeddingBagCollection
from recapp.tables.config import EmbeddingBagConfig

TOLERANCE = {"rtol": 1e-9, "atol": 1e-9}
RULES = {
    "sgd": rules.sgd(0.5),
    "adagrad": rules.adagrad(0.5),
    "rowwise_adagrad": rules.rowwise_adagrad(0.5),
    "adam": rules.adam(0.1),
}
KINDS = [*(t.value for t in ShardingType), "mixed", "random"]


@dataclass
class Case:
    tables: list
    plan: ShardingPlan
    batches: list  # [step][rank] -> KeyedJaggedTensor
    head: torch.Tensor
    rule: Rules
    lookups: tuple | None = None  # None: those that the tables declare


def random_tiling(table, world, rng):
    """Cut the table a few times, deal the rectangles to any ranks. Columns are halved."""
    parts = [(0, table.plan_rows, 0, table.embedding_dim)]
    for _ in range(rng.randint(0, 5)):
        r0, r1, c0, c1 = parts.pop(rng.randrange(len(parts)))
        if rng.random() < 0.5 and r1 - r0 > 1:
            m = rng.randrange(r0 + 1, r1)
            parts += [(r0, m, c0, c1), (m, r1, c0, c1)]
        elif c1 - c0 > 1:
            m = (c0 + c1) // 2
            parts += [(r0, r1, c0, m), (r0, r1, m, c1)]
        else:
            parts.append((r0, r1, c0, c1))
    return TableSharding(
        tuple(Shard(rng.randrange(world), range(a, b), range(c, d)) for a, b, c, d in parts)
    )


def sharding(kind, table, world, rng, mode):
    if kind == "mixed":
        kind = rng.choice([k for k in KINDS if k != "mixed"])
    if kind == "random":
        found = random_tiling(table, world, rng)
        return TableSharding(found.shards, mode)
    ranks = list(range(world))
    rng.shuffle(ranks)
    half = max(1, world // 2)
    hosts = [h for h in (list(range(half)), list(range(half, world))) if h]
    width = rng.choice([1, 2, 2])
    return tile(table, kind, CandidateRanks(ranks, hosts), mode, column_width=width)


def make_batch(tables, rows, rng, generator, weighted):
    features = sorted({f for t in tables for f in t.feature_names})
    smallest = {f: min(t.num_embeddings for t in tables if f in t.feature_names) for f in features}
    lengths = torch.randint(0, 4, (len(features), rows), generator=generator)
    if rng.random() < 0.3:
        lengths[rng.randrange(len(features))] = 0  # a feature absent from this rank's batch
    if rng.random() < 0.1:
        lengths[:] = 0
    ids = torch.cat(
        [
            torch.randint(0, smallest[f], (int(n.sum()),), generator=generator)
            for f, n in zip(features, lengths, strict=True)
        ]
    )
    weights = torch.rand(len(ids), generator=generator, dtype=torch.float64) if weighted else None
    return KeyedJaggedTensor(features, ids, weights, lengths.flatten())


def in_order(plan, row_order):
    """Return the plan with the rows of all tables in an order, cut by rows or not."""
    tables = {name: replace(s, row_order=row_order) for name, s in plan.tables.items()}
    return replace(plan, tables=tables)


def rows_held(block):
    """Return the numbers of the rows of a block."""
    position_N = torch.arange(block.rows.start, block.rows.stop)
    return position_N if block.order is None else block.order.rows_at(position_N)


def make_case(
    seed,
    kind,
    world,
    *,
    rule,
    mode,
    pooling,
    weighted,
    steps=3,
    rows=7,
    uneven=False,
    row_order="natural",
):
    rng = random.Random(f"{seed}/{kind}/{world}")
    generator = torch.Generator().manual_seed(seed)
    tables = [
        EmbeddingBagConfig(
            name=f"t{k}",
            num_embeddings=rng.choice([1, 3, 17, 131]),
            embedding_dim=rng.choice([1, 3, 3, 3]),
            data_type="fp64",
            feature_names=[f"f{k}_{j}" for j in range(rng.choice([1, 1, 2]))]
            + (["shared"] if k < 2 else []),
            pooling=rng.choice(["sum", "mean"]) if pooling == "both" else pooling,
        )
        for k in range(4)
    ]
    modes = ["unique", "pooled"] if mode == "both" else [mode]
    plan = ShardingPlan(
        {t.name: sharding(kind, t, world, rng, rng.choice(modes)) for t in tables}, world
    )
    batches = [
        [
            make_batch(tables, rows + (r if uneven else 0), rng, generator, weighted)
            for r in range(world)
        ]
        for _ in range(steps)
    ]
    width = sum(t.embedding_dim * len(t.feature_names) for t in tables)
    return Case(
        tables,
        in_order(plan, row_order),
        batches,
        torch.randn(width, generator=generator, dtype=torch.float64),
        RULES[rule] if isinstance(rule, str) else rule,
    )


def train_and_compare(comm, seed, kind, backend, options, break_it=False):
    """Runs on every rank; returns collectives per step, table and name of the tensors that were
    compared, and whether row statistics travel.
    """
    case = make_case(seed, kind, comm.world, **options)
    sharded = shard_bags(case.tables, case.plan, comm, case.rule, seed, backend)
    oracle = Oracle(case, seed)
    if break_it and comm.rank == comm.world - 1:
        next(b for b in sharded.blocks() if b.tensor == "weight" and b.data.numel()).data[0, 0] += (
            1e-3
        )
    for batches in case.batches:
        before = comm.calls
        values = sharded(batches[comm.rank]).values()
        rows = sum(sharded.shared.header.rows_W)
        (loss_of(values, case.head).sum() * comm.world / max(rows, 1)).backward()
        calls = comm.calls - before
        torch.testing.assert_close(values.detach(), oracle.step(batches)[comm.rank], **TOLERANCE)
    compared = set()
    for block in sharded.blocks():
        whole = oracle.tensor(block.table, block.tensor)
        torch.testing.assert_close(
            block.data,
            whole[rows_held(block), block.cols.start : block.cols.stop],
            **TOLERANCE,
        )
        compared.add((block.table, block.tensor))
    held = bytes_per_rank(case.tables, case.plan, case.rule)[comm.rank].total
    assert held == sum(sum(store.nbytes) for store in sharded.shared.state.stores)
    return calls, compared, sharded.shared.state.row_statistics is not None


def loss_of(values, head):
    """Not linear, so that a wrong scale anywhere shows."""
    return (values.tanh() * head).sum(1)


class Oracle:
    """The unsharded collection under torch's own optimisers, one of each table."""

    def __init__(self, case, seed):
        self.case = case
        self.model = EmbeddingBagCollection(
            case.tables, is_weighted=None, seed=seed, lookups=case.lookups, sparse=True
        )
        self.optimizers = {
            t.name: self._optimizer(rule_of(case.rule, t.name), [self.model.weight(t.name)])
            for t in case.tables
        }

    def _optimizer(self, rule, weights):
        if rule not in RULES.values():
            return DenseRule(weights, rule)
        return {
            "sgd": lambda: torch.optim.SGD(weights, rule.lr),
            "adagrad": lambda: torch.optim.Adagrad(weights, rule.lr, eps=1e-10),
            "adam": lambda: torch.optim.SparseAdam(weights, rule.lr),
            "rowwise_adagrad": lambda: RowwiseAdagrad(weights, rule.lr),
        }[rule.name]()

    def step(self, batches):
        """One update on the concatenated batch; returns each rank's output."""
        outputs = [self.model(b).values() for b in batches]
        rows = sum(len(o) for o in outputs)
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()
        (sum(loss_of(o, self.case.head).sum() for o in outputs) / max(rows, 1)).backward()
        for optimizer in self.optimizers.values():
            optimizer.step()
        return [o.detach() for o in outputs]

    def tensor(self, table, name):
        """A logical tensor of a table: its weight or a state of the optimiser."""
        weight = self.model.weight(table)
        if name == "weight":
            return weight.detach()
        optimizer = self.optimizers[table]
        state = optimizer.state[weight]
        if name in state:
            return state[name]
        return torch.zeros_like(weight)


class RowwiseAdagrad(torch.optim.Optimizer):
    """s += mean_D(g^2); w -= lr g / (sqrt(s) + eps), written for one dense table: the
    definition.
    """

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for w in group["params"]:
                g = w.grad.to_dense()
                s = self.state[w].setdefault("sum", torch.zeros(len(w), 1, dtype=w.dtype))
                s += g.square().mean(1, keepdim=True)
                w -= torch.where(g != 0, group["lr"] * g / (s.sqrt() + 1e-8), 0)


class Plain(nn.Module):
    """A model that is nothing but a collection."""

    def __init__(self, collection):
        super().__init__()
        self.collection = collection
