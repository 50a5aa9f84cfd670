"""Gradients clipped over tables and dense part together: as the unsharded model with torch's
clipping of all gradients of the whole batch.
"""

from dataclasses import replace

import pytest
import torch
from engine.engine_cases import Head, batch_of, make_plan, make_tables, same_bits, whole_tensors
from parity.cases import RowwiseAdagrad
from tiers import one_of
from torch.utils._python_dispatch import TorchDispatchMode

from recapp.compat.torchrec.optimizers import (
    CombinedOptimizer,
    GradientClipping,
    GradientClippingOptimizer,
    KeyedOptimizerWrapper,
)
from recapp.engine.sharded_collection import sharded_collections
from recapp.errors import ConfigError
from recapp.optim.optimizer import clip_norm, gradient_norm
from recapp.optim.rules import adam, rowwise_adagrad, sgd
from recapp.parallel import DistributedModelParallel, EmbeddingBagCollectionSharder
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.tables.collections import EmbeddingBagCollection

pytestmark = pytest.mark.usefixtures("reference_kernels")
RULES = {"sgd": sgd(0.5), "rowwise_adagrad": rowwise_adagrad(0.5), "adam": adam(0.1)}
ROWS = 6
STEPS = 3


def built(device, dtype="fp64"):
    tables = make_tables(data_type=dtype)
    return Head(EmbeddingBagCollection(tables=tables, device=torch.device(device), seed=2))


def sharded_model(comm, rule, kind, dtype="fp64", mode="unique"):
    plan = make_plan(kind, make_tables(data_type=dtype), comm.world, mode=mode)
    sharder = EmbeddingBagCollectionSharder(rule)
    return DistributedModelParallel(built("meta", dtype), comm.group, plan=plan, sharders=[sharder])


def optimizer_of(model, **clipping):
    dense = KeyedOptimizerWrapper(
        dict(model.named_parameters()), lambda p: torch.optim.SGD(p, lr=0.5)
    )
    optimizer = CombinedOptimizer([model.fused_optimizer, ("dense", dense)])
    if clipping:
        optimizer = GradientClippingOptimizer(optimizer, **clipping)
    return optimizer


def batches_of(step, world, dtype="fp64"):
    tables = make_tables(data_type=dtype)
    return [batch_of(tables, ROWS, 10 * step + rank) for rank in range(world)]


def loss_of(model, batch, twice=False):
    """The second time the ids are looked up by an object of its own: the rows' gradients add."""
    loss = model(batch).pow(2).mean()
    if twice:
        again = KeyedJaggedTensor(batch.keys(), batch.values(), None, batch.lengths())
        loss = loss + 0.5 * model(again).mean()
    return 100.0 * loss


def result_of(comm, model):
    found = {
        ".".join(key): value
        for key, value in whole_tensors(comm, sharded_collections(model)[0]).items()
    }
    return found | {name: p.detach() for name, p in model.module.named_parameters()}


def trained(comm, rule, kind, clipping, twice=False, mode="unique"):
    model = sharded_model(comm, RULES[rule], kind, mode=mode)
    optimizer = optimizer_of(model, enable_global_grad_clip=True, **clipping)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, batches_of(step, comm.world)[comm.rank], twice).backward()
        optimizer.step()
    return result_of(comm, model)


def torchs(rule, weights):
    return {
        "sgd": lambda: torch.optim.SGD(weights, 0.5),
        "rowwise_adagrad": lambda: RowwiseAdagrad(weights, 0.5),
        "adam": lambda: torch.optim.SparseAdam(weights, 0.1),
    }[rule]()


def expected(world, rule, clipping, twice=False):
    """The unsharded model on the batches of all ranks, clipped by torch; and the norms."""
    model = built("cpu")
    weights = [model.collection.weight(t.name) for t in model.collection.tables()]
    layers = list(model.layers.parameters())
    of_tables = torchs(rule, weights)
    dense = torch.optim.SGD(layers, lr=0.5)
    norms = []
    for step in range(STEPS):
        model.zero_grad()
        batches = batches_of(step, world)
        losses = [loss_of(model, batch, twice) for batch in batches]
        (sum(losses) / world).backward()
        if clipping["clipping"] is GradientClipping.VALUE:
            torch.nn.utils.clip_grad_value_(model.parameters(), clipping["max_gradient"])
        else:
            order = float(clipping.get("norm_type", 2.0))
            most = clipping["max_gradient"]
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), most, order)))
        for table, weight in zip(model.collection.tables(), weights, strict=True):
            ids = [batch[f].values() for batch in batches for f in table.feature_names]
            rows = torch.cat(ids).unique()  # the others rest
            values = weight.grad[rows]
            weight.grad = torch.sparse_coo_tensor(rows[None], values, weight.shape)
        of_tables.step()
        dense.step()
    found = {
        f"{t.name}.weight": w.detach()
        for t, w in zip(model.collection.tables(), weights, strict=True)
    }
    return found | {f"layers.{n}": p.detach() for n, p in model.layers.named_parameters()}, norms


NORM = {"clipping": GradientClipping.NORM, "max_gradient": 2.0}
LARGEST = {"clipping": GradientClipping.NORM, "max_gradient": 0.5, "norm_type": "inf"}
CUBES = {"clipping": GradientClipping.NORM, "max_gradient": 1.0, "norm_type": 3.0}
VALUE = {"clipping": GradientClipping.VALUE, "max_gradient": 0.25}
CASES = [
    ("sgd", "row_wise", NORM, False, "unique"),
    ("sgd", "mixed", VALUE, True, "unique"),
    ("rowwise_adagrad", "column_wise", NORM, True, "unique"),
    ("rowwise_adagrad", "random", LARGEST, False, "unique"),
    ("rowwise_adagrad", "table_wise", VALUE, False, "unique"),
    ("adam", "grid_shard", NORM, False, "unique"),
    ("adam", "data_parallel", NORM, True, "unique"),
    ("adam", "row_wise", CUBES, False, "pooled"),
]


@pytest.mark.parametrize(("rule", "kind", "clipping", "twice", "mode"), CASES)
@pytest.mark.parametrize("world", one_of(3, [2, 1, 4]))
def test_clipped_training_is_that_of_the_whole_batch_unsharded(
    ranks, world, rule, kind, clipping, twice, mode
):
    whole, norms = expected(world, rule, clipping, twice)
    assert all(norm > 1.5 * clipping["max_gradient"] for norm in norms), "nothing is clipped"
    for found in ranks.run(trained, world, rule, kind, clipping, twice, mode):
        for name, value in whole.items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9, msg=name)


def untouched(comm, rule, kind, twice):
    """Training with a limit that is never reached, against training without clipping."""
    results = []
    for clipping in ({}, {"enable_global_grad_clip": True, **NORM, "max_gradient": 1e30}):
        model = sharded_model(comm, RULES[rule], kind, "fp32")
        optimizer = optimizer_of(model, **clipping)
        for step in range(STEPS):
            optimizer.zero_grad()
            batch = batches_of(step, comm.world, "fp32")[comm.rank]
            loss_of(model, batch, twice=bool(step % 2) and twice).backward()
            optimizer.step()
        results.append(result_of(comm, model))
    assert results[0].keys() == results[1].keys()
    return [key for key, value in results[0].items() if not same_bits(value, results[1][key])]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("kind", "twice"), one_of(2, [("column_wise", True), ("mixed", False)]))
@pytest.mark.parametrize("world", one_of(3, [2, 1, 4]))
def test_where_nothing_is_clipped_bits_are_those_without(ranks, world, rule, kind, twice):
    assert not any(ranks.run(untouched, world, rule, kind, twice))


def in_steps(comm):
    """Gradients add up over backwards, a dropped one is gone, a step without one does nothing."""
    model = sharded_model(comm, sgd(0.5), "row_wise")
    optimizer = optimizer_of(model, enable_global_grad_clip=True, **NORM)
    start = result_of(comm, model)
    batch = batches_of(0, comm.world)[comm.rank]
    loss_of(model, batch).backward()
    assert same_bits(result_of(comm, model)["t0.weight"], start["t0.weight"])
    optimizer.zero_grad()
    optimizer.step()
    assert all(same_bits(value, start[name]) for name, value in result_of(comm, model).items())
    norms = []
    for _ in range(2):
        loss_of(model, batch).backward()
        calls = model.comm.calls
        norms.append(optimizer.clip_grad_norm_())
        assert model.comm.calls == calls + 1
    optimizer.step()
    assert model.fused_optimizer.shared[0].updates == 1
    return norms


@pytest.mark.parametrize("world", [1, 2])
def test_gradients_wait_for_the_step_as_those_of_a_parameter(ranks, world):
    for once, added in ranks.run(in_steps, world):
        assert once > 2.0
        assert added > once


def counted_norm(comm, kind):
    model = sharded_model(comm, sgd(0.5), kind)
    optimizer = optimizer_of(model, enable_global_grad_clip=True, **NORM)
    loss_of(model, batches_of(0, comm.world)[comm.rank]).backward()
    return optimizer.clip_grad_norm_()


@pytest.mark.parametrize("kind", ["data_parallel", "column_wise", "row_wise", "random"])
@pytest.mark.parametrize("world", one_of(2, [4, 2]))
def test_the_norm_is_one_number_on_all_ranks_and_counts_each_row_once(ranks, world, kind):
    (norm, *_) = expected(world, "sgd", NORM)[1]
    found = ranks.run(counted_norm, world, kind)
    assert len(set(found)) == 1
    assert found[0] == pytest.approx(norm, rel=1e-12)


def dense_alone(comm):
    """Without the option tables train in backward and the dense part alone is clipped."""
    model = sharded_model(comm, sgd(0.5), "table_wise")
    optimizer = optimizer_of(model, **NORM)
    start = result_of(comm, model)
    loss_of(model, batches_of(0, comm.world)[comm.rank]).backward()
    assert not same_bits(result_of(comm, model)["t0.weight"], start["t0.weight"])
    optimizer.step()
    clipped = [p.grad for p in model.parameters()]
    assert float(torch.nn.utils.get_total_norm(clipped)) == pytest.approx(2.0)
    with pytest.raises(ConfigError, match="param_to_pgs: recapp knows the ranks of the tables"):
        optimizer_of(model, param_to_pgs={1: [comm.group]})


def test_without_the_option_the_dense_part_alone_is_clipped(ranks):
    ranks.run(dense_alone, 2)


def plain():
    return KeyedOptimizerWrapper(
        {"w": torch.nn.Parameter(torch.ones(2))}, lambda p: torch.optim.SGD(p, lr=1.0)
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clipping": "norm"}, "clipping='norm': give GradientClipping.NORM"),
        ({"max_gradient": -1.0}, "max_gradient=-1.0: must be at least 0"),
        ({"norm_type": "two"}, "norm_type='two': must be a number above 0, or inf"),
        ({"norm_type": 0}, "norm_type=0: must be a number above 0, or inf"),
        ({"enable_global_grad_clip": True}, "enable_global_grad_clip=True: the optimiser has no"),
    ],
)
def test_what_is_wrong_is_said(settings, message):
    with pytest.raises(ConfigError, match=message):
        GradientClippingOptimizer(plain(), **settings)


def test_a_closure_runs_before_its_gradients_are_clipped():
    optimizer = GradientClippingOptimizer(plain(), GradientClipping.NORM, 0.5)
    (p,) = optimizer.params.values()

    def closure():
        loss = (3.0 * p).sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 6.0
    assert float(p.grad.norm()) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("clipping", "tracked"),
    [
        (GradientClipping.NORM, False),
        (GradientClipping.VALUE, True),
        (GradientClipping.NONE, True),
        (GradientClipping.NONE, False),
    ],
)
def test_the_norm_before_clipping_is_kept_where_it_is_asked_for(clipping, tracked):
    optimizer = GradientClippingOptimizer(plain(), clipping, 0.5, track_grad_norm=tracked)
    (p,) = optimizer.params.values()
    assert optimizer.last_total_grad_norm is None
    (torch.tensor([3.0, 4.0]) * p).sum().backward()
    optimizer.step()
    asked = tracked or clipping is GradientClipping.NORM
    assert optimizer.last_total_grad_norm == (torch.tensor(5.0) if asked else None)


@pytest.mark.parametrize("order", [2.0, "inf"])
def test_an_empty_gradient_has_no_norm(order):
    optimizer = GradientClippingOptimizer(plain(), GradientClipping.NORM, 0.5, order)
    empty = torch.nn.Parameter(torch.ones(0))
    optimizer.param_groups[0]["params"].append(empty)
    (p,) = optimizer.params.values()
    (4.0 * p).sum().backward()
    empty.grad = torch.ones(0)
    optimizer.step()
    assert optimizer.last_total_grad_norm == (4.0 if order == "inf" else 32**0.5)


def norm_of_all(comm):
    model = sharded_model(comm, RULES["sgd"], "mixed")
    optimizer = optimizer_of(model, enable_global_grad_clip=True, track_grad_norm=True)
    batches = batches_of(0, comm.world)
    loss_of(model, batches[comm.rank]).backward()
    optimizer.step()
    whole = built("cpu")
    sum(loss_of(whole, batch) / comm.world for batch in batches).backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in whole.parameters()])
    assert float(optimizer.last_total_grad_norm) == pytest.approx(float(expected), rel=1e-6)


def test_the_tracked_norm_is_that_of_tables_and_dense_part(ranks):
    ranks.run(norm_of_all, 2)


def test_sparse_gradients_of_the_dense_part_are_refused():
    table = torch.nn.Embedding(3, 2, sparse=True)
    table(torch.tensor([1, 1])).sum().backward()
    assert gradient_norm(table.parameters(), []) == pytest.approx(8**0.5), "but may be measured"
    with pytest.raises(ConfigError, match="has a sparse gradient, whose rows may repeat"):
        clip_norm(table.parameters(), [], 1.0)


def test_a_norm_that_is_no_number_leaves_none():
    p = torch.nn.Parameter(torch.ones(2))
    p.grad = torch.tensor([1.0, float("nan")])
    assert torch.tensor(clip_norm([p], [], 1.0)).isnan()
    assert p.grad.isnan().all()


class CountReads(TorchDispatchMode):
    """Counts the reads of single numbers, for each of which the host waits for a GPU."""

    reads = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.reads += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def test_the_norms_of_all_gradients_are_read_together():
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
    for number, p in enumerate(parameters):
        p.grad = torch.full((2,), float(number))
    with CountReads() as counted:
        norm = clip_norm(parameters, [], 1.0)
    assert (norm, counted.reads) == (pytest.approx(10**0.5), 0)


def with_parameters(comm):
    tables = make_tables()
    plan = make_plan("data_parallel", tables, comm.world)
    plan.tables["t1"] = replace(plan.tables["t1"], as_parameter=True)
    model = DistributedModelParallel(
        built("meta", "fp32"),
        comm.group,
        plan=plan,
        sharders=[EmbeddingBagCollectionSharder(sgd())],
    )
    with pytest.raises(ConfigError, match=r"tables t1 are parameters \(compute kernel dense\)"):
        optimizer_of(model, enable_global_grad_clip=True, **NORM)


def test_tables_that_are_parameters_beside_others_are_refused(ranks):
    ranks.run(with_parameters, 1)
