"""Training from another place, and with checkpoints there, has the bits of training on a disk."""

import os
import signal
import time

import jobs
import pytest
from dataset.places import needs_s3, s3, shelf
from trainer.runs import compose, fit, make_logs, on_logs

from recapp.dataset.storage import sizes_in
from recapp.stored.stored_model import read_manifest

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


@pytest.mark.parametrize("_", [pytest.param(0, marks=needs_s3)])
def test_a_run_that_is_killed_goes_on_from_a_bucket_as_if_nothing_had_been(s3, tmp_path, _):
    bucket = f"bucket-{os.urandom(4).hex()}"
    s3.files.create_dir(bucket)
    there = f"s3://{bucket}/run"
    logs = on_logs(make_logs(tmp_path / "logs"))
    run = [*logs, "trainer.devices=2", "trainer.max_steps=30", "trainer.val_check_interval=5"]
    undisturbed = jobs.command(
        "train", *run, "checkpoints=whole", "hydra.run.dir=first", cwd=tmp_path
    )
    assert undisturbed.code == 0
    killed = jobs.start(
        "train", *run, f"checkpoints={there}", "hydra.run.dir=a", cwd=tmp_path, fresh=True
    )
    while "last.ckpt/link.recapp" not in sizes_in(there):
        assert killed.poll() is None
        time.sleep(0.02)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    assert read_manifest(f"{there}/last.ckpt").step < 30
    refused = jobs.command("train", *run, f"checkpoints={there}", cwd=tmp_path).error()
    assert refused.startswith(f"checkpoints={there}: has the checkpoints of another run: go on ")
    more = (f"ckpt_path={there}/last.ckpt", f"checkpoints={there}", "hydra.run.dir=b")
    done = jobs.command("train", *more, cwd=tmp_path)
    assert done.code == 0 and f"checkpoint  {there}/step_" in done.out
    whole = tmp_path / "whole"
    ours, expected = (read_manifest(path) for path in (f"{there}/last.ckpt", whole / "last.ckpt"))
    assert (ours.step, ours.metrics) == (expected.step, expected.metrics)
    assert [one.crc32 for one in ours.blocks] == [one.crc32 for one in expected.blocks]
    names = {name.partition("/")[0] for name in sizes_in(there)}
    assert names == {path.name for path in whole.iterdir()}
    assert not list(tmp_path.glob("*/checkpoints/*"))
