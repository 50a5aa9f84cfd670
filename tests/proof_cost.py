"""The cost of proof: seconds, processes and trainings of each room of tests, and their limits.

Every worker counts the processes that a test starts and the models that it trains; the session
adds both to the seconds of the tests and prints a table, so that growth is seen. The default tier
has a budget of starts, as rooms of the product have one of statements: whoever raises a number
writes in `docs/design.md`, section 28, what it pays for.
"""

import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest

LIMIT_S = {"not full": 60, "full": 900}
"""The most seconds of a test, by tier. Tests take a tenth where nothing else runs."""

BUDGET = {"processes": 400, "trainings": 540}
"""The most starts of the default tier."""

FORKS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn")

starts = Counter()
"""Of this process, by the names of `BUDGET`."""


def count(kind):
    """Add a start that no hook sees: a fork by another process, a training on ranks."""
    starts[kind] += 1


def pytest_configure(config):
    """Count processes that this one starts; sum where the session's reports arrive."""
    sys.addaudithook(lambda event, _: event in FORKS and count("processes"))
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Costs(config))


def pytest_collection_modifyitems(items):
    """Give every test the limit of its tier; pytest-timeout ends the test at the limit."""
    for item in items:
        if not item.get_closest_marker("timeout"):
            tier = "full" if item.get_closest_marker("full") else "not full"
            item.add_marker(pytest.mark.timeout(LIMIT_S[tier]))


def pytest_runtest_setup(item):
    """Count trainings in this process, from the first test on that has imported Lightning."""
    trainer = getattr(sys.modules.get("lightning.pytorch"), "Trainer", None)
    if trainer and not hasattr(trainer, "fit_of_lightning"):
        trainer.fit_of_lightning = fit = trainer.fit

        def counted(self, *args, **kwargs):
            count("trainings")
            return fit(self, *args, **kwargs)

        trainer.fit = counted


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Send the counts along with the report, from workers to the session."""
    report = yield
    report.user_properties = [*starts.items()]
    starts.clear()
    return report


class Costs:
    """The sums by room of tests, where the session's reports arrive."""

    def __init__(self, config):
        whole = config.args == config.getini("testpaths") and not config.option.keyword
        self._limited = whole and config.option.markexpr == "not full"
        self._rooms = defaultdict(Counter)

    def pytest_runtest_logreport(self, report):
        """Add a phase of a test."""
        parts = Path(report.nodeid.split("::")[0]).parts
        room = self._rooms[parts[1] if len(parts) > 2 else "top level"]
        room.update(dict(report.user_properties))
        room["seconds"] += report.duration
        room["tests"] += report.when == "call"

    @property
    def exceeded(self):
        """A line for each limit that the default tier has exceeded."""
        total = sum(self._rooms.values(), Counter())
        return [
            f"the default tier starts {total[kind]} {kind}, more than {limit} (tests/proof_cost.py)"
            for kind, limit in BUDGET.items()
            if self._limited and total[kind] > limit
        ]

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session, exitstatus):
        """Fail a session that starts more than its budget allows."""
        if self.exceeded and exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        """Print a line for each room, the dearest first, and the limits that were exceeded."""
        columns = ("seconds", "tests", *BUDGET)
        terminalreporter.section("cost by room of tests")
        terminalreporter.write_line("".join(f"{name:>10} " for name in columns) + "room")
        for name, room in sorted(self._rooms.items(), key=lambda pair: -pair[1]["seconds"]):
            numbers = "".join(f"{room[column]:>10.0f} " for column in columns)
            terminalreporter.write_line(numbers + name)
        for line in self.exceeded:
            terminalreporter.write_line(line, red=True)
