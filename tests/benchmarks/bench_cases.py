"""Benchmarks of a size for tests: few small tables, one rank in this process, two rounds."""

from recapp.benchmarks.workloads import LOOKUPS, MODELS, WORKLOADS, NamedModel, Workload

ROWS = (50, 7, 300)
BAGS = (1, 3, 2)
TINY = Workload("W1", 16, ROWS, (8, 8, 8), BAGS)
SETTINGS = {
    "rounds": 2,
    "round_seconds": 1e-4,
    "threads": [1],
    "backend": "torch",
    "transport": ["auto"],
    "torchrec_python": None,
    "workload": ["W1"],
    "model": ["small"],
    "ids": ["uniform", "zipf"],
    "batch_size": [4],
    "bag": 3,
    "keys": 60,
    "compile": False,
    "keep_freed_memory": False,
}
PLANS = {
    "table_wise": {"rules": [{"type": "table_wise"}]},
    "row_wise": {"rules": [{"type": "row_wise"}]},
}


class TinyModel(NamedModel):
    """A DLRM over the tiny tables."""

    def workload(self):
        return Workload(self.name, self.batch_size, ROWS, (self.dim,) * len(ROWS), (1,) * len(ROWS))


def make_tiny(monkeypatch):
    """Make workload W1, also of quantised lookups, and the small model tiny."""
    monkeypatch.setitem(WORKLOADS, "W1", TINY)
    monkeypatch.setitem(LOOKUPS, "W1", TINY)
    monkeypatch.setitem(MODELS, "small", TinyModel("small", 32, 4, (8,), (8, 1)))
