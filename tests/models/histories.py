"""Samples with histories, their tables, and programs of models that read them."""

from types import SimpleNamespace

import torch
from transcription import ROWS, random_vectors

from recapp.sparse.jagged_tensor import JaggedTensor, KeyedTensor
from recapp.sparse.keyed_jagged_tensor import Batch, KeyedJaggedTensor
from recapp.tables.collections import EmbeddingBagCollection, EmbeddingCollection
from recapp.tables.config import EmbeddingBagConfig, EmbeddingConfig

LENGTHS = [2, 0, 3, 1, 5, 1]


def bags_of(features, dim):
    """Return float64 tables of the candidate and of other columns."""
    return EmbeddingBagCollection(
        [
            EmbeddingBagConfig(
                name=name,
                num_embeddings=ROWS,
                embedding_dim=dim,
                feature_names=[name],
                data_type="fp64",
            )
            for name in features
        ]
    )


def sequences_of(names, dim):
    """Return float64 tables of sequences."""
    return EmbeddingCollection(
        [
            EmbeddingConfig(
                name=f"{name}_table",
                num_embeddings=ROWS,
                embedding_dim=dim,
                feature_names=[name],
                data_type="fp64",
            )
            for name in names
        ]
    )


def histories_of(names, dense, lengths=LENGTHS, seed=5):
    """Return samples with an item, a user and histories; lengths are those of each history."""
    draw = torch.Generator().manual_seed(seed)
    samples = len(lengths)
    all_lengths = torch.tensor([1] * (2 * samples) + list(lengths) * len(names))
    ids_L = torch.randint(ROWS, (int(all_lengths.sum()),), generator=draw)
    sparse = KeyedJaggedTensor(["item", "user", *names], ids_L, lengths=all_lengths)
    dense_BI = torch.randn(samples, dense, generator=draw, dtype=torch.float64)
    return Batch(dense_BI, sparse, torch.ones(samples))


def behaviours(parameters, batch, names):
    """Return the vectors of the behaviours of each sample, side by side."""
    samples = []
    for b in range(batch.rows):
        parts = []
        for name in names:
            weight_RD = parameters[f"embedding_collection.embeddings.{name}_table.weight"]
            offsets = [0, *batch.sparse[name].lengths().cumsum(0).tolist()]
            ids = batch.sparse[name].values()[offsets[b] : offsets[b + 1]].tolist()
            parts.append([weight_RD[i] for i in ids])
        samples.append([torch.cat(vectors) for vectors in zip(*parts, strict=True)])
    return samples


def at_most(found, amount):
    """Return jagged tensors with values behind the last bag, as in buffers of a fixed size."""
    return {
        name: JaggedTensor.unchecked(
            torch.cat([x.values(), 9 * random_vectors(amount, x.values().shape[1])]),
            None,
            x.lengths(),
            may_have_slack=True,
        )
        for name, x in found.items()
    }


class _Dense(torch.nn.Module):
    """The dense part of a model: vectors come from outside."""

    def __init__(self, model, names):
        super().__init__()
        self.model = model
        self.names = names
        self.bags = model.fields.embedding_bag_collection.lookups

    def forward(self, dense_BI, pooled_BK, *jagged):
        keyed = KeyedTensor([x.output for x in self.bags], [x.dim for x in self.bags], pooled_BK)
        given = {
            name: JaggedTensor.unchecked(values_LD, None, lengths_B)
            for name, values_LD, lengths_B in zip(
                self.names, jagged[::2], jagged[1::2], strict=True
            )
        }
        model = self.model
        model.fields.embedding_bag_collection.forward = lambda _: keyed
        model.embedding_collection.forward = lambda _: given
        try:
            return model(SimpleNamespace(dense_BI=dense_BI, sparse=None, rows=dense_BI.shape[0]))
        finally:
            del model.fields.embedding_bag_collection.forward
            del model.embedding_collection.forward


def exported(model, names, dense):
    """Yield batches of several sizes and what the exported dense part returns for them."""
    part = _Dense(model, names)

    def inputs(batch):
        found = model.embedding_collection(batch.sparse)
        jagged = [t for name in names for t in (found[name].values(), found[name].lengths())]
        pooled = model.fields.embedding_bag_collection(batch.sparse).values()
        return [t.detach() for t in (batch.dense_BI, pooled, *jagged)]

    samples = torch.export.Dim("B", min=1)
    counts = [torch.export.Dim(f"L{i}", min=0) for i in range(len(names))]
    sizes = [{0: samples}, {0: samples}]
    sizes += [size for count in counts for size in ({0: count}, {0: samples})]
    program = torch.export.export(
        part,
        tuple(inputs(histories_of(names, dense))),
        dynamic_shapes=(sizes[0], sizes[1], tuple(sizes[2:])),
        strict=False,
    ).module()
    for lengths in (LENGTHS, [4], [0, 0], [30, 0, 1], [1] * 9):
        batch = histories_of(names, dense, lengths)
        yield batch, program(*inputs(batch))
