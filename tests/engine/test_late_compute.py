"""Tables of every kind beside a stream that is late: what is exchanged ahead of its turn is ordered
with the update of the step before, and no bit depends on it.
"""

from contextlib import contextmanager
from itertools import product
from unittest import mock

import pytest
from engine import test_bags_and_sequences as sequences
from engine import test_dynamic_tables as dynamic
from engine.engine_cases import batch_of, make_tables, same_bits, sharded
from engine.streams import late_compute, watched
from tiers import cover, one_of

from recapp.engine.sharded_collection import shard_model, sharded_tables
from recapp.kernels import row_memory
from recapp.trainer.lookahead import LookAhead
from recapp.transport.communicator import Comm

STEPS = 6
DEPTHS = (0, 1, 2)
BAGS = ("table_wise", "row_wise", "column_wise", "data_parallel", "mixed")
DYNAMIC = ({}, {"seen": 2}, {"max_rows": 64}, {"seen": 2, "max_rows": 64, "eviction": "lru"})


@contextmanager
def rows_move():
    """Memory grows by copying, as on a GPU."""

    def nothing_is_reserved(*_):
        raise OSError

    with mock.patch.object(row_memory, "_reserved", nothing_is_reserved):
        yield


def bags(comm, kind, mode):
    """Static tables, and their batches."""
    tables = make_tables()
    batches = [batch_of(tables, 6 + comm.rank, 10 * n + comm.rank) for n in range(STEPS)]
    collection = sharded(comm, tables, kind, "adagrad", backend="torch", mode=mode)
    return lambda features: collection(features).values(), collection.shared, batches


def bags_and_sequences(comm, kind, grow):
    """Bags, a concatenation and sequences; some of their tables are dynamic where `grow`."""
    plan = sequences.plan_of(kind, comm.world, False, grow)
    model = shard_model(
        sequences.Model(3, False, grow), plan, comm, sequences.RULES["adagrad"], "torch"
    )
    (shared,) = sharded_tables(model)
    batches = [sequences.batch_of(6, 10 * n + comm.rank, False) for n in range(STEPS)]
    return model, shared, batches


def keys(comm, kind, settings):
    """Dynamic tables, and keys that come from anywhere, more of them with each step."""
    collection = dynamic.made(
        comm, kind, "adagrad", backend="torch", configs=dynamic.tables(**settings)
    )
    any_keys = dynamic.any_keys()
    batches = [
        dynamic.batch_of(n, comm.rank, rows=2 + 4 * n, keys=any_keys) for n in range(2 * STEPS)
    ]
    return lambda features: collection(features).values(), collection.shared, batches


MAKE = {"bags": bags, "sequences": bags_and_sequences, "keys": keys}


def trained(comm, case, depth, now=lambda: None):
    """Return the outputs and rows after some steps."""
    make, *arguments = case
    lookup, shared, batches = MAKE[make](comm, *arguments)
    loader = LookAhead(batches, depth, lambda: [shared], lambda x: x, comm.side)
    outputs = []
    for features in loader if depth else batches:
        values = lookup(features)
        outputs.append(values.detach().clone())
        values.square().sum().backward()
    now()
    rows = dynamic.rows_by_key(comm, shared)
    return outputs + [rows[name] for name in sorted(rows)]


def side_stays():
    """The side stream is used even where it is known to be wrong."""
    return mock.patch.object(Comm, "work_in_order", lambda comm: None)


def late(comm, case, depth):
    """Whether bits are those without look-ahead, and whether a side stream was used."""
    with rows_move():
        wanted = trained(comm, case, 0)
        with late_compute(comm) as now:
            found = trained(comm, case, depth, now)
            beside = comm.side.overlaps
    return len(wanted) == len(found) and all(map(same_bits, wanted, found)), beside


def late_beside(comm, case, depth):
    with side_stays():
        return late(comm, case, depth)


def unordered(comm, case, depth):
    """What two streams touch unordered, and whether a side stream was used."""
    with rows_move(), watched(comm) as watch:
        trained(comm, case, depth)
        return sorted(watch.found), comm.side.overlaps


def unordered_beside(comm, case, depth):
    with side_stays():
        return unordered(comm, case, depth)


STATIC_CASES = [
    *(("bags", kind, mode) for kind, mode in product(BAGS, ("unique", "pooled"))),
    *(("sequences", kind, False) for kind in ("row_wise", "data_parallel", "mixed")),
]
DYNAMIC_CASES = [
    *(("keys", kind, settings) for kind, settings in product(("row_wise", "mixed"), DYNAMIC)),
    ("keys", "data_parallel", {}),
    ("sequences", "mixed", True),
]


@pytest.mark.parametrize(
    ("case", "depth", "world"), one_of(30, cover(2, [STATIC_CASES, DEPTHS, [2, 1]]))
)
def test_static_tables_are_ordered_beside_compute_and_keep_their_bits(ranks, world, case, depth):
    assert ranks.run(unordered, world, case, depth) == [([], True)] * world
    assert ranks.run(late, world, case, depth) == [(True, True)] * world


@pytest.mark.parametrize(
    ("case", "depth", "world"), one_of(30, cover(2, [DYNAMIC_CASES, DEPTHS, [2, 1]]))
)
def test_dynamic_tables_run_in_order_and_keep_their_bits(ranks, world, case, depth):
    assert ranks.run(unordered, world, case, depth) == [([], False)] * world
    assert ranks.run(late, world, case, depth) == [(True, False)] * world


@pytest.mark.parametrize("case", one_of(11, [(case,) for case in DYNAMIC_CASES]))
def test_the_watch_would_see_dynamic_tables_beside_compute(case):
    found, beside = unordered_beside(Comm(), case, 1)
    assert beside and any("on side does not wait for compute" in line for line in found)


@pytest.mark.parametrize("settings", one_of(4, DYNAMIC))
def test_a_late_update_would_change_dynamic_tables_beside_compute(settings):
    """So the simulation sees rows that move, and slots that are given again."""
    assert late_beside(Comm(), ("keys", "table_wise", settings), 1) == (False, True)
    assert late_beside(Comm(), ("keys", "table_wise", settings), 0) == (True, True)
