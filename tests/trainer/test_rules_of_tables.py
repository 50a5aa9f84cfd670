"""Rules of single tables in a run: from settings to the log, the checkpoint and a resumed run."""

import pytest
from trainer.runs import MORE, SCHEDULE, STOP, compose, fit, fit_twice

from recapp.cli.compose import compose_over
from recapp.errors import ConfigError
from recapp.optim.rules import ftrl, rowwise_adagrad, sgd
from recapp.run.constructors import row_rules
from recapp.settings.records import to_plain
from recapp.stored.stored_model import load_table, read_manifest

TABLES = "optimizer.sparse.tables={C3: {rule: sgd, lr: 0.5}, C1*: {lr: 0.01}}"


@pytest.fixture
def resumed(logs, tmp_path):
    """`resumed(first, then)`: the rates of the steps after a stop, the optimiser, the manifest."""

    return lambda first, then: fit_twice(logs, tmp_path, first, then)[:3]


def rates_of(optimizer):
    return {group["name"]: group["lr"] for group in optimizer.param_groups}


def test_settings_make_rules_by_name_and_glob(logs):
    assert compose(logs, TABLES).rules == {
        "*": rowwise_adagrad(0.05),
        "C3": sgd(0.5),
        "C1*": rowwise_adagrad(0.01),
    }
    assert compose(logs).rules == rowwise_adagrad(0.05)
    own = "optimizer.sparse.tables={C3: {_target_: recapp.optim.rules.ftrl, l1: 0.1}}"
    assert compose(logs, own).rules["C3"] == ftrl(l1=0.1)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.sparse.tables={C3: {rule: sdg}}", r"sparse.tables.C3.rule=sdg: .*sgd"),
        ("optimizer.sparse.tables={C3: {rule: sgd, eps: 1}}", "the rule sgd has no eps; "),
        ("optimizer.sparse.tables={C3: {lr: -1}}", "optimizer.sparse.tables.C3.lr=-1.0: must be"),
        ("optimizer.sparse.tables={C3: 5}", "optimizer.sparse.tables.C3=5: must be a mapping of"),
        ("optimizer.sparse.tables=5", "optimizer.sparse.tables=5: must be a mapping of table"),
        ("optimizer.sparse.tables={C3: {_target_: torch.optim.SGD}}", "must make a row rule"),
    ],
)
def test_settings_that_make_no_rule_are_refused_before_ranks_start(logs, override, message):
    with pytest.raises(ConfigError, match=message) as refused:
        row_rules(compose(logs, override).optimizer.sparse)
    assert len(str(refused.value).splitlines()) == 1


def test_a_name_that_no_table_has_is_refused_before_the_first_step(logs, tmp_path):
    settings = compose(logs, "optimizer.sparse.tables={C33: {lr: 0.1}}")
    with pytest.raises(ConfigError, match=r"optimizer.sparse.tables.C33: no such table; .*C3"):
        fit(settings, tmp_path)


def test_a_run_goes_on_with_the_rates_and_the_state_of_every_rule(resumed, capsys):
    rates, optimizer, manifest = resumed((TABLES, *SCHEDULE), (TABLES, *SCHEDULE))
    assert rates_of(optimizer).keys() == {
        "dense",
        "sparse/sgd",
        "sparse/rowwise_adagrad@C1+10",
        "sparse/rowwise_adagrad@C2+13",
    }
    steps = range(STOP + 1, STOP + MORE + 1)
    by_name = dict(zip(rates_of(optimizer), zip(*rates, strict=True), strict=True))
    assert by_name["sparse/sgd"] == tuple(pytest.approx(0.05 * s) for s in steps)
    assert manifest.rules["C3"] == "sgd" and manifest.rules["C4"] == "rowwise_adagrad"
    assert "the checkpoint" not in capsys.readouterr().err


def test_a_table_that_changes_its_rule_begins_its_state_anew_and_it_is_said(resumed, capsys):
    then = "optimizer.sparse.tables={C3: {rule: ftrl}, C4: {rule: adam, lr: 0.002}}"
    rates, optimizer, _ = resumed((TABLES, *SCHEDULE), (then, *SCHEDULE))
    found = rates_of(optimizer)
    assert found["sparse/adam"] == pytest.approx(0.002 * 0.8)  # the rate of the step to come
    said = capsys.readouterr().err
    assert "table C3 goes on by ftrl, the checkpoint has sgd: weights stay, the optim" in said
    assert "table C4 goes on by adam, the checkpoint has rowwise_adagrad: weights stay" in said
    assert "optimizer.sparse.tables=" in said and len(rates) == MORE


@pytest.mark.full
def test_moments_that_begin_anew_are_corrected_as_those_of_first_updates(logs, tmp_path):
    """A first step of Adam moves a weight by its rate, whatever number the step has."""
    last = "checkpoints/last.ckpt"
    for name, rule, steps in (("one", "sgd", 4), ("two", "adam", 5), ("three", "adam", 6)):
        (tmp_path / name).mkdir()
        before = tmp_path / {"one": "", "two": "one", "three": "two"}[name] / last
        settings = (f"optimizer.sparse.tables={{C3: {{rule: {rule}, lr: 0.01}}}}",)
        recipe = compose(logs, *settings, f"trainer.max_steps={steps}")
        fit(recipe, tmp_path / name, ckpt_path=before if before.exists() else None)
    found = [read_manifest(tmp_path / name / last).begun for name in ("one", "two", "three")]
    assert found == [{}, {"C3": 4}, {"C3": 4}]
    rows = [load_table(tmp_path / name / last, "C3") for name in ("one", "two")]
    moved = (rows[1] - rows[0]).abs()
    assert 0.005 < moved.max() <= 0.0101  # 3.2 rates without the correction


@pytest.mark.full
def test_an_older_checkpoint_of_one_rule_goes_on_with_rules_by_table(logs, tmp_path, capsys):
    def without_the_new_setting(settings):
        settings["optimizer"]["sparse"].pop("tables")

    then = (TABLES, *SCHEDULE)
    _, optimizer, manifest = fit_twice(logs, tmp_path, SCHEDULE, then, without_the_new_setting)[:3]
    assert set(manifest.rules.values()) == {"rowwise_adagrad"}
    found = rates_of(optimizer)
    assert found["sparse/rowwise_adagrad@C1+10"] == pytest.approx(0.01 * 0.8)
    assert found["sparse/rowwise_adagrad@C2+13"] == pytest.approx(0.05 * 0.8)
    assert "table C3 goes on by sgd" in capsys.readouterr().err


def test_a_checkpoints_settings_take_rules_of_tables(logs, tmp_path):
    stored = to_plain(compose(logs))
    settings = compose_over(stored, "train", [TABLES])
    assert settings["optimizer"]["sparse"]["tables"]["C3"] == {"rule": "sgd", "lr": 0.5}
