"""TorchRec's DLRM and random data: parameter names, logits and batches are those that TorchRec 1.8
itself printed for the same seeds.
"""

import pytest
import torch

from recapp.compat.torchrec.batches import Batch, RandomRecDataset
from recapp.compat.torchrec.models import DLRM, MLP, DLRMTrain
from recapp.errors import ConfigError
from recapp.tables.collections import EmbeddingBagCollection
from recapp.tables.config import EmbeddingBagConfig


def data(**settings):
    given = {"num_dense": 2, "manual_seed": 3, "num_batches": 3, "min_ids_per_features": [1, 0]}
    return RandomRecDataset(
        ["a", "b"], 4, hash_sizes=[50, 9], ids_per_features=[3, 1], **given | settings
    )


def collection(dims=(4, 4)):
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=f"t_{feature}", embedding_dim=dim, num_embeddings=rows, feature_names=[feature]
            )
            for feature, rows, dim in zip(("a", "b"), (50, 9), dims, strict=True)
        ]
    )


def model():
    made = DLRMTrain(DLRM(collection(), 2, [3, 4], [5, 6, 1]))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, p in sorted(made.named_parameters()):
            p.copy_(torch.randn(p.shape, generator=generator))
    return made


def test_batches_of_a_seed_are_torchrecs():
    batches = list(data())
    assert len(batches) == len(data()) == 3
    second = batches[1]
    assert second.sparse_features.values().tolist() == [45, 34, 21, 16, 33, 47, 1, 2, 4]
    assert second.sparse_features.lengths().tolist() == [1, 2, 1, 3, 1, 0, 1, 0]
    assert second.labels.tolist() == [1, 1, 1, 0]
    torch.testing.assert_close(
        second.dense_features.flatten()[:3], torch.tensor([-1.4510227, -0.6293740, 0.1544151])
    )


def test_batches_repeat_after_those_that_were_made_or_are_made_anew():
    few = list(data(num_generated_batches=2))
    assert few[0] is few[2] and few[0] is not few[1]
    anew = list(data(num_generated_batches=-1))
    assert not torch.equal(anew[0].dense_features, anew[2].dense_features)


def test_a_data_set_without_an_end_goes_on():
    batches = iter(data(num_batches=None))
    assert all(isinstance(next(batches), Batch) for _ in range(25))


def test_lists_of_another_length_are_refused():
    with pytest.raises(ConfigError, match="hash_sizes has 1 numbers for 2 keys"):
        RandomRecDataset(["a", "b"], 4, hash_sizes=[50])


def test_parameters_are_called_as_torchrecs():
    layers = [f"dense_arch.model._mlp.{n}._linear" for n in (0, 1)]
    layers += [f"over_arch.model.0._mlp.{n}._linear" for n in (0, 1)] + ["over_arch.model.1"]
    names = [f"model.{layer}.{kind}" for layer in layers for kind in ("weight", "bias")]
    tables = "model.sparse_arch.embedding_bag_collection.embedding_bags"
    names += [f"{tables}.t_a.weight", f"{tables}.t_b.weight"]
    assert sorted(model().state_dict()) == sorted(names)


def test_logits_and_loss_are_torchrecs():
    loss, (same, logits_B, labels_B) = model()(list(data())[1])
    torch.testing.assert_close(loss, torch.tensor(0.5381522178649902))
    expected = torch.tensor([15.888427734375, 5.157984733581543, 5.629703998565674, 2.0185546875])
    torch.testing.assert_close(logits_B, expected)
    assert same.item() == loss.item() and not logits_B.requires_grad
    assert labels_B.tolist() == [1, 1, 1, 0]


def test_a_batch_moves_as_one():
    moved = next(iter(data())).to(torch.device("meta"))
    assert moved.dense_features.is_meta and moved.labels.is_meta
    assert moved.sparse_features.values().is_meta


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DLRM(collection((4, 5)), 2, [4], [5, 1]), "tables of one embedding_dim"),
        (lambda: DLRM(collection(), 2, [3], [5, 1]), "the last must be the tables' embedding_dim"),
        (lambda: DLRM(collection(), 2, [4], [1]), "name two layers or more"),
        (lambda: MLP(3, [2], activation="tanh"), "activation=tanh: name relu or sigmoid"),
        (lambda: MLP(3, [0]), "0 is no width"),
    ],
)
def test_what_does_not_fit_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_an_mlp_takes_other_activations():
    mlp = MLP(3, [2], activation="sigmoid")
    x = torch.randn(4, 3)
    assert torch.equal(mlp(x), torch.sigmoid(mlp._mlp[0]._linear(x)))
