"""Derived columns from training to each way of scoring: the same bits everywhere."""

import json
import subprocess

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from trainer.runs import compose, fit, make_logs

import recapp
from recapp.app.model_export import export_model
from recapp.errors import ArtefactError
from recapp.inference.build_cpp import missing_tools
from recapp.inference.export_settings import Export
from recapp.stored.checkpoint import read_manifest

pytestmark = pytest.mark.full
DERIVED = (
    "dataset.buckets={I1: log, I2: 8, I5: log}",
    "dataset.min_frequency={C1: 2, C10: 3, I1_bucket: 2, C2_x_I2_bucket: 2}",
    "dataset.crosses=[[C2,I2_bucket],[C3,C4,C6]]",
    "dataset.missing_flags=[I1,I3]",
    "dataset.piecewise={I4: 3}",
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Logs, a checkpoint after six steps, and its compiled artefact."""
    folder = tmp_path_factory.mktemp("derived")
    logs = make_logs(folder / "logs")
    fit(compose(logs, *DERIVED, "trainer.max_steps=6"), folder / "run")
    path = folder / "run" / "checkpoints" / "last.ckpt"
    export_model(path, folder / "art", Export(report_rows=64))
    return folder


@pytest.fixture(scope="module")
def rows(trained):
    table = pq.read_table(trained / "logs").slice(0, 300).drop_columns(["label"])
    return table


def test_a_checkpoint_and_its_artefact_score_alike(trained, rows):
    torch.set_num_threads(1)
    manifest = read_manifest(trained / "run" / "checkpoints" / "last.ckpt")
    assert manifest.shapes["I1_bucket"].rows < 100
    assert manifest.shapes["C1"].rows < 400
    assert {"I5_bucket", "C2_x_I2_bucket", "C3_x_C4_x_C6"} <= manifest.shapes.keys()
    wanted = recapp.load_model(trained / "run" / "checkpoints" / "last.ckpt").predict(rows)
    assert len(wanted.unique()) > 100
    assert torch.equal(recapp.load_model(trained / "art").predict(rows), wanted)


def test_a_resumed_run_keeps_the_fitted_values_and_equals_the_unbroken_run(trained, tmp_path):
    logs = trained / "logs"
    whole = fit(compose(logs, *DERIVED, "trainer.max_steps=9"), tmp_path / "whole")[0]
    last = trained / "run" / "checkpoints" / "last.ckpt"
    more = compose(logs, *DERIVED, "trainer.max_steps=9")
    seen, _, module = fit(more, tmp_path / "more", ckpt_path=last)
    assert seen.losses == whole.losses[6:]
    assert seen.batches == whole.batches[6:]
    assert module is not None


@pytest.mark.skipif(
    bool(missing_tools()), reason="needs cmake and a C++ compiler: apt-get install cmake g++"
)
def test_the_cpp_program_computes_the_same_bits(trained, rows, program):
    torch.set_num_threads(1)
    wanted = recapp.load_model(trained / "art", trust_compiled=True).predict(rows)
    text = "".join(json.dumps(row) + "\n" for row in rows.to_pylist()).encode()
    words = [program, trained / "art", "--threads=1"]
    done = subprocess.run(words, input=text, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    found = [json.loads(line)["score"] for line in done.stdout.splitlines()]
    assert np.array_equal(np.array(found, np.float32), wanted.numpy())


def test_an_artefact_with_other_values_is_refused(trained, tmp_path):
    from stored import copy

    artefact = copy(trained / "art", tmp_path / "art")
    file = artefact / "derived.bin"
    raw = bytearray(file.read_bytes())
    raw[5] ^= 1
    file.write_bytes(raw)
    with pytest.raises(ArtefactError, match=r"derived\.bin is damaged"):
        recapp.load_model(artefact)
