"""A store is all that the engine knows of rows: one that keeps them elsewhere changes no number."""

import pytest
import torch
from engine.engine_cases import RULES, batch_of, make_plan, make_tables, same_bits, whole_tensors
from tiers import one_of

from recapp.engine.row_store import FloatStore
from recapp.engine.sharded_collection import shard_bags
from recapp.errors import ConfigError
from recapp.transport.communicator import Comm

TABLES = make_tables()
SEEDS = {table.name: 3 for table in TABLES}


class Scattered(FloatStore):
    """Keeps row r in another row of its memory, with gaps, as a table of any keys would."""

    finds_rows = True

    def __init__(self, group, rule, seeds):
        super().__init__(group, rule, seeds)
        generator = torch.Generator().manual_seed(group.number)
        self.at = torch.randperm(2 * self.rows + 1, generator=generator)[: self.rows]
        self.own = [self.weights, *self.state]
        self.kept = []
        for held in self.own:
            kept = torch.full((2 * self.rows + 1, held.shape[1]), torch.nan, dtype=held.dtype)
            kept[self.at] = held
            self.kept.append(kept)

        self.numbers = torch.empty(2 * self.rows + 1, dtype=torch.int64)
        self.numbers[self.at] = torch.arange(self.rows)
        self.rows = 2 * self.rows + 1

    def locate(self, row_N, strip_N=None, trains=False):
        return self.at[row_N.long()].to(row_N.dtype)

    def piece_keys(self, row_U):
        return self.numbers[row_U.long()]

    def pool(self, links, target, in_lines=False):
        rows = self.kept[0].view(-1)
        dtype = self.group.dtype
        self.backend.pool(rows, self.width, self.width, links, target, dtype, in_lines=in_lines)

    def update(self, gradients, links, row_U, mean_U, lr):
        weights_RD, *state = self.kept
        dtype = self.group.dtype
        self.backend.update(
            gradients, links, row_U, mean_U, weights_RD, state, dtype, lr, self.rule
        )

    def blocks(self, averaged=False):
        for held, kept in zip(self.own, self.kept, strict=True):
            held.copy_(kept[self.at])
        yield from super().blocks()


def trained(comm, kind, mode, rule, weighted, backend, make):
    """Outputs, gradients of sample weights and all rows of three steps; two lookups in the last."""
    plan = make_plan(kind, TABLES, comm.world, mode=mode)
    collection = shard_bags(
        TABLES,
        plan,
        comm,
        RULES[rule],
        backend=backend,
        make_store=(lambda group: make(group, RULES[rule], SEEDS)) if make else None,
        seed=3,
    )
    found = []
    for step in range(3):
        batches = [batch_of(TABLES, 6, 10 * step + k + comm.rank) for k in range(1 + step // 2)]
        if weighted:
            batches = [batch_of(TABLES, 6, 10 * step + comm.rank, weighted=True)]
            batches[0].weights().requires_grad_(weighted == "learned")
        values = [collection(batch).values() for batch in batches]
        sum(v.square().sum() for v in values).backward()
        found += [v.detach() for v in values]
        if weighted == "learned":
            found.append(batches[0].weights().grad)
    return found + [data for _, data in sorted(whole_tensors(comm, collection).items())]


@pytest.mark.parametrize(
    ("world", "backend"), one_of(3, [(2, "torch"), (2, "numba"), (1, "numba"), (1, "torch")])
)
@pytest.mark.parametrize(
    ("kind", "mode", "rule", "weighted"),
    one_of(
        4,
        [
            ("mixed", "unique", "adam", ""),
            ("column_wise", "unique", "rowwise_adagrad", ""),
            ("row_wise", "pooled", "adagrad", "weighted"),
            ("random", "unique", "rowwise_adagrad", "learned"),
            ("data_parallel", "unique", "sgd", "learned"),
        ],
    ),
)
def test_rows_may_lie_wherever_a_store_keeps_them(
    ranks, world, kind, mode, rule, weighted, backend
):
    one, other = (
        ranks.run(trained, world, kind, mode, rule, weighted, backend, make)
        for make in (None, Scattered)
    )
    for a_rank, b_rank in zip(one, other, strict=True):
        for a, b in zip(a_rank, b_rank, strict=True):
            assert same_bits(a, b)


def test_tables_without_a_rule_are_looked_up_and_neither_updated_nor_given_a_rate():
    plan = make_plan("table_wise", TABLES, 1)
    trains, reads = (
        shard_bags(TABLES, plan, Comm(), rule, 3, "torch") for rule in (RULES["adam"], None)
    )
    batch = batch_of(TABLES, 6, 0)
    values = reads(batch).values()
    assert same_bits(values.detach(), trains(batch).values().detach())
    with pytest.raises(ConfigError, match=r"read-only \(rule=None\).*torch.no_grad"):
        values.sum().backward()
    with pytest.raises(ConfigError, match="read-only"):
        _ = reads.shared.param_groups
    assert {b.tensor for b in reads.blocks()} == {"weight"}
    assert sum(store.nbytes.state for store in reads.shared.state.stores) == 0
