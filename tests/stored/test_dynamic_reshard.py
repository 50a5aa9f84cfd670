"""A checkpoint of dynamic tables has keys, rows, state and counts; it loads under any plan, on any
number of ranks.
"""

import pytest
import torch
from engine.dynamic_checkpoints import fill, write
from engine.engine_cases import make_plan, same_bits
from engine.test_dynamic_tables import (
    ROWS,
    any_keys,
    batch_of,
    made,
    rows_by_key,
    tables,
    train,
)
from tiers import one_of

from recapp.engine.sharded_state import gathered_state_dict
from recapp.errors import CheckpointError
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.stored.checkpoint import write_checkpoint
from recapp.stored.stored_model import load_table, static_table
from recapp.tables.positions import positions_of
from recapp.transport.communicator import Comm

SETTINGS = (
    {},
    {"seen": 4},
    {"seen": 3, "counter": "sketch", "max_rows": 64},
    {"eviction": "ttl", "ttl_steps": 4},
)


def saved(comm, path, kind, settings, rule="rowwise_adagrad"):
    """What training leaves, and what six more steps make of it."""
    collection = made(comm, kind, rule, configs=tables(**settings))
    train(collection, comm, 6, any_keys())
    write(path, collection, comm)
    before = rows_by_key(comm, collection)
    train(collection, comm, 6, any_keys(), first=6)
    return before, rows_by_key(comm, collection)


def loaded(comm, path, kind, settings, rule="rowwise_adagrad"):
    collection = made(comm, kind, rule, seed=8, configs=tables(**settings))
    train(collection, comm, 2, any_keys(), first=50)  # what is loaded replaces other rows
    fill(path, collection)
    return rows_by_key(comm, collection), collection


def goes_on(comm, path, kind, settings):
    before, collection = loaded(comm, path, kind, settings)
    train(collection, comm, 6, any_keys(), first=6)
    return before, rows_by_key(comm, collection)


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "other", "settings"),
    one_of(
        len(SETTINGS) + 1,
        [
            (kind, other, settings)
            for kind, other in (
                ("row_wise", "column_wise"),
                ("column_wise", "data_parallel"),
                ("mixed", "row_wise"),
                ("data_parallel", "mixed"),
            )
            for settings in SETTINGS
        ],
    ),
)
def test_training_goes_on_under_another_plan_as_if_it_had_never_stopped(
    ranks, tmp_path, kind, other, settings
):
    path = tmp_path / "a.ckpt"
    wanted = ranks.run(saved, 2, path, kind, settings)[0]
    found = ranks.run(goes_on, 2, path, other, settings)[0]
    for a, b in zip(wanted, found, strict=True):
        assert a.keys() == b.keys()
        assert len(a["t0", "keys"])
        for name in a:
            assert same_bits(a[name], b[name]), name


def on_other_ranks(comm, path, kind, settings):
    return loaded(comm, path, kind, settings)[0]


@pytest.mark.parametrize("world", one_of(2, [1, 4]))
@pytest.mark.parametrize("settings", SETTINGS)
def test_any_number_of_ranks_loads_it(ranks, tmp_path, world, settings):
    path = tmp_path / "a.ckpt"
    wanted = ranks.run(saved, 2, path, "mixed", settings)[0][0]
    found = ranks.run(on_other_ranks, world, path, "row_wise", settings)[0]
    assert wanted.keys() == found.keys()
    for name in wanted:
        assert same_bits(wanted[name], found[name]), name


def test_a_notebook_reads_keys_and_rows_without_a_plan(ranks, tmp_path):
    path = tmp_path / "a.ckpt"
    wanted = ranks.run(saved, 2, path, "row_wise", {})[0][0]
    keys, rows = load_table(path, "t1", "keys")[:, 0], load_table(path, "t1")
    assert bool((positions_of(keys).diff() > 0).all())
    assert same_bits(rows[keys.argsort()], wanted["t1", "weight"])


def test_a_dynamic_table_is_exported_in_the_order_of_its_keys(ranks, tmp_path):
    path = tmp_path / "a.ckpt"
    wanted = ranks.run(saved, 2, path, "row_wise", {})[0][0]
    table = static_table(path, "t1")
    assert bool((table.keys_R.diff() > 0).all())
    assert same_bits(table.tensor_RD, wanted["t1", "weight"])
    assert same_bits(static_table(path, "t1", "sum").tensor_RD, wanted["t1", "sum"])
    with pytest.raises(CheckpointError, match="has no dynamic table t8: known: t0, t1, t2"):
        static_table(path, "t8")


def damaged(comm, path):
    collection = made(comm, "row_wise", "sgd", configs=tables())
    train(collection, comm, 2, any_keys())
    blocks = list(collection.shared.blocks())
    keys = next(b for b in blocks if b.tensor == "keys" and len(b.data) > 1)
    keys.data[:2] = keys.data[:2].flip(0)
    info = {"updates": [2], "dynamic": collection.shared.rows_of_stretches()}
    write_checkpoint(path, blocks, comm=comm, meta={}, manifest=info, parameters={})
    with pytest.raises(CheckpointError) as refused:
        fill(path, collection)
    return str(refused.value)


def test_keys_that_are_not_in_order_are_refused(ranks, tmp_path):
    (said,) = ranks.run(damaged, 1, tmp_path / "a.ckpt")
    assert "the stored keys are not in the order of their positions" in said


def static_into_dynamic(comm, path):
    static = made(comm, "row_wise", "sgd", configs=tables(dynamic=False))
    info = {"updates": [0]}
    blocks = list(static.shared.blocks())
    write_checkpoint(path, blocks, comm=comm, meta={}, manifest=info, parameters={})
    with pytest.raises(CheckpointError) as refused:
        fill(path, made(comm, "row_wise", "sgd"))
    return str(refused.value)


def test_a_table_of_numbered_rows_is_not_taken_for_a_dynamic_one(ranks, tmp_path):
    (said,) = ranks.run(static_into_dynamic, 1, tmp_path / "a.ckpt")
    assert said.startswith("table t0: the table is dynamic in the model, and static or absent in")


def dynamic_into_static(comm, path):
    dynamic = made(comm, "row_wise", "sgd")
    train(dynamic, comm, 4, torch.arange(ROWS))
    write(path, dynamic, comm)
    with pytest.raises(CheckpointError) as refused:
        fill(path, made(comm, "row_wise", "sgd", configs=tables(dynamic=False)))
    return str(refused.value)


def test_a_dynamic_table_is_not_taken_for_one_of_numbered_rows(ranks, tmp_path):
    (said,) = ranks.run(dynamic_into_static, 1, tmp_path / "a.ckpt")
    assert said.startswith(
        "table t0: the table is static in the model and dynamic in the checkpoint"
    )


def lowered(comm, path):
    """How many rows a table has that was saved under one limit and goes on under a lower one."""
    collection = made(comm, "mixed", "sgd", configs=tables(max_rows=8000))
    train(collection, comm, 1, torch.arange(ROWS))
    many = torch.arange(4000) * 7919
    for part in many.split(400):
        features = KeyedJaggedTensor(
            ["a", "b", "c", "s"], part, lengths=torch.tensor([len(part), 0, 0, 0])
        )
        collection(features).values().sum().backward()
    write(path, collection, comm)
    goes_on = made(comm, "row_wise", "sgd", configs=tables(max_rows=320))
    fill(path, goes_on)
    before = sum(goes_on.shared.rows_of_stretches()["t0"]["rows"])
    train(goes_on, comm, 1, torch.arange(ROWS))
    return before, goes_on.shared.rows_of_stretches()["t0"]["rows"], rows_by_key(comm, goes_on)


def test_rows_beyond_a_lowered_limit_leave_after_a_step(ranks, tmp_path):
    one = ranks.run(lowered, 1, tmp_path / "one.ckpt")[0]
    two = ranks.run(lowered, 2, tmp_path / "two.ckpt")[0]
    for before, rows, _ in (one, two):
        assert before > 4000 and rows == [5] * 64
    assert one[2]["t0", "keys"].shape == (320, 1)


@pytest.mark.usefixtures("reference_kernels")
def test_an_empty_table_is_exported_and_gathered(tmp_path):
    collection = made(Comm(), "row_wise", "sgd", configs=tables(seen=9))
    train(collection, Comm(), 1, any_keys())
    state = gathered_state_dict(collection)
    assert state["embedding_bags.t0.weight"].shape == (0, 8)
    again = made(Comm(), "column_wise", "sgd", configs=tables())
    again.load_state_dict(state)
    assert not sum(again.shared.rows_of_stretches()["t0"]["rows"])
    info = {"dynamic": collection.shared.rows_of_stretches()}
    plan = make_plan("row_wise", tables(), 1).to_dict()
    blocks = list(collection.shared.blocks())
    path = tmp_path / "a.ckpt"
    write_checkpoint(path, blocks, comm=Comm(), meta={}, manifest={**info, "plan": plan})
    assert [x.shape for x in static_table(path, "t0")] == [(0,), (0, 8)]


def through_state_dict(comm):
    collection = made(comm, "mixed", "sgd", configs=tables())
    train(collection, comm, 4, any_keys())
    wanted = rows_by_key(comm, collection)
    own = collection.state_dict()
    whole = comm.all_gather(gathered_state_dict(collection))[0]
    same_plan = made(comm, "mixed", "sgd", configs=tables())
    same_plan.load_state_dict(own)
    other_plan = made(comm, "column_wise", "sgd", configs=tables())
    train(other_plan, comm, 1, any_keys(), first=9)
    other_plan.load_state_dict(whole)
    equal = True
    for found in (rows_by_key(comm, same_plan), rows_by_key(comm, other_plan)):
        equal &= wanted.keys() == found.keys()
        equal &= all(same_bits(wanted[name], found[name]) for name in wanted)
    with torch.no_grad():
        values = [c(batch_of(3, 0, keys=any_keys())).values() for c in (same_plan, other_plan)]
    return equal and same_bits(*values)


def other_ranks_strips(comm, kind):
    collection = made(comm, "row_wise", "sgd", configs=tables())
    train(collection, comm, 3, any_keys())
    state = comm.all_gather(collection.state_dict())[1 - comm.rank]
    return why_refused(comm, made(comm, kind, "sgd", configs=tables()), state)


def why_refused(comm, into, state):
    """Why a state dict is refused; the rows of the table that cannot be loaded stay."""
    train(into, comm, 1, any_keys(), first=30)
    before = rows_by_key(comm, into)
    with pytest.raises((RuntimeError, CheckpointError)) as refused:
        into.load_state_dict(state)
    after = rows_by_key(comm, into)
    for name in ("keys", "weight"):
        assert same_bits(before["t0", name], after["t0", name])
    return str(refused.value)


@pytest.mark.parametrize("kind", ["row_wise", "column_wise"])
def test_rows_that_no_rank_takes_are_not_lost_in_silence(ranks, kind):
    for said in ranks.run(other_ranks_strips, 2, kind):
        assert "load the state of the same plan and rank, or whole tables" in said


def faulty_on_one_rank(comm, fault):
    collection = made(comm, "row_wise", "sgd", configs=tables())
    train(collection, comm, 3, any_keys())
    state = collection.state_dict()
    if comm.rank == 0:
        name = "embedding_bags.t0.keys"
        ((rows, cols, keys), *others) = state[name]
        if fault == "twice":
            state[name] = [(rows, cols, keys * 0), *others]
        else:
            del state[name]
    return why_refused(comm, made(comm, "row_wise", "sgd", configs=tables()), state)


@pytest.mark.parametrize(
    ("fault", "here", "there"),
    [
        ("twice", "a key is stored twice", "rank 0 cannot load it: a key is stored twice"),
        ("lacking", "Missing key(s)", "rank 0 cannot load it: keys or rows are missing"),
    ],
)
def test_a_state_dict_that_is_faulty_on_one_rank_is_refused_by_all(ranks, fault, here, there):
    first, second = ranks.run(faulty_on_one_rank, 2, fault)
    assert here in first and there in second


@pytest.mark.usefixtures("reference_kernels")
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda k, w: (k, w.half()), "weight: torch.float16 is stored, the table is torch.float32"),
        (lambda k, w: (k.double(), w), "keys: torch.float64 is stored, the table is torch.int64"),
        (lambda k, w: (k, torch.cat([w, w], 1)), "weight: a tensor of shape (5, 16) is stored"),
        (lambda k, w: (k[:3], w), "shape (5, 8) is stored, the table is (3, 8)"),
        (lambda k, w: (k, 5), "weight: a int is stored, neither a whole tensor nor"),
        (lambda k, w: (k, [7]), "weight: entry 0 is no (rows, cols, tensor)"),
        (lambda k, w: ([7], w), "keys: entry 0 is no (rows, cols, tensor)"),
        (lambda k, w: (k, [((0, 4), (0, 8), w[:4])]), "do not have every row whose key they have"),
    ],
)
def test_a_state_dict_of_something_else_is_refused_before_anything_changes(change, says):
    keys, weights = change(torch.arange(5)[:, None], torch.ones(5, 8))
    into = made(Comm(), "row_wise", "sgd", configs=tables())
    train(into, Comm(), 1, any_keys())
    state = into.state_dict()
    state |= {"embedding_bags.t0.keys": keys, "embedding_bags.t0.weight": weights}
    assert says in why_refused(Comm(), into, state)


@pytest.mark.parametrize("world", one_of(2, [2, 1]))
def test_state_dicts_hold_keys_and_rows(ranks, world):
    assert all(ranks.run(through_state_dict, world))
