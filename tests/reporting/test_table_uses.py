"""What reads a table and trains it, said where that is not the same for all."""

from recapp.optim.rules import adagrad, sgd
from recapp.reporting.plan_report import table_uses
from recapp.tables.config import (
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
    TableLookup,
    lookups_of,
)

SIZE = {"num_embeddings": 10, "embedding_dim": 4}
USERS = EmbeddingBagConfig(name="users", feature_names=["user"], **SIZE)
ITEMS = EmbeddingBagConfig(name="items", feature_names=["seen"], **SIZE)
WORDS = EmbeddingConfig(name="words", feature_names=["text"], **SIZE)


def test_tables_that_are_all_read_and_trained_alike_need_no_words():
    tables = [USERS, ITEMS]
    assert table_uses(tables, lookups_of(tables), sgd()) == []
    assert table_uses(tables, lookups_of(tables), {"*": sgd(0.1), "items": sgd(0.2)}) == []


def test_rules_that_differ_are_named():
    tables = [USERS, ITEMS]
    assert table_uses(tables, lookups_of(tables), {"*": sgd(), "items": adagrad()}) == [
        {"table": "users", "lookups": "user sum", "rule": "sgd"},
        {"table": "items", "lookups": "seen sum", "rule": "adagrad"},
    ]


def test_every_kind_of_lookup_has_its_words():
    concat = TableLookup(ITEMS, "seen", "last", PoolingType.CONCAT, hotness=3)
    lookups = (*lookups_of([ITEMS, WORDS]), concat)
    assert table_uses([ITEMS, WORDS], lookups, None) == [
        {"table": "items", "lookups": "seen sum, seen concat of 3", "rule": None},
        {"table": "words", "lookups": "text sequence", "rule": None},
    ]
