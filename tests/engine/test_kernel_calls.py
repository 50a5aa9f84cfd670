"""How often kernels are called, counted, and what memory a backward takes: neither grows with the
number or the size of tables.
"""

from collections import Counter

import pytest
import torch
from engine.engine_cases import batch_of, make_plan

from recapp.engine.sharded_collection import shard_bags
from recapp.optim.rules import rowwise_adagrad, sgd
from recapp.processes.process_memory import (
    forget_peak_resident,
    peak_resident_bytes,
    settled_bytes,
)
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.tables.config import EmbeddingBagConfig


class Counting:
    """A backend whose calls are counted by name."""

    def __init__(self, backend):
        self.backend = backend
        self.calls = Counter()

    def __getattr__(self, name):
        found = getattr(self.backend, name)
        if not callable(found):
            return found

        def counted(*arguments, **named):
            self.calls[name] += 1
            return found(*arguments, **named)

        return counted


def calls_of_a_step(comm, count, kind, dims, backend):
    """Groups that hold vectors of other ranks, all groups, and the calls of forward and of
    backward.
    """
    tables = [
        EmbeddingBagConfig(
            name=f"t{k}",
            num_embeddings=20,
            embedding_dim=dims[k % len(dims)],
            feature_names=[f"f{k}"],
        )
        for k in range(count)
    ]
    collection = shard_bags(
        tables,
        make_plan(kind, tables, comm.world, column_width=6),
        comm,
        sgd(),
        backend=backend,
    )
    counting = Counting(collection.shared.state.backend)
    collection.shared.state.backend = counting
    for g in range(len(collection.shared.stores)):
        collection.shared.state.stores[g].backend = counting
    values = collection(batch_of(tables, 6, comm.rank)).values()
    forward = counting.calls
    counting.calls = Counter()
    values.sum().backward()
    return collection.shared.state.answered, len(collection.shared.stores), forward, counting.calls


@pytest.mark.parametrize("backend", ["numba", "torch"])
@pytest.mark.parametrize(
    ("kind", "dims"),
    [
        ("table_wise", (12,)),
        ("row_wise", (12, 6)),
        ("data_parallel", (12, 6)),
        ("column_wise", (12,)),
    ],
)
def test_a_group_has_one_lookup_and_one_update_call_whatever_the_number_of_tables(
    ranks, kind, dims, backend
):
    steps = {count: ranks.run(calls_of_a_step, 2, count, kind, dims, backend) for count in (4, 40)}
    assert steps[4] == steps[40]
    for answered, groups, forward, backward in steps[40]:
        assert groups == len(set(dims)) and answered == (0 if kind == "data_parallel" else groups)
        # owners bring rows together; asking ranks sum them to bags
        assert forward["pool"] == answered + groups
        # gradients leave; owners sum and update in one
        assert backward["pool"] == groups and backward["update"] == groups
        assert forward["update"] == 0 and max((forward + backward).values()) <= 3 * groups


ROWS = 1_000_000
DIM = 128
BAGS = 512
BAG = 10
SLACK_BYTES = 8 << 20  # allocators, threads' stacks


def growth_of_a_backward(comm, rule):
    """Rows that were touched here, and bytes by which this process grew at most."""
    table = EmbeddingBagConfig(
        name="t", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["f"]
    )
    collection = shard_bags([table], make_plan("row_wise", [table], comm.world), comm, rule)
    first = KeyedJaggedTensor(["f"], torch.arange(4), lengths=torch.ones(4, dtype=torch.int64))
    collection(first).values().sum().backward()  # code is loaded once
    for state in collection.shared.stores[0].state:
        state.zero_()  # memory that a row is the first to touch is the table's
    ids = torch.randint(0, ROWS, (BAGS * BAG,), generator=torch.Generator().manual_seed(comm.rank))
    values = collection(KeyedJaggedTensor(["f"], ids, lengths=torch.full((BAGS,), BAG))).values()
    gradient = torch.ones_like(values)
    comm.barrier()
    before = settled_bytes()
    forget_peak_resident()
    torch.autograd.backward(values, gradient)
    return len(ids.unique()), (peak_resident_bytes() or 0) - before


@pytest.mark.full
@pytest.mark.parametrize(
    "rule",
    [pytest.param(sgd(), marks=pytest.mark.full), rowwise_adagrad()],
    ids=lambda rule: rule.name,
)
def test_a_backward_needs_memory_for_touched_rows_not_for_the_table(ranks, rule):
    for touched, grown in ranks.run(growth_of_a_backward, 2, rule):
        vector = 4 * DIM
        # Gradients of asked rows leave in one buffer and those of owned rows arrive in another,
        # each shared memory at most once more; a few integers go with each row.
        assert grown <= touched * (4 * vector + 100) + SLACK_BYTES < ROWS * DIM * 4 // 20, (
            touched,
            grown,
        )
