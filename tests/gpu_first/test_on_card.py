"""What runs first on a GPU: kernels have work that they can do, and a case that fails or takes long
is one line.
"""

import json
import sys

import pytest
import torch
from jobs import recipe
from speed.__main__ import settings_of
from speed.lab import TERABYTE_MODELS

from recapp.benchmarks.workloads import MODELS

from . import kernels, on_card, ragged
from .on_card import Case, answer_of


def test_kernels_are_called_as_they_are(monkeypatch):
    pytest.importorskip("triton", reason="triton is not installed")

    def measure(call):
        call()
        return 1.0

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = kernels.times(device, measure, samples=3, tables=2, rows=9, width=4)
    of_tables = ["pool, 1 ids", "update, 1 ids", "pool, 10 ids", "update, 10 ids"]
    assert list(found) == [*of_tables, "dots", "dots backward", "dots by torch"]


@pytest.mark.full
def test_ragged_batches_are_trained_by_graphs_as_without(monkeypatch):
    triton = pytest.importorskip("triton", reason="triton is not installed")
    if not triton.knobs.runtime.interpret:
        pytest.skip("kernels are compiled for the GPU here: python -m tests.gpu_first")
    from gpu_first.recorder import captured

    made = []
    make = ragged.steps_of_model
    monkeypatch.setattr(ragged, "steps_of_model", lambda *how: made.append(make(*how)) or made[-1])

    def capture(step):
        state = [x for s in made[-1].optimizer.dense.state.values() for x in s.values()]
        value, recorder = captured(step, [*ragged.weights_of(made[-1]), *state])
        return value, recorder.replay

    found = ragged.compared(torch.device("cpu"), capture, 6, 3, 20, 4, 3)
    assert found["equal"] and found["graphs, recorded"] == 1 and not found["launches, recorded"]


@pytest.mark.full
def test_a_case_is_a_line_whatever_happens(tmp_path):
    def line(text, files=(), limit=60.0):
        return answer_of(Case("a.b", 60, ("-c", text, "RUN"), files), tmp_path, limit)

    assert line("print([1, 2])") | {"seconds": 0} == {"case": "a.b", "seconds": 0, "result": [1, 2]}
    assert line("print('1 passed\\n2 passed')")["result"] == "2 passed"
    assert "no memory" in line("raise SystemExit('no memory')")["error"]
    late = line("import time; print('half', flush=True); time.sleep(60)", limit=2.0)
    assert (late["error"], late["printed"]) == ("took more than 2 s", "half\n")
    written = line("import sys; open(sys.argv[1], 'w').write('3')", ("RUN", "RUN/x"))
    assert written["result"] == {"RUN": 3}


def test_the_commands_of_the_cases_mean_something():
    kinds = set()
    for case in on_card.cases():
        _, module, *arguments = case.arguments
        kinds.add(module)
        if module == "tests.speed":
            settings = settings_of(arguments)
            assert settings.device == "cuda" and settings.ranks == 1
            assert {*settings.model} <= {*MODELS, *TERABYTE_MODELS}
        elif module == "recapp.bench":
            told = [argument for argument in arguments[1:] if "RUN" not in argument]
            assert recipe("bench_train", told).device == "cuda"
        elif module == "recapp.train":
            assert recipe("train", arguments).trainer.accelerator == "gpu"
    assert kinds == {
        "tests.gpu_first.kernels",
        "tests.gpu_first.ragged",
        "tests.speed",
        "pytest",
        "recapp.train",
        "recapp.bench",
    }


def test_cases_that_have_no_time_left_are_named(tmp_path, capsys):
    file = tmp_path / "figures"
    on_card.main(0, file=file)
    printed = capsys.readouterr().out
    assert file.read_text() == printed
    lines = [json.loads(line) for line in printed.splitlines()]
    assert [line["case"] for line in lines] == [case.name for case in on_card.cases()]
    assert len({line["case"] for line in lines}) == len(lines)
    assert all("no time" in line["error"] for line in lines)


def test_a_case_that_fails_keeps_no_other_from_running(monkeypatch, capsys):
    made = [Case("bad", 60, ("-c", "raise SystemExit('no memory')")), Case("good", 60, ("-c", "1"))]
    monkeypatch.setattr(on_card, "cases", lambda: [*made, Case("other", 60, ("-c", "1"))])
    on_card.main(60, ["bad", "good"])
    bad, good = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert "no memory" in bad["error"] and good["case"] == "good" and "error" not in good


def test_rivals_have_turns_where_they_are_installed(monkeypatch):
    monkeypatch.setattr(on_card, "find_spec", lambda name: name)
    assert any(sys.executable in case.arguments for case in on_card.cases())
    monkeypatch.setattr(on_card, "find_spec", lambda name: None)
    assert not any(sys.executable in case.arguments for case in on_card.cases())
