"""Whatever is wrong with a request is answered by a 4xx that names the field, in one line."""

import asyncio
import json
import struct
import time

import pytest
from serving.small_models import ROWS, asked, running
from serving.test_protocols import binary, inputs, tensor
from starlette.requests import Request

from recapp.serving.app import check_origin
from recapp.serving.limits import Refused


def refused(body, verb="infer", headers=(), status=400, **limits):
    """The error of a request."""
    answer = asked(body, verb, headers=headers, **limits)
    assert answer.status == status, answer.body
    return answer.error


def without(name):
    return [each for each in inputs() if each["name"] != name]


def shaped(shape):
    return tensor("age", "FP32", [31, None, 7]) | {"shape": shape}


# ---- Open Inference


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (without("user"), "input user: missing; every feature of the model is needed"),
        ([inputs()[0]], "input price and 3 more: missing"),
        (
            [*inputs(), tensor("usr", "INT64", [1])],
            "input usr: the model has no such feature; did you mean user?",
        ),
        ([*inputs(), inputs()[0]], "input age: is sent twice"),
        (
            inputs(age=tensor("age", "FP99", [1])),
            "input age: datatype 'FP99' does not exist; known: BOOL, BYTES, FP16, FP32",
        ),
        (inputs(age=tensor("age", ["FP32"], [1])), "input age: datatype ['FP32'] does not exist; "),
        (inputs(age=tensor("age", {}, [1])), "input age: datatype {} does not exist; known: BOOL"),
        (
            inputs(age=tensor("age", "FP32", [1, 2, 3]) | {"parameters": 5}),
            "input age: parameters must be an object, not 5",
        ),
        (inputs(age=tensor("age", "BOOL", [True] * 3)), "datatype BOOL must be FP32, FP64, INT64"),
        (inputs(user=tensor("user", "FP32", [1.0] * 3)), "datatype FP32 must be INT64 or BYTES"),
        (inputs(age=tensor("age", "FP32", [31, 7])), "input price: has 3 rows, but age has 2"),
        (inputs(age=tensor("age", "FP32", [1, 2, 3], 4)), "shape [4] is 4 values, but there are 3"),
        (inputs(age=shaped([3, 2])), "shape [3, 2] must be [N] or [N, 1]"),
        (inputs(age=shaped("3")), "shape '3' must be [N] or [N, 1]"),
        (inputs(age=shaped([-3])), "shape [-3] must be [N] or [N, 1]"),
        (inputs(age=tensor("age", "FP32", ["x", 1, 2])), "input age: holds a value that is no FP"),
        (inputs(user=tensor("user", "INT64", [1.5, 1, 2])), "input user: holds a value that is no"),
        (inputs(user=tensor("user", "INT64", [True, 1, 2])), "a value that is no INT64: True"),
        (inputs(user=tensor("user", "INT64", [2**70, 1, 2])), "input user: holds a value that is"),
        (inputs(item=tensor("item", "BYTES", [1, 2, 3])), "input item: holds a value that is no"),
        (inputs(age={"name": "age", "datatype": "FP32", "shape": [3]}), "input age: has neither"),
        (
            inputs(seen__lengths=tensor("seen.lengths", "INT32", [2, 0, 2])),
            "input seen.lengths: the lengths add up to 4, but seen has 5 ids",
        ),
        (
            inputs(seen__lengths=tensor("seen.lengths", "INT64", [2**62, 2**62, 5])),
            "input seen.lengths: the lengths add up to",
        ),
        (inputs(seen__lengths=tensor("seen.lengths", "INT32", [6, -1, 0])), "holds -1; a length"),
        (inputs(seen__lengths=tensor("seen.lengths", "FP32", [2.0, 0, 3])), "must be INT32 or"),
        (inputs(seen__lengths=tensor("seen.lengths", "INT32", [2, None, 3])), "without null"),
        (
            inputs(seen__lengths=tensor("seen.lengths", "UINT64", [2**64 - 1, 0, 0])),
            "input seen.lengths: the lengths add up to 18446744073709551615, but seen has 5 ids",
        ),
        (inputs(seen__lengths=None), "input seen: has 5 rows, but age has 3; a feature"),
        (
            inputs(user__present=tensor("user.present", "BOOL", [True])),
            "input user.present: must be BOOL with the 3 values of user",
        ),
        (
            inputs(user__present=tensor("user.present", "BOOL", [True, None, True])),
            "input user.present: must be BOOL with the 3 values of user, without null",
        ),
        (
            inputs(seen__present=tensor("seen.present", "BOOL", [True] * 3)),
            "input seen.present: a row without ids has the length 0 in seen.lengths",
        ),
        (inputs(user=tensor("user", "BYTES", ["x", "1", "2"])), "column user, row 0 holds 'x'"),
        (inputs(user=tensor("user", "INT64", [3, 50, 1])), "feature user has the id 50, which is"),
        (inputs(age=tensor("age", "FP64", [1e300, 1, 2])), "column age, row 0 holds 1e+300, which"),
        (
            inputs(user=tensor("user", "INT64", [-(2**63), 1, 2])),
            "row 0 holds -9223372036854775808, the one number that is no id",
        ),
        (["age"], "inputs: each is an object with name, datatype, shape and data"),
        ([], "inputs: missing; a list of tensors"),
        ("age", "inputs: missing; a list of tensors"),
        ([{**each, "shape": [0], "data": []} for each in inputs()], "the request has no rows"),
    ],
)  # fmt: skip
def test_a_tensor_that_does_not_fit_is_named(given, said):
    assert said in refused({"inputs": given})


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        ({"id": 7}, "id: must be text, not 7"),
        ({"outputs": [{"name": "scores"}]}, "output 'scores': the model has none; did you mean"),
        ({"outputs": ["score"]}, "output 'score': the model has none"),
        ({"outputs": []}, "outputs: must be a list of objects with a name: score, logit"),
        ({"outputs": [{"name": "score", "parameters": {"classification": 3}}]}, "classification"),
        ({"outputs": [{"name": "score", "parameters": 3}]}, "output score: parameters: must be"),
        ({"outputs": [{"name": "score"}, {"name": "score"}]}, "output score: is named twice"),
        ({"parameters": []}, "parameters: must be an object"),
        ({"parameters": {"binary_data_output": 1}}, "parameter binary_data_output: must be true"),
    ],
)
def test_what_a_request_wants_is_checked(request_, said):
    assert said in refused({"inputs": inputs(), **request_})


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "the body is empty: send a JSON object"),
        (b"{", "the body is no JSON"),
        (b"[" * 100_000, "the body is no JSON"),
        (b"\xff\xfe\x00", "the body is no JSON"),
        (b"[1]", "the body must be a JSON object, not list"),
        (b'{"inputs": [{"name": "age", "data": [NaN]}]}', "NaN is no number of JSON; write null"),
        (b'{"id": 1' + b"0" * 5000 + b"}", "the body is no JSON"),
    ],
)
def test_a_body_that_is_no_json_is_refused(body, said):
    assert said in refused(body)
    assert said in refused(body, "infer_rows")


def test_binary_data_must_add_up():
    body, headers = binary(inputs(age=None, user=None))
    size = int(headers["Inference-Header-Content-Length"])
    described = json.loads(body[:size])

    def said(change, more=b"", length=None):
        given = json.loads(json.dumps(described))
        change(given["inputs"])
        text = json.dumps(given).encode()
        length = str(len(text)) if length is None else length
        return refused(
            text + body[size:] + more, headers={"Inference-Header-Content-Length": length}
        )

    def sized(count):
        def change(given):
            given[0]["parameters"]["binary_data_size"] = count

        return change

    def nothing(given):
        pass

    assert "are left after the JSON" in said(sized(10**9))
    assert "binary_data_size must be a number of bytes, not -1" in said(sized(-1))
    assert "binary_data_size must be a number of bytes, not True" in said(sized(True))
    assert "binary_data_size=16, but 3 values of FP64 have 24 bytes" in said(sized(16))
    assert "of the inputs add up to" in said(nothing, more=b"xxxx")
    assert "99999999 must be the bytes of the JSON" in said(nothing, length="99999999")
    assert "-1 must be the bytes of the JSON" in said(nothing, length="-1")
    assert "must be the bytes of the JSON" in said(nothing, length="9" * 5000)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (struct.pack("<I", 9) + b"ab", "input item: a text of 9 bytes goes beyond"),
        (b"\x01\x00", "input item: its binary data ends inside of a length"),
        (struct.pack("<I", 1) + b"a", "shape [3] is 3 values, but there are 1"),
    ],
)
def test_binary_texts_must_add_up(data, said):
    item = {"name": "item", "datatype": "BYTES", "shape": [3]}
    item["parameters"] = {"binary_data_size": len(data)}
    text = json.dumps({"inputs": inputs(item=item)}).encode()
    headers = {"Inference-Header-Content-Length": str(len(text))}
    assert said in refused(text + data, headers=headers)


# ---- rows of JSON


def renamed(name, other):
    return {other if key == name else key: value for key, value in ROWS[0].items()}


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (3, "rows: must be a list of objects"),
        ([3], "rows: must be a list of objects"),
        ([], "the request has no rows"),
        ([{"age": 1}], "feature price: missing in every row; null is a missing value"),
        ([renamed("user", "who")], "null is a missing value; of other names the rows have who"),
        ([ROWS[0], renamed("user", "usr")], "feature user: missing in row 1, which has usr; write"),
        ([ROWS[0], renamed("seen", "Seen")], "seen instead, or null for seen"),
        ([ROWS[0] | {"label": 1}, renamed("user", "b")], "missing in row 1, which has b"),
        ([ROWS[0], ROWS[0] | {"user": "3"}], "feature user: holds a value that is no integer or"),
        ([ROWS[0], ROWS[0] | {"seen": 4}], "feature seen: holds a value that is no integer or te"),
        ([ROWS[0], ROWS[0] | {"age": "31"}], "feature age: holds a value that is no number"),
        ([ROWS[0] | {"seen": [2**63, "x"]}], "feature seen: holds a value that is no integer or"),
        ([ROWS[0] | {"age": "old"}], "column age, row 0 holds 'old', which is not a number"),
        ([ROWS[0] | {"age": [1]}], "column age (dense feature age) has type list"),
        ([ROWS[0] | {"user": "3"}, ROWS[1] | {"user": "x"}], "column user, row 1 holds 'x', which"),
        ([ROWS[0] | {"user": "3"}, ROWS[1] | {"user": "1.5"}], "column user, row 1 holds '1.5'"),
        ([ROWS[0], ROWS[0] | {"item": 1.5}], "feature item: holds a value that is no integer or"),
        ([ROWS[0] | {"seen": ["a", True]}], "feature seen: holds a value that is no integer or"),
        ([ROWS[0] | {"user": {"a": 1}}], "feature user: holds a value that is no integer or text"),
        ([ROWS[0] | {"seen": [[1]]}], "or a list of those: a list inside of a list"),
        ([ROWS[0] | {"seen": [1, {}]}], "or a list of those: an object"),
        ([ROWS[0] | {"age": {}}], "feature age: holds a value that is no number: an object"),
        ([ROWS[0] | {"age": 10**400}], "column age, row 0 holds inf, which is not finite"),
        ([ROWS[0] | {"item": 2**64}], "feature item: holds a value that is no integer or text"),
        ([ROWS[0] | {"seen": [2**63, -1]}], "feature seen: holds a value that is no integer or t"),
        ([ROWS[0] | {"seen": [2**63, True]}], "feature seen: holds a value that is no integer or"),
        ([ROWS[0] | {"seen": [2**63, 1.5]}], "feature seen: holds a value that is no integer or"),
        ([ROWS[0] | {"user": True}], "feature user: holds a value that is no integer or text"),
        ([ROWS[0] | {"user": 77}], "feature user has the id 77, which is outside its 50 rows"),
    ],
)  # fmt: skip
def test_a_row_that_does_not_fit_is_named(rows, said):
    assert said in refused({"rows": rows}, "infer_rows")


def test_any_number_of_names_is_refused_at_once():
    names = dict.fromkeys(f"{number:x}user" for number in range(60_000))
    start = time.process_time()
    assert "feature age: missing in every row" in refused({"rows": [names]}, "infer_rows")
    assert time.process_time() - start < 10


@pytest.mark.parametrize("opened", ["[", '{"a":'])
def test_what_is_nested_by_the_hundred_is_refused_like_what_is_nested_once(opened):
    closed = "]" if opened == "[" else "}"
    body = json.dumps({"rows": [ROWS[0] | {"seen": "HERE"}]})
    deep = body.replace('"HERE"', opened * 800 + "1" + closed * 800)
    said = refused(deep.encode(), "infer_rows")
    assert said.startswith("feature seen: holds a value that is no integer or text")
    assert len(said) < 200


@pytest.mark.parametrize("verb", ["infer", "infer_rows"])
def test_an_error_does_not_send_back_all_that_it_names(verb):
    name = "x" * 100_000
    bodies = {"infer": {"inputs": [tensor(name, "FP32", [1])]}, "infer_rows": {"rows": [{name: 1}]}}
    assert len(refused(bodies[verb], verb)) <= 1000
    bodies = {
        "infer": {"inputs": [tensor("a\nb", "FP32", [1])]},
        "infer_rows": {"rows": [{"a\nb": 1}]},
    }
    said = {
        "infer": "input a b: the model has no such feature",
        "infer_rows": "age: missing in every row; null is a missing value; of other names the rows "
        "have a b",
    }
    assert said[verb] in refused(bodies[verb], verb)


# ---- limits


@pytest.mark.parametrize("verb", ["infer", "infer_rows"])
def test_each_limit_is_named_by_its_setting(verb):
    bodies = {"infer": {"inputs": inputs()}, "infer_rows": {"rows": ROWS}}
    body = bodies[verb]
    for setting, value in (("max_body_bytes", 100), ("max_rows", 2), ("max_ids", 10)):
        said = refused(body, verb, status=413, **{setting: value})
        assert f"above {setting}={value}" in said
        assert f"start the server with a larger {setting}" in said
    assert asked(body, verb, max_rows=3, max_ids=11).status == 200


def test_a_body_without_a_length_is_cut_off_where_it_is_too_long():
    headers = {"content-length": "chunked"}
    assert "max_body_bytes=100" in refused(
        b"x" * 101, headers=headers, status=413, max_body_bytes=100
    )


# ---- HTTP


def test_compressed_bodies_are_refused_by_name():
    said = refused(b"x", headers={"content-encoding": "gzip"}, status=415)
    assert said == "Content-Encoding: gzip: bodies are taken as they are; send it without"


@pytest.mark.parametrize("encoding", ["", "identity", "Identity"])
def test_a_body_may_say_that_it_is_not_compressed(encoding):
    headers = {"content-encoding": encoding}
    assert asked({"rows": ROWS}, "infer_rows", headers=headers).status == 200


def test_a_page_of_another_site_may_not_ask():
    body = {"rows": ROWS}
    said = refused(body, "infer_rows", headers={"origin": "http://evil.example"}, status=403)
    assert said.startswith("origin http://evil.example: pages of other sites")
    assert asked(body, "infer_rows", headers={"origin": "http://here"}).status == 200


@pytest.mark.parametrize(
    ("origins", "hosts"),
    [
        (["null"], [""]),
        (["null"], []),
        (["file://here"], ["here"]),
        (["http://here", "http://evil.example"], ["here"]),
        (["http://here", "http://here"], ["here"]),
        (["http://here"], ["here", "here"]),
        (["http://"], [""]),
        (["http://here:81"], ["here"]),
        (["here"], ["here"]),
    ],
)
def test_only_one_plain_origin_of_the_servers_own_passes(origins, hosts):
    headers = [(b"origin", each.encode()) for each in origins]
    headers += [(b"host", each.encode()) for each in hosts]
    with pytest.raises(Refused, match="pages of other sites may not use this server"):
        check_origin(Request({"type": "http", "headers": headers}))


@pytest.mark.parametrize("origin", [None, "http://here:8000", "https://here:8000"])
def test_programs_and_the_servers_own_pages_pass(origin):
    headers = [(b"host", b"here:8000"), *([(b"origin", origin.encode())] if origin else [])]
    check_origin(Request({"type": "http", "headers": headers}))


def test_what_is_not_there_is_a_404_that_says_what_is():
    async def ask():
        async with running() as client:
            said = (await client("GET", "/v2/models/clcks")).error
            assert said == "no model clcks; did you mean clicks?"
            said = (await client("POST", "/v2/models/clicks/versions/v2/infer", {})).error
            assert said == "model clicks has no version v2; v1 is in service"
            answer = await client("GET", "/v3")
            assert answer.status == 404
            assert answer.error == "GET /v3: Not Found; docs/serving.md lists the routes"
            answer = await client("GET", "/v2/models/clicks/infer")
            assert answer.status == 405 and "Method Not Allowed" in answer.error

    asyncio.run(ask())
