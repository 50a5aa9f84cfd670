"""Any LightningDataModule trains under the Strategy."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from jobs import script
from torch import nn

from recapp.sharding.sharding_plan import ShardingPlan
from recapp.stored.stored_model import read_manifest
from recapp.trainer.sharded_checkpoint import manifest_of

TESTS = Path(__file__).parents[1]
SCRIPT = Path(__file__).with_name("plain_data_script.py")


@pytest.mark.full
def test_a_data_module_of_ones_own_without_statistics_or_position_trains_on_two_ranks(tmp_path):
    script(SCRIPT, tmp_path, cwd=TESTS, world=2)
    found = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    trained = {"steps": 5, "modes": ["unique"], "updates": [5]}
    assert found == [trained | {"problem": True}, trained | {"problem": False}]
    manifest = read_manifest(tmp_path / "mine.ckpt")
    assert manifest.step == 5
    assert manifest.info["position"] is None and manifest.info["ids"] is None


def test_an_example_that_is_none_is_stored_as_no_rows():
    data = SimpleNamespace(example=lambda: None)
    trainer = SimpleNamespace(datamodule=data, callback_metrics={}, global_step=0)
    assert manifest_of(trainer, nn.Module(), ShardingPlan({}, 1))["example"] == []
