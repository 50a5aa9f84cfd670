"""A sharded model's state dict on another device, and whole in the unsharded model on rank 0."""

import pytest
import torch
from recapp.distributed import DistributedModelParallel
from recapp.inference.state_dict_transform import state_dict_gather, state_dict_to_device
from torch import nn

from recapp import EmbeddingBagCollection, EmbeddingBagConfig
from recapp.errors import ConfigError


class Tower(nn.Module):
    def __init__(self, seed, device="cpu"):
        super().__init__()
        tables = [
            EmbeddingBagConfig(name=n, num_embeddings=30, embedding_dim=4, feature_names=[n])
            for n in ("user", "movie")
        ]
        self.ebc = EmbeddingBagCollection(tables, seed=seed, device=torch.device(device))
        self.layer = nn.Linear(4, 2, device=device)


def gathered(comm):
    torch.manual_seed(5)
    model = DistributedModelParallel(Tower(3), env=comm.group)
    state = state_dict_to_device(model.state_dict(), comm.group, torch.device("cpu"))
    strips = [part for name in state for part in state[name] if "ebc" in name]
    whole = Tower(8, "meta" if comm.rank else "cpu")
    state_dict_gather(state, whole.state_dict())
    with torch.no_grad():
        for part in strips:
            part[2].fill_(0)  # a copy
    again = Tower(9, "meta" if comm.rank else "cpu")
    state_dict_gather(model.state_dict(), again.state_dict())
    if comm.rank:
        return None
    torch.manual_seed(5)
    expected = Tower(3).state_dict()
    for found in (whole.state_dict(), again.state_dict()):
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    return len(expected)


@pytest.mark.parametrize("world", [1, 4])  # a group of its own, and the default one
def test_rank_0_gets_the_unsharded_model(ranks, reference_kernels, world):
    if world == 1:
        state = DistributedModelParallel(Tower(3)).state_dict()
        whole = Tower(8)
        state_dict_gather(
            state_dict_to_device(state, None, torch.device("cpu")), whole.state_dict()
        )
        assert torch.equal(whole.ebc.weight("user"), Tower(3).ebc.weight("user"))
        return
    assert ranks.run(gathered, world)[0] == 4


def test_what_does_not_fit_is_said(reference_kernels):
    state = DistributedModelParallel(Tower(3)).state_dict()
    with pytest.raises(ConfigError, match="dst has more, and src does not"):
        state_dict_gather(state, {"more": torch.zeros(1)})
    with pytest.raises(ConfigError, match=r"layer.bias is \[2\] in src and \[3\] in dst"):
        state_dict_gather(state, {"layer.bias": torch.zeros(3)})
    with pytest.raises(ConfigError, match="layer is a str: must be a tensor, or the strips"):
        state_dict_to_device({"layer": "x"}, None, torch.device("cpu"))
