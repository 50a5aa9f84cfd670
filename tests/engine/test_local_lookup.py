"""A single rank that only reads has the bits of the exchange, and sends nothing."""

import pytest
import torch
from engine.test_random_mixtures import Mixture, batch_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parity.cases import sharding

from recapp.engine.sharded_collection import shard_model, sharded_tables
from recapp.errors import IdError
from recapp.sharding.sharding_plan import ShardingPlan
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.tables.collections import embedding_tables
from recapp.transport.communicator import Comm


def model_of(seed, kind="random"):
    import random

    model = Mixture(seed, 3, True)
    rng = random.Random(seed)
    tables = embedding_tables(model)
    cut = {t.name: sharding(kind, t, 1, rng, "unique") for t in tables}
    return shard_model(model, ShardingPlan(cut, 1), Comm(alone=True), None, "torch")


def both_ways(model, batch):
    """What is read directly, and by requests."""
    found = []
    with torch.no_grad():
        for direct in (True, False):
            held = [(shared, shared._local) for shared in sharded_tables(model)]
            for shared, _ in held:
                shared._local = shared._local if direct else None
            found.append(model(batch))
            for shared, local in held:
                shared._local = local
    return found


@settings(max_examples=6, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 10_000))
def test_any_mixture_under_any_tiling_has_the_same_bits(seed):
    model = model_of(seed)
    for rows in (4, 1, 0):
        direct, requested = both_ways(model, batch_of(rows, seed))
        assert torch.equal(direct, requested)


def one_id_each(seed, samples):
    """A batch whose features have one id a sample."""
    features = batch_of(samples, seed).keys()
    values = torch.randint(0, 3, (len(features) * samples,), generator=torch.manual_seed(seed))
    return KeyedJaggedTensor(features, values, None, torch.ones_like(values))


@pytest.mark.parametrize("seed", [1, 8, 21])
def test_batches_of_one_form_have_the_bits_of_the_exchange_whatever_came_between(seed):
    model = model_of(seed)
    batches = [one_id_each(n, rows) for n, rows in enumerate([3, 3, 2, 3, 2])]
    batches.insert(2, batch_of(3, seed))
    for batch in batches:
        direct, requested = both_ways(model, batch)
        assert torch.equal(direct, requested)


def test_weights_are_multiplied_alike():
    model = model_of(7, "row_wise")
    plain = batch_of(5, 7)
    weights = torch.rand(len(plain.values()), dtype=torch.float64)
    batch = KeyedJaggedTensor(plain.keys(), plain.values(), weights, plain.lengths())
    direct, requested = both_ways(model, batch)
    assert torch.equal(direct, requested)


def test_nothing_is_sent_and_an_id_outside_is_the_same_error():
    model = model_of(21, "table_wise")
    (shared, *_) = sharded_tables(model)
    before = shared.comm.calls
    good = batch_of(3, 21)
    with torch.no_grad():
        model(good)
    assert shared.comm.calls == before
    bad = KeyedJaggedTensor(good.keys(), good.values() + 10**6, None, good.lengths())
    said = []
    for direct in (True, False):
        for tables in sharded_tables(model):
            tables._local = tables._local if direct else None
        with torch.no_grad(), pytest.raises(IdError) as error:
            model(bad)
        said.append(str(error.value))
    assert said[0] == said[1]
