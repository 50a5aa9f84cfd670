"""What counts as a step, what an output is worth later, and what no step touches."""

import gc

import pytest
import torch
from engine.engine_cases import RULES, batch_of, make_tables, same_bits, sharded, whole_tensors
from parity.cases import Case, Oracle, loss_of
from tiers import one_of

TABLES = make_tables(data_type="fp64")
HEAD = torch.linspace(-1, 1, 16 * 2 + 5 * 2 + 12, dtype=torch.float64)
KINDS = ["table_wise", "row_wise", "column_wise", "data_parallel", "random"]


def batch(step, rank, rows=6):
    return batch_of(TABLES, rows, 10 * step + rank)


def loss(values, comm):
    """This rank's part of the mean over the global batch; ranks have equal batches."""
    return loss_of(values, HEAD).mean()


def all_equal(comm, collection, oracle):
    for (table, tensor), data in whole_tensors(comm, collection).items():
        torch.testing.assert_close(data, oracle.tensor(table, tensor), rtol=1e-9, atol=1e-9)


def oracle_of(rule):
    return Oracle(Case(TABLES, None, [], HEAD, RULES[rule]), seed=1)


def two_lookups(comm, kind, rule, order):
    """Two forwards, then their backwards, against one update with both losses added."""
    collection = sharded(comm, TABLES, kind, rule)
    oracle = oracle_of(rule)
    for step in range(3):
        values = [collection(batch(2 * step + k, comm.rank)).values() for k in range(2)]
        with torch.no_grad():
            collection(batch(99, comm.rank, rows=2))  # a look in between changes nothing
        if order == "together":
            (loss(values[0], comm) + 2 * loss(values[1], comm)).backward()
        else:
            for k in order:
                ((1 + k) * loss(values[k], comm)).backward()
        for optimizer in oracle.optimizers.values():
            optimizer.zero_grad()
        for k in range(2):
            outputs = [oracle.model(batch(2 * step + k, r)).values() for r in range(comm.world)]
            (sum((1 + k) * loss(o, comm) for o in outputs) / comm.world).backward()
        for optimizer in oracle.optimizers.values():
            optimizer.step()
        assert collection.shared.updates == step + 1
    all_equal(comm, collection, oracle)


@pytest.mark.parametrize("kind", one_of(3, KINDS))
@pytest.mark.parametrize(
    ("rule", "order"), [("rowwise_adagrad", (0, 1)), ("adam", (1, 0)), ("adagrad", "together")]
)
def test_two_lookups_of_a_step_are_one_update_with_summed_gradients(ranks, kind, rule, order):
    ranks.run(two_lookups, 2, kind, rule, order)


def dropped(comm, how, rule="rowwise_adagrad"):
    """An output that takes no part in the loss, dropped or held by some ranks only, delays nothing
    for good.
    """
    collection = sharded(comm, TABLES, "column_wise", rule)
    oracle = oracle_of(rule)
    held = []
    for step in range(4):
        if how == "dropped before":
            collection(batch(50 + step, comm.rank))
        values = collection(batch(step, comm.rank)).values()
        unused = (
            collection(batch(60 + step, comm.rank)).values()
            if how in ("dropped after", "held by one rank")
            else None
        )
        loss(values, comm).backward()
        if how == "held by one rank" and comm.rank == 1:
            held.append(unused)
        values = unused = None
        gc.collect()
        oracle.step([batch(step, r) for r in range(comm.world)])
    all_equal(comm, collection, oracle)
    assert collection.shared.updates == 4


@pytest.mark.parametrize("how", one_of(3, ["held by one rank", "dropped before", "dropped after"]))
def test_an_output_that_is_not_learned_from_blocks_no_update(ranks, how):
    ranks.run(dropped, 2, how)


def held_outputs(comm, kind, mode):
    collection = sharded(comm, TABLES, kind, "sgd", mode=mode)
    held = []
    copies = []
    for step in range(10):
        with torch.set_grad_enabled(step % 3 != 2):
            values = collection(batch(step % 4, comm.rank, rows=3 + step % 2)).values()
        held.append(values.detach())
        copies.append(values.detach().clone())
        if values.requires_grad:
            loss(values, comm).backward()
    assert not torch.equal(held[0], held[4])  # same ids, learned rows: something did change
    assert all(same_bits(a, b) for a, b in zip(held, copies, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["unique", "pooled"])
def test_outputs_held_over_ten_steps_are_never_rewritten(ranks, kind, mode):
    ranks.run(held_outputs, 2, kind, mode)


def twice(comm):
    collection = sharded(comm, TABLES, "row_wise", "sgd")
    value = loss(collection(batch(0, comm.rank)).values(), comm)
    value.backward(retain_graph=True)
    before = whole_tensors(comm, collection)
    with pytest.raises(RuntimeError, match="already differentiated"):
        value.backward()
    after = whole_tensors(comm, collection)
    assert all(same_bits(before[k], after[k]) for k in before)


def test_a_second_backward_through_one_lookup_is_refused(ranks):
    ranks.run(twice, 2)


def without_gradient(comm, guard):
    """Looks without a gradient between two halves of a step: nothing is learned from them, and
    message memory stays usable.
    """
    collection = sharded(comm, TABLES, "mixed", "adam")
    oracle = oracle_of("adam")
    for step in range(3):
        with guard():
            first = collection(batch(70 + step, comm.rank, rows=9)).values()
        values = collection(batch(step, comm.rank)).values()
        with guard():
            second = collection(batch(70 + step, comm.rank, rows=9)).values()
            assert not second.requires_grad and torch.equal(first, second)
        loss(values, comm).backward()
        oracle.step([batch(step, r) for r in range(comm.world)])
        assert collection.shared.updates == step + 1
    all_equal(comm, collection, oracle)


def test_evaluation_without_gradients_fits_between_forward_and_backward(ranks):
    ranks.run(without_gradient, 2, torch.no_grad)


def test_inference_mode_leaves_nothing_behind_that_training_trips_over(ranks):
    ranks.run(without_gradient, 2, torch.inference_mode)


def untouched(comm, kind, rule, dtype):
    tables = make_tables(rows=(131, 40, 30), data_type=dtype)
    collection = sharded(comm, tables, kind, rule)
    start = whole_tensors(comm, collection)
    batches = [batch_of(tables, 5, 10 * step + r) for step in range(3) for r in range(comm.world)]
    for step in range(3):
        loss_of(
            collection(batches[comm.world * step + comm.rank]).values(), HEAD.float()
        ).mean().backward()
    looked_up = {
        t.name: torch.cat([b[f].values() for b in batches for f in t.feature_names]).unique()
        for t in tables
    }
    for (table, tensor), data in whole_tensors(comm, collection).items():
        changed = (data != start[table, tensor]).any(1)
        assert 0 < len(looked_up[table]) < len(data)
        assert changed[looked_up[table]].all()
        changed[looked_up[table]] = False
        assert not changed.any()


@pytest.mark.parametrize("rule", RULES)
def test_rows_that_were_not_looked_up_keep_their_bits(ranks, rule):
    ranks.run(untouched, 2, "random", rule, "fp32")
    ranks.run(untouched, 2, "data_parallel", rule, "fp32")


def wanted(comm):
    collection = sharded(comm, TABLES, "mixed")
    collection.shared.header.wanted = 2 if comm.rank == 1 else 0
    collection(batch(0, comm.rank, rows=3 + comm.rank))
    return collection.shared.header.rows_W, collection.shared.header.wanted_W


def test_every_rank_hears_the_rows_and_the_wishes_of_every_rank(ranks):
    assert ranks.run(wanted, 2) == [([3, 4], [0, 2])] * 2
