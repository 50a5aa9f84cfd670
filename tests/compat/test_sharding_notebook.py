"""A notebook about TorchRec's sharding strategies, cell by cell on two CPU ranks: with other import
lines, on the CPU, and with a batch that has a length for each of its keys and samples.
"""

import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from matplotlib import pyplot
from ranks import auto_means

from recapp import run_ranks

CHANGES = (
    ("import torchrec\n", "import recapp as torchrec\nfrom matplotlib import pyplot as plt\n"),
    ("from torchrec.", "from recapp."),
    ("from utils.", "from recapp.utils."),
    ('device="cuda"', 'device="cpu"'),
    ("(batch_size * 10,)", "(3 * batch_size * 10,)"),
    ("torch.ones(batch_size) * 10", "torch.full((3 * batch_size,), 10)"),
)
CELLS = 10


def cells_of(text):
    """The code of a notebook that was printed: between its marks and the next heading."""
    return [re.split(r"^## ", part, flags=re.MULTILINE)[0] for part in text.split("In [None]:")[1:]]


@pytest.fixture
def notebook(foreign_programs):
    text = (foreign_programs / "sharding_strategies.txt").read_text()
    for old, new in CHANGES:
        assert old in text, old
        text = text.replace(old, new)
    names = {}
    cells = cells_of(text)
    for cell in cells:
        exec(compile(cell, "sharding_strategies", "exec"), names)
    assert len(cells) == CELLS
    return SimpleNamespace(**names)


@pytest.mark.full
def test_the_notebook_runs_whole(notebook, no_process_group, monkeypatch, capfd):
    few = partial(notebook.TorchRecBenchmark, rounds=2, round_seconds=1e-3)
    monkeypatch.setitem(notebook.ShardingBenchmark.__init__.__globals__, "TorchRecBenchmark", few)
    shown = []
    monkeypatch.setattr(pyplot, "show", lambda: shown.append(pyplot.gca().get_title()))

    def work():
        results = notebook.run_sharding_comparison(world_size=dist.get_world_size())
        planner = notebook.EmbeddingShardingPlanner(
            topology=notebook.Topology(world_size=2, compute_device="cpu"),
            constraints=notebook.create_sharding_configs()["mixed"],
        )
        return results, notebook.analyze_sharding_plan(planner.collective_plan(notebook.base_model))

    with auto_means("torch"):
        (first, analysis), (second, _) = run_ranks(work, timeout=200)
    strategies = ["table_wise", "row_wise", "column_wise", "mixed"]
    assert list(first) == list(second) == strategies
    said = capfd.readouterr().out
    assert all(said.count(f"Testing {name} sharding strategy...\n") == 2 for name in strategies)
    for name in strategies:
        assert first[name]["batch_time_ms"] == second[name]["batch_time_ms"] > 0
        assert first[name]["throughput"] == pytest.approx(64e3 / first[name]["batch_time_ms"])
    weights_gb = (1_000_000 * 128 + 100_000 * 256 + 10_000 * 32) * 4 / 1e9
    for name in strategies:  # weights lie once on both ranks together, with their state and buffers
        held = first[name]["memory_gb"] + second[name]["memory_gb"]
        assert weights_gb <= held < weights_gb * 1.25, name
    assert analysis["sharding_types"] == {"row_wise": 1, "column_wise": 1, "table_wise": 1}
    assert sum(analysis["memory_distribution"].values()) == pytest.approx(weights_gb * 1e9)

    notebook.visualize_results(first)
    assert shown == ["Latency by Sharding Strategy", "Memory Usage by Sharding Strategy"]
    pyplot.close("all")
    types = {
        name: constraints.sharding_types
        for name, constraints in notebook.production_constraints.items()
    }
    assert types == {
        "large_table": ["row_wise"],
        "wide_table": ["column_wise"],
        "small_table": ["table_wise"],
    }
