"""A rule for each table: every table trains as it would alone under a dense optimiser of its own,
whatever plan, and groups, names, rates and state are those of its rule.
"""

import pytest
import torch
from engine.engine_cases import make_plan, make_tables
from optim.dense_rules import CASES as RULE_CASES
from optim.dense_rules import rule_of_case
from parity.cases import KINDS, train_and_compare
from tiers import cover, one_of

from recapp.compat.torchrec.keyed import FusedOptimizer
from recapp.engine.sharded_collection import shard_bags
from recapp.errors import ConfigError
from recapp.optim.optimizer import hybrid
from recapp.optim.rules import adagrad, adam, rowwise_adagrad, sgd
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.transport.communicator import Comm

MIXES = {
    "torchs": {"*": rowwise_adagrad(0.5), "t1": sgd(0.5), "t2": adagrad(0.5), "t[3-9]": adam(0.1)},
    **{
        f"{n}": {f"t{k}": rule_of_case(RULE_CASES[(n + 5 * k) % len(RULE_CASES)]) for k in range(4)}
        for n in range(5)
    },
}


def train(comm, seed, kind, mix, backend, mode):
    options = {"rule": MIXES[mix], "mode": mode, "pooling": "both", "weighted": False}
    return train_and_compare(comm, seed, kind, backend, options | {"uneven": True, "steps": 4})


def check(ranks, seed, kind, world, mix, backend, mode):
    compared = set()
    for calls, here, agreed in ranks.run(train, world, seed, kind, mix, backend, mode):
        # one rank learns from the gradient itself; row statistics are one message
        assert calls == (4 if world > 1 else 3) + agreed
        compared |= here
    assert compared == {
        (table, tensor)
        for table, rule in zip(("t0", "t1", "t2", "t3"), in_order(mix), strict=True)
        for tensor in ("weight", *(name for name, _ in rule.state))
    }


def in_order(mix):
    return list(MIXES[mix].values())


CASES = [
    (kind, world, *kernels, mix)
    for kind, world, kernels, mix in cover(
        2, [KINDS, [1, 2, 4], [("torch", "pooled"), ("numba", "unique")], list(MIXES)]
    )
]


# few of many rules that are compiled: tests/kernels/test_rules.py has all of them
@pytest.mark.parametrize(("kind", "world", "backend", "mode", "mix"), one_of(25, CASES))
def test_every_table_trains_as_under_a_dense_optimiser_of_its_own(
    ranks, kind, world, backend, mode, mix
):
    check(ranks, 5, kind, world, mix, backend, mode)


# ---- one rank, no training needed


def collection(rule):
    tables = make_tables()
    plan = make_plan("table_wise", tables, 1)
    return shard_bags(tables, plan, Comm(), rule, backend="torch")


def test_each_rule_has_a_param_group_whose_name_says_which():
    made = collection({"*": adagrad(0.1), "t0": sgd(0.2)})
    assert [(g["name"], g["lr"], g["tables"]) for g in made.shared.param_groups] == [
        ("sparse/sgd", 0.2, ["t0"]),
        ("sparse/adagrad", 0.1, ["t1", "t2"]),
    ]
    assert [g["name"] for g in collection(sgd(0.1)).shared.param_groups] == ["sparse/sgd"]
    made = collection({"*": sgd(0.1), "t0": sgd(0.2)})
    assert [g["name"] for g in made.shared.param_groups] == ["sparse/sgd@t0", "sparse/sgd@t1+1"]
    assert made.shared.rules == {"t0": sgd(0.2), "t1": sgd(0.1), "t2": sgd(0.1)}


def test_several_collections_number_only_names_that_occur_twice():
    two = [collection(rule).shared for rule in ({"*": sgd(0.1), "t0": adam(0.2)}, sgd(0.1))]
    optimizer = hybrid(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1), two)
    names = [group["name"] for group in optimizer.param_groups]
    assert names == ["dense", "sparse/adam", "sparse/sgd/1", "sparse/sgd/2"]


def step(made, ids=(0, 1, 2)):
    features = [f for t in make_tables() for f in t.feature_names]
    features = list(dict.fromkeys(features))
    values = torch.tensor(ids * len(features))
    lengths = torch.ones(len(values), dtype=torch.int64)
    made(KeyedJaggedTensor(features, values, lengths=lengths)).values().sum().backward()


def weights_of(made):
    return {b.table: b.data.clone() for b in made.blocks() if b.tensor == "weight"}


def test_one_scheduler_drives_every_rule_and_each_reads_its_own_live_rate():
    made = collection({"*": adagrad(0.1), "t0": sgd(0.2)})
    optimizer = hybrid(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 1.0), [made.shared])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.5**n)
    optimizer.step()
    schedule.step()
    assert [group["lr"] for group in made.shared.param_groups] == [0.1, 0.05]
    made.shared.param_groups[0]["lr"] = 0.0
    before = weights_of(made)
    step(made)
    after = weights_of(made)
    assert [torch.equal(before[t], after[t]) for t in ("t0", "t1", "t2")] == [True, False, False]


def test_the_state_of_several_rules_loads_again():
    one = collection({"*": adagrad(0.1), "t0": adam(0.2)})
    step(one)
    one.shared.param_groups[1]["lr"] = 0.7
    kept = FusedOptimizer({"": one})
    kept.save_param_groups(True)
    stored = kept.state_dict()
    assert [group["params"] for group in stored["param_groups"]] == [
        ["embedding_bags.t0.weight"],
        ["embedding_bags.t1.weight", "embedding_bags.t2.weight"],
    ]
    other = collection({"*": adagrad(0.1), "t0": adam(0.2)})
    other.load_state_dict(one.state_dict())
    loaded = FusedOptimizer({"": other})
    loaded.save_param_groups(True)
    loaded.load_state_dict(stored)
    assert [group["lr"] for group in other.shared.param_groups] == [0.2, 0.7]
    assert other.shared.updates == 1
    for made in (one, other):
        step(made)
    found = weights_of(other)
    assert all(torch.equal(held, found[table]) for table, held in weights_of(one).items())


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"*": sgd(), "t7": sgd()}, "optimizer.sparse.tables.t7: no such table; "),
        ({"*": sgd(), "x*": sgd()}, r"optimizer.sparse.tables.x\*: no such table; "),
        ({"t0": sgd()}, "optimizer.sparse.tables: table t1 has no rule: name it, or give"),
    ],
)
def test_rules_and_tables_that_do_not_fit_are_refused(rules, message):
    with pytest.raises(ConfigError, match=message) as refused:
        collection(rules)
    assert len(str(refused.value).splitlines()) == 1
