"""Derived columns from training to each way of scoring: the same bits everywhere."""

import json
import subprocess

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from compilers import needs_program
from trainer.runs import compose, fit, make_logs

import recapp
from recapp.errors import ArtefactError, DataError
from recapp.inference.export_settings import Export
from recapp.model_export import export_model
from recapp.serving.json_rows import read_rows
from recapp.serving.limits import Limits, Refused
from recapp.serving.served_model import Served, check_model
from recapp.stored.stored_model import read_manifest

pytestmark = pytest.mark.full
DERIVED = (
    "dataset.buckets={I1: log, I2: 8, I5: log}",
    "dataset.min_frequency={C1: 2, C10: 3, I1_bucket: 2, C2_x_I2_bucket: 2}",
    "dataset.crosses=[[C2,I2_bucket],[C3,C4,C6]]",
    "dataset.missing_flags=[I1,I3]",
    "dataset.piecewise={I4: 3}",
    "dataset.times={seen: ms, day: s}",
    "dataset.periodic={I6: 7.3}",
    "dataset.vectors={image: 3, text: 2}",
    "dataset.separator={C7: '::'}",
    "dataset.padding=0",
)


ODD = [
    *({"image": [value, 2, 3]} for value in ("1", "+1.5", True, None, 1e300, 2**70)),
    {"image": [3.4e38, -3.4e38, 3.4e38]},  # finite, and the score is not
    *({"I1": value} for value in ("1", "+1.5", "+-1", "+", " 1", "1e400", "nan", True, 2**70)),
    *({"seen": value} for value in ("+1", True, 1.5, 1e18)),
    *({"C1": value} for value in ("+1", True, 1.5, "", 7.0)),
]
"""Values that C++ and the server judge alike: both refuse them, or score them alike."""


def add_columns(folder):
    """Write times and vectors into the logs, some of them missing."""
    for path in sorted(folder.glob("*.parquet")):
        table = pq.read_table(path)
        random = np.random.default_rng(table.num_rows)
        rows = table.num_rows
        times = random.integers(-(10**12), 2 * 10**12, rows)
        some = random.random(rows) < 0.1
        image = random.normal(size=(rows, 3)).astype(np.float32)
        columns = {
            "seen": pa.array(times, mask=some),
            "day": pa.array(times // 86_400_000, mask=some).cast(pa.int32()).cast(pa.date32()),
            "image": pa.FixedSizeListArray.from_arrays(image.reshape(-1), 3),
            "text": pa.array([None if each else [0.5, -2.0] for each in some]),
        }
        ids = random.integers(0, 20, (rows, 4))  # 0 fills the lists up
        lists = {
            "C7": pa.array(
                [
                    None if n else "::".join(f"{i:x}" for i in r)
                    for n, r in zip(some, ids, strict=True)
                ]
            ),
            "C8": pa.array(ids.tolist(), pa.list_(pa.int64(), 4)),
        }
        for name, column in lists.items():
            table = table.set_column(table.column_names.index(name), name, column)
        for name, column in columns.items():
            table = table.append_column(name, column)
        pq.write_table(table, path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Logs, a checkpoint after six steps, and its compiled artefact."""
    folder = tmp_path_factory.mktemp("derived")
    logs = make_logs(folder / "logs")
    add_columns(logs)
    fit(compose(logs, *DERIVED, "trainer.max_steps=6"), folder / "run")
    path = folder / "run" / "checkpoints" / "last.ckpt"
    export_model(path, folder / "art", Export(report_rows=64))
    return folder


@pytest.fixture(scope="module")
def rows(trained):
    table = pq.read_table(trained / "logs").slice(0, 300).drop_columns(["label"])
    return table


def test_a_checkpoint_and_its_artefact_score_alike(trained, rows):
    torch.set_num_threads(1)
    manifest = read_manifest(trained / "run" / "checkpoints" / "last.ckpt")
    assert manifest.shapes["I1_bucket"].rows < 100
    assert manifest.shapes["C1"].rows < 400
    assert {"I5_bucket", "C2_x_I2_bucket", "C3_x_C4_x_C6"} <= manifest.shapes.keys()
    wanted = recapp.load_model(trained / "run" / "checkpoints" / "last.ckpt").predict(rows)
    assert len(wanted.unique()) > 100
    assert torch.equal(recapp.load_model(trained / "art").predict(rows), wanted)


def test_a_resumed_run_keeps_the_fitted_values_and_equals_the_unbroken_run(trained, tmp_path):
    logs = trained / "logs"
    whole = fit(compose(logs, *DERIVED, "trainer.max_steps=9"), tmp_path / "whole")[0]
    last = trained / "run" / "checkpoints" / "last.ckpt"
    more = compose(logs, *DERIVED, "trainer.max_steps=9")
    seen, _, module = fit(more, tmp_path / "more", ckpt_path=last)
    assert seen.losses == whole.losses[6:]
    assert seen.batches == whole.batches[6:]
    assert module is not None


def seconds_of(dates):
    return pc.multiply(dates.cast(pa.int32()).cast(pa.int64()), 86_400)


def test_requests_have_times_and_vectors(trained, rows):
    torch.set_num_threads(1)
    model = recapp.load_model(trained / "art")
    wanted = model.predict(rows.slice(0, 20))
    served = Served("clicks", model)
    check_model(model)
    inputs = {each["name"]: each for each in served.metadata()["inputs"]}
    assert inputs["image"]["shape"] == [-1, 3] and inputs["seen"]["datatype"] == "INT64"
    plain = rows.set_column(rows.column_names.index("day"), "day", seconds_of(rows["day"]))
    some = plain.slice(0, 20).to_pylist()
    body = memoryview(json.dumps({"rows": some}).encode())
    assert torch.equal(model.predict(read_rows(body, {}, served, Limits()).table), wanted)
    example = memoryview(json.dumps({"rows": served.example()}).encode())
    assert model.predict(read_rows(example, {}, served, Limits()).table).isfinite().all()


@needs_program
def test_the_cpp_program_computes_the_same_bits(trained, rows, program):
    torch.set_num_threads(1)
    model = recapp.load_model(trained / "art", trust_compiled=True)
    served = Served("clicks", model)
    wanted = model.predict(rows)
    plain = rows.set_column(rows.column_names.index("day"), "day", seconds_of(rows["day"]))
    text = "".join(json.dumps(row) + "\n" for row in plain.to_pylist()).encode()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as stream:
        stream.write_table(rows)
    words = [program, trained / "art", "--threads=1"]
    for sent in (text, sink.getvalue().to_pybytes()):
        done = subprocess.run(words, input=sent, capture_output=True, timeout=120)
        assert done.returncode == 0, done.stderr.decode()
        found = [json.loads(line)["score"] for line in done.stdout.splitlines()]
        assert np.array_equal(np.array(found, np.float32), wanted.numpy())
    row = plain.slice(0, 1).to_pylist()[0]
    for changed, said in (
        ({"image": [1, 2]}, "feature image holds a list of 2 values; a vector has 3"),
        ({"image": 7}, "feature image holds no list of numbers"),
        ({"seen": "noon"}, "feature seen holds no time, which is a whole number"),
    ):
        bad = json.dumps({**row, **changed}).encode()
        done = subprocess.run(words, input=bad, capture_output=True, timeout=120)
        assert done.returncode and said in done.stderr.decode()
    differ = []
    for changed in ODD:
        bad = json.dumps({**row, **changed}).encode()
        done = subprocess.run(words, input=bad, capture_output=True, timeout=120)
        asked = memoryview(b'{"rows": [' + bad + b"]}")
        found = json.loads(done.stdout)["score"] if not done.returncode else None
        try:
            wanted = model.predict(read_rows(asked, {}, served, Limits()).table).item()
        except (DataError, Refused) as error:
            wanted = None
            if "no finite number" in str(error) and str(error) not in done.stderr.decode():
                differ.append((changed, str(error), done.stderr))
        if (found is None) != (wanted is None) or np.float32(found or 0) != np.float32(wanted or 0):
            differ.append((changed, wanted, found))
    assert differ == []


def test_an_artefact_with_other_values_is_refused(trained, tmp_path):
    from stored import copy

    artefact = copy(trained / "art", tmp_path / "art")
    file = artefact / "derived.bin"
    raw = bytearray(file.read_bytes())
    raw[5] ^= 1
    file.write_bytes(raw)
    with pytest.raises(ArtefactError, match=r"derived\.bin is damaged"):
        recapp.load_model(artefact)
