"""Tables and lookups that settings list in HugeCTR's words."""

import re

import pytest
from list_of_tables import listed
from omegaconf import OmegaConf

from recapp.cli import compose
from recapp.errors import ConfigError
from recapp.settings.other_systems import in_recapp_words
from recapp.tables.config import EmbeddingBagConfig
from recapp.tables.table_settings import listed_tables, row_features

OURS = {"name": "t", "num_embeddings": 10, "embedding_dim": 4}
THEIRS = {"table_id": 7, "max_vocabulary_size": 10, "ev_size": 4, "min_key": 5, "max_key": 15}


def translated(tables, lookups):
    made = in_recapp_words({"source": "list", "tables": tables, "lookups": lookups})
    return made["tables"], made["lookups"]


def test_lookups_are_described_in_either_vocabulary():
    lookups = [
        {"table": "u", "feature": "f"},
        {"table": "t", "input": "g", "output": "o", "combiner": "average"},
        {"emb_table": "u", "bottom_name": "g", "top_name": "p", "combiner": "sum"},
        {"table_config": "t", "feature": "h"},
    ]
    made = listed_tables(listed(*translated([OURS, OURS | {"name": "u"}], lookups)))
    assert [t.feature_names for t in made.tables] == [("g", "h"), ("f", "g")]
    assert [(x.table.name, x.feature, x.output, x.pooling) for x in made.lookups] == [
        ("u", "f", "f", "sum"),
        ("t", "g", "o", "mean"),
        ("u", "g", "p", "sum"),
        ("t", "h", "h", "sum"),
    ]


def test_tables_are_described_in_hugectrs_words():
    made = listed_tables(listed(*translated([THEIRS], [{"table": "table_7", "feature": "f"}])))
    assert made.tables == [
        EmbeddingBagConfig(
            name="table_7", num_embeddings=10, embedding_dim=4, feature_names=["f"], min_key=5
        )
    ]


def test_tables_of_one_set_of_keys_are_tables_of_their_own():
    one = {"id_space": 3, "max_vocabulary_size": 10, "ev_size": 4, "feature_names": ["f"]}
    made = listed_tables(listed(*translated([one, one | {"ev_size": 8}], None)))
    assert [(t.name, t.embedding_dim) for t in made.tables] == [("table_3", 4), ("table_3_1", 8)]
    assert [x.output for x in made.lookups] == ["f@table_3", "f@table_3_1"]


def test_a_table_without_a_name_is_called_by_its_place():
    bare = {"num_embeddings": 10, "embedding_dim": 4, "feature_names": ["f"]}
    tables, _ = translated([OURS, bare], None)
    assert [values["name"] for values in tables] == ["t", "table_1"]


def test_minus_one_rows_are_a_table_that_grows():
    (table,), _ = translated([{"name": "t", "max_vocabulary_size": -1, "ev_size": 4}], None)
    assert table == {"name": "t", "num_embeddings": "dynamic", "embedding_dim": 4}


def test_features_are_rows_where_some_table_does_not_hash_them():
    hashed = OURS | {"name": "hashed", "id_rule": "hash"}
    lookups = [{"table": "t", "input": "a"}, {"table": "hashed", "feature": "b"}]
    assert row_features(listed(*translated([OURS, hashed], lookups))) == {"a"}


@pytest.mark.parametrize(
    "tables",
    [
        None,
        7,
        {"source": "from_dataset", "dim": 16},
        {"source": "list", "tables": "t", "lookups": {"table": "t"}},
        {"source": "list", "tables": [7], "lookups": ["f"]},
    ],
)
def test_what_is_no_list_of_tables_is_left_to_the_check_of_the_settings(tables):
    assert in_recapp_words(tables) == tables


def test_settings_in_recapps_words_stay_as_they_are():
    tables = [OURS | {"feature_names": ["f"]}]
    lookups = [{"table": "t", "feature": "f", "output": None, "combiner": "mean"}]
    assert translated(tables, lookups) == (tables, lookups)


@pytest.mark.parametrize(
    ("table", "lookup", "says"),
    [
        (
            OURS | {"ev_size": 4},
            {"table": "t", "feature": "f"},
            "tables.tables[0]: embedding_dim and ev_size are two names of one value: give only one",
        ),
        (
            THEIRS | {"max_vocabulary_size": -1},
            {"table": "table_7", "feature": "f"},
            "tables.table_7.min_key=5: a dynamic table takes any id: leave min_key out",
        ),
        (
            THEIRS | {"max_key": 16},
            {"table": "table_7", "feature": "f"},
            "tables.table_7.max_key=16: 10 rows from min_key=5 on hold the keys 5..14",
        ),
    ],
)
def test_what_cannot_be_listed_is_refused_in_one_line(table, lookup, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        listed_tables(listed(*translated([table], [lookup])))


@pytest.mark.parametrize(
    ("table", "lookup", "says"),
    [
        ({"ev_size": 0}, {}, "tables.tables[0].ev_size=0: must be a whole number of at least 1"),
        ({"table_id": -1}, {}, "tables.tables[0].table_id=-1: must be a whole number of at least"),
        (
            {"max_vocabulary_size": -2},
            {},
            "tables.tables[0].max_vocabulary_size=-2: must be a whole number of at least -1",
        ),
        (
            {"evsize": 4},
            {},
            "unknown setting tables.tables[0].evsize: did you mean tables.tables[0",
        ),
        ({}, {"top": "o"}, "unknown setting tables.lookups[0].top: "),
        (
            {},
            {"combiner": "max"},
            "lookups[0].combiner=max: known: average, concat, mean, none, sum",
        ),
        ({}, {"emb_table": [1]}, "tables.lookups[0].emb_table=[1]: must be text"),
    ],
)
def test_a_wrong_value_is_named_in_the_word_that_was_written(table, lookup, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        translated([OURS | table], [{"table": "t", "feature": "f"} | lookup])


SETTINGS = {
    "source": "list",
    "tables": [{"id_space": 3, "max_vocabulary_size": -1, "ev_size": 4}],
    "lookups": [{"emb_table": "table_3", "input": "C1", "combiner": "average"}],
}


def test_composed_settings_are_in_recapps_words():
    config = compose.without_hydra(compose.compose("plan"))
    OmegaConf.update(config, "tables", SETTINGS, merge=False)
    assert compose.to_plain(config, whole=False)["tables"] == {
        "source": "list",
        "tables": [{"name": "table_3", "num_embeddings": "dynamic", "embedding_dim": 4}],
        "lookups": [{"table": "table_3", "feature": "C1", "combiner": "mean"}],
    }


def test_settings_over_a_stored_model_are_in_recapps_words():
    config = compose.to_plain(compose.without_hydra(compose.compose("train")))
    stored = config | {"choices": {"tables": "sample"}, "tables": SETTINGS}
    tables = compose.recipe_over(stored, "eval", ["ckpt_path=elsewhere"]).tables
    (table,) = tables.tables
    assert (table.name, table.num_embeddings, table.embedding_dim) == ("table_3", "dynamic", 4)
    (lookup,) = tables.lookups
    assert (lookup.table, lookup.feature, lookup.combiner) == ("table_3", "C1", "mean")
