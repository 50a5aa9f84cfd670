"""The embedding part of programs written for HugeCTR, with another import line."""

import json
import re
from hashlib import sha256

import pytest
import torch
from engine.engine_cases import whole_tensors
from torch import nn

from recapp import hugectr
from recapp.engine.sharded_collection import sharded_collections
from recapp.errors import ConfigError, IdError, PlanError
from recapp.optim.rules import adam, sgd
from recapp.parallel import DistributedModelParallel, EmbeddingBagCollectionSharder
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor

SIZES = [203931, 18598, 14092, 7012, 18977, 4, 6385, 1245, 49, 186213, 71328, 67288, 11, 2168]
SIZES += [7338, 61, 4, 932, 15, 204515, 141526, 199433, 60919, 9137, 71, 34]
MIXED = [
    [
        {
            "local_embedding_list": own,
            "global_embedding_list": [[0, 2], [1, 3]],
            "table_placement_strategy": "mp",
        },
        {
            "local_embedding_list": [4],
            "global_embedding_list": [[4], [4]],
            "table_placement_strategy": "dp",
        },
    ]
    for own in ([0, 2], [1, 3])
]


def config(rows=10, dim=4, **more):
    return hugectr.EmbeddingTableConfig(max_vocabulary_size=rows, ev_size=dim, **more)


def planned(plan=None, **more):
    """The notebook's own second example: lookups 0, 1, 2, 3, 4 on tables 0, 1, 2, 1, 3."""
    tables = [config(rows, table_id=k, **more) for k, rows in enumerate((11, 7, 5, 4))]
    planner = hugectr.EmbeddingPlanner()
    for k, table in enumerate((0, 1, 2, 1, 3)):
        combiner = "average" if k == 3 else "sum"
        planner.embedding_lookup(
            table_config=tables[table],
            bottom_name=f"data{k}",
            top_name=f"emb{k}",
            combiner=combiner,
        )
    return planner.create_embedding_collection(plan)


def ids_of(keys, ids, lengths=None):
    return KeyedJaggedTensor(
        list(keys),
        torch.as_tensor([*ids]),
        lengths=torch.ones(len(ids)).long() if lengths is None else lengths,
    )


def plan_file(folder):
    path = folder / "plan.json"
    path.write_text(json.dumps(MIXED))
    return path


# ---- tables


def test_a_table_is_described_by_position_and_under_every_name():
    wanted = config(10, 4, id_space=3, min_key=2, max_key=12).record("t", ["f"])
    for made in (
        hugectr.EmbeddingTableConfig(3, 10, 4, 2, 12),
        hugectr.EmbeddingTablePlaceHolder(id_space=3, max_vocabulary_size=10, ev_size=4, min_key=2),
        hugectr.EmbeddingTableConfig("t", 10, 4, min_key=2),
        config(torch.tensor(10), 4, name="t", min_key=2, opt_params_or_empty=None),
    ):
        assert made.record("t", ["f"]) == wanted
    rule = hugectr.CreateOptimizer(optimizer_type=hugectr.Optimizer_t.SGD)
    assert hugectr.EmbeddingTableConfig("t", 10, 4, rule).opt_params is rule
    assert hugectr.EmbeddingTableConfig(3, 10, 4, 0, 10, rule).opt_params is rule
    assert config(opt_params_py=rule).opt_params is rule


def test_tables_have_names_by_name_number_or_set_of_keys():
    planner = hugectr.EmbeddingPlanner()
    for k, table in enumerate(
        (
            config(name="clicks"),
            config(id_space=0),
            config(id_space=0),
            config(),
            config(table_id=9),
        )
    ):
        planner.embedding_lookup(table, "data", f"emb{k}", "sum")
    made = planner.create_embedding_collection()
    names = ["clicks", "table_0", "table_0_1", "table_3", "table_9"]
    assert [t.name for t in made.tables] == names
    vectors = made.module()(ids_of(["data"], [7]))
    assert not torch.equal(vectors["emb1"], vectors["emb2"])  # the same key, other vectors


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"rows": -2}, "table_0: max_vocabulary_size=-2: must be a whole number of at least 1"),
        ({"opt_params": 5}, "table_0: opt_params=5: must be a result of CreateOptimizer"),
        ({"rows": None}, "EmbeddingTableConfig: table_0: max_vocabulary_size must be given"),
        ({"max_key": 11}, "tables.table_0.max_key=11: 10 rows from min_key=0 on hold the keys"),
        ({"minkey": 1}, "EmbeddingTableConfig: table_0: unknown argument minkey"),
        ({"dim": 0}, "tables.table_0.embedding_dim=0: must be a whole number"),
    ],
)
def test_a_table_that_cannot_be_is_refused(values, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        config(**values)


@pytest.mark.usefixtures("reference_kernels")
def test_a_table_of_minus_one_rows_takes_any_key_and_needs_no_bounds():
    planner = hugectr.EmbeddingPlanner()
    planner.embedding_lookup(config(rows=-1, min_key=2, max_key=12), "data", "emb", "sum")
    made = planner.create_embedding_collection()
    assert made.tables[0].dynamic is not None
    model = DistributedModelParallel(nn.ModuleList([made.module()]))
    assert model.module[0](ids_of(["data"], [2**62])).values().shape == (1, 4)


@pytest.mark.parametrize("key", [12, 1])
def test_a_key_beyond_its_table_names_table_lookup_and_key(key):
    planner = hugectr.EmbeddingPlanner()
    planner.embedding_lookup(config(min_key=2, max_key=12), "data", "emb", "sum")
    module = planner.create_embedding_collection().module()
    says = f"table table_0: lookup emb: feature data has the id {key}, which is outside its 10 rows"
    with pytest.raises(IdError, match=says):
        module(ids_of(["data"], [key]))


# ---- lookups


def test_lookups_are_declared_under_every_name_in_their_order():
    tables = [config(), config()]
    planner = hugectr.EmbeddingPlanner()
    planner.embedding_lookup(tables[1], "data0", "emb0", "sum")
    planner.embedding_lookup(emb_table=tables[0], input="data1", output="emb1", combiner="mean")
    planner.embedding_lookup([tables[1], tables[0]], ["data2", "data3"], "joint", ["average"] * 2)
    planner.embedding_lookup(table_config=tables, bottom_name=["a", "b"], top_name=["x", "y"])
    made = planner.create_embedding_collection()
    assert [(x.table.name, x.feature, x.output, x.pooling) for x in made.lookups] == [
        ("table_0", "data0", "emb0", "sum"),
        ("table_1", "data1", "emb1", "mean"),
        ("table_0", "data2", "joint0", "mean"),
        ("table_1", "data3", "joint1", "mean"),
        ("table_1", "a", "x", "sum"),
        ("table_0", "b", "y", "sum"),
    ]
    outputs = made.module()(ids_of(["data0", "data1", "data2", "data3", "a", "b"], range(6)))
    assert outputs.keys()[2:4] == ["joint0", "joint1"] and outputs.values().shape == (1, 24)


def two_of_one_name():
    return [config(name="t"), config(name="t")], ["a", "b"], ["x", "y"], "sum"


@pytest.mark.parametrize(
    ("values", "named", "says"),
    [
        (two_of_one_name(), {}, "embedding_lookup: two tables are called t: give each a name or"),
        (
            ([config(), config()], ["a", "b"], "x", ["sum", "average"]),
            {},
            "embedding_lookup: the combiners of one lookup differ (sum, average): call it once",
        ),
        (
            ([config(), config()], ["a"], "x", "sum"),
            {},
            "embedding_lookup: 2 tables, 1 inputs, 2 outputs and 2 combiners: must be lists of one",
        ),
        ((config(), "a", "x", "summ"), {}, "lookup 0 (x).combiner=summ: did you mean sum"),
        ((config(), "a"), {"topname": "x"}, "unknown argument topname; did you mean top_name"),
        ((config(), "a"), {}, "embedding_lookup: top_name must be given"),
        ((config(), "a", "x"), {"top_name": "y"}, "output and top_name are two names of one value"),
        (("t", "a", "x", "sum"), {}, "table_config=t: must be an EmbeddingTableConfig"),
    ],
)
def test_a_lookup_that_cannot_be_is_refused_in_one_line(values, named, says):
    with pytest.raises(ConfigError, match=re.escape(says)) as refused:
        hugectr.EmbeddingPlanner().embedding_lookup(*values, **named)
    assert "\n" not in str(refused.value)


def test_what_is_missing_or_told_twice_is_refused_when_the_collection_is_made():
    with pytest.raises(ConfigError, match="no lookup is declared: call embedding_lookup"):
        hugectr.EmbeddingPlanner().create_embedding_collection()
    planner = hugectr.EmbeddingPlanner()
    for name in ("a", "b"):
        planner.embedding_lookup(config(), name, "x", "sum")
    with pytest.raises(ConfigError, match="two lookups are called x; outputs need different names"):
        planner.create_embedding_collection()


def test_an_unknown_input_is_an_error_with_the_close_matches():
    with pytest.raises(Exception, match=r"data3.*did you mean data_3"):
        planned().module()(ids_of(["data0", "data1", "data2", "data_3", "data4"], [0] * 5))


def test_optimisers_of_tables_become_row_rules():
    kind = hugectr.Optimizer_t
    rule = hugectr.CreateOptimizer(kind.Adam, beta1=0.8)
    assert hugectr.row_rule(planned(opt_params=rule).opt_params["table_0"]) == {
        "rule": "adam",
        "beta1": 0.8,
        "beta2": 0.999,
        "eps": 1e-7,
    }
    assert hugectr.row_rule(hugectr.CreateOptimizer(kind.SGD)) == {"rule": "sgd"}
    adagrad = hugectr.CreateOptimizer(optimizer_type=kind.AdaGrad, epsilon=1e-6)
    assert hugectr.row_rule(adagrad) == {
        "rule": "adagrad",
        "eps": 1e-6,
        "initial_accumulator": 0.0,
    }
    planner = hugectr.EmbeddingPlanner()
    for k, table in enumerate((config(opt_params=rule), config())):
        planner.embedding_lookup(table, "data", f"emb{k}", "sum")
    rules = planner.create_embedding_collection().rules(sgd(0.5))
    assert rules == {"*": sgd(0.5), "table_0": adam(0.5, 0.8, 0.999, 1e-7)}
    momentum = hugectr.CreateOptimizer(kind.MomentumSGD, momentum_factor=0.8)
    ftrl = hugectr.CreateOptimizer(kind.Ftrl, lambda1=0.1)
    assert hugectr.row_rule(momentum) == {"rule": "momentum_sgd", "momentum": 0.8}
    assert hugectr.row_rule(ftrl) == {"rule": "ftrl", "beta": 0.0, "l1": 0.1, "l2": 0.0}
    with pytest.raises(ConfigError, match="CreateOptimizer: update_type="):
        hugectr.CreateOptimizer(kind.Adam, update_type=hugectr.Update_t.Global)


def test_a_concatenation_without_a_model_needs_its_hotness():
    planner = hugectr.EmbeddingPlanner()
    planner.embedding_lookup(config(), "a", "x", "concat")
    made = planner.create_embedding_collection()
    with pytest.raises(ConfigError, match="lookup x: combiner=concat: embedding_lookup must get"):
        made.module()
    assert made.sized({"a": 3}).module().lookups[0].hotness == 3


def test_outputs_are_as_hugectrs_layers_take_them():
    planner = hugectr.EmbeddingPlanner()
    tables = [config() for _ in range(2)]
    planner.embedding_lookup(tables, ["a", "b"], "emb", "sum")
    planner.embedding_lookup(tables[0], "a", "side by side", "concat", hotness=3)
    made = planner.create_embedding_collection()
    ids = KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2, 3, 4]), lengths=[2, 0, 1, 1])
    found = made.outputs(made.module()(ids))
    columns = tables[0].ev_size
    assert {name: list(t.shape) for name, t in found.items()} == {
        "emb0": [2, 1, columns],
        "emb1": [2, 1, columns],
        "side by side": [2, 3 * columns],
    }
    assert torch.cat([found["emb0"], found["emb1"]], 1).shape == (2, 2, columns)
    assert not found["side by side"][0, 2 * columns :].any()  # a short bag ends in zeros


# ---- plans


def test_a_plan_file_numbers_lookups_as_they_were_declared(tmp_path):
    made = planned(plan_file(tmp_path))
    assert [made.plan.tables[f"table_{k}"].ranks for k in range(4)] == [[0], [1], [0], [0, 1]]
    assert not made.plan.undecided and made.plan.tables["table_3"].mode == "replicated"
    assert [[{**g} for g in own] for own in made.lists()] == MIXED
    assert planned().plan is None


def test_a_plan_for_other_lookups_is_refused(tmp_path):
    table = config(name="t")
    planner = hugectr.EmbeddingPlanner()
    for k in range(5):
        planner.embedding_lookup(table if k in (0, 3) else config(), f"data{k}", f"emb{k}", "sum")
    with pytest.raises(
        PlanError,
        match=r"lookup 3 \(t\) and lookup 0 .*: lookup 0 lies on GPU 0, lookup 3 lies on GPU 1",
    ):
        planner.create_embedding_collection(plan_file(tmp_path))


def notebook_plan(sizes, gpus):
    """What the notebook's first generator makes."""
    whole = [k for k, rows in enumerate(sizes) if rows > 6000]
    replicated = [k for k, rows in enumerate(sizes) if rows <= 6000]
    every = [whole[g::gpus] for g in range(gpus)]
    return [
        [
            {
                "local_embedding_list": every[g],
                "table_placement_strategy": "mp",
                "global_embedding_list": every,
            },
            {
                "local_embedding_list": replicated,
                "table_placement_strategy": "dp",
                "global_embedding_list": [replicated] * gpus,
            },
        ]
        for g in range(gpus)
    ]


def test_the_notebooks_program_plans_and_prints_what_it_prints_there(tmp_path, capsys):
    tables = [
        hugectr.EmbeddingTableConfig(
            table_id=k, max_vocabulary_size=rows, ev_size=128, min_key=0, max_key=rows
        )
        for k, rows in enumerate(SIZES)
    ]
    planner = hugectr.EmbeddingPlanner()
    for k, table in enumerate(tables):
        planner.embedding_lookup(
            table_config=table, bottom_name=f"data{k}", top_name=f"emb_vec{k}", combiner="sum"
        )
    plan = notebook_plan(SIZES, 8)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan, indent=4))
    made = planner.create_embedding_collection(str(path))
    for printed in (plan, made):
        hugectr.print_plan(printed)
        said = capsys.readouterr().out
        assert sha256(said.encode()).hexdigest() == (
            "f4d859efc70b1b6626943f41512d6e8b77fcac3815f6da5f2e89c3f3fde14c3e"
        )
    assert made.module("meta").embedding_bag_configs()[0].num_embeddings == SIZES[0]
    with pytest.raises(PlanError, match="does not have the tables that it was made for"):
        hugectr.print_plan(made.plan)
    with pytest.raises(PlanError, match="has no plan"):
        hugectr.print_plan(planned())


def test_later_versions_declare_lookups_and_leave_the_plan_to_recapp():
    ebc = hugectr.EmbeddingCollectionConfig(True, hugectr.CommunicationStrategy.Hierarchical)
    tables = [config(name=str(k)) for k in range(3)]
    features = [f"data{k}" for k in range(3)]
    ebc.embedding_lookup(tables, features, "sparse_embedding", ["sum"] * 3)
    assert [t.name for t in ebc.collection.tables] == ["0", "1", "2"]
    assert ebc.collection.plan is None
    says = (
        r"recapp does not read plans that are a matrix of GPUs and tables \(shard_matrix\): leave"
    )
    with pytest.raises(PlanError, match=rf"EmbeddingCollectionConfig.shard: {says}"):
        ebc.shard(
            shard_matrix=[["0", "2"], ["0", "1", "2"]],
            shard_strategy=[("mp", ["0", "1"]), ("dp", ["2"])],
            compression_strategy={hugectr.CompressionStrategy.Reduction: ["1"]},
        )
    planner = hugectr.EmbeddingPlanner()
    planner.embedding_lookup(config(), "data", "emb", "sum")
    for matrix in (([[1], [1]], [[0]], ["mp"]), ([[1]],)):
        with pytest.raises(PlanError, match=f"takes a plan_file alone: {says}"):
            planner.create_embedding_collection(*matrix)


# ---- training


class Clicks(nn.Module):
    """A model on a collection."""

    def __init__(self, collection):
        super().__init__()
        torch.manual_seed(5)
        self.collection = collection
        self.score = nn.Linear(20, 1, dtype=torch.float64)

    def forward(self, features):
        """Return a logit per sample."""
        return self.score(self.collection(features).values()).squeeze(1)


def batch(seed):
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (5 * 6,), generator=draw)
    sizes = torch.tensor([11, 7, 5, 7, 4]).repeat_interleave(lengths.view(5, 6).sum(1))
    ids = (torch.rand(len(sizes), generator=draw) * sizes).long() + 100
    return ids_of([f"data{k}" for k in range(5)], ids, lengths)


def trained(comm, path):
    made = planned(path, min_key=100, data_type="fp64")
    model = DistributedModelParallel(
        Clicks(made.module("meta", seed=3)),
        comm.group,
        plan=made.plan,
        sharders=[EmbeddingBagCollectionSharder(sgd(0.5))],
    )
    dense = torch.optim.SGD(model.parameters(), 0.5)
    oracle = Clicks(made.module(seed=3))
    whole = torch.optim.SGD(oracle.parameters(), 0.5)
    for step in range(4):
        dense.zero_grad()
        model(batch(10 * step + comm.rank)).square().mean().backward()
        dense.step()
        whole.zero_grad()
        losses = [oracle(batch(10 * step + r)).square().mean() for r in range(comm.world)]
        (sum(losses) / comm.world).backward()
        whole.step()
    (collection,) = sharded_collections(model)
    for (table, _), data in whole_tensors(model.comm, collection).items():
        torch.testing.assert_close(
            data, oracle.collection.weight(table).detach(), rtol=1e-9, atol=1e-9
        )
    return {name: s.ranks for name, s in model.plan.items()}


@pytest.mark.usefixtures("reference_kernels")
def test_a_program_trains_under_its_plan_file_as_without_sharding(ranks, tmp_path):
    for lie in ranks.run(trained, 2, str(plan_file(tmp_path))):
        assert lie == {"table_0": [0], "table_1": [1], "table_2": [0], "table_3": [0, 1]}
