"""`recapp.eval` measures an artefact on the validation rows of the run that made it."""

import shutil
from types import SimpleNamespace

import pytest
import torch
from jobs import validation

from recapp import train
from recapp.inference.export_settings import Export
from recapp.model_export import export_model
from recapp.run.training import CheckExample
from recapp.tasks.task import ClickTask
from recapp.trainer.module import TaskModule


@pytest.fixture(scope="module")
def run(stored):
    return stored.small_run("trainer.max_steps=6", "engine.payload=bf16")


def exported(run, folder, **options):
    options = {"compile": False} | options
    return export_model(run / "checkpoints/last.ckpt", folder, Export(**options))


@pytest.mark.full
@pytest.mark.parametrize("world", [1, 2])
def test_it_has_the_metrics_of_its_checkpoint(jobs, run, tmp_path, world):
    exported(run, tmp_path / "art", report_rows=0)
    whole = [f"ckpt_path={run / 'checkpoints/last.ckpt'}", "engine.payload=full"]
    of_checkpoint = jobs.evaluate(tmp_path / "a", *whole, world=world)
    of_artefact = jobs.evaluate(tmp_path / "b", f"ckpt_path={tmp_path / 'art'}", world=world)
    assert validation(of_artefact) == pytest.approx(validation(of_checkpoint), abs=1e-6)
    assert of_artefact["checkpoint"] == str(tmp_path / "art") and of_artefact["ranks"] == world


@pytest.mark.full
def test_in_fewer_bits_it_has_the_metrics_that_its_export_reported(jobs, run, tmp_path):
    report = exported(run, tmp_path / "art", quantize="int4", report_rows=10**6)
    found = validation(jobs.evaluate(tmp_path / "eval", f"ckpt_path={tmp_path / 'art'}", world=1))
    wanted = report["widths"][-1]
    assert found["val_auc"] == pytest.approx(wanted["auc"], abs=1e-6)


@pytest.mark.full
def test_files_that_do_not_belong_together_are_refused(jobs, run, tmp_path):
    exported(run, tmp_path / "one", report_rows=0)
    exported(run, tmp_path / "two", report_rows=0, quantize="int8")
    shutil.copy(tmp_path / "one/dense.safetensors", tmp_path / "two/dense.safetensors")
    dense = bytearray((tmp_path / "two/dense.safetensors").read_bytes())
    dense[-1] ^= 1
    (tmp_path / "two/dense.safetensors").write_bytes(dense)
    with pytest.raises(Exception, match=r"dense\.safetensors is damaged"):
        jobs.evaluate(tmp_path / "eval", f"ckpt_path={tmp_path / 'two'}", world=1)


@pytest.mark.full
def test_training_does_not_go_on_from_it(run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exported(run, tmp_path / "art", report_rows=0)
    job = [f"hydra.run.dir={tmp_path}/job", f"ckpt_path={tmp_path / 'art'}"]
    assert train.main(job) == 1
    assert "is an artefact that recapp.export has written, and no ch" in capsys.readouterr().err


def test_an_example_is_compared_in_full_precision_whatever_ranks_compute_in(monkeypatch):
    """The products of a GPU are TF32 in commands, and would not agree to the tolerance."""
    seen = []
    module = TaskModule(ClickTask(), torch.nn.Identity, lambda parameters: None)
    monkeypatch.setattr(
        module, "outputs", lambda batch: seen.append(torch.get_float32_matmul_precision()) or {}
    )
    check = CheckExample(SimpleNamespace(example_outputs=lambda names: None), torch.zeros(1))
    torch.set_float32_matmul_precision("high")
    try:
        check.on_predict_start(None, module)
        assert [*seen, torch.get_float32_matmul_precision()] == ["highest", "high"]
    finally:
        torch.set_float32_matmul_precision("highest")
