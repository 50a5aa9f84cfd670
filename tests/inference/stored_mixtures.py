"""Random models whose tables are stored in random ways, as files of an artefact and in memory."""

import random

import torch
from engine.test_random_mixtures import FEATURES, Mixture

from recapp.engine.sharded_collection import embedding_collections, shard_model
from recapp.inference.held_tables import RowWriter, mapped_tables, one_rank, stored, values
from recapp.stored.manifest import ArtefactManifest
from recapp.stored.stored_model import Artefact
from recapp.tables.collections import embedding_tables
from recapp.tables.config import DataType
from recapp.tables.initial import start_values
from recapp.tables.positions import positions_of

STORAGES = (
    DataType.FP64,
    DataType.FP32,
    DataType.FP16,
    DataType.BF16,
    DataType.INT8,
    DataType.INT4,
)
START = 7


def on_meta(seed):
    """The mixture with tables on the meta device."""
    with torch.device("meta"):
        return Mixture(seed, START, True)


def storages(seed):
    rng = random.Random(f"storages {seed}")
    tables = embedding_tables(on_meta(seed))
    return {t.name: rng.choice(STORAGES) for t in tables}


def keys_that_exist(table, seed):
    """Some of the keys that batches have; the others answer start values."""
    rng = random.Random(f"keys {seed} {table.name}")
    most = FEATURES[table.feature_names[0]]
    keys = torch.tensor([k for k in range(most) if rng.random() < 0.6] + [-5, 2**62])
    return keys[positions_of(keys).argsort()]


def trained_rows(table, seed):
    """Rows of any values, those of dynamic tables by the positions of their keys."""
    generator = torch.Generator().manual_seed(seed)
    rows = table.num_embeddings if table.dynamic is None else len(keys_that_exist(table, seed))
    return torch.randn(rows, table.embedding_dim, generator=generator, dtype=torch.float64)


def write(folder, seed):
    """Write the tables of a mixture, and return them as an artefact."""
    chosen = storages(seed)
    with RowWriter(folder) as writer:
        for t in embedding_tables(on_meta(seed)):
            dynamic = t.dynamic is not None
            positions = positions_of(keys_that_exist(t, seed)) if dynamic else None
            writer.add(t, trained_rows(t, seed), chosen[t.name], positions, START)
        files = writer.finish()
    return ArtefactManifest(folder, {}, files, tuple(writer.tables))


def mapped(artefact, seed, comm=None, plan=None):
    """The mixture on ranks, its tables those of the artefact; on one rank without a plan."""
    model = on_meta(seed)
    for collection in dict.fromkeys(c for _, c in embedding_collections(model)):
        collection.store_as({t.name: t.data_type for t in artefact.tables})
    make_store = mapped_tables(Artefact.of(artefact)).make_store
    if plan is None:
        return one_rank(model, torch.device("cpu"), make_store)
    return shard_model(model, plan, comm, None, trains=False, make_store=make_store).eval()


def oracle(seed):
    """The unsharded mixture with the values that are stored. Dynamic tables are plain ones here,
    of the rows that their keys would have.
    """
    model = Mixture(seed, START, False)
    chosen = storages(seed)
    grown = {t.name: t for t in embedding_tables(on_meta(seed))}
    for collection in model.parts:
        for table in collection.tables():
            rows = _all_rows(grown[table.name], table, seed)
            kept = values(stored(rows, chosen[table.name]), torch.float64)
            weight = collection.weight(table.name)
            weight.data = kept.to(weight.dtype)
    return model


def _all_rows(grown, table, seed):
    if grown.dynamic is None:
        return trained_rows(grown, seed)
    keys = torch.arange(table.num_embeddings)
    cols = range(table.embedding_dim)
    dtype = torch.float64 if storages(seed)[table.name] is DataType.FP64 else torch.float32
    rows = start_values(keys, grown, START, cols, dtype).double()
    exist = keys_that_exist(grown, seed)
    known = (exist >= 0) & (exist < len(keys))
    rows[exist[known]] = trained_rows(grown, seed)[known]
    return rows
