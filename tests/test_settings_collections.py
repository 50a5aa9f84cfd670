"""A model of a user's package gets bags, a sequence and wide weights from the settings. It trains
under every plan to the scores of the unsharded model, resumes, predicts, and is exported.
"""

import json
import os
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from jobs import command, recipe, validation
from list_of_tables import listed

from recapp import plan
from recapp.dataset.data_settings import DataSettings
from recapp.dataset.schema import Schema
from recapp.errors import ConfigError
from recapp.run.model import build_model
from recapp.run.model_tables import check_collections, tables_of_model
from recapp.run.run_checks import check_training
from recapp.run.run_rows import made_up_rows, rows_of
from recapp.settings.records import Constructor
from recapp.tables.table_settings import BAGS, FurtherTables, TablesOfDataset, listed_tables

ROWS = 1200
STEPS = 8
RATE = 0.5
TESTS = Path(__file__).resolve().parent
HERE = os.pathsep.join([str(TESTS.parent), str(TESTS)])
TRUST = "trust=[watch_model]"
TABLES = """
source: list
tables:
  - {name: user, num_embeddings: 40, embedding_dim: 4}
  - {name: item, num_embeddings: 30, embedding_dim: 4}
  - {name: item_weight, num_embeddings: 30, embedding_dim: 1, collection: wide}
  - {name: history_weight, num_embeddings: 20, embedding_dim: 1, collection: wide, id_rule: hash}
lookups:
  - {table: user, feature: user}
  - {table: item, feature: item}
  - {table: item, feature: history, combiner: none}
  - {table: item_weight, feature: item}
  - {table: history_weight, feature: history, combiner: mean}
"""


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """A folder with what users watched, and the options of the user's package."""
    folder = tmp_path_factory.mktemp("watch")
    random = np.random.default_rng(7)
    item = random.integers(0, 30, ROWS)
    history = [random.integers(0, 30, n).tolist() for n in random.integers(0, 6, ROWS)]
    columns = {
        "clicked": np.array([i in h for i, h in zip(item, history, strict=True)], np.int8),
        "price": random.random(ROWS).astype(np.float32),
        "user": random.integers(0, 40, ROWS),
        "item": item,
        "history": pa.array(history, pa.list_(pa.int64())),
    }
    pq.write_table(pa.table(columns), folder / "logs.parquet")
    options = {
        "tables/watched.yaml": TABLES,
        "model/watch.yaml": "_target_: watch_model.Watch\n",
    }
    for name, text in options.items():
        path = folder / "mine" / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    return folder


def settings(logs, *more, tables="watched", model="watch"):
    return (
        *(f"tables={tables}", f"model={model}", "dataset=custom", "optimizer=sgd"),
        *(f"dataset.path={logs}/logs.parquet", "dataset.label=clicked", "dataset.dense=[price]"),
        *("dataset.sparse=[user,item,history]", "dataset.batch_size=128"),
        *(
            f"optimizer.dense.lr={RATE}",
            f"optimizer.sparse.lr={RATE}",
            f"trainer.max_steps={STEPS}",
        ),
        *more,
    )


@pytest.fixture(scope="module")
def expected(logs):
    """Scores of the model that torch trains on one process, with whole tables; rows in the order of
    their prices.
    """
    found = recipe("train", settings(logs), [logs / "mine"])
    torch.manual_seed(found.seed)
    model = build_model(found)
    for collection in (model.bags, model.watched, model.wide):
        collection.to_empty(device="cpu")
        collection.reset_parameters()
    model.watched.share("item", model.bags)
    rows = rows_of(found)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    for batch, _ in zip(rows.training_stream(), range(STEPS), strict=False):
        optimizer.zero_grad()
        found.built_task.loss({"logit": model(batch)}, batch).backward()
        optimizer.step()
    with torch.no_grad():
        parts = [
            torch.stack([batch.dense_BI[:, 0], model(batch).sigmoid()])
            for source in (rows.train, rows.val)
            for batch in rows.stream(source)
        ]
    price_N, score_N = torch.cat(parts, 1)
    return score_N[price_N.argsort()].tolist()


def scores(logs, source, name):
    output = logs / f"{name}.parquet"
    wanted = (f"ckpt_path={source}", TRUST, f"input={logs}/logs.parquet", f"output={output}")
    job = f"hydra.run.dir={logs}/predict_{name}"
    found = command("predict", *wanted, job, "trainer.devices=1", cwd=logs, PYTHONPATH=HERE)
    assert found.code == 0, found.err
    prices = pq.read_table(logs / "logs.parquet")["price"].to_numpy()
    return pq.read_table(output)["score"].to_numpy()[prices.argsort()].tolist()


def last(job):
    return job / "checkpoints/last.ckpt"


@pytest.mark.full
@pytest.mark.parametrize("plan", ["row_wise", "table_wise", None])
def test_every_plan_trains_to_the_scores_of_the_unsharded_model(plan, logs, expected, jobs):
    job = logs / f"two_{plan}"
    more = [f"+plan={plan}"] if plan else []
    jobs.train(job, *settings(logs, *more), folders=[logs / "mine"])
    assert len(set(expected)) > ROWS / 2
    assert scores(logs, last(job), f"two_{plan}") == pytest.approx(expected, abs=1e-6)


@pytest.mark.full
def test_a_run_goes_on_under_another_plan_and_is_evaluated_and_exported(logs, expected, jobs):
    job = logs / "part"
    jobs.train(
        job,
        *settings(logs, "+plan=table_wise", f"trainer.max_steps={STEPS // 2}"),
        folders=[logs / "mine"],
        world=1,
    )
    on = (f"ckpt_path={last(job)}", TRUST, "+plan=row_wise", f"trainer.max_steps={STEPS}")
    trained = jobs.train(job, *on, folders=[logs / "mine"])
    assert scores(logs, last(job), "part") == pytest.approx(expected, abs=1e-6)
    evaluated = jobs.evaluate(logs / "eval", f"ckpt_path={trained['checkpoint']}", TRUST)
    assert validation(evaluated) == pytest.approx(validation(trained), abs=1e-6)
    artefact = logs / "artefact"
    more = (f"ckpt_path={last(job)}", TRUST, f"output={artefact}", "compile=false")
    exported = command("export", *more, cwd=logs, PYTHONPATH=HERE)
    assert exported.code == 0, exported.err
    assert scores(logs, artefact, "artefact") == pytest.approx(expected, abs=1e-6)


def test_a_plan_on_paper_prices_the_tables_of_all_collections_once(logs, capsys, monkeypatch):
    monkeypatch.chdir(logs)
    wanted = ("--config-dir", "mine", *settings(logs, "trainer.devices=2", "+plan=row_wise"))
    assert plan.main(["explain", *wanted, "format=json"]) == 0
    said = json.loads(capsys.readouterr().out)
    names = ["user", "item", "item_weight", "history_weight"]
    assert [row["table"] for row in said["rows"]] == names
    read = {each["table"]: each["lookups"] for each in said["uses"]}
    assert read["item"] == "item sum, history sequence"
    assert plan.main(["export", *wanted]) == 0
    assert "features: [item, history]}" in capsys.readouterr().out


def test_a_made_up_row_has_ids_that_every_table_of_a_feature_has():
    sizes = {"num_embeddings": 9, "embedding_dim": 4, "feature_names": ["user"]}
    tables = [sizes | {"name": f"from_{first}", "min_key": first} for first in (7, 3)]
    made = made_up_rows(Schema(None, [], ["user"]), listed_tables(listed(tables)).lookups)
    assert made["user"].to_pylist() == [7]


MEAN = "model._target_=watch_model.MeanWatched"


def of_columns(logs, *more):
    left_out = ("~model.bottom_layers", "~model.top_layers")
    return settings(logs, MEAN, *left_out, *more, tables="from_dataset", model="dlrm")


@pytest.mark.full
def test_columns_of_a_data_set_are_sequences_by_name(logs, jobs):
    wanted = of_columns(logs, "tables.sequences=[history]", "tables.dim=4")
    found = recipe("train", wanted)
    assert [x.pooling for x in found.model_tables.lookups] == ["sum", "sum", "none"]
    trained = jobs.train(logs / "named", *wanted)
    assert trained["status"] == "ok"


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ((), "needs embedding_collection, and the tables have no lookups that do not pool: "),
        (("tables.sequences=[user,item,history]",), "needs embedding_bag_collection, and the "),
        (("tables.sequences=[user,user]",), "tables.sequences=[user, user]: names user twice"),
        (("tables.sequences=[hist]",), "tables.sequences names hist, which is no sparse column; d"),
    ],
)
def test_a_model_that_needs_another_collection_is_told_the_setting(more, says, logs):
    found = recipe("train", of_columns(logs, *more))
    with pytest.raises(ConfigError, match=re.escape(says)):
        build_model(found)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("item}", "item, collection: wide2}", "takes no wide2, the collection of item (collection"),
        ("combiner: mean", "combiner: none", "the collection wide has a lookup that pools, item, "),
        (
            "item}",
            "item, collection: dense_in_features}",
            "(item) has the name of another argument",
        ),
    ],
)
def test_tables_that_the_model_does_not_take_are_refused_before_ranks_start(old, new, says, logs):
    path = logs / "mine/tables/other.yaml"
    path.write_text(TABLES.replace(old, new, 1))
    with pytest.raises(ConfigError, match=re.escape(says)):
        check_training(recipe("train", settings(logs, tables="other"), [logs / "mine"]))


class AnyCollections(torch.nn.Module):
    """A model that takes collections of any name, and has a setting with a default."""

    def __init__(self, dense_in_features, dropout=0.1, **collections):
        super().__init__()
        self.dropout = dropout
        self.collections = torch.nn.ModuleDict(collections)


@pytest.mark.parametrize("name", ["target", "setting", "wide"])
def test_a_collection_may_have_any_name(name, logs):
    assert name in build_model(watched_by_any(logs, name)).collections


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("a.b", "collection: 'a.b' (item) cannot be an argument of the model"),
        ("self", "collection: 'self' (item) cannot be an argument of the model"),
        ("dropout", "the collection dropout (item) has the name of another argument of the model"),
    ],
)
def test_a_collection_that_is_no_argument_of_its_own_is_refused(name, says, logs):
    with pytest.raises(ConfigError, match=re.escape(says)):
        check_training(watched_by_any(logs, name))


def watched_by_any(logs, name):
    """A recipe of a model that takes any collection, with one of a name."""
    tables = TABLES.replace("item}", f"item, collection: {name}}}", 1)
    (logs / "mine/tables/any.yaml").write_text(tables)
    (logs / "mine/model/any.yaml").write_text(f"_target_: {__name__}.AnyCollections\n")
    return recipe("train", settings(logs, tables="any", model="any"), [logs / "mine"])


class MoreByPlace(torch.nn.Module):
    """A model whose further arguments have no names."""

    def __init__(self, embedding_bag_collection, dense_in_features, *args):
        super().__init__()


def test_arguments_without_names_take_no_collection():
    table = {"name": "item", "num_embeddings": 9, "embedding_dim": 4, "collection": "args"}
    made = listed_tables(listed([table], [{"table": "item", "feature": "item"}]))
    with pytest.raises(ConfigError, match="takes no args, the collection of item"):
        check_collections(Constructor(f"{__name__}.MoreByPlace"), made.collections)


def test_a_model_without_the_argument_is_told_what_makes_the_collection(logs):
    wanted = settings(logs, "tables.sequences=[history]", tables="from_dataset", model="dlrm")
    says = r"DLRM: takes no embedding_collection, the collection of history \(tables.sequences="
    with pytest.raises(ConfigError, match=says):
        check_training(recipe("train", wanted))


def made_of_columns(model="watch_model.Watch", table_dims=None, **tables):
    """The tables of `tables=from_dataset` for the columns user, item and history."""
    dataset = DataSettings(path="logs", sparse=("user", "item", "history"), table_dims=table_dims)
    return tables_of_model(
        TablesOfDataset(dim=4, max_rows=50, **tables),
        dataset,
        Schema("clicked", ("price",), dataset.sparse),
        Constructor(model),
    )


def test_columns_share_a_table_and_have_wide_weights():
    made = made_of_columns(
        sequences=("history",),
        shared={"history": "item"},
        collections={"context": FurtherTables(dim=3, columns=("item",))},
    )
    assert {t.name: t.embedding_dim for t in made.tables} == {
        "user": 4,
        "item": 4,
        "wide_user": 1,
        "wide_item": 1,
        "context_item": 3,
    }
    assert {name: [x.output for x in c.lookups] for name, c in made.collections.items()} == {
        "embedding_bag_collection": ["user", "item"],
        "embedding_collection": ["history"],
        "context": ["item"],
        "wide": ["user", "item"],
    }
    (history,) = made.collections["embedding_collection"].lookups
    assert history.table.name == "item"
    assert {t.start_range for t in made.collections["wide"].tables} == {0.0}


def test_wide_weights_are_made_if_the_settings_ask_or_the_model_requires_them():
    def names(model, wide=None):
        return [t.name for t in made_of_columns(model, wide=wide).tables if t.embedding_dim == 1]

    dlrm = "recapp.models.published_dlrm.DLRM"
    assert names(dlrm) == []
    assert names(dlrm, wide=True) == ["wide_user", "wide_item", "wide_history"]
    assert names("watch_model.Watch") == names(dlrm, wide=True)
    assert names("watch_model.Watch", wide=False) == []


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"shared": {"history": "itme"}}, "did you mean item"),
        ({"shared": {"histroy": "item"}}, "did you mean history"),
        ({"shared": {"history": "item", "item": "user"}}, "no sparse column with a table of its"),
        ({"collections": {"c": FurtherTables(columns=("itme",))}}, "tables.collections.c.columns"),
        ({"collections": {"wide": FurtherTables()}, "wide": True}, "leave tables.wide=null"),
        (
            {"collections": {"c": FurtherTables(columns=())}},
            r"collections.c.columns=\[\]: makes no",
        ),
        ({"collections": {BAGS: FurtherTables()}}, "has the name of the columns' own tables"),
        (
            {"shared": {"history": "item"}, "model": "recapp.models.fm.LogisticRegression"},
            r"the model has further collections alone \(wide\)",
        ),
        (
            {"shared": {"history": "item"}, "table_dims": {"history": 8}},
            r"history reads the table of item \(tables.shared\): leave it out, or name item",
        ),
    ],
)
def test_wrong_names_of_further_collections_are_refused(tables, words):
    with pytest.raises(ConfigError, match=words):
        made_of_columns(**tables)


def test_a_further_table_with_the_name_of_a_columns_table_is_refused():
    dataset = DataSettings(path="logs", sparse=("a", "wide_a"))
    tables = TablesOfDataset(wide=True)
    model = Constructor("recapp.models.published_dlrm.DLRM")
    with pytest.raises(ConfigError, match="two tables are called wide_a"):
        tables_of_model(tables, dataset, Schema("clicked", (), dataset.sparse), model)
