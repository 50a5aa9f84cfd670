"""Programs that torch.export makes of models with unsharded collections answer as the models do,
for batches of other sizes, and end where an id is outside."""

import pytest
import torch
from torch import nn
from torch.export import Dim

from recapp.compat.torchrec.wrapped_collections import (
    FeatureProcessedEmbeddingBagCollection,
    PositionWeightedModuleCollection,
)
from recapp.errors import IdError
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.tables.collections import EmbeddingBagCollection, EmbeddingCollection
from recapp.tables.config import EmbeddingBagConfig, EmbeddingConfig, TableLookup

ROWS = 12
ANY = Dim.AUTO


def bags(name, features, rule="error", pooling="sum", dim=4, **options):
    return EmbeddingBagConfig(
        name=name,
        num_embeddings=ROWS,
        embedding_dim=dim,
        feature_names=features,
        id_rule=rule,
        pooling=pooling,
        **options,
    )


def batch(seed, stride, keys=("b", "a", "c"), low=0, high=ROWS, weighted=False):
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (len(keys) * stride,), generator=random)
    total = int(lengths.sum())
    weights = torch.rand(total, generator=random) if weighted else None
    ids = torch.randint(low, high, (total,), generator=random)
    return KeyedJaggedTensor(list(keys), ids, weights, lengths)


class Scores(nn.Module):
    """A dense part over the numbers of a batch and its pooled vectors."""

    def __init__(self, collection):
        super().__init__()
        self.collection = collection
        self.score = nn.Linear(2 + sum(x.columns for x in collection.lookups), 1)

    def forward(self, dense, kjt):
        return self.score(torch.cat([dense, self.collection(kjt).values()], 1))


class Sequences(nn.Module):
    """The vectors of every feature and the rows that they are of, with their lengths."""

    def __init__(self, collection):
        super().__init__()
        self.collection = collection

    def forward(self, kjt):
        return {
            name: (found.values(), found.weights_or_none(), found.lengths())
            for name, found in self.collection(kjt).items()
        }


def dynamic(kjt):
    """Say that a KeyedJaggedTensor has any number of values and of samples."""
    return [{0: ANY}, None if kjt.weights_or_none() is None else {0: ANY}, {0: ANY}]


def programs(model, args, shapes, path):
    """The exported program, and the same from a file."""
    exported = torch.export.export(model, args, dynamic_shapes=shapes)
    torch.export.save(exported, path)
    return exported.module(), torch.export.load(path).module()


def check(collection, tmp_path, **options):
    """Compare bags of several batches, one of them of empty bags alone."""
    torch.manual_seed(0)
    model = Scores(collection)
    first = batch(1, 5, **options)
    made = programs(
        model, (torch.rand(5, 2), first), ({0: ANY}, dynamic(first)), tmp_path / "scores.pt2"
    )
    empty = first.values()[:0]
    weights = None if first.weights_or_none() is None else first.weights()[:0]
    batches = [batch(seed, stride, **options) for seed, stride in ((1, 5), (2, 9), (3, 2))]
    batches.append(KeyedJaggedTensor(first.keys(), empty, weights, torch.zeros(9).long()))
    batches.append(
        KeyedJaggedTensor(first.keys(), first.values(), first.weights_or_none(), [0] * 6)
    )
    for kjt in batches:
        dense = torch.rand(kjt.stride(), 2)
        for program in made:
            assert torch.equal(program(dense, kjt), model(dense, kjt))


@pytest.mark.parametrize(
    "rule",
    ["error", *(pytest.param(rule, marks=pytest.mark.full) for rule in ("hash", "clamp", "drop"))],
)
def test_bags_of_a_program_are_those_of_the_model_under_every_rule(tmp_path, rule):
    outside = {} if rule == "error" else {"low": -3, "high": 3 * ROWS}
    tables = [bags("t", ["a", "b"], rule, "mean"), bags("u", ["c"], rule, dim=3)]
    check(EmbeddingBagCollection(tables=tables), tmp_path, **outside)


@pytest.mark.full
def test_bags_of_a_program_are_those_of_the_model_where_rules_differ(tmp_path):
    tables = [
        bags("hash", ["a"], "hash", "mean"),
        bags("drop", ["a", "c"], "drop", "mean"),
        bags("clamp", ["b"], "clamp", min_key=-2),
    ]
    check(EmbeddingBagCollection(tables=tables), tmp_path, low=-5, high=2 * ROWS)


@pytest.mark.full
def test_weights_of_ids_count_in_a_program(tmp_path):
    tables = [bags("t", ["a", "b"], "drop"), bags("u", ["c"], "hash", "mean")]
    collection = EmbeddingBagCollection(tables=tables, is_weighted=True)
    check(collection, tmp_path, weighted=True, high=2 * ROWS)


@pytest.mark.full
def test_concatenations_of_a_program_are_those_of_the_model(tmp_path):
    tables = [bags("t", ["a"]), bags("u", ["c"], "drop")]
    cut = TableLookup(tables[0], "a", "a", "concat", hotness=2, truncates=True)
    whole = TableLookup(tables[1], "c", "c", "concat", hotness=3)
    again = TableLookup(tables[0], "a", "mean of a", "mean")
    collection = EmbeddingBagCollection(tables=tables, lookups=[cut, again, whole])
    check(collection, tmp_path)


def test_sequences_of_a_program_are_those_of_the_model(tmp_path):
    tables = [
        EmbeddingConfig(
            name=name, num_embeddings=ROWS, embedding_dim=4, feature_names=read, id_rule=rule
        )
        for name, read, rule in (("t", ["a", "c"], "hash"), ("u", ["b"], "drop"))
    ]
    model = Sequences(EmbeddingCollection(tables=tables, need_indices=True))
    first = batch(1, 5, high=2 * ROWS)
    made = programs(model, (first,), (dynamic(first),), tmp_path / "sequences.pt2")
    for seed, stride in ((1, 5), (2, 9), (3, 2)):
        kjt = batch(seed, stride, high=2 * ROWS)
        expected = model(kjt)
        for program in made:
            found = program(kjt)
            assert list(found) == list(expected)
            for name, tensors in expected.items():
                assert all(torch.equal(a, b) for a, b in zip(found[name], tensors, strict=True)), (
                    name
                )


@pytest.mark.full
def test_a_program_ends_where_an_id_is_outside(tmp_path):
    model = Scores(EmbeddingBagCollection(tables=[bags("t", ["a"]), bags("u", ["b"], "hash")]))
    first = batch(1, 3, ("a", "b"))
    dense = torch.rand(3, 2)
    made = programs(model, (dense, first), (None, dynamic(first)), tmp_path / "model.pt2")
    outside = KeyedJaggedTensor(["a", "b"], [1, ROWS, 99], None, [0, 2, 0, 1, 0, 0])
    with pytest.raises(IdError, match=f"feature a has the id {ROWS}"):
        model(dense, outside)
    for program in made:
        with pytest.raises(RuntimeError, match=r"table t: feature a has an id outside its 12 rows"):
            program(dense, outside)


def test_a_program_ends_where_a_bag_is_longer_than_its_concatenation():
    table = bags("t", ["a"])
    lookups = [TableLookup(table, "a", "a", "concat", hotness=2)]
    model = Scores(EmbeddingBagCollection(tables=[table], lookups=lookups))
    first = KeyedJaggedTensor(["a"], [1, 2], None, [2, 0, 0])
    dense = torch.rand(3, 2)
    program = torch.export.export(model, (dense, first), dynamic_shapes=(None, dynamic(first)))
    with pytest.raises(RuntimeError, match="feature a has a bag of more than 2 ids"):
        program.module()(dense, KeyedJaggedTensor(["a"], [1, 2, 3], None, [3, 0, 0]))


def test_a_batch_without_dynamic_shapes_fixes_the_sizes_of_a_program():
    model = Scores(EmbeddingBagCollection(tables=[bags("t", ["a"])]))
    first = KeyedJaggedTensor(["a"], [1, 2], None, [2, 0, 0])
    program = torch.export.export(model, (torch.rand(3, 2), first)).module()
    other = KeyedJaggedTensor(["a"], [5, 3], None, [0, 1, 1])
    dense = torch.rand(3, 2)
    assert torch.equal(program(dense, other), model(dense, other))


class Padded(nn.Module):
    """The vectors of a feature as a matrix, as models of sequences want them."""

    def __init__(self, collection):
        super().__init__()
        self.collection = collection

    def forward(self, kjt):
        return self.collection(kjt)["a"].to_padded_dense(2, padding_value=-1.0)


def test_sequences_are_padded_in_a_program(tmp_path):
    table = EmbeddingConfig(
        name="t", num_embeddings=ROWS, embedding_dim=4, feature_names=["a"], id_rule="hash"
    )
    model = Padded(EmbeddingCollection(tables=[table]))
    first = batch(1, 5)
    exported = torch.export.export(model, (first,), dynamic_shapes=(dynamic(first),)).module()
    empty = KeyedJaggedTensor(["b", "a", "c"], [], None, [0] * 9)
    for kjt in (first, batch(2, 9), empty):
        assert torch.equal(exported(kjt), model(kjt))


def test_position_weights_count_in_a_program():
    positions = PositionWeightedModuleCollection({"a": 4, "c": 3})
    with torch.no_grad():
        positions.position_weights["a"].copy_(torch.rand(4))
    collection = EmbeddingBagCollection(tables=[bags("t", ["a", "c"])], is_weighted=True)
    model = FeatureProcessedEmbeddingBagCollection(collection, positions)
    first = batch(1, 5, ("a", "c"))
    exported = torch.export.export(model, (first,), dynamic_shapes=(dynamic(first),)).module()
    for kjt in (first, batch(2, 9, ("a", "c"))):
        assert torch.equal(exported(kjt).values(), model(kjt).values())
    with pytest.raises(IndexError):
        exported(KeyedJaggedTensor(["a", "c"], [1] * 6, None, [5, 1, 0, 0]))


# torch's own, where it goes on behind what it cannot compile
@pytest.mark.full
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_a_compiled_model_answers_and_refuses_as_the_model_does():
    model = Scores(EmbeddingBagCollection(tables=[bags("t", ["a"]), bags("u", ["b"], "drop")]))
    compiled = torch.compile(model, backend="eager")
    for seed, stride in ((1, 5), (2, 6)):
        kjt = batch(seed, stride, ("a", "b"))
        dense = torch.rand(stride, 2)
        assert torch.equal(compiled(dense, kjt), model(dense, kjt))
    with pytest.raises(IdError, match="feature a has the id 99"):
        compiled(torch.rand(1, 2), KeyedJaggedTensor(["a", "b"], [99], None, [1, 0]))


class FromParts(nn.Module):
    """Makes the KeyedJaggedTensor inside of the program."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, dense, ids, lengths):
        return self.model(dense, KeyedJaggedTensor(["b", "a", "c"], ids, None, lengths))


def test_a_program_may_make_its_jagged_tensor_of_values_and_lengths():
    model = Scores(EmbeddingBagCollection(tables=[bags("t", ["b", "a", "c"])]))
    first = batch(1, 5)
    args = (torch.rand(5, 2), first.values(), first.lengths())
    shapes = ({0: ANY}, {0: ANY}, {0: ANY})
    program = torch.export.export(FromParts(model), args, dynamic_shapes=shapes).module()
    other = batch(2, 7)
    dense = torch.rand(7, 2)
    assert torch.equal(program(dense, other.values(), other.lengths()), model(dense, other))
    with pytest.raises(RuntimeError, match="Runtime assertion failed"):
        program(dense, other.values()[:-1], other.lengths())
