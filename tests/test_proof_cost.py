"""The sums of seconds and starts by room of tests, and the budget of the default tier."""

from types import SimpleNamespace

import pytest
from proof_cost import BUDGET, Costs


def costs(*reports, expression="not full", args=("tests",)):
    config = SimpleNamespace(
        args=list(args),
        getini=lambda name: ["tests"],
        option=SimpleNamespace(keyword="", markexpr=expression),
    )
    sums = Costs(config)
    for name, properties in reports:
        sums.pytest_runtest_logreport(
            SimpleNamespace(nodeid=name, when="call", duration=2.0, user_properties=properties)
        )
    return sums


def test_seconds_and_starts_are_summed_by_room(capsys):
    sums = costs(
        ("tests/engine/test_a.py::test_x", [("processes", 3)]),
        ("tests/engine/test_b.py::test_x", [("processes", 1), ("trainings", 2)]),
        ("tests/test_c.py::test_x", []),
    )
    reporter = SimpleNamespace(section=print, write_line=lambda line, **_: print(line))
    sums.pytest_terminal_summary(reporter)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert lines == [["4", "2", "4", "2", "engine"], ["2", "1", "0", "0", "top", "level"]]


@pytest.mark.parametrize(
    ("others", "fails"),
    [({}, True), ({"expression": "full"}, False), ({"args": ("tests/engine",)}, False)],
)
def test_a_default_tier_above_its_budget_of_starts_fails(others, fails):
    starts = ("tests/engine/test_a.py::test_x", [("processes", BUDGET["processes"])])
    one_more = ("tests/test_c.py::test_x", [("processes", 1)])
    assert costs(starts, **others).exceeded == []
    session = SimpleNamespace(exitstatus=pytest.ExitCode.OK)
    costs(starts, one_more, **others).pytest_sessionfinish(session, pytest.ExitCode.OK)
    assert (session.exitstatus != pytest.ExitCode.OK) == fails
