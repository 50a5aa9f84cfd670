"""Running statistics of layers: which they are, and that ranks end with their average."""

import torch
from torch import nn

from recapp.models.layers import Dice
from recapp.trainer.step_of_ranks import running_statistics
from recapp.transport.communicator import average_over_ranks


def test_batch_norms_and_dice_have_running_statistics_and_other_layers_none():
    layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.LayerNorm(4), Dice(4))
    found = running_statistics(layers)
    norm, dice = layers[1], layers[3]
    expected = [norm.running_mean, norm.running_var, dice.mean_U, dice.variance_U]
    assert [id(each) for each in found] == [id(each) for each in expected]
    assert running_statistics(nn.BatchNorm1d(4, track_running_stats=False)) == []


def averaged(comm):
    rank = comm.rank
    low = torch.full((2,), 257.0 * rank, dtype=torch.bfloat16)  # 257 is 256 there
    tensors = [torch.full((2, 2), float(rank)), low, torch.arange(3.0) + rank]
    average_over_ranks(tensors, comm.group)
    return [tensor.tolist() for tensor in tensors]


def test_ranks_average_their_tensors_in_place(ranks):
    for found in ranks.run(averaged, 2):
        assert found == [[[0.5, 0.5], [0.5, 0.5]], [128.0, 128.0], [0.5, 1.5, 2.5]]
    alone = torch.ones(2)
    average_over_ranks([alone])
    assert alone.tolist() == [1.0, 1.0]
