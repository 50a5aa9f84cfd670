"""A server is measured in every protocol, and its results are left."""

import json
import math

import pytest
from serving.processes import trained

from . import lab

pytestmark = pytest.mark.full
SHORT = {"verb": "serve", "rounds": 2, "round_seconds": 0.3, "load": [0.5]}


def rows_of(artefact, folder, **more):
    lab.run(SHORT | {"folder": str(folder), "artefact": str(artefact)} | more, folder)
    return json.loads((folder / "metrics.json").read_text())["rows"]


def test_a_server_is_measured_in_every_protocol(stored, tmp_path, capsys):
    rows = rows_of(trained(stored), tmp_path, batch_size=[3])
    assert "refuses unknown ids" not in capsys.readouterr().err
    assert [(row["protocol"], row["load"]) for row in rows] == [
        (protocol, load) for protocol in ("rows", "json", "binary") for load in (0.5, "most")
    ]
    for row in rows:
        assert row["rows"] == 3 and row["requests_per_second"] > 0
        assert row["median_ms"] <= row["p99_ms"] and row["overhead_ms"] > 0 < row["model_ms"]
        assert (row["rows_ratio"] is None) == (row["load"] != "most")
        assert all(math.isfinite(value) for value in row.values() if isinstance(value, float))


def test_a_model_that_refuses_unknown_ids_is_asked_for_those_of_its_example(
    stored, tmp_path, capsys
):
    artefact = trained(stored, "tables.id_rule=error")
    rows = rows_of(artefact, tmp_path, protocol=["rows"], batch_size=[1], rounds=1)
    assert "the model refuses unknown ids" in capsys.readouterr().err and len(rows) == 2
