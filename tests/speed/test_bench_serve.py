"""`bench serve` measures a server of its own, in every protocol, and leaves its records."""

import json
import math

import pytest
from jobs import command
from serving.processes import trained

pytestmark = pytest.mark.full


def test_a_server_is_measured_in_every_protocol(stored, tmp_path):
    artefact = trained(stored)
    ran = command(
        "bench", "serve", f"artefact={artefact}", "rounds=2", "round_seconds=0.3", "batch_size=3",
        "load=[0.5]", "format=json", "hydra.run.dir=bench",
        cwd=tmp_path,
    )  # fmt: skip
    assert ran.code == 0, ran.err
    assert "refuses unknown ids" not in ran.err
    rows = json.loads(ran.out)["rows"]
    assert [(row["protocol"], row["load"]) for row in rows] == [
        (protocol, load)
        for protocol in ("rows", "json", "binary", "arrow")
        for load in (0.5, "most")
    ]
    for row in rows:
        assert row["rows"] == 3 and row["requests_per_second"] > 0
        assert row["median_ms"] <= row["p99_ms"] and row["overhead_ms"] > 0 < row["model_ms"]
        assert (row["rows_ratio"] is None) == (row["load"] != "most")
        assert all(math.isfinite(value) for value in row.values() if isinstance(value, float))


def test_a_model_that_refuses_unknown_ids_is_asked_for_those_of_its_example(stored, tmp_path):
    artefact = trained(stored, "tables.id_rule=error")
    ran = command(
        "bench", "serve", f"artefact={artefact}", "rounds=1", "round_seconds=0.2", "protocol=rows",
        "load=[0.5]", "batch_size=1", "format=json", "hydra.run.dir=bench",
        cwd=tmp_path,
    )  # fmt: skip
    assert ran.code == 0 and "the model refuses unknown ids" in ran.err, ran.err
    assert len(json.loads(ran.out)["rows"]) == 2


def test_without_an_artefact_it_says_so(tmp_path):
    assert command("bench", "serve", cwd=tmp_path, fresh=True).error() == (
        "artefact must be given: artefact=DIR, an artefact of recapp.export or a checkpoint"
    )
    wrong = command("bench", "serve", "artefact=x", "protocol=jsn", cwd=tmp_path)
    assert wrong.error() == "protocol=jsn: did you mean json?"


def test_a_model_that_cannot_be_served_is_one_line(tmp_path):
    said = command("bench", "serve", "artefact=nowhere", cwd=tmp_path).error()
    assert said.startswith("there is no checkpoint ")
