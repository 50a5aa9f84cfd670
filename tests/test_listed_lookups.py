"""Tables and lookups written out in HugeCTR's words, from the command line."""

import json

import pytest
from jobs import command, metrics_of, recipe, resolved, small

from recapp import plan
from recapp.errors import ConfigError
from recapp.run.model_tables import check_features
from recapp.run.recipe import read_settings
from recapp.settings.records import to_plain

TABLES = """
source: list
tables:
  - {table_id: 0, max_vocabulary_size: 120001, ev_size: 8, min_key: 0, max_key: 120001}
  - {table_id: 1, max_vocabulary_size: 19000, ev_size: 8}
  - {table_id: 2, max_vocabulary_size: 15000, ev_size: 8}
  - {name: hashed, num_embeddings: 900, embedding_dim: 8, id_rule: hash}
  - {name: nobody, max_vocabulary_size: 5, ev_size: 8}
lookups:
  - {table_config: table_0, bottom_name: C1, top_name: emb0, combiner: sum}
  - {table: table_1, input: C2, output: emb1, combiner: average}
  - {table: table_2, feature: C3}
  - {table: table_1, feature: C5, combiner: sum}
  - {table: hashed, feature: C4}
"""
MIXED = [
    [
        {
            "local_embedding_list": own,
            "table_placement_strategy": "mp",
            "global_embedding_list": [[0, 2], [1, 3]],
        },
        {
            "local_embedding_list": [4],
            "table_placement_strategy": "dp",
            "global_embedding_list": [[4], [4]],
        },
    ]
    for own in ([0, 2], [1, 3])
]
LAYERS = ("model.bottom_layers=[16,8]", "model.top_layers=[8,1]")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the tables and a plan of HugeCTR's for two ranks."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine/tables").mkdir(parents=True)
    (tmp_path / "mine/tables/theirs.yaml").write_text(TABLES)
    (tmp_path / "plan.json").write_text(json.dumps(MIXED, indent=4))
    return tmp_path


def arguments(*more):
    return ["--config-dir", "mine", "tables=theirs", *LAYERS, *small("data", rows=3000), *more]


def test_a_plan_file_numbers_the_lookups_that_settings_list(folder, capsys):
    wanted = ("trainer.devices=2", "+plan=file", "plan.path=plan.json", "as=hugectr")
    assert plan.main(["explain", *arguments(*wanted, "format=json")]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out) == {"plan": MIXED}
    assert said.err.splitlines() == ["table nobody is read by no lookup: it is left out"]
    assert plan.main(["export", *arguments(*wanted, "indent=4", "path=again.json")]) == 0
    assert (folder / "again.json").read_text() == (folder / "plan.json").read_text()


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("output: emb1", "outputs: emb1", "tables.lookups[1].outputs: did you mean tables.lookups"),
        ("feature: C5", "feature: C3", "lookup 3 (table_1)"),
        ("ev_size: 8, min_key", "evsize: 8, min_key", "unknown setting tables.tables[0].evsize"),
        (
            "combiner: average",
            "combiner: avg",
            "combiner=avg: known: average, concat, mean, none, sum",
        ),
        ("max_key: 120001", "max_key: 120002", "tables.table_0.max_key=120002: 120001 rows"),
    ],
)
def test_what_cannot_be_listed_is_refused_in_one_line(folder, old, new, says, capsys):
    path = folder / "mine/tables/theirs.yaml"
    path.write_text(path.read_text().replace(old, new))
    if says.startswith("lookup 3"):
        swapped = [[{**g} for g in own] for own in MIXED]
        for own, held in zip(swapped, ([0, 1], [2, 3]), strict=True):
            own[0] |= {"local_embedding_list": held, "global_embedding_list": [[0, 1], [2, 3]]}
        (folder / "plan.json").write_text(json.dumps(swapped))
    refused = plan.main(
        [
            "explain",
            *arguments("trainer.devices=2", "+plan=file", "plan.path=plan.json", "statistics=auto"),
        ]
    )
    assert refused == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if "nobody" not in line]
    assert len(lines) == 1 and says in lines[0]


def test_a_feature_that_the_data_set_does_not_have_is_refused_with_the_close_ones(folder):
    path = folder / "mine/tables/theirs.yaml"
    path.write_text(path.read_text().replace("input: C2", "input: C99"))
    with pytest.raises(ConfigError, match=r"table_1 reads feature C99, .* did you mean C9 or C19"):
        found = recipe("train", arguments()[2:], [folder / "mine"])
        check_features(found.model_tables, found.schema)


def test_settings_that_list_lookups_are_kept_in_recapps_words(folder):
    config = resolved("train", arguments()[2:], [folder / "mine"])
    assert to_plain(read_settings(config, "train")) == config
    assert config["tables"]["lookups"][:2] == [
        {"table": "table_0", "feature": "C1", "output": "emb0", "combiner": "sum"},
        {"table": "table_1", "feature": "C2", "output": "emb1", "combiner": "mean"},
    ]
    assert config["tables"]["tables"][1] == {
        "num_embeddings": 19000,
        "embedding_dim": 8,
        "name": "table_1",
    }


@pytest.mark.full
def test_concatenated_vectors_train_from_the_command_line(folder):
    path = folder / "mine/tables/theirs.yaml"
    last = "  - {table: hashed, feature: C4}\n"
    assert path.read_text().endswith(last)
    wide = last.replace("C4}", "C4, output: wide, combiner: concat, hotness: 3}")
    path.write_text(path.read_text() + wide)
    losses = []
    for devices in (1, 2):
        ran = command(
            "train",
            *arguments("trainer.max_steps=6", "optimizer=sgd", f"trainer.devices={devices}"),
            f"hydra.run.dir=ranks_{devices}",
            cwd=folder,
        )
        assert ran.code == 0, ran.err
        losses.append(metrics_of(folder / f"ranks_{devices}")["val_log_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.full
def test_listed_lookups_train_under_hugectrs_plan_as_on_one_rank(folder):
    wanted = arguments("trainer.max_steps=6", "optimizer=sgd")
    losses = []
    for name, more in {
        "two": ("trainer.devices=2", "+plan=file", "plan.path=plan.json"),
        "one": ("trainer.devices=1",),
    }.items():
        ran = command("train", *wanted, *more, f"hydra.run.dir={name}", cwd=folder)
        assert ran.code == 0, ran.err
        losses.append(metrics_of(folder / name)["val_log_loss"])
    assert metrics_of(folder / "two")["plan"] == "hugectr"
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
