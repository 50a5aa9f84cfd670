"""What a body means, in each protocol: the scores of the same rows are the model's own."""

import asyncio
import json
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import torch
from serving.small_models import ROWS, SCHEMA, asked, running, scorer, table

from recapp.dataset.schema import Schema
from recapp.serving.json_rows import read_rows
from recapp.serving.limits import Limits, Refused
from recapp.serving.open_inference import binary_of

DIRECT = scorer().predict(table())


def tensor(name, datatype, data, count=None, **parameters):
    found = {"name": name, "datatype": datatype, "shape": [len(data) if count is None else count]}
    if parameters:
        return found | {"parameters": parameters}
    return found | {"data": data}


def inputs(**others):
    """The three rows as tensors of JSON; `others` replace some by name, None leaves one out."""
    found = {
        "age": tensor("age", "FP32", [31, None, 7]),
        "price": tensor("price", "FP64", [2.5, 0, 100.25]),
        "user": tensor("user", "INT64", [3, 49, None]),
        "item": tensor("item", "BYTES", ["lamp", "", "DE"]),
        "seen": tensor("seen", "INT64", [4, 9, 1, 2, 3]),
        "seen.lengths": tensor("seen.lengths", "INT32", [2, 0, 3]),
    }
    found |= {name.replace("__", "."): given for name, given in others.items()}
    return [given for given in found.values() if given is not None]


def binary(given, **request):
    """Inputs with their data behind the JSON; the body and its header."""
    kinds = {"FP32": "<f4", "FP64": "<f8", "INT64": "<i8", "INT32": "<i4", "BOOL": "?"}
    data = []
    described = []
    for each in given:
        if each["datatype"] == "BYTES":
            data.append(binary_of([text.encode() for text in each["data"]]))
        else:
            data.append(np.array(each["data"], dtype=kinds[each["datatype"]]).tobytes())
        kept = {key: each[key] for key in ("name", "datatype", "shape")}
        described.append(kept | {"parameters": {"binary_data_size": len(data[-1])}})
    text = json.dumps({"inputs": described, **request}).encode()
    return text + b"".join(data), {"Inference-Header-Content-Length": str(len(text))}


PRESENT = {
    "age": tensor("age", "FP32", [31, 0, 7]),
    "age__present": tensor("age.present", "BOOL", [True, False, True]),
    "user": tensor("user", "INT64", [3, 49, 0]),
    "user__present": tensor("user.present", "BOOL", [True, True, False]),
}


def equal(scores, expected=DIRECT):
    assert torch.tensor(scores).tolist() == expected.tolist()


# ---- the same rows, the same scores


def test_open_inference_in_json_is_scored_as_the_model_scores():
    answer = asked({"id": "7", "inputs": inputs()})
    assert answer.status == 200 and answer.headers["content-type"] == "application/json"
    found = answer.json
    (output,) = found.pop("outputs")
    assert found == {"model_name": "clicks", "model_version": "v1", "id": "7"}
    equal(output.pop("data"))
    assert output == {"name": "score", "datatype": "FP32", "shape": [3]}


@pytest.mark.parametrize("given", [inputs(**PRESENT)])
def test_missing_values_can_be_said_by_a_tensor_of_their_own(given):
    equal(asked({"inputs": given}).json["outputs"][0]["data"])


def test_tensors_may_be_binary_in_and_out():
    body, headers = binary(inputs(**PRESENT), parameters={"binary_data_output": True})
    answer = asked(body, headers=headers)
    assert answer.status == 200 and answer.headers["content-type"] == "application/octet-stream"
    size = int(answer.headers["inference-header-content-length"])
    (output,) = json.loads(answer.body[:size])["outputs"]
    assert output["parameters"] == {"binary_data_size": 12}
    equal(np.frombuffer(answer.body[size:], "<f4").tolist())


def test_json_and_binary_mix_in_one_request_and_in_one_answer():
    given = inputs()
    body, headers = binary([each for each in given if each["name"] in ("seen", "price")])
    size = int(headers["Inference-Header-Content-Length"])
    request = json.loads(body[:size])
    request["inputs"] += [each for each in given if each["name"] not in ("seen", "price")]
    request["outputs"] = [
        {"name": "logit", "parameters": {"binary_data": True}},
        {"name": "score"},
    ]
    text = json.dumps(request).encode()
    headers = {"Inference-Header-Content-Length": str(len(text))}
    answer = asked(text + body[size:], headers=headers)
    end = int(answer.headers["inference-header-content-length"])
    logit, score = json.loads(answer.body[:end])["outputs"]
    assert logit["name"] == "logit" and score["name"] == "score"
    logits_B = torch.from_numpy(np.frombuffer(answer.body[end:], "<f4").copy())
    assert torch.equal(torch.sigmoid(logits_B), DIRECT)
    equal(score["data"])


def test_a_column_may_have_the_shape_of_one_and_nested_data():
    age = {"name": "age", "datatype": "FP32", "shape": [3, 1], "data": [[31], [None], [7]]}
    equal(asked({"inputs": inputs(age=age)}).json["outputs"][0]["data"])


def test_ids_are_the_same_as_integers_and_as_text():
    seen = tensor("seen", "BYTES", ["4", "9", "1", "2", "3"])
    user = tensor("user", "BYTES", ["3", "49", ""])
    equal(asked({"inputs": inputs(seen=seen, user=user)}).json["outputs"][0]["data"])


def test_rows_of_json_are_scored_as_the_model_scores():
    answer = asked({"rows": ROWS}, "infer_rows")
    equal(answer.json.pop("scores"))
    rows = [{key: value for key, value in row.items() if value is not None} for row in ROWS]
    equal(asked({"rows": rows}, "infer_rows").json["scores"])


@pytest.mark.parametrize("verb", ["infer_rows", "predict"])
def test_what_is_no_feature_is_left_out_everywhere(verb):
    extra = {"label": 1, "Price2": "x", "timestamp": None}
    if verb == "infer_rows":
        nested = extra | {"seen_": [[{}]], "usr": 5}
        rows = [ROWS[0] | nested, *(row | extra for row in ROWS[1:])]
        return equal(asked({"rows": rows}, verb).json["scores"])
    rows = table()
    for name, value in extra.items():
        rows = rows.append_column(name, pa.array([value] * 3))
    return equal(scorer().predict(rows).tolist())


def test_a_row_of_features_alone_may_leave_some_out_beside_rows_with_other_fields():
    rows = [{key: value for key, value in row.items() if value is not None} for row in ROWS]
    rows[0] |= {"label": 0, "u1": 3, "userland": 9, "C1": 7}
    equal(asked({"rows": rows}, "infer_rows").json["scores"])
    stated = [*ROWS[:2], ROWS[2] | {"usr": 9}]  # it says null for user itself
    equal(asked({"rows": stated}, "infer_rows").json["scores"])


def test_integers_of_json_may_have_64_bits_without_a_sign():
    large = 2**63 + 11
    rows = [
        ROWS[0] | {"item": large, "seen": [2**64 - 1, 1], "age": 2**60 + 1},
        ROWS[1] | {"item": 5, "seen": [], "age": 1.5},
    ]
    texts = [
        row | {"item": str(row["item"]), "seen": list(map(str, row["seen"])), "age": age}
        for row, age in zip(rows, [float(2**60), 1.5], strict=True)
    ]
    found, expected = (asked({"rows": given}, "infer_rows").json for given in (rows, texts))
    assert found["scores"] == expected["scores"]
    assert asked({"rows": [ROWS[0] | {"age": 2**70}]}, "infer_rows").status == 200


def test_random_rows_have_the_same_scores_in_every_protocol():
    random = np.random.default_rng(3)
    rows = [
        {
            "age": float(random.integers(99)),
            "price": float(np.float32(random.random())),
            "user": int(random.integers(50)),
            "item": str(random.integers(2**40)),
            "seen": random.integers(0, 2**62, random.integers(5)).tolist(),
        }
        for _ in range(40)
    ]
    expected = scorer().predict(table(rows))
    flat = {name: [row[name] for row in rows] for name in ROWS[0]}
    seen = [id for row in rows for id in row["seen"]]
    given = [
        tensor("age", "FP32", flat["age"]),
        tensor("price", "FP32", flat["price"]),
        tensor("user", "INT64", flat["user"]),
        tensor("item", "BYTES", flat["item"]),
        tensor("seen", "INT64", seen),
        tensor("seen.lengths", "INT32", [len(row["seen"]) for row in rows]),
    ]
    equal(asked({"inputs": given}).json["outputs"][0]["data"], expected)
    body, headers = binary(given)
    equal(asked(body, headers=headers).json["outputs"][0]["data"], expected)
    equal(asked({"rows": rows}, "infer_rows").json["scores"], expected)


# ---- what it says of itself


def test_the_server_and_the_model_describe_themselves():
    async def ask():
        async with running() as client:
            assert (await client("GET", "/v2")).json["extensions"] == [
                "binary_tensor_data",
                "model_repository",
            ]
            for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/clicks/ready"):
                assert (await client("GET", path)).status == 200
            for path in ("/v2/models/clicks", "/v2/models/clicks/versions/v1"):
                found = (await client("GET", path)).json
                assert found["name"] == "clicks" and found["versions"] == ["v1"]
                assert [each["name"] for each in found["inputs"]] == list(ROWS[0])
                assert {each["name"]: each["datatype"] for each in found["inputs"]} == {
                    "age": "FP32", "price": "FP32",
                    "user": "INT64", "item": "BYTES", "seen": "BYTES",
                }  # fmt: skip
                assert [each["name"] for each in found["outputs"]] == ["score", "logit"]
            example = (await client("GET", "/v2/models/clicks/example")).json
            assert example["made_up"] is True
            assert (await client.infer(example, "infer_rows")).status == 200
            (listed,) = (await client("POST", "/v2/repository/index")).json
            assert listed == {"name": "clicks", "version": "v1", "state": "READY", "reason": ""}
            answer = await client.infer({"inputs": inputs()}, "versions/v1/infer")
            assert answer.status == 200
            timing = answer.headers["server-timing"].split(", ")
            assert [part.split(";")[0] for part in timing] == ["queue", "read", "model", "total"]

    asyncio.run(ask())


def test_an_example_that_was_kept_is_what_the_page_offers():
    kept = scorer(example=table(), expected={"score": DIRECT})

    async def ask():
        async with running(lambda: kept) as client:
            found = (await client("GET", "/v2/models/clicks/example")).json
            assert found["made_up"] is False
            return found["rows"]

    assert asyncio.run(ask()) == ROWS


def test_features_are_those_of_the_schema():
    assert SCHEMA.dense + SCHEMA.sparse == tuple(ROWS[0])


def test_features_may_stand_inside_of_objects():
    schema = Schema(None, ("item.price",), ("user.id", "seen.id", "context.os.version"))
    served = SimpleNamespace(scorer=SimpleNamespace(schema=schema))

    def read(*rows):
        body = json.dumps({"rows": rows}).encode()
        return read_rows(memoryview(body), {}, served, Limits()).table

    nested = {
        "item": {"price": 2.5},
        "user": {"id": 7, "age": 31},
        "seen": [{"id": 4}, None, {"id": 9}],
        "context": {"os.version": "7", "device": "web"},
    }
    flat = {
        "item.price": 2.5,
        "user.id": 7,
        "seen.id": [4, None, 9],
        "context.os.version": "7",
    }
    nothing = {"item": None, "user": {}, "seen": None, "context": {"device": "web"}}
    assert read(nested, nothing).equals(read(flat, dict.fromkeys(flat)))
    with pytest.raises(Refused, match=r"feature user\.id: 3 stands where an object is expected"):
        read(nested, nothing | {"user": 3})
    with pytest.raises(Refused, match=r"feature user\.id: missing in every row"):
        read({name: value for name, value in nested.items() if name != "user"})
    with pytest.raises(Refused, match=r"feature seen\.id"):
        read(nested | {"seen": [[{"id": 4}]]})
