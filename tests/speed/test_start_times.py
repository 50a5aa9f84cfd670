"""Whole commands timed beside another recapp's. What they take is not tested."""

import json
import sys

import pytest
from documents import REPOSITORY

from recapp.errors import ConfigError

from . import start_times
from .lab import Settings
from .start_times import IMPORTS, PARTS, PROMPT, WAITS, Recapp, Waits, measure

SECONDS = {"recapp": 2.0, "baseline": 3.0}


@pytest.fixture
def instant(monkeypatch):
    """Commands that take no time, and say that they took seconds: train and eval twice as many as
    the others.
    """
    ran = []

    def run(self, arguments, begun=""):
        ran.append((self.name, *arguments))
        seconds = SECONDS[self.name]
        if begun:
            self.folder.joinpath("run").mkdir(exist_ok=True)
            moments = {"seconds_to_ranks": 1.0, "seconds_to_training": 1.5}
            own = self.name == "recapp"
            said = {**moments, "seconds_to_first_step": 1.75} if own else {}
            (self.folder / "run" / "metrics.json").write_text(json.dumps(said))
            return 2 * seconds, seconds
        return (seconds / 10 if IMPORTS in arguments else seconds), None

    monkeypatch.setattr(Recapp, "run", run)
    return ran


def settings(**others):
    given = {"rounds": 3, "cache": ("warm",), "baseline": str(REPOSITORY)} | others
    return Settings(verb="start", **given)


def test_a_ratio_above_one_is_a_recapp_that_is_faster(instant, tmp_path):
    found = measure(settings(), tmp_path, lambda _: None)
    assert [row["what"] for row in found["rows"]] == list(WAITS)
    for row in found["rows"]:
        assert row["baseline_ratio"] == pytest.approx(1.5), row
        assert row["q1_s"] <= row["median_s"] <= row["q3_s"]
    (prompt,) = (row for row in found["rows"] if row["what"] == PROMPT)
    assert (prompt["median_s"], prompt["baseline_median_s"]) == pytest.approx((4, 6))


def test_contenders_take_turns_and_every_other_round_has_them_reversed(instant, tmp_path):
    measure(settings(), tmp_path, lambda _: None)
    turns = [name for name, *rest in instant if "recapp.eval" in rest]
    own, other = "recapp", "baseline"
    assert turns == [own, other, own, other, other, own, own, other]  # the first two warm up


def test_the_parts_of_a_start_make_up_the_whole(instant, tmp_path):
    parts = measure(settings(), tmp_path, lambda _: None)["parts"]
    assert {p["part"]: p["median_s"] for p in parts} == pytest.approx(
        dict(zip(PARTS, (0.2, 0.8, 0.5, 0.25, 2.25), strict=True))
    )
    # one that does not say when its ranks were there has imports alone
    assert [p["baseline_median_s"] for p in parts] == [pytest.approx(0.3), None, None, None, None]


def test_without_a_baseline_and_without_root_numbers_are_none(instant, tmp_path, monkeypatch):
    monkeypatch.setattr(start_times, "can_drop_caches", lambda: False)
    found = measure(settings(cache=("warm", "cold"), baseline=None), tmp_path, lambda _: None)
    for row in found["rows"] + found["parts"]:
        assert (row["median_s"] is None) == (row["cache"] == "cold"), row
        assert row["baseline_median_s"] is None and row.get("baseline_ratio") is None


def test_the_cache_is_emptied_before_each_command(instant, tmp_path, monkeypatch):
    emptied = []
    monkeypatch.setattr(start_times, "can_drop_caches", lambda: True)
    monkeypatch.setattr(start_times, "drop_caches", lambda: emptied.append(len(instant)))
    measure(settings(rounds=1, cache=("cold",), baseline=None), tmp_path, lambda _: None)
    commands = len(start_times.COMMANDS)
    assert emptied == list(range(commands, 2 * commands))


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        ("/no/such/python", ("no such program or directory", "a checkout")),
        ("{tmp}", ("holds no recapp/train.py",)),
        ("/bin/false", ("has no recapp",)),
    ],
)
def test_a_baseline_that_is_none_is_refused(path, parts, tmp_path):
    wanted = settings(baseline=path.format(tmp=tmp_path))
    with pytest.raises(ConfigError) as error:
        measure(wanted, tmp_path, lambda _: None)
    assert f"--baseline={wanted.baseline}: " in str(error.value)
    assert all(part in str(error.value) for part in parts)


def test_a_command_that_fails_is_named(tmp_path, capsys):
    failing = Recapp("baseline", sys.executable, None, tmp_path)
    with pytest.raises(Exception, match=r"baseline: python -c .* failed: .*no such thing"):
        failing.run(["-c", "raise SystemExit('no such thing')"])


@pytest.mark.full
def test_commands_are_timed(tmp_path):
    waits = Waits(Recapp("recapp", sys.executable, REPOSITORY, tmp_path))
    waits.one_round("warm", lambda: None)
    found = {what: ms for what, ((ms,),) in waits.measured["warm"].rounds.items()}
    assert set(found) == {*WAITS, *PARTS} and all(found[what] > 0 for what in WAITS)
    assert sum(found[part] for part in PARTS) == pytest.approx(found[PROMPT])
