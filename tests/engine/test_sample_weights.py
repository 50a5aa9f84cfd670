"""Sample weights: their gradient equals the unsharded collection's, wherever rows lie and however
they are asked for.
"""

from dataclasses import replace

import pytest
import torch
from engine.engine_cases import batch_of, make_tables, sharded, whole_tensors
from parity.cases import RULES, Case, Oracle, loss_of

from recapp.errors import ConfigError
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.transport.communicator import Comm

HEAD = torch.linspace(-1, 1, 16 * 2 + 5 * 2 + 12, dtype=torch.float64)


def raw_batch(tables, rank, step, weights_dtype=torch.float64):
    """Keys in another order than the tables', one that no table reads, ids outside that `drop`
    leaves out; weights are leaves.
    """
    fitting = batch_of(tables, 6, 10 * step + rank)
    ids = fitting.values().clone()
    ids[::5] = 1000
    foreign = torch.tensor([1, 2, 3, 4, 5, 6])
    kjt = KeyedJaggedTensor(
        [*fitting.keys(), "foreign"],
        torch.cat([ids, foreign]),
        None,
        torch.cat([fitting.lengths(), torch.ones(6, dtype=torch.int64)]),
    )
    kjt = kjt.permute([4 - i for i in range(len(kjt.keys()))])
    weights = torch.rand(
        len(kjt.values()), generator=torch.Generator().manual_seed(step), dtype=weights_dtype
    ).requires_grad_()
    return KeyedJaggedTensor(list(kjt.keys()), kjt.values(), weights, kjt.lengths()), weights


def weight_gradients(comm, kind, mode, pooling, weights_dtype=torch.float64):
    tables = make_tables(id_rule="drop", pooling=pooling, data_type="fp64")
    collection = sharded(comm, tables, kind, "adagrad", mode=mode)
    oracle = Oracle(Case(tables, None, [], HEAD, RULES["adagrad"]), seed=1)
    for step in range(3):
        batches = [raw_batch(tables, r, step, weights_dtype) for r in range(comm.world)]
        kjt, weights = batches[comm.rank]
        twin = weights.detach().clone().requires_grad_()
        values = collection(
            KeyedJaggedTensor(list(kjt.keys()), kjt.values(), twin, kjt.lengths())
        ).values()
        with torch.no_grad():
            # message memory is used again in between
            collection(raw_batch(tables, comm.rank, 40 + step)[0])
        loss_of(values, HEAD).mean().backward()
        oracle.step([b for b, _ in batches])
        # the oracle's loss is the mean over the global batch, a rank's over its own
        torch.testing.assert_close(twin.grad, weights.grad * comm.world, rtol=1e-9, atol=1e-9)
        used = weights.grad != 0
        assert used.any() and not used.all()  # dropped and foreign ids have none
    for (table, tensor), data in whole_tensors(comm, collection).items():
        torch.testing.assert_close(data, oracle.tensor(table, tensor), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mode", ["unique", "pooled"])
@pytest.mark.parametrize(
    "kind", ["table_wise", "row_wise", "column_wise", "data_parallel", "random"]
)
@pytest.mark.parametrize("pooling", [pytest.param("sum", marks=pytest.mark.full), "mean"])
def test_gradients_of_sample_weights_equal_the_unsharded_ones(ranks, kind, mode, pooling):
    ranks.run(weight_gradients, 2, kind, mode, pooling)


def narrow_weights(comm):
    tables = make_tables(data_type="fp64", id_rule="drop")
    kjt, weights = raw_batch(tables, comm.rank, 0, torch.float32)
    twin = weights.detach().clone().requires_grad_()
    loss_of(sharded(comm, tables, "row_wise", "sgd")(kjt).values(), HEAD).mean().backward()
    oracle = Oracle(Case(tables, None, [], HEAD, RULES["sgd"]), seed=1)
    loss_of(
        oracle.model(
            KeyedJaggedTensor(list(kjt.keys()), kjt.values(), twin, kjt.lengths())
        ).values(),
        HEAD,
    ).mean().backward()
    torch.testing.assert_close(weights.grad, twin.grad)
    return weights.grad.dtype


def test_weights_narrower_than_the_tables_get_gradients_of_their_own_type(ranks):
    assert ranks.run(narrow_weights, 2) == [torch.float32] * 2


def weighted_somewhere(comm, mode, weighting_W):
    """A batch per rank with weights as named; returns the error's text, or how far the output is
    from the unsharded one.
    """
    tables = make_tables(data_type="fp64")
    collection = sharded(comm, tables, "row_wise", "sgd", mode=mode)
    how = weighting_W[comm.rank]
    batch = batch_of(
        tables,
        4,
        comm.rank,
        most=0 if how == "no ids" else 3,
        weighted=how not in ("no ids", "none"),
    )
    if how == "learned":
        batch.weights().requires_grad_()
    try:
        values = collection(batch).values()
    except ConfigError as e:
        return str(e)
    values.sum().backward()
    return float(
        (Oracle(Case(tables, None, [], HEAD, RULES["sgd"]), seed=1).model(batch).values() - values)
        .abs()
        .max()
    )


@pytest.mark.parametrize("mode", ["unique", "pooled"])
@pytest.mark.parametrize("weighting", ["none", "given", "learned"])
def test_a_rank_without_ids_need_not_know_how_the_others_weigh_theirs(ranks, mode, weighting):
    assert (
        max(ranks.run(weighted_somewhere, 4, mode, ["no ids", weighting, "no ids", weighting]))
        < 1e-12
    )


@pytest.mark.parametrize("mode", ["unique", "pooled"])
def test_weights_on_some_ranks_only_are_refused_on_all(ranks, mode):
    for text in ranks.run(weighted_somewhere, 3, mode, ["given", "none", "given"]):
        assert "rank 1 has a batch with no sample weights, rank 0 one with sample weights" in text
    for text in ranks.run(weighted_somewhere, 2, mode, ["given", "learned"]):
        assert (
            "rank 0 has a batch with sample weights, rank 1 one with sample weights that need a "
            "gradient"
        ) in text


def looks_without_gradient(comm):
    """Without a gradient learned weights are plain ones, whether their keys had to be put in order
    or not.
    """
    tables = [replace(t, feature_names=t.feature_names[:1]) for t in make_tables(data_type="fp64")]
    collection = sharded(comm, tables, "row_wise", "sgd", mode="pooled")
    batch = batch_of(tables, 4, 0, weighted=True)
    batch.weights().requires_grad_()
    with torch.no_grad():
        return collection(batch.permute([2, 1, 0]) if comm.rank else batch).values()


def test_learned_weights_are_read_without_gradient_under_any_key_order(ranks):
    a, b = ranks.run(looks_without_gradient, 2)
    torch.testing.assert_close(a, b)


def wide_rows(comm, dtype):
    """As with a table of more than 2^31 rows on a rank: rows and, between them, the bits of weights
    travel as 64-bit words.
    """
    tables = make_tables(data_type=dtype)
    batch = batch_of(tables, 6, comm.rank, weighted=True)
    outputs = []
    for row_dtype in (torch.int32, torch.int64):
        collection = sharded(comm, tables, "random", "sgd", mode="pooled")
        state = collection.shared.state
        state.routes = [replace(routes, row_dtype=row_dtype) for routes in state.routes]
        collection(batch).values().sum().backward()
        outputs.append(collection(batch).values().detach())
    return torch.equal(*outputs)


@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_weights_arrive_whole_among_rows_of_either_width(ranks, dtype):
    assert ranks.run(wide_rows, 2, dtype) == [True, True]


def spread_out(tensor):
    """Return a tensor whose entries do not stand one behind the other in memory."""
    return torch.stack([tensor, tensor.flip(0)], 1)[:, 0]


def rows_after(comm, mode, weighted, change):
    # keys in the order of the tables are not copied on the way
    dims = (8, 8, 8)
    tables = [replace(t, feature_names=t.feature_names[:1]) for t in make_tables(dims=dims)]
    collection = sharded(comm, tables, "row_wise", "adagrad", backend="numba", mode=mode)
    for step in range(2):
        batch = batch_of(tables, 500, step, weighted=weighted, one_hot=True)
        parts = (batch.values(), batch.weights_or_none(), batch.lengths())
        values, weights, lengths = (None if x is None else change(x) for x in parts)
        if change is spread_out:
            lengths = torch.ones(1, dtype=lengths.dtype).expand(len(lengths))
        kjt = KeyedJaggedTensor([*batch.keys()], values, weights, lengths)
        collection(kjt).values().square().sum().backward()
    return whole_tensors(comm, collection)


@pytest.mark.parametrize("mode", ["unique", "pooled"])
@pytest.mark.parametrize("weighted", [True, False])
def test_parts_of_a_batch_may_lie_anywhere_in_memory(mode, weighted):
    plain = rows_after(Comm(alone=True), mode, weighted, lambda tensor: tensor)
    strided = rows_after(Comm(alone=True), mode, weighted, spread_out)
    assert all(torch.equal(strided[name], tensor) for name, tensor in plain.items())
