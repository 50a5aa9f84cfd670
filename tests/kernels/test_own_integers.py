"""On a GPU that holds all rows, four launches and a sort make the integers of all groups. They are
those of the reference, group by group. Kernels run in Triton's interpreter here.
"""

import itertools

import numpy as np
import pytest
import torch
from engine.engine_cases import RULES, make_plan

from recapp.engine.own_integers import OwnIntegers
from recapp.engine.requests import Requests
from recapp.engine.sharded_tables import ShardedTables
from recapp.engine.state import Member
from recapp.errors import IdError
from recapp.sparse.keyed_jagged_tensor import MISSING, KeyedJaggedTensor
from recapp.tables.config import EmbeddingBagConfig, EmbeddingConfig, lookups_of
from recapp.transport.communicator import Comm

FEATURES = ["a", "b", "c", "d"]
BAGS = {
    "t0": (131, 8, ["a", "b"], {}),
    "t1": (40, 16, ["b", "c"], {"id_rule": "hash"}),
    "t2": (7, 8, ["c"], {"id_rule": "clamp", "min_key": -2, "pooling": "mean"}),
    "t3": (1500, 4, ["d"], {"id_rule": "hash", "pooling": "mean"}),
}


def tables(plan="table_wise", row_order="natural"):
    bags = [
        EmbeddingBagConfig(name=n, num_embeddings=rows, embedding_dim=dim, feature_names=f, **more)
        for n, (rows, dim, f, more) in BAGS.items()
    ]
    sequences = [EmbeddingConfig(90, 8, "s0", feature_names=["d", "a"], id_rule="clamp")]
    comm = Comm()
    both = [*bags, *sequences]
    cut = make_plan(plan, both, 1, row_order=row_order, column_width=4)
    members = [Member(lookups_of(bags)), Member(lookups_of(sequences))]
    rule = RULES["sgd"]
    return ShardedTables(both, cut, comm, rule, 1, "triton", None, True, None, members)


def batch(samples, seed, most=3, weighted=False, outside=True):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, most + 1, (len(FEATURES), samples), generator=generator)
    total = int(lengths.sum())
    ids = torch.randint(-50 if outside else 0, 4000, (total,), generator=generator)
    per_F = lengths.sum(1).tolist()
    ids[: per_F[0] + per_F[1]] %= 131  # the table of `a` and `b` has the rule `error`
    if total:
        ids[torch.randint(0, total, (3,), generator=generator)] = MISSING
        ids[-1] = 2**63 - 1
    weights = torch.rand(total, generator=generator) if weighted else None
    return KeyedJaggedTensor(FEATURES, ids, weights, lengths.flatten())


def links_of(shared, features, own):
    with torch.enable_grad():
        requests = Requests(features, shared.state, None, own)
    requests.finish()
    requests.group()
    return requests


def assert_equal(linked, reference):
    for asked, known in zip(linked.asked, reference.asked, strict=True):
        for name in ("combine_links", "gradient_links"):
            mine, wanted = getattr(asked, name), getattr(known, name)
            bags = mine.bags if mine.count is None else int(mine.count)
            assert bags == wanted.bags
            assert torch.equal(mine.offsets_M1[: bags + 1], wanted.offsets_M1)
            assert torch.equal(mine.index_N.long(), wanted.index_N.long())
            for a, b in ((mine.weights_N, wanted.weights_N), (mine.at_M, wanted.at_M)):
                assert (a is None) == (b is None)
                assert a is None or torch.equal(a, b)
        assert torch.equal(asked.row_U[: len(known.row_U)].long(), known.row_U.long())


@pytest.mark.parametrize(
    ("samples", "most", "weighted", "plan", "order"),
    [
        (5, 3, False, "table_wise", "natural"),
        (300, 6, True, "table_wise", "mixed"),
        (40, 1, False, "column_wise", "natural"),
        (2, 0, True, "row_wise", "natural"),
        (0, 0, False, "table_wise", "natural"),
    ],
)
def test_the_integers_of_all_groups_are_those_of_the_reference(
    interpreted, samples, most, weighted, plan, order
):
    shared = tables(plan, order)
    assert OwnIntegers.takes(shared.state)
    own = OwnIntegers(shared.state)
    for seed in range(2):  # the second batch finds the memory of the first
        features = batch(samples, seed, most, weighted)
        linked = links_of(shared, features, own)
        changed = dict(shared.state.id_rules.changed)
        reference = links_of(shared, features, None)
        twice = shared.state.id_rules.changed
        assert {k: 2 * (n - b) for (k, n), b in zip(changed.items(), itertools.repeat(0))} == twice
        assert_equal(linked, reference)
        shared.state.id_rules.changed.update(dict.fromkeys(twice, 0))
        linked.release()
        reference.release()


def test_an_id_outside_of_its_table_is_named(interpreted):
    shared = tables()
    features = batch(20, 1)
    features.values()[7] = 131
    features.values()[9] = -3
    with pytest.raises(IdError, match="table t0: .*feature a has the id 131, which is outside"):
        links_of(shared, features, OwnIntegers(shared.state))
