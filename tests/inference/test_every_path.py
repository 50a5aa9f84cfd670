"""One model, every way to its scores, on the validation rows of real logs: trainer, predictions on
ranks, `load_model`, artefact, compiled, C++ and server. Bit for bit where the arithmetic is the
same, else within a stated bound.
"""

import asyncio
import json
import subprocess

import pyarrow.parquet as pq
import pytest
import torch
from compilers import needs_program
from serving.small_models import arrow, running

import recapp
from recapp.dataset.sequential_rows import example_rows
from recapp.metrics import click_metrics
from recapp.run.recipe import recipe_of
from recapp.run.run_rows import validation_batches, validation_source

pytestmark = pytest.mark.full

AT_ONCE = 2048
COMPILED_BOUND = 1e-5  # of a logit, relative to the larger of 1 and its size
WIDTHS = ("none", "fp16", "int8", "int4")


@pytest.fixture(scope="module")
def checkpoint(stored, real_data):
    """A model that was trained on real logs on two ranks."""
    logs = f"dataset.path={real_data / 'criteo_kaggle_137k' / 'train'}"
    run = stored.run("dataset=criteo_kaggle", logs, "trainer.max_steps=40")
    return run / "checkpoints/last.ckpt"


@pytest.fixture(scope="module")
def base(checkpoint, tmp_path_factory):
    """A directory with the model's validation rows as a file."""
    base = tmp_path_factory.mktemp("every_path")
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    recipe = recipe_of(manifest["config"], "train")
    source = validation_source(recipe)
    rows = example_rows(source, recipe.schema, source.rows)
    pq.write_table(rows, base / "rows.parquet")
    return base


@pytest.fixture(scope="module")
def rows(base):
    return pq.read_table(base / "rows.parquet")


@pytest.fixture(scope="module", params=WIDTHS)
def artefact(request, stored, checkpoint):
    """An artefact of each width; that of int8 is compiled as well."""
    return exported(stored, checkpoint, request.param)


def exported(stored, checkpoint, width):
    return stored.made(_export, str(checkpoint), width) / width


def _export(folder, checkpoint, width):
    options = recapp.Export(quantize=width, compile=width == "int8", report_rows=0)
    recapp.export_model(checkpoint, folder / width, options)


def slices(rows):
    return [rows.slice(first, AT_ONCE) for first in range(0, len(rows), AT_ONCE)]


def scores_of(model, rows):
    return torch.cat([model.predict(part) for part in slices(rows)])


def predicted(jobs, base, folder, path, world):
    """The scores of `recapp.predict` on so many ranks."""
    folder.mkdir()
    output = folder / "scores.parquet"
    settings = [
        f"ckpt_path={path}",
        f"input={base / 'rows.parquet'}",
        f"output={output}",
        f"rows_per_batch={AT_ONCE}",
    ]
    jobs.run("predict", folder / "job", settings, world)
    return torch.from_numpy(pq.read_table(output)["score"].to_numpy().copy())


def test_the_trainers_metrics_are_those_of_load_model(jobs, base, checkpoint, tmp_path):
    for world in (1, 2):
        found = jobs.evaluate(tmp_path / f"eval{world}", f"ckpt_path={checkpoint}", world=world)
        model = recapp.load_model(checkpoint)
        stored = json.loads((checkpoint / "manifest.json").read_text())["config"]
        config = recipe_of(stored, "train")
        batches = validation_batches(validation_source(config), config, 10**9)
        metrics = click_metrics(("auc", "log_loss"), sync_on_compute=False)
        for batch in batches:
            for metric in metrics.values():
                metric.update(model(batch), batch.labels_B)
        for name, metric in metrics.items():
            assert found[f"val_{name}"] == pytest.approx(float(metric.compute()), abs=1e-7)


def test_predictions_on_ranks_are_the_bits_of_load_model(jobs, base, checkpoint, rows, tmp_path):
    alone = scores_of(recapp.load_model(checkpoint), rows)
    for world in (1, 2, 4):
        found = predicted(jobs, base, tmp_path / str(world), checkpoint, world)
        assert torch.equal(found, alone)


def test_an_artefact_is_the_checkpoint_and_the_same_on_ranks(
    jobs, base, checkpoint, artefact, rows, tmp_path
):
    alone = scores_of(recapp.load_model(artefact), rows)
    trained = scores_of(recapp.load_model(checkpoint), rows)
    change = {"none": 0.0, "fp16": 1e-3, "int8": 1e-2, "int4": 1e-1}[artefact.name]
    assert float((alone - trained).abs().max()) <= change
    for world in (1, 2, 4):
        assert torch.equal(predicted(jobs, base, tmp_path / str(world), artefact, world), alone)


def test_a_server_answers_the_bits_of_load_model(artefact, rows):
    model = recapp.load_model(artefact)
    alone = scores_of(model, rows)

    async def ask():
        found = []
        async with running(lambda: model, max_batch=AT_ONCE, max_body_bytes=1 << 24) as client:
            for part in slices(rows):
                path = f"/v2/models/{model.name}/infer_rows"
                answer = await client("POST", path, {"rows": part.to_pylist()})
                assert answer.status == 200, answer.body
                found += answer.json["scores"]
        return found

    assert torch.equal(torch.tensor(asyncio.run(ask())), alone)


@needs_program
def test_compiled_is_near_and_cpp_is_the_same_bits(stored, checkpoint, rows, program):
    folder = exported(stored, checkpoint, "int8")
    portable = recapp.load_model(folder)
    compiled = recapp.load_model(folder, trust_compiled=True)
    assert compiled.info["compiled"]
    near = torch.cat([portable(portable.batch(part)) for part in slices(rows)])
    logits = torch.cat([compiled(compiled.batch(part)) for part in slices(rows)])
    assert bool(((logits - near).abs() <= COMPILED_BOUND * near.abs().clamp(min=1)).all())
    found = []
    for part in slices(rows):
        done = subprocess.run(
            [program, folder, "--logits"], input=arrow(part), capture_output=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        found += [json.loads(line)["logit"] for line in done.stdout.splitlines()]
    assert torch.equal(torch.tensor(found), logits)
