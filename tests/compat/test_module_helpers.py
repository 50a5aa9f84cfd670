"""TorchRec's small functions about modules say of a sharded model what they say there."""

import pytest
from recapp.distributed.sharding_plan import (
    get_default_sharders,
    get_module_to_default_sharders,
    placement,
)
from recapp.types import DataType

import recapp as torchrec
from recapp.errors import PlanError


def test_placements_are_written_as_there():
    assert placement("cpu", 5, 4) == "rank:5/cpu" and placement("cuda", 5, 4) == "rank:5/cuda:1"
    with pytest.raises(PlanError, match="compute_device=mtia: must be cpu or cuda"):
        placement("mtia", 0, 1)


def test_default_sharders_are_found_by_the_class_they_shard():
    found = get_module_to_default_sharders()
    assert [type(s) for s in found.values()] == [type(s) for s in get_default_sharders()]
    assert list(found) == [torchrec.EmbeddingBagCollection, torchrec.EmbeddingCollection]
    assert DataType is torchrec.distributed.types.DataType
