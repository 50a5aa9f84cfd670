"""Tables and lookups that settings list."""

import re

import pytest
from list_of_tables import listed

from recapp.errors import ConfigError
from recapp.tables.config import EmbeddingBagConfig, lookups_of
from recapp.tables.table_settings import listed_tables, row_features

OURS = {"name": "t", "num_embeddings": 10, "embedding_dim": 4}


def test_without_lookups_tables_are_read_by_the_features_they_name():
    made = listed_tables(listed([OURS | {"feature_names": ["f", "g"]}]))
    assert made.tables == [EmbeddingBagConfig(**OURS, feature_names=["f", "g"])]
    assert made.lookups == lookups_of(made.tables)


def test_lookups_stand_in_their_own_order_with_their_own_combiners():
    lookups = [
        {"table": "u", "feature": "f"},
        {"table": "t", "feature": "g", "output": "o", "combiner": "mean"},
        {"table": "u", "feature": "g", "output": "p", "combiner": "sum"},
        {"table": "t", "feature": "h"},
    ]
    made = listed_tables(listed([OURS, OURS | {"name": "u"}], lookups))
    assert [t.name for t in made.tables] == ["t", "u"]
    assert [t.feature_names for t in made.tables] == [("g", "h"), ("f", "g")]
    assert [(x.table.name, x.feature, x.output, x.pooling) for x in made.lookups] == [
        ("u", "f", "f", "sum"),
        ("t", "g", "o", "mean"),
        ("u", "g", "p", "sum"),
        ("t", "h", "h", "sum"),
    ]


def test_a_table_that_nothing_reads_is_left_out_and_noted(capsys):
    tables = [OURS, OURS | {"name": "unread"}]
    made = listed_tables(listed(tables, [{"table": "t", "feature": "f"}]))
    assert [t.name for t in made.tables] == ["t"]
    assert "table unread is read by no lookup: it is left out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("table", "lookup", "says"),
    [
        (OURS, None, "tables.t.feature_names must be given: the features that read the table, or"),
        (
            {"name": "t", "feature_names": ["f"]},
            None,
            "tables.t.num_embeddings must be given",
        ),
        (OURS, {"feature": "f"}, "tables.lookups[0].table must be given"),
        (OURS, {"table": "tt", "feature": "f"}, "tables.lookups[0] reads table tt, which is not "),
        (
            OURS,
            {"table": "t", "feature": "f", "combiner": "concat"},
            "lookup f: hotness=None: a concatenation needs",
        ),
    ],
)
def test_what_cannot_be_listed_is_refused_in_one_line(table, lookup, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        listed_tables(listed([table], None if lookup is None else [lookup]))


def test_two_tables_of_one_name_are_refused():
    with pytest.raises(ConfigError, match="two tables are called t; names must be unique"):
        listed_tables(listed([OURS, OURS], [{"table": "t", "feature": "f"}]))


def test_features_are_rows_where_some_table_does_not_hash_them():
    hashed = OURS | {"name": "hashed", "id_rule": "hash"}
    lookups = [{"table": "t", "feature": "a"}, {"table": "hashed", "feature": "b"}]
    assert row_features(listed([OURS, hashed], lookups)) == {"a"}
    assert row_features(listed([hashed | {"feature_names": ["a", "b"]}])) == set()
