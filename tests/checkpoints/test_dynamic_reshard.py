"""A checkpoint of dynamic tables has keys, rows, state and counts; it loads under any plan, on any
number of ranks.
"""

import pytest
import torch
from engine.engine_cases import same_bits
from engine.test_dynamic_tables import any_keys, batch_of, made, rows_by_key, tables, train
from tiers import one_of

from recapp.checkpoints.directory import load_blocks, load_table, read_manifest, write_checkpoint
from recapp.checkpoints.static_table import static_table
from recapp.engine.gathered_state import gathered_state_dict
from recapp.errors import CheckpointError
from recapp.tables.dynamic import positions_of

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


def write(path, collection, comm):
    shared = collection.shared
    info = {"updates": [shared.updates], "dynamic": shared.stored.rows_of_runs()}
    write_checkpoint(path, list(shared.blocks()), comm=comm, meta={}, manifest=info, parameters={})


def loaded(comm, path, kind, settings, rule="rowwise_adagrad"):
    collection = made(comm, kind, rule, seed=8, configs=tables(**settings))
    train(collection, comm, 2, any_keys(), first=50)  # what is loaded replaces other rows
    fill(path, collection)
    return rows_by_key(comm, collection), collection


def fill(path, collection):
    manifest = read_manifest(path)
    shared = collection.shared
    load_blocks(path, shared.stored.blocks_to_load(manifest.dynamic, manifest.updates[0]))
    shared.stored.loaded()
    shared.updates = manifest.updates[0]


def goes_on(comm, path, kind, settings):
    before, collection = loaded(comm, path, kind, settings)
    train(collection, comm, 6, any_keys(), first=6)
    return before, rows_by_key(comm, collection)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize(
    ("kind", "other"),
    one_of(
        2,
        [
            ("row_wise", "column_wise"),
            ("column_wise", "data_parallel"),
            ("mixed", "row_wise"),
            ("data_parallel", "mixed"),
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
    with pytest.raises(CheckpointError, match="has no dynamic table t8: did you mean t"):
        static_table(path, "t8")


def damaged(comm, path):
    collection = made(comm, "row_wise", "sgd", configs=tables())
    train(collection, comm, 2, any_keys())
    blocks = list(collection.shared.blocks())
    keys = next(b for b in blocks if b.tensor == "keys" and len(b.data) > 1)
    keys.data[:2] = keys.data[:2].flip(0)
    info = {"updates": [2], "dynamic": collection.shared.stored.rows_of_runs()}
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
    assert said.startswith("table t0: it is dynamic, and the checkpoint has it as a table of")


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


@pytest.mark.parametrize("world", one_of(2, [2, 1]))
def test_state_dicts_hold_keys_and_rows(ranks, world):
    assert all(ranks.run(through_state_dict, world))
