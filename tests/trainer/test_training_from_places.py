"""Training from another place has the bits of training from a disk."""

import pytest
from dataset.places import s3, shelf
from trainer.runs import compose, fit, make_logs

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
