"""Tests of hooks: those that do nothing are not called, all others are."""

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LambdaCallback

from recapp.trainer.lightnings_parts import BATCH_HOOKS, BatchCallback, skip_idle_hooks


class Counting(Callback):
    """Counts the batches of training."""

    def __init__(self):
        self.batches = 0

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.batches += 1


class Inherits(Counting):
    pass


def called(callback):
    return [name for name in BATCH_HOOKS if callable(getattr(callback, name))]


@pytest.mark.parametrize("kind", [Counting, Inherits])
def test_only_the_hooks_of_a_callback_are_called(kind):
    own, base = kind(), Callback()
    skip_idle_hooks([own, base])
    assert called(own) == ["on_train_batch_start"] and called(base) == []
    own.on_train_batch_start(None, None, None, 0)
    assert own.batches == 1
    assert callable(own.on_train_start)  # not a hook of a batch
    assert called(Counting()) == list(BATCH_HOOKS)  # other callbacks of the class stay as they are


def test_hooks_that_lightning_calls_by_batch_exist():
    assert all(callable(getattr(Callback, name)) for name in BATCH_HOOKS)


def test_skipping_twice_changes_nothing_more():
    own = BatchCallback()
    skip_idle_hooks([own])
    found = called(own)
    skip_idle_hooks([own])
    ends = [f"on_{stage}_batch_end" for stage in ("train", "validation", "test", "predict")]
    assert sorted(called(own)) == sorted(found) == sorted(ends)


def test_a_hook_that_a_callback_was_given_is_called():
    heard = []
    own = LambdaCallback(on_before_zero_grad=lambda *_: heard.append("zero"))
    skip_idle_hooks([own])
    assert called(own) == ["on_before_zero_grad"]
    own.on_before_zero_grad(None, None, None)
    assert heard == ["zero"]
