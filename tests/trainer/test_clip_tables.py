"""Lightning's gradient clipping over tables and dense part together."""

import lightning
import pytest
import torch
from tiers import one_of
from trainer.own_lightning import ITEMS, SEEN, Clicks, loader
from trainer.runs import compose, fit, make_logs

from recapp import EmbeddingBagCollection, EmbeddingCollection, EmbeddingShardingStrategy
from recapp.errors import ConfigError
from recapp.optim.optimizer import HybridOptimizer
from recapp.optim.rules import sgd

LR = 0.5


class Sharded(Clicks):
    def configure_optimizers(self):
        dense = torch.optim.SGD((p for p in self.parameters() if p.requires_grad), LR)
        return HybridOptimizer(dense, self.trainer.strategy.sparse_groups())


class Unsharded(Clicks):
    """The same on one process, with tables that are parameters."""

    def configure_model(self):
        if not hasattr(self, "bags"):
            super().configure_model()
            self.bags = EmbeddingBagCollection(tables=[ITEMS])
            self.sequences = EmbeddingCollection(tables=[SEEN])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), LR)


class Without(Clicks):
    def configure_optimizers(self):
        return torch.optim.SGD(self.score.parameters(), LR)


def trainer(strategy, **settings):
    return lightning.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **settings,
    )


def state_of(module, strategy, **settings):
    trainer(strategy, **settings).fit(module, loader())
    state = module.state_dict()
    return {
        name: value if isinstance(value, torch.Tensor) else value[0][2]
        for name, value in state.items()
    }


@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_clip_val": 0.1},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    ],
)
def test_a_clipped_fit_is_that_of_the_module_with_tables_of_its_own(settings):
    strategy = EmbeddingShardingStrategy(rule=sgd(LR), clip_tables=True)
    found = state_of(Sharded(), strategy, **settings)
    expected = state_of(Unsharded(), "auto", **settings)
    unclipped = state_of(Unsharded(), "auto")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)
        assert not torch.allclose(unclipped[name], value, rtol=1e-4, atol=1e-5), name


@pytest.mark.parametrize(
    ("module", "settings", "message"),
    [
        (Sharded, {}, r"Trainer\(gradient_clip_val=None\) clips nothing"),
        (
            Without,
            {"gradient_clip_val": 1.0},
            "the module's optimizers are SGD, and tables are updated in the step of one",
        ),
    ],
)
def test_what_cannot_clip_tables_is_refused(module, settings, message):
    strategy = EmbeddingShardingStrategy(rule=sgd(LR), clip_tables=True)
    with pytest.raises(ConfigError, match=message):
        trainer(strategy, **settings).fit(module(), loader())


def weights_after(steps, clip, logs, folder):
    settings = (f"trainer.max_steps={steps}", f"engine.clip_tables={clip}")
    _, ended, _ = fit(compose(logs, "trainer.gradient_clip_val=1e-30", *settings), folder)
    blocks = ended.strategy.sharded_tables()[0].blocks()
    return torch.cat([b.data.flatten() for b in blocks if b.tensor == "weight"])


@pytest.mark.parametrize("clip", one_of(2, ["true", "false"]))
def test_a_run_clips_its_tables_where_the_setting_says_so(tmp_path, clip):
    """Gradients that are clipped to almost nothing move no row."""
    logs = make_logs(tmp_path / "set")
    one, three = (weights_after(n, clip, logs, tmp_path / str(n)) for n in (1, 3))
    assert torch.equal(one, three) == (clip == "true")
