"""A wrong setting of a benchmark is an error of one line, before anything is measured."""

import pytest
from jobs import recipe

from recapp import bench
from recapp.errors import ConfigError


@pytest.mark.parametrize(
    ("verb", "argument", "parts"),
    [
        ("step", "workload=[W1,w2]", ("workload=[W1, w2]", "W2")),
        ("step", "transport=shared", ("transport=shared", "shared_memory")),
        ("step", "backend=nmba", ("backend=nmba", "numba")),
        ("step", "workload=[]", ("workload=[]", "at least one")),
        ("train", "models=smal", ("models=smal", "small")),
        ("train", "compile=perhaps", ("compile=perhaps", "true or false")),
        ("strategies", "ids=zip", ("ids=zip", "zipf")),
        ("strategies", "batch_size=0", ("batch_size=0", "at least 1")),
        ("strategies", "tables=from_dataset", ("tables",)),
        ("data", "dataset=sample", ("dataset.naming=exact", "criteo")),
        ("inference", "threads=0", ("artefact must be given",)),
    ],
)
def test_a_mistake_is_named_with_what_is_allowed(verb, argument, parts):
    with pytest.raises(ConfigError) as error:
        recipe(f"bench_{verb}", [argument])
    assert all(part in str(error.value) for part in parts), error.value


def test_a_plan_that_is_not_there_is_refused():
    assert list(bench.rules_of(("mixed", "mixed"))) == ["mixed"]
    with pytest.raises(ConfigError, match=r"plan=mixd.*mixed"):
        bench.rules_of("mixd")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("speed",), ("unknown verb speed", "step")),
        (("step", "wrkload=W1"), ("wrkload", "workload")),
        (("step", "rounds=0"), ("rounds=0", "at least 1")),
        (("inference", "artefact=x", "quantize=int7"), ("quantize=int7", "int8")),
        (("step", "device=gpu"), ("device=gpu", "cuda")),
        (("train", "device=cuda", "ranks=99"), ("device=cuda ranks=99", "device=cpu")),
    ],
)
def test_a_mistake_is_one_line_of_the_command(arguments, parts, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "run_on_ranks", lambda *_, **__: pytest.fail("it was measured"))
    assert bench.main([*arguments, f"hydra.run.dir={tmp_path}/run"]) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and len(printed.err.splitlines()) == 1, printed
    assert printed.err.startswith("error: ") and all(part in printed.err for part in parts)
