"""Rules from plain values, and those of single tables in the settings."""

import pytest

from recapp.errors import ConfigError
from recapp.optim.named_rules import make_rule, settings_of_table, table_rules
from recapp.optim.rules import adagrad, ftrl, rowwise_adagrad, sgd

SPARSE = {"_target_": "recapp.optim.rules.adagrad", "lr": 0.05, "eps": 1e-6}


def no_target(wanted, where):
    raise AssertionError(f"{where} names no constructor of its own")


def test_a_rule_is_made_from_its_name_and_fields():
    assert make_rule({"rule": "ftrl", "lr": 0.1, "l1": "0.5"}, "x") == ftrl(0.1, l1=0.5)
    assert make_rule({"rule": "sgd"}, "x") == sgd()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rule": "adagard"}, r"x.rule=adagard: did you mean adagrad\?|x.rule=adagard: "),
        ({"lr": 0.1}, "x.rule=None: "),
        ({"rule": "sgd", "eps": 0.1}, "x.eps: the rule sgd has no eps; "),
        ({"rule": "sgd", "lr": "fast"}, "x.lr=fast: must be a number"),
        ({"rule": "sgd", "lr": True}, "x.lr=True: must be a number"),
        ({"rule": "sgd", "lr": -1}, "^x.lr=-1.0: must be a number of at least 0"),
        ({"rule": "adam", "beta1": 2}, "^x.beta1=2.0: must be from 0 to less than 1"),
    ],
)
def test_what_makes_no_rule_is_refused_in_one_line(given, message):
    with pytest.raises(ConfigError, match=message) as refused:
        make_rule(given, "x")
    assert len(str(refused.value).splitlines()) == 1


def test_a_table_names_a_rule_or_changes_that_of_all():
    tables = {"C3": {"rule": "sgd", "lr": 0.1}, "C1*": {"lr": 0.01}, "C4": {"rule": "adagrad"}}
    assert table_rules(SPARSE | {"tables": tables}, "s", no_target) == {
        "C3": sgd(0.1),
        "C1*": adagrad(0.01, 1e-6),
        "C4": adagrad(),
    }
    assert table_rules(SPARSE | {"tables": None}, "s", no_target) == {}
    own = {"C3": {"_target_": "mine.rule", "x": 1}}
    made = table_rules(SPARSE | {"tables": own}, "s", lambda wanted, where: (wanted, where))
    assert made == {"C3": (own["C3"], "s.tables.C3")}
    target = {"C3": {"_target_": "recapp.optim.rules.rowwise_adagrad"}}
    assert table_rules(SPARSE | {"tables": target}, "s", no_target) == {"C3": rowwise_adagrad()}


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (5, "s.tables=5: must be a mapping of table names or globs to settings"),
        ({"C3": 0.1}, "s.tables.C3=0.1: must be a mapping of settings"),
        ({"C3": {"beta": 1}}, "s.tables.C3.beta: the rule adagrad has no beta; "),
        ({"C3": {"rule": "sgd", "_target_": "x.y"}}, "s.tables.C3: rule and _target_ both name"),
    ],
)
def test_settings_of_tables_that_make_no_rule_are_refused(tables, message):
    with pytest.raises(ConfigError, match=message):
        table_rules(SPARSE | {"tables": tables}, "s", no_target)


def test_the_settings_of_a_table_are_its_own_over_those_of_all():
    sparse = SPARSE | {"tables": {"C*": {"lr": 0.1}, "C3": {"rule": "sgd"}}}
    assert settings_of_table("C3", sparse) == {"rule": "sgd"}
    assert settings_of_table("C4", sparse) == SPARSE | {"lr": 0.1}
    assert settings_of_table("D", sparse) == SPARSE
    assert settings_of_table("D", "broken") == settings_of_table("D", None) == {}
