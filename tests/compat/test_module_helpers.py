"""TorchRec's small functions about modules say of a sharded model what they say there."""

import pytest
import torch
from recapp.distributed.planner import bytes_to_gb
from recapp.distributed.planner.utils import gb_to_bytes
from recapp.distributed.sharding_plan import (
    get_default_sharders,
    get_module_to_default_sharders,
    placement,
)
from recapp.distributed.utils import (
    add_prefix_to_state_dict,
    append_prefix,
    filter_state_dict,
    get_device_type,
    get_unsharded_module_names,
    none_throws,
)
from recapp.modules.embedding_configs import data_type_to_dtype
from recapp.types import DataType
from torch import nn

import recapp as torchrec
from recapp.errors import PlanError


class Inner(nn.Module):
    def __init__(self, bags):
        super().__init__()
        self.bags = bags
        self.projection = nn.Sequential(nn.Linear(2, 2))


class Outer(nn.Module):
    def __init__(self, bags):
        super().__init__()
        self.inner = Inner(bags)
        self.over = nn.Sequential(nn.Linear(2, 1))


def bags():
    return torchrec.EmbeddingBagCollection(
        [
            torchrec.EmbeddingBagConfig(
                name="t", num_embeddings=3, embedding_dim=2, feature_names=["f"]
            )
        ]
    )


def test_unsharded_modules_are_the_largest_without_a_sharded_collection(reference_kernels):
    model = torchrec.distributed.DistributedModelParallel(Outer(bags())).module
    assert get_unsharded_module_names(model) == ["inner.projection", "over"]
    assert get_unsharded_module_names(Outer(bags())) == []
    alone = torchrec.distributed.DistributedModelParallel(bags()).module
    assert get_unsharded_module_names(alone) == []


def test_names_in_state_dicts_get_and_lose_prefixes():
    state = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)).state_dict()
    assert list(filter_state_dict(state, "1")) == ["weight", "bias"]
    assert list(filter_state_dict(state, "0.wei")) == []
    add_prefix_to_state_dict(state, "model.")
    assert list(state) == ["model.0.weight", "model.0.bias", "model.1.weight", "model.1.bias"]
    assert [append_prefix("a", "b"), append_prefix("", "b"), append_prefix("a", "")] == [
        "a.b",
        "b",
        "a",
    ]


def test_what_must_be_there_is_returned_or_missed():
    assert none_throws(0) == 0
    with pytest.raises(AssertionError, match="no group"):
        none_throws(None, "no group")


def test_sizes_devices_and_placements_are_written_as_there():
    assert bytes_to_gb(gb_to_bytes(1.5)) == 1.5
    assert get_device_type() == ("cuda" if torch.cuda.is_available() else "cpu")
    assert placement("cpu", 5, 4) == "rank:5/cpu" and placement("cuda", 5, 4) == "rank:5/cuda:1"
    with pytest.raises(PlanError, match="compute_device=mtia: must be cpu or cuda"):
        placement("mtia", 0, 1)


def test_default_sharders_are_found_by_the_class_they_shard():
    found = get_module_to_default_sharders()
    assert [type(s) for s in found.values()] == [type(s) for s in get_default_sharders()]
    assert list(found) == [torchrec.EmbeddingBagCollection, torchrec.EmbeddingCollection]
    assert DataType is torchrec.distributed.types.DataType


def test_a_data_type_has_a_dtype():
    assert data_type_to_dtype(DataType.BF16) is torch.bfloat16
    assert data_type_to_dtype("fp64") is torch.float64
