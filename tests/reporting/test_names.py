"""How runs are named: by what differs between them, whole."""

import pytest
from reporting.sweeps import make_sweep

from recapp.reporting.runs import names_of, read_runs, short_names, texts_of, varied


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (["optimizer.dense.lr"], ["lr"]),
        (["optimizer.dense.lr", "optimizer.sparse.lr"], ["dense.lr", "sparse.lr"]),
        (["seed", "dataset.generate.seed"], ["seed", "generate.seed"]),
        (["lr", "x_lr"], ["lr", "x_lr"]),
    ],
)
def test_a_name_is_as_short_as_tells_it_from_the_others(names, short):
    assert list(short_names(names).values()) == short


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ([0.0009815071, 0.01], ["0.000982", "0.01"]),
        ([0.12341, 0.12342], ["0.12341", "0.12342"]),
        ([1, 2], ["1", "2"]),
        (["a", None], ["a", "None"]),
    ],
)
def test_numbers_have_the_digits_that_tell_them_apart(values, texts):
    assert texts_of(values) == texts


def test_settings_are_varied_where_jobs_differ_or_the_sweep_asked_for_several():
    said = [
        {"seed": "1", "lr": "0.1", "dim": "8"},
        {"seed": "1", "lr": "0.2", "dim": "8", "extra": "x"},
    ]
    assert varied(said, {}) == ["lr", "extra"]
    # the first job of a sweep
    assert varied(said[:1], {"seed": "1", "lr": "0.1,0.2", "dim": "8"}) == ["lr"]
    assert varied(said[:1], {}) == []


def test_runs_are_named_by_what_differs_and_by_their_plan_where_nothing_does(tmp_path):
    jobs = [
        {"overrides": [f"+plan={plan}", f"a.lr={rate}", "trainer.max_steps=5"], "plan": plan}
        for plan, rate in (("mixed", 0.1), ("mixed", 0.25), ("row_wise", 0.1))
    ]
    runs = read_runs(make_sweep(tmp_path, None, jobs))
    assert names_of(runs) == ["mixed lr=0.1", "mixed lr=0.25", "row_wise lr=0.1"]
    assert names_of(runs[:2]) == ["lr=0.1", "lr=0.25"] and names_of(runs, ["plan"]) == [
        "lr=0.1",
        "lr=0.25",
        "lr=0.1",
    ]
    assert names_of(runs[:1]) == ["mixed"]
    assert names_of(runs, ["a.lr"]) == ["mixed", "mixed", "row_wise"]


def test_a_job_that_does_not_say_a_setting_has_its_default(tmp_path):
    runs = read_runs(
        make_sweep(
            tmp_path, None, [{"overrides": ["trainer.precision=bf16-mixed"]}, {"overrides": []}]
        )
    )
    assert names_of(runs) == ["precision=bf16-mixed", "defaults"]
