"""Every batch is trained exactly once, wherever a run stops and goes on."""

import pytest
from lightning.pytorch import Callback
from trainer.runs import compose, fit

EPOCH = 18  # batches


@pytest.fixture(scope="module")
def unbroken(logs, tmp_path_factory):
    seen, _, module = fit(
        compose(logs, "trainer.max_epochs=2"), tmp_path_factory.mktemp("unbroken")
    )
    assert len(seen.batches) == 2 * EPOCH
    return seen, module


def last_of(folder):
    return str(folder / "checkpoints" / "last.ckpt")


def weights(module):
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def test_two_epochs_hold_the_same_rows_in_another_order(unbroken):
    seen, _ = unbroken
    assert seen.batches[:EPOCH] != seen.batches[EPOCH:]
    assert sum(seen.batches[:EPOCH]) == pytest.approx(sum(seen.batches[EPOCH:]), rel=0.02)


@pytest.mark.parametrize(
    "stop",
    [7, EPOCH, *(pytest.param(stop, marks=pytest.mark.full) for stop in (1, EPOCH - 1, EPOCH + 5))],
)
def test_going_on_from_a_stop_equals_the_unbroken_run(logs, unbroken, tmp_path, stop):
    first, _, _ = fit(compose(logs, f"trainer.max_steps={stop}"), tmp_path)
    rest, trainer, module = fit(
        compose(logs, "trainer.max_epochs=2"), tmp_path / "rest", ckpt_path=last_of(tmp_path)
    )
    seen, whole = unbroken
    assert first.batches + rest.batches == seen.batches
    assert first.losses + rest.losses == seen.losses
    assert trainer.global_step == 2 * EPOCH
    for name, value in weights(whole).items():
        assert value.equal(weights(module)[name]), name


def test_going_on_under_another_batch_size_skips_no_row_that_was_not_trained(logs, tmp_path):
    fit(compose(logs, "trainer.max_steps=6"), tmp_path)
    rest, trainer, _ = fit(
        compose(logs, "dataset.batch_size=192"), tmp_path / "rest", ckpt_path=last_of(tmp_path)
    )
    assert len(rest.batches) == EPOCH // 2 - 3  # 6 batches of 96 are 3 of 192
    assert rest.validations == [trainer.global_step]


@pytest.mark.full
def test_going_on_between_epochs_under_a_smaller_batch_size_trains_no_row_again(logs, tmp_path):
    half = "dataset.batch_size=48"
    whole, _, _ = fit(compose(logs, "trainer.max_epochs=2", half), tmp_path / "whole")
    fit(compose(logs, f"trainer.max_steps={EPOCH}"), tmp_path)
    more = compose(logs, "trainer.max_epochs=2", half)
    rest, _, _ = fit(more, tmp_path / "rest", ckpt_path=last_of(tmp_path))
    assert rest.batches == whole.batches[-len(rest.batches) :]
    assert 2 * len(rest.batches) == len(whole.batches)


@pytest.mark.full
def test_max_steps_goes_on_over_several_epochs(logs, tmp_path):
    seen, trainer, _ = fit(compose(logs, f"trainer.max_steps={2 * EPOCH + 4}"), tmp_path)
    assert len(seen.batches) == 2 * EPOCH + 4
    assert trainer.current_epoch in (2, 3)


def test_validation_every_n_steps_counts_across_epochs(logs, tmp_path):
    seen, _, _ = fit(
        compose(logs, "trainer.max_epochs=2", "trainer.val_check_interval=7"), tmp_path
    )
    assert seen.validations[:5] == [7, 14, 21, 28, 35]
    assert seen.validations[-1] == 2 * EPOCH


@pytest.mark.parametrize("limit", ["2", "0.5"])
def test_validation_can_be_limited_and_has_its_own_batch_size(logs, tmp_path, limit):
    rows = []

    class Rows(Callback):
        def on_validation_batch_end(
            self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0
        ):
            rows.append(batch.rows)

    fit(
        compose(
            logs,
            "trainer.max_steps=2",
            f"trainer.limit_val_batches={limit}",
            "dataset.val_batch_size=80",
        ),
        tmp_path,
        Rows(),
    )
    assert rows[:2] == [80, 80]
    assert len(rows) == 2  # 300 validation rows are 4 batches of 80


@pytest.mark.full
def test_a_run_without_validation_leaves_a_checkpoint_too(logs, unbroken, tmp_path):
    first, _, _ = fit(compose(logs, "trainer.max_steps=5", "trainer.limit_val_batches=0"), tmp_path)
    assert first.validations == []
    rest, _, _ = fit(
        compose(logs, "trainer.max_steps=9"), tmp_path / "rest", ckpt_path=last_of(tmp_path)
    )
    assert first.losses + rest.losses == unbroken[0].losses[:9]


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:Total length of")
def test_a_run_without_validation_rows_goes_on_at_its_row_again_and_again(logs, tmp_path):
    none = ["dataset.val_share=0", "trainer.max_epochs=3"]
    whole, _, _ = fit(compose(logs, *none), tmp_path / "whole")
    epoch = len(whole.batches) // 3
    batches = []
    last = None
    for part, steps in enumerate((4, epoch, epoch + 6, 2 * epoch + 1, -1)):
        settings = compose(logs, *none, f"trainer.max_steps={steps}")
        seen, trainer, _ = fit(settings, tmp_path / f"{part}", ckpt_path=last)
        batches += seen.batches
        last = last_of(tmp_path / f"{part}")
        done = divmod(len(batches), epoch)
        position = trainer.datamodule.position
        assert (position.epoch, position.batches) == done
    assert batches == whole.batches
