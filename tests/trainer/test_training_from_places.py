"""Training from another place has the bits of training from a disk. Stored models know the
conversion that has made their rows.
"""

import hashlib
import json

import pytest
from dataset.places import s3, shelf
from trainer.runs import compose, fit, make_logs

import recapp
from recapp.logs.conversion import convert
from recapp.run.recipe import Convert

__all__ = ["s3", "shelf"]  # fixtures


@pytest.mark.full
def test_training_has_the_bits_of_a_disk_also_when_it_is_resumed(shelf, tmp_path):
    make_logs(shelf.folder / "clicks", rows=900)
    shelf.put()
    losses = []
    for number, path in enumerate((shelf.folder / "clicks", f"{shelf.uri}/clicks")):
        first, then = (compose(path, f"trainer.max_steps={steps}") for steps in (3, 7))
        seen, _, _ = fit(first, tmp_path / f"first{number}")
        last = tmp_path / f"first{number}/checkpoints/last.ckpt"
        more, _, _ = fit(then, tmp_path / f"then{number}", ckpt_path=str(last))
        losses.append((seen.losses, more.losses, more.batches))
    assert losses[0] == losses[1] and len(losses[0][1]) == 4


@pytest.mark.full
def test_checkpoints_and_artefacts_know_the_conversion_of_their_rows(tmp_path):
    make_logs(tmp_path / "clicks", rows=900)
    out = tmp_path / "out"
    convert(Convert(path=str(tmp_path / "clicks"), out=str(out), val_share=0.1))
    fit(compose(out / "train", "trainer.max_steps=2"), tmp_path / "run")
    last = tmp_path / "run/checkpoints/last.ckpt"
    recapp.export_model(last, tmp_path / "art", recapp.Export(report_rows=0, compile=False))
    written = (out / "recapp_dataset.json").read_bytes()
    wanted = {"md5": hashlib.md5(written).hexdigest(), **json.loads(written)}
    del wanted["files"]
    for folder in (last, tmp_path / "art"):
        assert json.loads((folder / "manifest.json").read_text())["conversions"] == [wanted]
