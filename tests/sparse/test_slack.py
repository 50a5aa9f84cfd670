"""More values than the bags hold, as in buffers of a fixed size: the first ones count wherever a
KeyedJaggedTensor goes.
"""

import pickle

import pytest
import torch
from sparse.bags_by_hand import same
from torch.utils import _pytree as pytree

from recapp.errors import DataError
from recapp.sparse.jagged_tensor import JaggedTensor
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.tables.collections import EmbeddingBagCollection, EmbeddingCollection
from recapp.tables.config import EmbeddingBagConfig, EmbeddingConfig

KEYS = ["a", "b"]
LENGTHS = [2, 1, 0, 3]


def exact(weighted):
    weights = torch.arange(1.0, 7.0) if weighted else None
    return KeyedJaggedTensor(KEYS, torch.arange(6), weights, torch.tensor(LENGTHS))


def buffered(weighted, device="cpu", **counts):
    """Ids that no table has stand behind those that count."""
    values = torch.cat([torch.arange(6), torch.full((4,), 1000)]).to(device)
    weights = torch.cat([torch.arange(1.0, 7.0), torch.full((7,), 50.0)]) if weighted else None
    counts = counts or {"lengths": torch.tensor(LENGTHS, device=device)}
    return KeyedJaggedTensor(KEYS, values, weights, **counts)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    "counts", [{"lengths": torch.tensor(LENGTHS)}, {"offsets": torch.tensor([0, 2, 3, 3, 6])}]
)
def test_every_way_leaves_the_rest_out(weighted, counts):
    kjt = buffered(weighted, **counts)
    want = exact(weighted)
    assert len(kjt.values()) == 10, "the buffer is not cut"
    assert kjt.length_per_key() == [3, 3] and kjt.offset_per_key() == [0, 3, 6]
    assert same(kjt.without_slack(), want) and want.without_slack() is want
    for order in ([0, 1], [1, 0], [1, 1, 0]):
        assert same(kjt.permute(order), want.permute(order))
    for one, other in zip(kjt.split([1, 1, 0]), want.split([1, 1, 0]), strict=True):
        assert same(one, other)
    assert kjt["b"].values().tolist() == [3, 4, 5]
    assert kjt.to_dict()["b"].lengths().tolist() == [0, 3]
    other = KeyedJaggedTensor(
        ["c"], [7, 8, 9], torch.ones(3) if weighted else None, torch.tensor([1, 1])
    )
    joined = KeyedJaggedTensor.concat([kjt, other])
    assert same(joined, KeyedJaggedTensor.concat([want, other.without_slack()]))
    assert same(KeyedJaggedTensor.from_jt_dict(kjt.to_dict()), want)
    tree = pytree.tree_map(lambda t: t, kjt)
    assert len(tree.values()) == 10 and same(tree.without_slack(), want)
    assert len(kjt.to("cpu").values()) == 10 and same(kjt.to("cpu").without_slack(), want)


def test_a_mapping_of_tensors_with_slack_makes_one_without():
    parts = {
        "a": JaggedTensor([1, 2, 3], lengths=[1, 0]),
        "b": JaggedTensor([4, 5, 6], lengths=[1, 1]),
    }
    kjt = KeyedJaggedTensor.from_jt_dict(parts)
    assert kjt.values().tolist() == [1, 4, 5] and kjt.length_per_key() == [1, 2]


def tables(kind):
    return [
        kind(name="t0", num_embeddings=6, embedding_dim=3, feature_names=["a"]),
        kind(name="t1", num_embeddings=6, embedding_dim=3, feature_names=["b"]),
    ]


@pytest.mark.parametrize("weighted", [False, True])
def test_collections_read_the_first_ones(weighted):
    bags = EmbeddingBagCollection(tables(EmbeddingBagConfig), is_weighted=weighted)
    assert torch.equal(bags(buffered(weighted)).values(), bags(exact(weighted)).values())
    sequences = EmbeddingCollection(tables(EmbeddingConfig))
    made = sequences(buffered(weighted))
    for name, jagged in sequences(exact(weighted)).items():
        assert torch.equal(made[name].values(), jagged.values())


def test_counts_that_were_handed_over_are_compared():
    with pytest.raises(DataError, match=r"length_per_key is \[3, 4\], but .* it is \[3, 3\]"):
        buffered(False, lengths=torch.tensor(LENGTHS), length_per_key=[3, 4])


def test_tensors_that_were_stored_before_are_read():
    kjt = exact(True)
    jagged = kjt["a"]
    for name in ("_strides", "_inverse_indices", "_jt_dict"):
        del kjt.__dict__[name]
    del jagged.__dict__["_may_have_slack"]
    kjt, jagged = pickle.loads(pickle.dumps((kjt, jagged)))
    assert same(kjt.permute([0, 1]), exact(True)) and kjt.to_dict()["b"].values().tolist() == [
        3,
        4,
        5,
    ]
    assert (
        jagged.without_slack().values().tolist() == [0, 1, 2] and not kjt.variable_stride_per_key()
    )
