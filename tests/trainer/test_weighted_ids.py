"""A model whose ids have weights: the same losses on one rank and on two, under every plan; and the
same scores from its checkpoint, its artefact and a request.
"""

import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from compilers import needs_program
from inference.test_cpp import problem
from jobs import refusal, validation

from recapp import load_model
from recapp.inference.export_settings import Export
from recapp.model_export import export_model

SETTINGS = (
    "dataset=custom",
    "dataset.sparse=[user,seen,item]",
    "dataset.batch_size=64",
    "dataset.val_batch_size=64",
    "tables.dim=8",
    "model.bottom_layers=[8]",
    "model.top_layers=[8,1]",
    "trainer.max_steps=8",
)
WEIGHTS = "dataset.id_weights={seen: seconds, item: share}"


def write(path, weigh):
    rng = random.Random(7)
    rows = 900
    bags = [[rng.randrange(60) for _ in range(rng.randrange(5))] for _ in range(rows)]
    seconds = [[rng.randrange(1, 16) / 8 for _ in bag] for bag in bags]
    label = [
        int(sum(s for s, id in zip(w, b, strict=True) if id % 2) > 1)
        for w, b in zip(seconds, bags, strict=True)
    ]
    table = {
        "label": label,
        "user": [rng.randrange(30) for _ in range(rows)],
        "seen": bags,
        "item": [rng.choice([None, *range(20)]) for _ in range(rows)],
        "seconds": [[weigh(x) for x in one] for one in seconds],
        "share": [weigh(rng.randrange(8) / 4) for _ in range(rows)],
    }
    pq.write_table(pa.table(table), path, row_group_size=100)
    return path


@pytest.fixture(scope="module")
def base(tmp_path_factory, jobs):
    """Runs with weights, on two ranks and on one, and with weights of 1; their measures."""
    base = tmp_path_factory.mktemp("weights")
    weighted = f"dataset.path={write(base / 'weighted.parquet', float)}"
    ones = f"dataset.path={write(base / 'ones.parquet', lambda weight: 1.0)}"
    runs = {
        "two": ([weighted, WEIGHTS, "+plan=row_wise"], 2),
        "one": ([weighted, WEIGHTS], 1),
        "replicated": ([weighted, WEIGHTS, "+plan=data_parallel"], 2),
        "ones": ([ones, WEIGHTS], 1),
    }
    measures = {
        name: jobs.train(base / name, *SETTINGS, *given, world=world)
        for name, (given, world) in runs.items()
    }
    return base, measures


@pytest.mark.full
def test_losses_do_not_depend_on_ranks_and_plans(base):
    _, measures = base
    losses = {name: validation(run) for name, run in measures.items()}
    assert losses["one"] == pytest.approx(losses["two"], rel=1e-5)
    assert losses["one"] == pytest.approx(losses["replicated"], rel=1e-5)
    assert losses["ones"] != pytest.approx(losses["one"], rel=1e-3)


@pytest.mark.full
def test_scores_are_those_of_weighted_sums(base):
    """Vectors of ids with weight 2 count twice: as an id that stands twice in its bag."""
    folder, _ = base
    model = load_model(folder / "one/checkpoints/last.ckpt")

    def score(seen, seconds):
        rows = {"user": [3], "seen": [seen], "seconds": [seconds], "item": [4], "share": [1.0]}
        return float(model.predict(rows)[0])

    assert score([5, 9], [2.0, 1.0]) == pytest.approx(score([5, 9, 5], [1.0] * 3), rel=1e-6)
    assert score([5, 9], [0.0, 1.0]) == score([9], [1.0])
    assert score([5, 9], [2.0, 1.0]) != score([5, 9], [1.0, 1.0])


@pytest.mark.full
def test_an_artefact_has_the_scores_of_its_checkpoint(base):
    folder, _ = base
    export_model(folder / "two/checkpoints/last.ckpt", folder / "art", Export(report_rows=0))
    rows = pq.read_table(folder / "weighted.parquet")
    of_checkpoint, of_artefact = (
        load_model(folder / place).predict(rows) for place in ("two/checkpoints/last.ckpt", "art")
    )
    assert torch.equal(of_checkpoint, of_artefact)
    assert np.isfinite(of_artefact.numpy()).all()


@pytest.mark.full
def test_a_sequence_has_no_weights(base, jobs, tmp_path):
    folder, _ = base
    given = [f"dataset.path={folder / 'weighted.parquet'}", WEIGHTS, "tables.sequences=[seen]"]
    din = [*SETTINGS[:5], "model=din", "tables.shared={seen: item}", "trainer.max_steps=1"]
    kind, line = refusal(jobs.train, tmp_path, *din, *given, world=1)
    assert kind == "ConfigError" and "no lookup pools seen" in line


@pytest.mark.full
@needs_program
def test_the_program_in_cpp_refuses_weights(base, stored):
    folder, _ = base
    export_model(folder / "one/checkpoints/last.ckpt", folder / "cpp", Export(report_rows=0))
    said = problem(stored.program(arrow=False), folder / "cpp", stdin=b"{}")
    assert "has weights of ids (dataset.id_weights), by which only Python multiplies" in said
