"""Looking ahead changes when messages travel and nothing else: not the numbers, not the turn in
which an error is raised, not who hears of it. Whatever is read ahead, messages leave in one order
on all ranks; where they did not, these tests would hang or differ.
"""

import pytest
import torch
from engine.engine_cases import Head, batch_of, make_tables, same_bits, sharded, whole_tensors

from recapp.errors import DataError, IdError, RankError
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.trainer.lookahead import LookAhead, sparse_of

STEPS = 6
UNREADABLE = DataError("file f, column c, row 3: not a number")


def batches_of(tables, rank, steps=STEPS):
    """Other ids and another number of rows on every rank and in every step; one batch is empty."""
    return [
        batch_of(tables, 0 if step == 3 and rank == 1 else 5 + 2 * rank + step, 100 * step + rank)
        for step in range(steps)
    ]


class Loader:
    """Batches; one that is an exception is raised instead. Its length is not known."""

    def __init__(self, batches):
        self.batches = batches
        self.read = 0

    def __iter__(self):
        for batch in self.batches:
            self.read += 1
            if isinstance(batch, Exception):
                raise batch
            yield batch


def reader(loader, depth, *collections):
    return (
        LookAhead(loader, depth, lambda: [c.shared for c in collections], lambda batch: batch)
        if depth
        else loader
    )


def step(head, features):
    loss = head(features).square().sum()
    loss.backward()
    return loss.detach()


def trained(comm, kind, depth, seed=0, stop=STEPS, **plan):
    """Losses and tables after an epoch that validates after its third step, and one that ends with
    `stop` steps.
    """
    tables = make_tables()
    collection = sharded(comm, tables, kind, "rowwise_adagrad", seed=seed, **plan)
    head = Head(collection)
    seen = {}
    kept = []
    loader = reader(Loader(batches_of(tables, comm.rank)), depth, collection)
    validation = batches_of(tables, comm.rank + 50, 3)
    for last in (STEPS, stop):
        for i, features in zip(range(last), loader, strict=False):
            seen[f"loss {last} {i}"] = step(head, features)
            kept.append(features)
            if i == 2:
                with torch.no_grad():
                    seen[f"validation {last}"] = torch.cat([head(v) for v in validation])
    collection.shared.forget_ahead()
    assert len(kept) == STEPS + stop
    return seen | {
        f"{tensor} of {table}": data
        for (table, tensor), data in whole_tensors(comm, collection).items()
    }


def differing(comm, kind, mode):
    found = {}
    for seed in range(3):
        plain = trained(comm, kind, 0, seed, stop=4, mode=mode)
        for depth in (1, 2, 5):
            ahead = trained(comm, kind, depth, seed, stop=4, mode=mode)
            assert ahead.keys() == plain.keys()
            found |= {
                (depth, seed, name): 1 for name in plain if not same_bits(plain[name], ahead[name])
            }
    return found


@pytest.mark.parametrize(
    ("kind", "mode", "world"),
    [
        pytest.param("mixed", "unique", 2, marks=pytest.mark.full),
        ("mixed", "unique", 1),
        pytest.param("mixed", "pooled", 2, marks=pytest.mark.full),
        pytest.param("random", "unique", 3, marks=pytest.mark.full),
    ],
)
def test_losses_and_tables_have_the_same_bits_however_far_one_looks_ahead(ranks, kind, mode, world):
    assert ranks.run(differing, world, kind, mode) == [{}] * world


def told(comm, depth, failing, guilty, error, steps=STEPS):
    """Steps trained and what is raised, where a batch of one rank is spoilt."""
    tables = make_tables()
    collection = sharded(comm, tables, "random")
    head = Head(collection)
    batches = batches_of(tables, comm.rank, steps)
    if comm.rank == guilty:
        batches[failing] = error if isinstance(error, Exception) else error(batches[failing])
    done = 0
    try:
        for features in reader(Loader(batches), depth, collection):
            step(head, features)
            done += 1
    except Exception as e:
        # all ranks have failed in the same turn: none waits for one that is gone
        collection.shared.forget_ahead()
        step(head, batches_of(tables, comm.rank)[1])
        return done, type(e), str(e)
    return done, None, ""


def outside(batch):
    ids = batch.values().clone()
    ids[batch.offset_per_key()[batch.index_of("b")]] = 77
    return KeyedJaggedTensor(list(batch.keys()), ids, None, batch.lengths())


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("failing", [1, 4, STEPS - 1])
def test_a_file_that_cannot_be_read_ahead_is_its_batchs_error_and_all_ranks_hear_of_it(
    ranks, depth, failing
):
    other, own = ranks.run(told, 2, depth, failing, 1, UNREADABLE)
    assert own == (failing, DataError, str(UNREADABLE))
    assert other == (
        failing,
        RankError,
        "rank 1 could not look up its batch; its own message has the reason",
    )


@pytest.mark.parametrize("depth", [1, 3])
def test_the_first_batch_may_be_the_one_that_cannot_be_read(ranks, depth):
    own, other = ranks.run(told, 2, depth, 0, 0, UNREADABLE)
    assert own[:2] == (0, DataError) and other[:2] == (0, RankError)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_an_id_outside_its_table_is_raised_in_its_batchs_turn_by_all(ranks, depth):
    for done, kind, line in ranks.run(told, 2, depth, 2, 0, outside):
        assert done == 2 and issubclass(kind, IdError)
        assert line.startswith("table t1: feature b has the id 77 on rank 0")


def fed_otherwise(comm, depth):
    """A model that gives its first collection the batch and its second one a part of it."""
    tables = make_tables()
    whole = sharded(comm, tables, "mixed")
    part = sharded(comm, make_tables()[2:], "row_wise")
    loader = reader(Loader(batches_of(tables, comm.rank, 9)), depth, whole, part)
    waiting = []
    for features in loader:
        loss = (
            whole(features).values().square().sum() + part(features.split([3, 1])[1]).values().sum()
        )
        loss.backward()
        waiting.append((whole.shared.waiting_ahead, part.shared.waiting_ahead))
    seen = {("whole", *key): data for key, data in whole_tensors(comm, whole).items()}
    return waiting, seen | {("part", *key): data for key, data in whole_tensors(comm, part).items()}


def check_fed_otherwise(comm):
    plain = fed_otherwise(comm, 0)[1]
    ahead = fed_otherwise(comm, 1)
    assert all(same_bits(plain[key], ahead[1][key]) for key in plain)
    return ahead[0]


def test_a_collection_that_is_fed_something_else_is_left_alone(ranks):
    for waiting in ranks.run(check_fed_otherwise, 2):
        assert [n for n, _ in waiting] == [1] * 8 + [0]
        assert max(n for _, n in waiting) == 3 and waiting[-1][1] == 0


def same_again(comm):
    """One batch object, handed out in every step."""
    tables = make_tables()
    ends = []
    for depth in (0, 2):
        collection = sharded(comm, tables, "random")
        head = Head(collection)
        batch = batches_of(tables, comm.rank)[1]
        for features in reader(Loader([batch] * 5), depth, collection):
            step(head, features)
        assert not collection.shared.waiting_ahead
        ends.append(whole_tensors(comm, collection))
    return all(same_bits(ends[0][key], ends[1][key]) for key in ends[0])


def test_the_same_batch_object_may_come_again(ranks):
    assert ranks.run(same_again, 2) == [True, True]


def wanted(comm, depth):
    """Steps after which all ranks know what rank 1 asked for after its second step."""
    tables = make_tables()
    collection = sharded(comm, tables, "random")
    head = Head(collection)
    for i, features in enumerate(reader(Loader(batches_of(tables, comm.rank)), depth, collection)):
        step(head, features)
        if any(collection.shared.header.wanted_W):
            collection.shared.forget_ahead()
            return i
        if i == 1 and comm.rank == 1:
            collection.shared.header.wanted = 1
    return None


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_stop_that_is_wanted_is_heard_in_the_next_step_by_all(ranks, depth):
    assert ranks.run(wanted, 2, depth) == [2, 2]


def test_reading_is_so_far_ahead_and_no_further(ranks):
    assert ranks.run(read_by_step, 1) == [{0: [1, 2, 3], 1: [2, 3, 4], 2: [3, 4, 5]}]


def read_by_step(comm):
    tables = make_tables()
    found = {}
    for depth in (0, 1, 2):
        collection = sharded(comm, tables)
        loader = Loader(batches_of(tables, 0))
        found[depth] = []
        for _, features in zip(range(3), reader(loader, depth, collection), strict=False):
            found[depth].append(loader.read)
            step(Head(collection), features)
        collection.shared.forget_ahead()
    return found


def test_the_ids_of_a_batch_are_found_where_there_is_one_choice():
    ids = batch_of(make_tables(), 2, 0)
    labels = torch.zeros(2)
    assert all(
        sparse_of(batch) is ids
        for batch in (ids, (ids, labels), [labels, ids], {"x": ids, "y": labels})
    )
    assert all(sparse_of(batch) is None for batch in (labels, (ids, ids), {"y": labels}, None))


def test_waiting_for_messages_is_added_up_by_phase(ranks):
    for waited, under_way, hidden in ranks.run(waits, 2):
        assert set(waited) == {"counts", "ids", "vectors", "gradients"} and all(
            0 < s < under_way[phase] for phase, s in waited.items()
        )
        assert hidden == {
            phase: 1 - waited[phase] / seconds for phase, seconds in under_way.items()
        }


def test_of_messages_for_which_only_a_gpu_waits_nothing_is_said(ranks):
    for found in ranks.run(waits, 2, "nccl"):
        assert [set(phases) for phases in found] == [{"counts"}] * 3


def waits(comm, transport=None):
    if transport:
        comm.transport = transport
    tables = make_tables()
    collection = sharded(comm, tables, "random")
    step(Head(collection), batches_of(tables, comm.rank)[0])
    return (
        collection.shared.waits.waited_s,
        collection.shared.waits.under_way_s,
        collection.shared.waits.hidden(),
    )
