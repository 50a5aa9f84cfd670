"""Id rules across ranks: an error on one rank is raised by all, and the other rules do the same as
without ranks.
"""

from dataclasses import replace

import pytest
import torch
from engine.engine_cases import RULES, batch_of, make_tables, sharded, whole_tensors
from parity.cases import Case, Oracle, loss_of

from recapp.errors import ConfigError, DataError, IdError, RankError
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.sparse.missing_ids import MISSING


def message_of(comm, guilty, spoil):
    """What each rank says of a batch that one rank cannot read; afterwards all of them go on."""
    tables = make_tables(data_type="fp64")
    collection = sharded(comm, tables, "random", "sgd")
    oracle = Oracle(Case(tables, None, [], None, RULES["sgd"]), seed=1)
    good = batch_of(tables, 4, comm.rank)
    try:
        collection(spoil(good) if comm.rank in guilty else good)
    except Exception as e:
        told = (type(e), str(e))
    values = collection(good).values()
    values.sum().backward()
    torch.testing.assert_close(values.detach(), oracle.model(good).values().detach())
    return told


def outside(batch):
    ids = batch.values().clone()
    ids[batch.offset_per_key()[batch.index_of("b")]] = 77
    return KeyedJaggedTensor(list(batch.keys()), ids, None, batch.lengths())


def floats(batch):
    return KeyedJaggedTensor(list(batch.keys()), batch.values().float(), None, batch.lengths())


def without_c(batch):
    return batch.permute([i for i, key in enumerate(batch.keys()) if key != "c"])


def test_an_id_outside_its_table_is_raised_by_all_ranks_with_the_first_guilty_one_named(ranks):
    text = "table t1: feature b has the id 77 on rank 1, which is outside its 40 rows (0..39)"
    for kind, said in ranks.run(message_of, 4, {1, 3}, outside):
        assert issubclass(kind, IdError) and said.startswith(text)


def test_a_rank_that_cannot_read_its_batch_says_why_and_the_others_name_it(ranks):
    (own, said), *others = ranks.run(message_of, 3, {0}, floats)
    assert own is ConfigError and "ids are torch.float32: a lookup needs integer ids" in said
    assert (
        others
        == [(RankError, "rank 0 could not look up its batch; its own message has the reason")] * 2
    )
    other, (own, said) = ranks.run(message_of, 2, {1}, without_c)
    assert issubclass(own, DataError) and said == "unknown key 'c': known: a, b, shared"
    assert other == (
        RankError,
        "rank 1 could not look up its batch; its own message has the reason",
    )


def alone(comm):
    tables = make_tables()
    with pytest.raises(IdError, match="has the id 77, which"):
        sharded(comm, tables)(outside(batch_of(tables, 4, 0)))


def test_one_process_names_no_rank(ranks):
    ranks.run(alone, 1)


HEAD = torch.linspace(-1, 1, 16 * 2 + 5 * 2 + 12, dtype=torch.float64)
WILD = [0, 3, 6, 7, 39, 40, 130, 131, -1, -(2**40), 2**40, MISSING]


def wild_batch(seed, extra):
    """Ids that no table fits, missing ones among them, in another order than the tables'; with keys
    that nobody reads.
    """
    generator = torch.Generator().manual_seed(seed)
    keys = ["c", "x", "shared", "b", "a"] if extra else ["a", "shared", "b", "c"]
    lengths = torch.randint(0, 4, (len(keys) * 5,), generator=generator)
    ids = torch.tensor(WILD)[
        torch.randint(0, len(WILD), (int(lengths.sum()),), generator=generator)
    ]
    return KeyedJaggedTensor(keys, ids, None, lengths)


def wild(comm, rules, kind, mode):
    tables = [
        replace(t, id_rule=rule)
        for t, rule in zip(make_tables(data_type="fp64"), rules, strict=True)
    ]
    collection = sharded(comm, tables, kind, "adagrad", mode=mode)
    oracle = Oracle(Case(tables, None, [], HEAD, RULES["adagrad"]), seed=1)
    for step in range(3):
        batches = [wild_batch(10 * step + r, extra=step % 2) for r in range(comm.world)]
        values = collection(batches[comm.rank]).values()
        loss_of(values, HEAD).mean().backward()
        torch.testing.assert_close(
            values.detach(), oracle.step(batches)[comm.rank], rtol=1e-9, atol=1e-9
        )
    for (table, tensor), data in whole_tensors(comm, collection).items():
        torch.testing.assert_close(data, oracle.tensor(table, tensor), rtol=1e-9, atol=1e-9)
    changed = {
        t.name: sum(c[t.name] for c in comm.all_gather(collection.shared.state.id_rules.changed))
        for t in tables
    }
    assert changed == oracle.model.id_rules.changed
    return changed


@pytest.mark.parametrize("mode", ["unique", "pooled"])
@pytest.mark.parametrize(
    "rules", [("clamp", "drop", "hash"), ("drop", "drop", "drop"), ("hash", "clamp", "clamp")]
)
def test_every_rule_does_and_counts_the_same_as_without_ranks(ranks, rules, mode):
    for changed in ranks.run(wild, 2, rules, "random", mode):
        assert all((changed[f"t{k}"] > 0) == (rule != "hash") for k, rule in enumerate(rules))


def calls_of_an_error(comm):
    tables = make_tables()
    collection = sharded(comm, tables, "row_wise")
    with pytest.raises(IdError):
        collection.shared.input_dist(outside(batch_of(tables, 4, comm.rank))).finish()
    return comm.calls


def test_an_error_is_told_with_the_counts_and_no_id_travels(ranks):
    assert ranks.run(calls_of_an_error, 2) == [1, 1]
