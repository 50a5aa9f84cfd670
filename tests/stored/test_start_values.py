"""Start values of tables from files: the same rows under every plan, whatever the file."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from engine.engine_cases import make_plan, same_bits, whole_tensors

from recapp.dataset.data_settings import Derivation, DerivedColumn
from recapp.dataset.decode import decode_ids
from recapp.dataset.schema import criteo_schema
from recapp.engine.sharded_collection import shard_bags
from recapp.errors import ConfigError, DataError, RecappError
from recapp.optim.rules import adagrad
from recapp.sharding.layout import Block
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.stored.checkpoint import write_checkpoint
from recapp.stored.start_values import check_values, fill_values
from recapp.tables.config import EmbeddingBagConfig, lookups_of
from recapp.tables.ids import IdRules
from recapp.tables.initial import fill_initial
from recapp.transport.communicator import Comm

ROWS = 131
DIM = 8
SCHEMA = replace(criteo_schema(), hex=())
TABLE = EmbeddingBagConfig(
    name="C1", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["C1"], id_rule="hash"
)
VALUES = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(0))
IDS = ["DE", "FR", "7", None, *(f"city {n}" for n in range(90))]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The same values as ids with vectors, and in a checkpoint."""
    folder = tmp_path_factory.mktemp("values")
    kind = pa.list_(pa.float32(), DIM)
    vectors = pa.array(VALUES[: len(IDS)].tolist(), kind)
    table = pa.table({"city": IDS, "vector": vectors})
    pq.write_table(table, folder / "v.parquet", row_group_size=40)
    block = Block("users", "weight", (ROWS, DIM), range(ROWS), range(DIM), VALUES, True)
    write_checkpoint(
        folder / "c.ckpt", [block], comm=Comm(), meta={}, manifest={"plan": {"name": "x"}}
    )
    return folder


def rows_of(ids):
    """The rows of ids by the table's rule."""
    id_N = torch.from_numpy(decode_ids(pa.array(ids)))
    features = KeyedJaggedTensor(["C1"], id_N, lengths=torch.ones(len(ids)).long())
    return IdRules(lookups_of([TABLE]))(features).rows_L.tolist()


def filled(comm, kind, order, given):
    """The whole table after its rectangles were filled from a file, and the rows and the values
    in the file.
    """
    plan = make_plan(kind, [TABLE], comm.world, row_order=order)
    collection = shard_bags([TABLE], plan, comm, adagrad())
    blocks = [b for b in collection.blocks() if b.tensor == "weight"]
    rows, values = fill_values(TABLE, given, SCHEMA, "C1", blocks)
    return whole_tensors(comm, collection)["C1", "weight"], rows, values


def every(comm, folder):
    by_id, *_ = filled(comm, "row_wise", "natural", f"{folder}/v.parquet")
    for kind, order in (("row_wise", "mixed"), ("column_wise", "natural"), ("random", "natural")):
        whole, rows, values = filled(comm, kind, order, f"{folder}/c.ckpt@users")
        assert same_bits(whole, VALUES) and rows == values == ROWS
        whole, rows, values = filled(comm, kind, order, f"{folder}/v.parquet")
        assert same_bits(whole, by_id)
    return by_id, rows, values


@pytest.mark.parametrize("world", [1, 2])
def test_every_file_fills_every_plan_with_the_same_bits(ranks, files, world):
    for by_id, rows, values in ranks.run(every, world, str(files)):
        row_N = rows_of(IDS)
        last = {row: number for number, row in enumerate(row_N)}  # ids may share a row
        assert rows == len(last) < len(IDS) == values
        start = torch.empty(ROWS, DIM)
        fill_initial(start, TABLE, 0, range(ROWS), range(DIM))
        for row in range(ROWS):
            assert torch.equal(by_id[row], VALUES[last[row]] if row in last else start[row])
        assert torch.equal(by_id[row_N[3]], VALUES[3]) and row_N[3] == 0, "the missing id"


def test_ids_go_through_the_vocabulary_of_their_feature(tmp_path):
    known = np.array([5, 70, 900])
    column = DerivedColumn("C1", Derivation.VOCABULARY, ("C1",), 2, known)
    schema = replace(SCHEMA, derived=(column,))
    table = replace(TABLE, num_embeddings=4, id_rule="error")
    pq.write_table(
        pa.table({"C1": [900, 6, 5], "e": [[1.0] * DIM, [2.0] * DIM, [3.0] * DIM]}),
        tmp_path / "v.parquet",
    )
    data = torch.zeros(4, DIM)
    block = Block("C1", "weight", (4, DIM), range(4), range(DIM), data, True)
    assert fill_values(table, f"{tmp_path}/v.parquet", schema, "C1", [block]) == (2, 2)
    assert data[:, 0].tolist() == [0.0, 3.0, 0.0, 1.0], "6 is no frequent id"


def test_what_does_not_fit_is_said_in_one_line_before_ranks_start(files, tmp_path):
    def refused(given, error=ConfigError, table=TABLE, sized=True):
        with pytest.raises(error) as found:
            check_values({"C1": str(given)}, [table], SCHEMA, sized)
        assert len(str(found.value).splitlines()) == 1
        assert str(found.value).startswith("tables.values.C1")
        return str(found.value)

    more = replace(TABLE, num_embeddings=140)
    assert "the values are 131 x 8, and table C1 is 140 x 8" in refused(
        f"{files}/c.ckpt@users", table=more
    )
    narrow = replace(TABLE, embedding_dim=4)
    assert "131 x 8, and table C1 is 131 x 4" in refused(
        f"{files}/c.ckpt@users", table=narrow, sized=False
    )
    assert "no table C1; known: users; PATH@TABLE" in refused(files / "c.ckpt")
    assert "no such file" in refused(files / "gone.parquet", DataError)
    assert "vectors have 8 numbers, the table has 4" in refused(
        files / "v.parquet", DataError, narrow
    )
    assert "has no names: leave out @x" in refused(f"{files}/v.parquet@x")
    dynamic = replace(TABLE, num_embeddings="dynamic", id_rule="error")
    assert "is dynamic, and its rows exist once" in refused(files / "v.parquet", table=dynamic)
    (tmp_path / "c.safetensors").write_text("x")
    said = refused(tmp_path / "c.safetensors", DataError)
    assert "name Parquet with ids and vectors, or a checkpoint" in said
    pq.write_table(pa.table({"a": [1], "b": [2], "v": [[1.0]]}), tmp_path / "two.parquet")
    assert "must have one column of ids" in refused(tmp_path / "two.parquet", DataError)
    pq.write_table(pa.table({"a": [1], "b": [2]}), tmp_path / "none.parquet")
    assert "must have one column of vectors" in refused(tmp_path / "none.parquet", DataError)


@pytest.mark.parametrize(
    ("ids", "vectors", "message"),
    [
        ([1, 2], [[1.0] * DIM, [1.0]], "row 1 has a vector of 1 numbers, the table has 8"),
        ([1, 2], [[1.0] * DIM, None], "row 1 has a vector of 0 numbers"),
        ([1, 2], [[1.0] * DIM, [None] + [1.0] * 7], "row 1 has a vector with a null"),
        ([1.5, 2], [[1.0] * DIM] * 2, r"row 0 holds 1.5"),
        ([1, 900], [[1.0] * DIM] * 2, "the id 900, which is outside its 131 rows"),
        ([1, 2], [[1.0] * DIM, [float("nan")] * DIM], "values that are not finite"),
    ],
)
def test_rows_that_are_no_start_values_are_named(tmp_path, ids, vectors, message):
    path = f"{tmp_path}/v.parquet"
    pq.write_table(pa.table({"id": ids, "vector": vectors}), path)
    table = replace(TABLE, id_rule="error")
    block = Block(
        "C1", "weight", (ROWS, DIM), range(ROWS), range(DIM), torch.zeros(ROWS, DIM), True
    )
    with pytest.raises(RecappError, match=message) as refused:
        fill_values(table, path, SCHEMA, "C1", [block])
    assert len(str(refused.value).splitlines()) == 1
