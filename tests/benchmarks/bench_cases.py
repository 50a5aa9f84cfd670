"""Benchmarks of a size for tests: few small tables, one rank in this process, two rounds."""

import json

from recapp.benchmarks import session
from recapp.benchmarks.workloads import MODELS, WORKLOADS, NamedModel, Workload
from recapp.processes.launch import LaunchSettings
from recapp.run.recipe import COMMANDS
from recapp.settings.records import to_plain

ROWS = (50, 7, 300)
BAGS = (1, 3, 2)
TINY = Workload("W1", 16, ROWS, (8, 8, 8), BAGS)
SHORT = {"rounds": 2, "round_seconds": 1e-4, "launch": LaunchSettings()}
ON_ONE_RANK = SHORT | {"ranks": 1, "backend": "torch", "keep_freed_memory": False}
PLANS = {
    "table_wise": {"rules": [{"type": "table_wise"}]},
    "row_wise": {"rules": [{"type": "row_wise"}]},
}


class TinyModel(NamedModel):
    """A DLRM over the tiny tables."""

    def workload(self):
        return Workload(self.name, self.batch_size, ROWS, (self.dim,) * len(ROWS), (1,) * len(ROWS))


def make_tiny(monkeypatch):
    """Make workload W1 and the small model tiny."""
    monkeypatch.setitem(WORKLOADS, "W1", TINY)
    monkeypatch.setitem(MODELS, "small", TinyModel("small", 32, 4, (8,), (8, 1)))


def measured(verb, folder, plans=PLANS, **more):
    """Return the results of a measurement on one rank, in this process."""
    from recapp.bench import MEASURES

    settings = COMMANDS[f"bench_{verb}"](**ON_ONE_RANK, **more)
    plain = to_plain(settings) | {"command": f"bench_{verb}", "measure": MEASURES[verb]}
    plain["rules"] = plans
    session.run(plain, folder)
    rows = json.loads((folder / "metrics.json").read_text())["rows"]
    assert json.loads((folder / "rows.json").read_text())["rows"] == rows
    return rows
