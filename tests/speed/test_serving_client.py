"""Bodies that a server is measured with, for models of all kinds of features."""

import json

import numpy as np
import pytest
from serving.small_models import asked

from .serving_client import ROUTES, body_of, draw

METADATA = {
    "inputs": [
        {"name": "age", "datatype": "FP32"},
        {"name": "price", "datatype": "FP32"},
        {"name": "user", "datatype": "INT64"},
        {"name": "item", "datatype": "BYTES"},
        {"name": "seen", "datatype": "BYTES"},
    ]
}


@pytest.mark.parametrize("protocol", ROUTES)
@pytest.mark.parametrize(
    ("user", "seen"),
    [(3, [4, 9]), (None, [4, 9]), (3, ["lamp", "x"]), (3, ["lamp", None]), (3, [])],
)
def test_the_server_takes_what_is_drawn_of_an_example(protocol, user, seen):
    columns = draw(METADATA, [{"user": user, "item": "x", "seen": seen}], 5, seed=1)
    body, headers = body_of(protocol, columns)
    answer = asked(body, ROUTES[protocol], headers=headers)
    assert answer.status == 200, answer.body
    plain, _ = body_of("rows", columns)
    scores = asked(plain, "infer_rows").json["scores"]
    if protocol == "json":
        assert answer.json["outputs"][0]["data"] == scores
    if protocol == "binary":
        size = int(answer.headers["inference-header-content-length"])
        assert np.frombuffer(answer.body[size:], np.float32).tolist() == scores


def test_ids_may_be_those_of_the_example_alone():
    columns = draw(METADATA, [{"user": 3, "item": "x", "seen": [4]}], 5, seed=1, any_ids=False)
    assert columns["item"] == ["x"] * 5 and columns["user"] == [3] * 5


def test_a_missing_list_is_one_of_no_ids():
    columns = {"seen": [[1], None, [2, 3]]}
    (ids, lengths) = json.loads(body_of("json", columns)[0])["inputs"]
    assert ids["data"] == [1, 2, 3] and lengths["data"] == [1, 0, 2]
