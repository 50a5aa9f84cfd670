"""Dims of tables by their rows: the rule, the tables it makes, the models that take one dim."""

import pytest
from jobs import recipe

from recapp.errors import ConfigError
from recapp.run.run_checks import check_training
from recapp.tables.table_settings import DimRule

DATA = [
    "dataset=custom",
    "dataset.path=logs",
    "dataset.sparse=[a,b,c]",
    "tables.dim_rule={factor: 6}",
    "tables.wide=false",
]
SIZED = "dataset.cardinality=[9999,15,99]"


def test_a_dim_is_the_nearest_multiple_within_limits():
    rule = DimRule()
    assert [rule.dim(rows) for rows in (2, 16, 100, 10_000, 10**6)] == [8, 12, 20, 60, 64]
    assert DimRule(factor=1, power=0.5, multiple=3, least=3, most=999_999).dim(10_000) == 99
    assert DimRule(power=0, multiple=1).dim(10**9) == 6


def test_limits_in_the_wrong_order_are_refused():
    with pytest.raises(ConfigError, match=r"tables\.dim_rule\.least=9: must be at most tables\.d"):
        DimRule(least=9, most=8)
    with pytest.raises(ConfigError, match=r"tables\.dim_rule\.most=66: must be a multiple of"):
        DimRule(most=66)


def test_a_factor_has_a_bound():
    with pytest.raises(ConfigError, match=r"tables\.dim_rule\.factor=1e\+?308: must be a number"):
        recipe("train", [*DATA[:3], "tables.dim_rule={factor: 1e308}"])


def test_tables_get_dims_by_their_rows():
    made = recipe("train", [*DATA, SIZED, "dataset.id_rule=error", "dataset.table_dims={b: 5}"])
    assert [t.embedding_dim for t in made.model_tables.tables] == [60, 5, 20]
    shared = recipe("train", [*DATA, SIZED, "dataset.id_rule=error", "tables.shared={b: a}"])
    assert [t.embedding_dim for t in shared.model_tables.tables] == [60, 20]
    limited = recipe("train", [*DATA, SIZED, "tables.max_rows=16"])
    assert [t.embedding_dim for t in limited.model_tables.tables] == [12] * 3
    sized = recipe("train", DATA).sized([10_000, 16, 100])
    assert [t.embedding_dim for t in sized.model_tables.tables] == [60, 12, 20]


def test_models_of_one_dim_are_refused_before_ranks_meet():
    with pytest.raises(ConfigError, match=r"one dim, and these have .*: leave out dataset.tab"):
        check_training(recipe("train", [*DATA, SIZED, "model=autoint"]))
    check_training(recipe("train", [*DATA, SIZED, "model=dcnv2"]))
    check_training(recipe("train", [*DATA, "model=autoint"]))  # its ranks count the ids first
    same = "tables.dim_rule={least: 16, most: 16}"
    check_training(recipe("train", [*DATA[:3], SIZED, same, "model=autoint"]))
