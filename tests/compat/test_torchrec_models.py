"""TorchRec's cross networks, DeepFM and further DLRMs: numbers that TorchRec itself prints for the
same seeds, and formulas written out.
"""

import pytest
import torch
from torch import nn

from recapp.compat.torchrec.models import (
    DLRM_DCN,
    CrossNet,
    DeepFM,
    DLRM_Projection,
    FactorizationMachine,
    FMInteractionArch,
    InteractionDCNArch,
    InteractionProjectionArch,
    LowRankCrossNet,
    LowRankMixtureCrossNet,
    SimpleDeepFMNN,
    VectorCrossNet,
)
from recapp.errors import ConfigError
from recapp.sparse.jagged_tensor import KeyedTensor
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.tables.collections import EmbeddingBagCollection
from recapp.tables.config import EmbeddingBagConfig


def close(found, expected):
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("network", "settings", "expected"),
    [
        (CrossNet, {}, [[2.4481, 2.2710], [-63.1721, -109.2410], [1.4030, 1.0054]]),
        (
            LowRankCrossNet,
            {"low_rank": 10},
            [[-11.5, -3.4863], [-0.2742, -0.3330], [249.6694, 117.3466]],
        ),
        (
            VectorCrossNet,
            {},
            [[1.8289e-04, -3.4827e-05], [-2.2084e02, 5.7615e01], [-1.3328e02, -1.7187e02]],
        ),
        (
            LowRankMixtureCrossNet,
            {"num_experts": 4, "low_rank": 10},
            [[1.7045, -0.2848], [-2.5357, 0.5811], [-0.9467, -1.3091]],
        ),
        (
            LowRankMixtureCrossNet,
            {"num_experts": 1, "low_rank": 10},
            [[3.9203, -0.2686], [-9.5767, 0.8621], [-2.5836, -1.8124]],
        ),
    ],
)
def test_a_cross_network_of_a_seed_is_torchrecs(network, settings, expected):
    torch.manual_seed(0)
    given = torch.randn(3, 2)
    close(network(2, 20, **settings)(given), expected)


def test_a_bias_of_a_cross_network_counts_as_in_its_formula():
    for network in (CrossNet, LowRankCrossNet, VectorCrossNet, LowRankMixtureCrossNet):
        plain = network(3, 1)
        given = torch.randn(4, 3)
        without = plain(given)
        with torch.no_grad():
            plain.bias[0].fill_(0.5)
        bias = 0.5 if network is VectorCrossNet else 0.5 * given
        torch.testing.assert_close(plain(given), without + bias)


def test_a_size_of_zero_is_refused():
    with pytest.raises(ConfigError, match="LowRankCrossNet: low_rank=0: must be at least 1"):
        LowRankCrossNet(3, 2, low_rank=0)


def test_the_factorisation_machine_adds_products_of_all_columns():
    vectors = [torch.randn(3, 2, 4), torch.randn(3, 5)]
    columns = torch.cat([v.flatten(1) for v in vectors], 1)
    pairs = torch.combinations(torch.arange(13))
    expected = (columns[:, pairs[:, 0]] * columns[:, pairs[:, 1]]).sum(1, keepdim=True)
    torch.testing.assert_close(FactorizationMachine()(vectors), expected)
    deep = nn.Linear(13, 2)
    torch.testing.assert_close(DeepFM(deep)(vectors), deep(columns))


def test_the_interaction_of_deepfm_is_torchrecs():
    torch.manual_seed(0)
    dense = torch.rand((3, 3))
    vectors = KeyedTensor(["f1", "f2"], [3, 3], torch.rand((3, 6)))
    close(
        FMInteractionArch(9, ["f1", "f2"], 2)(dense, vectors),
        [
            [0.4963, 0.7682, 0.0885, 0.0000, 0.2646, 4.3660],
            [0.1320, 0.3074, 0.6341, 0.0000, 0.0834, 7.6417],
            [0.4901, 0.8964, 0.4556, 0.0000, 0.0671, 15.5230],
        ],
    )


def test_further_interactions_are_their_formulas():
    dense = torch.randn(5, 3)
    vectors = torch.randn(5, 2, 3)
    columns = torch.cat([dense, vectors.flatten(1)], 1)
    crosses = LowRankCrossNet(9, 2, 3)
    torch.testing.assert_close(InteractionDCNArch(2, crosses)(dense, vectors), crosses(columns))
    first, second = nn.Linear(9, 6), nn.Linear(9, 12)
    left, right = first(columns).view(5, 2, 3), second(columns).view(5, 3, 4)
    products = torch.einsum("bij,bjk->bik", left, right).flatten(1)
    torch.testing.assert_close(
        InteractionProjectionArch(2, first, second)(dense, vectors),
        torch.cat([dense, products], 1),
    )


def collection():
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name="t1", embedding_dim=8, num_embeddings=100, feature_names=["f1", "f3"]
            ),
            EmbeddingBagConfig(
                name="t2", embedding_dim=8, num_embeddings=100, feature_names=["f2"]
            ),
        ]
    )


@pytest.mark.parametrize(
    ("make", "head"),
    [
        (lambda: DLRM_DCN(collection(), 6, [20, 8], [5, 1], 2, 8), "inter_arch.crossnet"),
        (
            lambda: DLRM_Projection(collection(), 6, [20, 8], [5, 1], [16, 32], [16, 24]),
            "inter_arch.interaction_branch2",
        ),
        (lambda: SimpleDeepFMNN(6, collection(), 20, 5), "inter_arch.deep_fm"),
    ],
)
def test_a_model_of_each_kind_trains_all_its_weights(make, head):
    model = make()
    ids = KeyedJaggedTensor(["f1", "f3", "f2"], [1, 2, 4, 5, 4, 3], lengths=[1] * 6)
    logits = model(torch.rand(2, 6) + 0.5, ids)
    assert logits.shape == (2, 1)
    logits.sum().backward()
    assert any(name.startswith(head) for name, _ in model.named_parameters())
    assert all(p.grad is not None for p in model.parameters())


def test_a_projection_of_another_width_is_refused():
    with pytest.raises(ConfigError, match=r"branch2_layer_sizes=\[9\]: the last must be a multi"):
        DLRM_Projection(collection(), 6, [20, 8], [5, 1], [16], [9])
    with pytest.raises(ConfigError, match="SimpleDeepFMNN needs tables of one embedding_dim"):
        tables = [
            EmbeddingBagConfig(name=n, embedding_dim=d, num_embeddings=9, feature_names=[n])
            for n, d in (("a", 4), ("b", 8))
        ]
        SimpleDeepFMNN(6, EmbeddingBagCollection(tables=tables), 20, 5)
