"""Updates that wait for an optimiser's step: the bits of updates in backward, for numbered rows
and for rows that come and go.
"""

import pytest
import torch
from engine.engine_cases import same_bits
from engine.test_dynamic_tables import batch_of, made, rows_by_key, tables
from tiers import one_of

from recapp.errors import ConfigError
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.transport.communicator import Comm


class Stepper:
    """Stands for the optimiser whose step ends the update."""


def trained(comm, kind, rule, backend, deferred, settings):
    """Steps of one lookup and of two; the second's ids overlap with the first's."""
    configs = tables(dynamic=settings is not None, **(settings or {}))
    collection = made(comm, kind, rule, backend=backend, configs=configs)
    gradients = collection.shared.update
    stepper = Stepper()
    if deferred:
        gradients.defer(stepper)
    for step in range(4):
        losses = [
            collection(batch_of(10 * step + n, comm.rank)).values().square().sum()
            for n in range(1 + step % 2)
        ]
        sum(losses).backward()
        gradients.end_step()
    return rows_by_key(comm, collection)


def differing(comm, kind, rule, backend, settings):
    now, later = (
        trained(comm, kind, rule, backend, deferred, settings) for deferred in (False, True)
    )
    assert now.keys() == later.keys()
    return [key for key, value in now.items() if not same_bits(value, later[key])]


@pytest.mark.parametrize(
    ("world", "kind", "rule", "backend", "settings"),
    one_of(
        8,
        [
            (2, "grid_shard", "adam", "torch", {"seen": 3}),
            (2, "column_wise", "rowwise_adagrad", "numba", None),
            (1, "table_wise", "rowwise_adagrad", "torch", None),
            (2, "row_wise", "adam", "numba", {}),
            (1, "mixed", "adam", "numba", {"max_rows": 64}),
            (4, "mixed", "rowwise_adagrad", "torch", {"seen": 2, "eviction": "lfu"}),
            (2, "data_parallel", "sgd", "numba", {"max_rows": 64, "seen": 2}),
            (4, "row_wise", "sgd", "torch", {"max_rows": 64}),
        ],
    ),
)
def test_updates_at_the_step_have_the_bits_of_updates_in_backward(
    ranks, world, kind, rule, backend, settings
):
    assert not any(ranks.run(differing, world, kind, rule, backend, settings))


def counted(comm, settings):
    configs = tables(**settings)
    collection = made(comm, "row_wise", "sgd", configs=configs)
    gradients = collection.shared.update
    stepper = Stepper()
    gradients.defer(stepper)
    lengths = torch.tensor([1, 0, 0, 0])
    ids = KeyedJaggedTensor(["a", "b", "c", "s"], torch.tensor([comm.rank]), lengths=lengths)
    collection(ids).values().sum().backward()
    return gradients.power_sum(2.0, 0.0)


@pytest.mark.parametrize(("settings", "rows"), [({}, 2), ({"seen": 3}, 0)])
def test_a_key_that_gets_no_row_does_not_count_in_the_norm(ranks, settings, rows):
    for total in ranks.run(counted, 2, settings):
        assert total == rows * 8 * 0.25


def test_gradients_of_tables_whose_optimiser_is_gone_are_an_error():
    collection = made(Comm(), "table_wise", "sgd", configs=tables(dynamic=False))
    stepper = Stepper()
    collection.shared.update.defer(stepper)
    loss = collection(batch_of(1, 0)).values().square().sum()
    del stepper
    with pytest.raises(
        ConfigError, match=r"the optimiser that clips gradients .* was deleted: keep it"
    ):
        loss.backward()
