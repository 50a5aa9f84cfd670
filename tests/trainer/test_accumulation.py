"""Gradients of several batches in one step: as with a batch so many times as large."""

import pytest
import torch
from tiers import one_of
from trainer.runs import compose, fit
from trainer.test_restart_tables import blocks_of, same

from recapp.errors import ConfigError
from recapp.trainer.step_of_ranks import Accumulation

LARGE = ("dataset.batch_size=96", "trainer.limit_train_batches=3")
SMALL = (
    "dataset.batch_size=32",
    "trainer.accumulate_grad_batches=3",
    "trainer.limit_train_batches=9",
)
PLAIN = ("optimizer=sgd", "optimizer.sparse.lr=1.0", "trainer.limit_val_batches=1")
CLIPS = (
    "trainer.gradient_clip_val=0.01",
    "engine.clip_tables=true",
)


def run(logs, folder, *settings, ckpt_path=None):
    """The rows of all tables, the dense part and what was seen."""
    folder.mkdir(parents=True, exist_ok=True)
    seen, trainer, module = fit(compose(logs, *settings), folder, ckpt_path=ckpt_path)
    (shared,) = trainer.strategy.sharded_tables()
    dense = {name: value.clone() for name, value in module.model.named_parameters()}
    return blocks_of(shared) | dense, seen, trainer


GROWS = ("tables=dynamic", "tables.init_range=0.05")


@pytest.mark.parametrize(
    "more", [CLIPS, pytest.param(GROWS, marks=pytest.mark.full)], ids=["clip", "dynamic"]
)
def test_a_step_of_three_batches_is_that_of_a_batch_three_times_as_large(logs, tmp_path, more):
    settings = (*PLAIN, *more, "trainer.max_epochs=2")
    wanted, _, large = run(logs, tmp_path / "large", *settings, *LARGE)
    found, seen, small = run(logs, tmp_path / "small", *settings, *SMALL)
    assert large.global_step == small.global_step == 6
    assert len(seen.batches) == 18
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=2e-4, atol=2e-5, msg=str(name))


def test_a_run_is_the_same_under_every_plan_and_after_a_resume(logs, tmp_path):
    def steps(number, plan, **more):
        settings = (*PLAIN, *CLIPS, *SMALL, f"+plan={plan}", f"trainer.max_steps={number}")
        found, seen, _ = run(logs, tmp_path / f"{number}{plan}", *settings, **more)
        return found, len(seen.batches)

    wanted, _ = steps(7, "mixed")
    assert steps(4, "row_wise")[1] == 12
    last = tmp_path / "4row_wise/checkpoints/last.ckpt"
    found, batches = steps(7, "column_wise", ckpt_path=last)
    assert batches == 3 * 3 and same(found, wanted)


def test_batches_of_other_sizes_count_by_their_rows():
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight])
    accumulation = Accumulation(3)
    for rows, loss in ((8, 1.0), (8, 2.0), (4, 6.0)):
        (weight * loss / 3 * accumulation.add(rows)).sum().backward()
    accumulation.end(lambda: None, optimizer, [])
    assert weight.grad.item() == pytest.approx((8 * 1 + 8 * 2 + 4 * 6) / 20)
    weight.grad = None
    (weight * 3.0 / 3 * accumulation.add(8)).sum().backward()
    accumulation.end(lambda: None, optimizer, [])
    assert weight.grad.item() == pytest.approx(3)


@pytest.mark.parametrize("every", ["10", "0.25", "1"])
def test_a_validation_within_a_step_is_refused(logs, every):
    with pytest.raises(ConfigError, match=f"trainer.val_check_interval={every}: counts batches"):
        compose(logs, *SMALL, f"trainer.val_check_interval={every}")
    compose(logs, *SMALL, "trainer.val_check_interval=9")


@pytest.mark.parametrize("more", one_of(2, ["trainer.max_epochs=1", "trainer.max_steps=4"]))
def test_a_shorter_last_step_lets_no_validation_fall_within_a_later_one(logs, tmp_path, more):
    settings = (*SMALL, "trainer.limit_train_batches=10", "trainer.val_check_interval=3")
    run(logs, tmp_path, *settings, more)  # one epoch has no later step
    with pytest.raises(ConfigError, match=r"val_check_interval=3: .* an epoch of 10 batches ends"):
        run(logs, tmp_path / "two", *settings, "trainer.max_epochs=2")
