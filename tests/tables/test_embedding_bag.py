"""The unsharded collection, every test's oracle, against loops in plain Python."""

import pytest
import torch
from torch import nn

from recapp.console import note_once
from recapp.errors import ConfigError
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.tables.collections import EmbeddingBagCollection
from recapp.tables.config import EmbeddingBagConfig

BAGS = {"a": [[1, 2, 2], [], [4]], "b": [[0], [3, 1], []], "c": [[2], [2], [2, 0]]}
WEIGHTS = {
    "a": [[0.5, 1.0, 2.0], [], [3.0]],
    "b": [[1.0], [0.25, 4.0], []],
    "c": [[1.0], [2.0], [3.0, 4.0]],
}


def tables(pooling, data_type):
    return [
        EmbeddingBagConfig(
            name=n,
            num_embeddings=6,
            embedding_dim=d,
            feature_names=f,
            pooling=pooling,
            data_type=data_type,
        )
        for n, d, f in (("t", 3, ["b", "a"]), ("u", 2, ["a"]))
    ]


def batch(weighted, dtype=torch.float64):
    def flat(bags):
        return [x for key in ("a", "b", "c") for bag in bags[key] for x in bag]

    weights = torch.tensor(flat(WEIGHTS), dtype=dtype) if weighted else None
    return KeyedJaggedTensor(
        ["a", "b", "c"],
        flat(BAGS),
        weights,
        [len(bag) for key in ("a", "b", "c") for bag in BAGS[key]],
    )


def by_hand(collection, pooling, weighted):
    columns = []
    for t in collection.embedding_bag_configs():
        rows = collection.weight(t.name).detach().to(collection.dtype)
        for f in t.feature_names:
            pooled = torch.zeros(3, t.embedding_dim, dtype=collection.dtype)
            for b, bag in enumerate(BAGS[f]):
                for k, i in enumerate(bag):
                    pooled[b] += rows[i] * (WEIGHTS[f][b][k] if weighted else 1)
                if pooling == "mean" and bag:
                    pooled[b] /= len(bag)
            columns.append(pooled)
    return torch.cat(columns, 1)


@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("data_type", ["fp64", "fp32", "fp16", "bf16"])
def test_bags_are_pooled_as_by_hand_and_keyed(pooling, weighted, data_type):
    collection = EmbeddingBagCollection(tables(pooling, data_type), weighted, seed=1)
    out = collection(batch(weighted))
    torch.testing.assert_close(
        out.values().detach(), by_hand(collection, pooling, weighted), rtol=1e-6, atol=1e-6
    )
    assert out.values().dtype == (torch.float64 if data_type == "fp64" else torch.float32)
    assert out.keys() == ["b", "a@t", "a@u"] and out.length_per_key() == [3, 3, 2]
    assert torch.equal(out["a@u"], out.values()[:, 6:])


@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_rows_and_weights_get_the_gradients_worked_out_by_hand(pooling):
    collection = EmbeddingBagCollection(tables(pooling, "fp64"), is_weighted=True, seed=1)
    kjt = batch(True)
    kjt.weights().requires_grad_()
    collection(kjt).values().sum().backward()
    grad = torch.zeros(6, dtype=torch.float64)
    for bag, weights in zip(BAGS["a"], WEIGHTS["a"], strict=True):
        for i, w in zip(bag, weights, strict=True):
            grad[i] += w / (len(bag) if pooling == "mean" else 1)
    torch.testing.assert_close(collection.weight("u").grad.to_dense(), grad[:, None].expand(6, 2))
    sums = {name: collection.weight(name).detach().sum(1) for name in ("t", "u")}
    length = (
        {"a": [3, 3, 3, 1], "b": [1, 2, 2]} if pooling == "mean" else {"a": [1] * 4, "b": [1] * 3}
    )
    expected = [
        (sums["t"][i] + sums["u"][i]) / n for i, n in zip([1, 2, 2, 4], length["a"], strict=True)
    ]
    expected += [sums["t"][i] / n for i, n in zip([0, 3, 1], length["b"], strict=True)]
    torch.testing.assert_close(
        kjt.weights().grad, torch.stack([*expected, *[torch.tensor(0.0, dtype=torch.float64)] * 4])
    )


@pytest.mark.parametrize("sparse", [False, True])
def test_gradients_are_whole_tables_unless_sparse_ones_are_asked_for(sparse):
    collection = EmbeddingBagCollection(tables("sum", "fp32"), seed=1, sparse=sparse)
    collection(batch(False)).values().sum().backward()
    for bag in collection.embedding_bags.values():
        assert bag.weight.grad.is_sparse == sparse == bag.sparse
    gradient = collection.weight("u").grad
    read = (gradient.to_dense() if sparse else gradient)[:, 0]
    assert read.tolist() == [0, 1, 2, 0, 1, 0]


def test_rows_that_are_converted_have_dense_gradients_only():
    collection = EmbeddingBagCollection(tables("sum", "fp16"), seed=1)
    collection(batch(False)).values().sum().backward()
    assert collection.weight("u").grad[:, 0].tolist() == [0, 1, 2, 0, 1, 0]
    with pytest.raises(ConfigError, match=r"data_type=fp16: sparse gradients of torch need"):
        EmbeddingBagCollection(tables("sum", "fp16"), sparse=True)


@pytest.mark.parametrize(
    "optimizer", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.SGD]
)
def test_any_optimiser_trains_the_tables_behind_a_clipped_norm(optimizer):
    collection = EmbeddingBagCollection(tables("sum", "fp32"), seed=1)
    twins = [nn.Parameter(p.detach().clone()) for p in collection.parameters()]
    ours = optimizer(collection.parameters(), lr=0.1)
    plain = optimizer(twins, lr=0.1)
    for _ in range(2):
        ours.zero_grad()
        collection(batch(False)).values().square().sum().backward()
        for p, twin in zip(collection.parameters(), twins, strict=True):
            twin.grad = p.grad.clone()
        nn.utils.clip_grad_norm_(collection.parameters(), 0.5)
        nn.utils.clip_grad_norm_(twins, 0.5)
        ours.step()
        plain.step()
    for p, twin in zip(collection.parameters(), twins, strict=True):
        assert torch.equal(p, twin)
    total = sum(p.grad.square().sum() for p in collection.parameters()).sqrt()
    torch.testing.assert_close(total, torch.tensor(0.5), rtol=1e-4, atol=0)


def test_the_device_is_that_of_the_tables():
    assert EmbeddingBagCollection(tables("sum", "fp32")).device == torch.device("cpu")
    assert EmbeddingBagCollection(tables("sum", "fp32"), device="meta").device.type == "meta"


def test_an_unweighted_collection_ignores_weights_and_says_so_once(capsys):
    note_once.cache_clear()
    collection = EmbeddingBagCollection(tables("sum", "fp32"))
    for _ in range(2):
        assert torch.equal(collection(batch(True)).values(), collection(batch(False)).values())
    assert capsys.readouterr().err == (
        "is_weighted=False: the sample weights of the ids are ignored; make the "
        "EmbeddingBagCollection with is_weighted=True to multiply by them\n"
    )


def test_a_weighted_collection_requires_weights():
    collection = EmbeddingBagCollection(tables("sum", "fp32"), is_weighted=True)
    with pytest.raises(ConfigError, match="is_weighted=True and the ids have no sample weights"):
        collection(batch(False))


def test_one_that_leaves_it_open_takes_weights_where_there_are_some():
    either = EmbeddingBagCollection(tables("sum", "fp32"), is_weighted=None)
    for weighted in (False, True):
        one = EmbeddingBagCollection(tables("sum", "fp32"), weighted)
        assert torch.equal(either(batch(weighted)).values(), one(batch(weighted)).values())


def test_a_device_in_the_place_of_is_weighted_is_refused():
    with pytest.raises(ConfigError, match="is_weighted=meta: must be True, False or None"):
        EmbeddingBagCollection(tables("sum", "fp32"), torch.device("meta"))


def test_a_batch_without_samples_gives_no_rows_of_the_right_width():
    collection = EmbeddingBagCollection(tables("mean", "fp32"))
    empty = KeyedJaggedTensor(
        ["a", "b"], torch.zeros(0, dtype=torch.int64), None, torch.zeros(0, dtype=torch.int64)
    )
    assert collection(empty).values().shape == (0, 8)


def test_on_the_meta_device_the_output_has_its_shape():
    tables = [
        EmbeddingBagConfig(
            name="t1", embedding_dim=3, num_embeddings=10, feature_names=["f1", "f3"]
        ),
        EmbeddingBagConfig(name="t2", embedding_dim=4, num_embeddings=10, feature_names=["f2"]),
    ]
    collection = EmbeddingBagCollection(tables, is_weighted=True, device="meta")
    pooled = collection(
        KeyedJaggedTensor.from_offsets_sync(
            ["f1", "f3", "f2"],
            torch.empty(12, dtype=torch.int64, device="meta"),
            torch.empty(7, dtype=torch.int64, device="meta"),
            torch.empty(12, device="meta"),
        )
    )
    assert pooled.values().shape == (2, 10) and pooled.values().is_meta
    assert pooled.keys() == ["f1", "f3", "f2"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: EmbeddingBagCollection(*tables("sum", "fp32")[:1]),
            r"tables is the single table t: ",
        ),
        (lambda: EmbeddingBagCollection([{"name": "t"}]), "tables has a dict: give a list of Emb"),
        (lambda: EmbeddingBagCollection(tables("sum", "fp32"), sparse="no"), "sparse=no: must be"),
        (lambda: made()(torch.zeros(2)), "features are a Tensor: give a KeyedJagged"),
        (
            lambda: made()(KeyedJaggedTensor(["a", "b"], torch.ones(2, 1).long(), lengths=[1, 1])),
            r"ids have the shape \[2, 1\]: a lookup needs a flat tensor",
        ),
        (
            lambda: made()(batch(False).to("meta")),
            "ids are on the meta device, where they have no values, and tables on cpu: give ids",
        ),
    ],
)
def test_what_is_no_batch_or_no_list_of_tables_is_named(call, message):
    with pytest.raises(ConfigError, match=message):
        call()


def made():
    return EmbeddingBagCollection(tables("sum", "fp32"))
