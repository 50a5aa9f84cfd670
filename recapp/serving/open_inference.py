"""The Open Inference protocol: read a question from a body of `infer`, and write its answer.

    {"id": "7", "inputs": [...], "outputs": [{"name": "score"}]}
    -> {"model_name": ..., "model_version": ..., "id": "7", "outputs": [{"name": "score", ...}]}

Outputs are the columns of scores (`score`, a probability) and the outputs of the model (`logit`);
without `outputs` the answer has the scores. The parameter `binary_data` of an output, or
`binary_data_output` of the request, makes an output binary.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from recapp.errors import suggest
from recapp.serving.feature_columns import table_of
from recapp.serving.limits import Limits, bad
from recapp.serving.question import Question, Reply, read_object, written
from recapp.serving.served_model import Served
from recapp.serving.tensors import BINARY_SIZE, BinaryData, InputTensor, binary_of, read_tensor

JSON_LENGTH = "inference-header-content-length"
BINARY = "application/octet-stream"
ALL_BINARY = "binary_data_output"


@dataclass(frozen=True, slots=True)
class OutputChoice:
    """An output that a request asks for.

    Args:
        name: One of `Served.outputs`.
        binary: Whether its values are binary data behind the JSON.
    """

    name: str
    binary: bool


def read_infer(
    body: memoryview, headers: Mapping[str, str], served: Served, limits: Limits
) -> Question:
    """Read a question from the body of an `infer` request.

    Args:
        body: The body.
        headers: The headers of the request.
        served: The model that answers.
        limits: The bounds of rows and ids.

    Raises:
        Refused: The body is malformed, or does not fit the model.
    """
    text, data = _split(body, headers.get(JSON_LENGTH))
    request = read_object(text)
    choices = _choices(request, served)
    schema = served.scorer.schema
    table = table_of(_tensors(request, data, schema.vectors), schema, limits)
    identity = request.get("id")
    if identity is not None and not isinstance(identity, str):
        raise bad(f"id: must be text, not {identity!r}")
    head = served.named if identity is None else {**served.named, "id": identity}

    def write(outputs: Mapping[str, Tensor]) -> Reply:
        plain = {name: values_B.float() for name, values_B in outputs.items()}
        return _reply(head, choices, {**plain, **served.task.scores(outputs)})

    return Question(table, write)


def _split(body: memoryview, length: str | None) -> tuple[memoryview, memoryview]:
    """Return the JSON of a body and the binary data behind it."""
    if length is None:
        return body, body[:0]
    if not length.isdecimal() or len(length) > 18 or int(length) > len(body):
        raise bad(
            f"Inference-Header-Content-Length: {length[:20]} must be the bytes of the JSON, at "
            f"most the {len(body)} of the body"
        )
    return body[: int(length)], body[int(length) :]


def _tensors(
    request: Mapping[str, Any], data: memoryview, vectors: Container[str]
) -> list[InputTensor]:
    inputs = request.get("inputs")
    if not isinstance(inputs, list) or not inputs:
        raise bad("inputs: missing; a list of tensors, one for each feature of the model")
    binary = BinaryData(data)
    tensors = [read_tensor(entry, binary, vectors) for entry in inputs]
    binary.check_all_taken()
    return tensors


def _parameters(entry: object, field: str) -> Mapping[str, Any]:
    if entry is None:
        return {}
    if not isinstance(entry, Mapping):
        raise bad(f"{field}: must be an object, not {entry!r:.40}")
    return entry


def _flag(parameters: Mapping[str, Any], name: str, default: bool) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise bad(f"parameter {name}: must be true or false, not {value!r:.40}")
    return value


def _choices(request: Mapping[str, Any], served: Served) -> list[OutputChoice]:
    everything = _flag(_parameters(request.get("parameters"), "parameters"), ALL_BINARY, False)
    outputs = request.get("outputs")
    if outputs is None:
        return [OutputChoice(output.column, everything) for output in served.task.outputs]
    if not isinstance(outputs, list) or not outputs:
        raise bad(f"outputs: must be a list of objects with a name: {', '.join(served.outputs)}")
    choices: list[OutputChoice] = []
    for entry in outputs:
        output = _output(entry, everything, served.outputs)
        if any(output.name == other.name for other in choices):
            raise bad(f"output {output.name}: is named twice")
        choices.append(output)
    return choices


def _output(entry: object, binary: bool, names: Sequence[str]) -> OutputChoice:
    if not isinstance(entry, Mapping) or entry.get("name") not in names:
        name = entry.get("name") if isinstance(entry, Mapping) else entry
        raise bad(f"output {name!r:.40}: the model has none; {suggest(str(name)[:40], names)}")
    parameters = _parameters(entry.get("parameters"), f"output {entry['name']}: parameters")
    if parameters.get("classification"):
        raise bad(
            f"output {entry['name']}: classification needs classes, which a score does not have"
        )
    return OutputChoice(entry["name"], _flag(parameters, "binary_data", binary))


def _reply(
    head: Mapping[str, str], choices: Sequence[OutputChoice], values: Mapping[str, Tensor]
) -> Reply:
    outputs: list[dict[str, Any]] = []
    parts: list[bytes] = []
    for output in choices:
        values_B = values[output.name]
        described: dict[str, Any] = {
            "name": output.name,
            "datatype": "FP32",
            "shape": [len(values_B)],
        }
        if output.binary:
            parts.append(binary_of(values_B.numpy()))
            described["parameters"] = {BINARY_SIZE: len(parts[-1])}
        else:
            described["data"] = values_B.tolist()
        outputs.append(described)
    text = written({**head, "outputs": outputs})
    if not parts:
        return Reply(text)
    return Reply(b"".join([text, *parts]), BINARY, {JSON_LENGTH: str(len(text))})
