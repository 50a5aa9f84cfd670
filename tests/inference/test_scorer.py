"""A model that answers is shared by threads, and copied as any module is."""

import math
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn

from recapp.dataset.collate import RawRows
from recapp.dataset.schema import Schema
from recapp.errors import DataError
from recapp.inference.scorer import Scorer


class Slow(nn.Module):
    """Keeps a batch in itself while it computes, as tables do."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(2.0), requires_grad=False)
        self.batch = None

    def forward(self, batch):
        self.batch = batch
        time.sleep(0.005)
        return self.batch.dense_BI[:, 0] * self.factor


def scorer():
    schema = Schema(label=None, dense=("n",), sparse=("id",))
    return Scorer(Slow(), RawRows(schema, "none"), "slow", "1", {})


def rows(number, *names):
    values = {"n": [float(number)], "id": [number], "other": [-1.0]}
    return pa.table({name: values[name] for name in names})


def test_threads_that_share_a_model_get_the_scores_of_their_own_rows():
    model = scorer()
    namings = (("n", "id"), ("other", "id", "n"))
    given = [rows(number, *namings[number % 2]) for number in range(40)]
    with ThreadPoolExecutor(8) as threads:
        found = torch.cat([*threads.map(model.predict, given)])
    assert torch.equal(found, torch.sigmoid(2.0 * torch.arange(40)))


class Frame:
    """A data frame of somebody else."""

    def __init__(self, table):
        self.table = table

    def __arrow_c_stream__(self, requested_schema=None):
        return self.table.__arrow_c_stream__(requested_schema)


@pytest.mark.parametrize(
    "given",
    [
        lambda table: table.combine_chunks().to_batches()[0],
        lambda table: table.to_pydict(),
        lambda table: {name: np.asarray(column) for name, column in table.to_pydict().items()},
        Frame,
    ],
)
def test_rows_may_be_whatever_becomes_a_table(given):
    model = scorer()
    table = pa.concat_tables([rows(number, "n", "id") for number in range(5)])
    assert torch.equal(model.predict(given(table)), model.predict(table))
    assert torch.equal(model(model.batch(given(table))), model(model.batch(table)))


def test_nan_in_a_mapping_is_a_missing_value_as_in_a_data_frame():
    model = scorer()
    numbers, ids = [0.5, math.nan, 2.0], ["7", math.nan, None]
    expected = model.batch({"n": [0.5, None, 2.0], "id": ["7", None, None]})
    arrays = {"n": np.array(numbers), "id": np.array(ids, dtype=object)}
    for given in ({"n": numbers, "id": ids}, arrays):
        found = model.batch(given)
        assert torch.equal(found.dense_BI, expected.dense_BI)
        assert torch.equal(found.sparse.values(), expected.sparse.values())
    with pytest.raises(DataError, match=r"column n, row 1 holds inf, which is not finite"):
        model.predict({"n": [0.5, math.inf, 2.0], "id": [1, 2, 3]})


WORDS = [None, "7", "", "8", "7"]
VIEW = pa.array(["7", "8", ""]).cast(pa.string_view())
CODES = pa.array([None, 0, 2, 1, 0], pa.uint32())


@pytest.mark.parametrize(
    "column",
    [
        pa.array(WORDS, pa.string_view()),
        pa.array([word and word.encode() for word in WORDS], pa.binary_view()),
        pa.DictionaryArray.from_arrays(CODES, VIEW),
    ],
    ids=["text", "bytes", "categories"],
)
def test_text_of_data_frames_is_read_as_any_other(column):
    model = scorer()
    plain = {"n": pa.array([0.5] * 5), "id": pa.array(WORDS)}
    lists = {"n": pa.array([0.5] * 3), "id": pa.ListArray.from_arrays([0, None, 2, 5], plain["id"])}
    views = pa.ListArray.from_arrays([0, None, 2, 5], column)
    for wanted, own in ((plain, column), (lists, views)):
        found = model.batch(pa.table(wanted | {"id": pa.chunked_array([own[:2], own[2:]])}))
        expected = model.batch(pa.table(wanted))
        assert found.sparse.values().tolist() == expected.sparse.values().tolist()
        assert found.sparse.lengths().tolist() == expected.sparse.lengths().tolist()


@pytest.mark.parametrize("given", [None, 5, "rows", [{"n": 1.0, "id": 2}], {"n": [1.0], "id": []}])
def test_what_is_no_table_is_one_line(given):
    for read in (scorer().predict, scorer().batch):
        with pytest.raises(DataError, match=f"rows of type {type(given).__name__} are no table"):
            read(given)


def test_a_copy_answers_by_itself():
    model = scorer()
    copy = deepcopy(model)
    copy.model.factor.fill_(0)
    one = rows(1, "n", "id")
    assert float(copy.predict(one)) == 0.5 < float(model.predict(one))


def test_it_is_not_pickled_but_loaded_in_every_process(tmp_path):
    for write in (pickle.dumps, lambda model: torch.save(model, tmp_path / "model.pt")):
        with pytest.raises(pickle.PicklingError, match=r"model slow .* recapp\.load_model\(path\)"):
            write(scorer())
