"""A model that answers is shared by threads, and copied as any module is."""

import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy

import pyarrow as pa
import pytest
import torch
from torch import nn

from recapp.dataset.raw_rows import RawRows
from recapp.dataset.schema import Schema
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
