"""Inputs of models: a vector for each field, or columns; and towers of layers."""

import pytest
import torch
from torch import nn

from recapp.errors import ConfigError
from recapp.models.layers import MLP, BatchNorm, FastDropout, FieldVectors
from recapp.sparse.keyed_jagged_tensor import Batch, KeyedJaggedTensor
from recapp.tables.collections import EmbeddingBagCollection
from recapp.tables.config import EmbeddingBagConfig

NUMBERS = 2
ROWS = 3


def collection(*dims):
    return EmbeddingBagCollection(
        [
            EmbeddingBagConfig(
                name=f"C{i}", num_embeddings=4, embedding_dim=dim, feature_names=[f"C{i}"]
            )
            for i, dim in enumerate(dims)
        ]
    )


def batch(features, numbers=NUMBERS):
    ids_L = torch.tensor([0, 1, 3] * features)
    names = [f"C{i}" for i in range(features)]
    sparse = KeyedJaggedTensor(names, ids_L, lengths=torch.ones_like(ids_L))
    return Batch(torch.randn(ROWS, numbers), sparse, torch.zeros(ROWS))


def test_numbers_scale_vectors_of_their_own():
    tables = collection(4, 4)
    fields = FieldVectors(tables, NUMBERS)
    samples = batch(2)
    found_BFD = fields(samples)
    assert (fields.count, fields.dim, fields.columns) == (4, 4, 16)
    pooled_BK = tables(samples.sparse).values()
    for i in range(NUMBERS):
        expected_BD = samples.dense_BI[:, [i]] * fields.number_vectors_ID[i]
        assert torch.equal(found_BFD[:, i], expected_BD)
    assert torch.equal(found_BFD[:, NUMBERS:].flatten(1), pooled_BK)
    assert torch.equal(fields.flat(samples), found_BFD.flatten(1))


def test_numbers_stay_columns_beside_vectors_of_any_dims():
    tables = collection(4, 2)
    fields = FieldVectors(tables, NUMBERS, numbers="concat")
    samples = batch(2)
    assert (fields.count, fields.dim, fields.columns) == (2, 0, 8)
    expected_BK = torch.cat([samples.dense_BI, tables(samples.sparse).values()], 1)
    assert torch.equal(fields.flat(samples), expected_BK)


def test_without_numbers_the_fields_are_the_lookups():
    fields = FieldVectors(collection(3, 3), 0)
    assert fields(batch(2, numbers=0)).shape == (ROWS, 2, 3)
    assert not list(fields.parameters(recurse=False))


def test_vectors_of_several_dims_and_other_batches_are_refused():
    with pytest.raises(ConfigError, match=r"the interaction of FM takes vectors of one dim.*2, 4"):
        FieldVectors(collection(4, 2), NUMBERS, model="FM")
    with pytest.raises(ConfigError, match=r"dataset\.dense must be the one"):
        FieldVectors(collection(4, 4), NUMBERS)(batch(2, numbers=1))


def _kind(layer):
    """Return the class of a layer, whose products may be written in a way of their own."""
    return nn.Linear if isinstance(layer, nn.Linear) else type(layer)


def test_a_tower_has_norms_activations_and_dropout_in_their_order():
    tower = MLP(5, [4, 3, 1], last_relu=False, activation="prelu", batch_norm=True, dropout=0.2)
    kinds = [_kind(layer) for layer in tower]
    block = [nn.Linear, BatchNorm, nn.PReLU, FastDropout]
    assert kinds == [*block, *block, nn.Linear]
    assert [_kind(layer) for layer in MLP(5, [4, 3])] == [nn.Linear, nn.ReLU] * 2


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"layers": [0]}, "0 is no width"),
        ({"layers": [4], "activation": "rleu"}, r"model\.activation=rleu: did you mean relu"),
        ({"layers": [4], "dropout": 1}, "model.dropout=1: must be at least 0 and less than 1"),
    ],
)
def test_wrong_settings_of_a_tower_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        MLP(5, **settings)


@pytest.mark.parametrize("numbers", ["vectors", "concat"])
def test_whole_vectors_of_lookups_are_dropped_and_numbers_stay(numbers):
    fields = FieldVectors(collection(4, 4), NUMBERS, numbers=numbers, dropout=0.5)
    samples = batch(2)
    own = NUMBERS * (4 if numbers == "vectors" else 1)
    torch.manual_seed(3)
    found_BK = fields.flat(samples)
    torch.manual_seed(3)
    assert torch.equal(fields.flat(samples), found_BK)
    whole_BK = fields.eval().flat(samples)
    assert torch.equal(found_BK[:, :own], whole_BK[:, :own])
    dropped_BF = found_BK[:, own:].view(ROWS, 2, 4).eq(0).all(2)
    assert 0 < int(dropped_BF.sum()) < ROWS * 2
    scaled_BF4 = (2 * whole_BK[:, own:]).view(ROWS, 2, 4)
    torch.testing.assert_close(
        found_BK[:, own:].view(ROWS, 2, 4), scaled_BF4 * ~dropped_BF[:, :, None]
    )
