"""A wrong setting of a benchmark is an error of one line, and nothing is measured."""

import sys

import pytest
from tiers import one_of

from recapp import bench


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """`refused(*arguments)`: the one line of a command that must fail before any rank is
    started.
    """
    monkeypatch.setattr(
        bench, "run_on_ranks", lambda *_, **__: pytest.fail("something was measured")
    )

    def run(*arguments):
        assert bench.main([*arguments, f"hydra.run.dir={tmp_path}/run"]) == 1
        printed = capsys.readouterr()
        assert printed.out == "" and len(printed.err.splitlines()) == 1, printed
        return printed.err.strip()

    return run


@pytest.mark.parametrize(
    ("arguments", "parts"),
    one_of(
        2,
        [
            (("kernels", "workload=W5"), ("workload=W5", "W4")),
            (("kernels", "workload=[W1,w2]"), ("workload=w2", "W2")),
            (("kernels", "workload=W1s"), ("workload=W1s", "W1")),
            (("step", "plan=row_wiss"), ("plan=row_wiss", "row_wise")),
            (("step", "plan=[mixed,hugectr_mix]"), ("plan=hugectr_mix", "hugectr_mixed")),
            (("step", "+plan=mixd"), ("plan=mixd", "mixed")),
            (("step", "transport=shared"), ("transport=shared", "shared_memory")),
            (("step", "backend=nmba"), ("backend=nmba", "numba")),
            (("train", "model=smal"), ("model=smal", "small")),
            (("strategies", "ids=zip"), ("ids=zip", "zipf")),
            (("strategies", "tables=from_dataset"), ("tables=sample",)),
            (("memory", "tables=from_dataset"), ("memory needs", "tables=sample")),
            (("train", "compile=perhaps"), ("compile=perhaps", "true or false")),
            (
                ("train", "model=fm", "compile=true"),
                ("compile=true", "dense part", "model=hugectr"),
            ),
            (("train", "model=fm", "plan=row_wise"), ("plan=row_wise", "leave plan out")),
            (("train", "model=[fm,din]", "threads=2"), ("threads=2", "on one thread")),
            (("train", "model=fm", "transport=gloo"), ("transport=gloo", "leave transport out")),
            (("strategies", "batch_size=0"), ("batch_size=0", "at least 1")),
            (("data", "dataset=sample"), ("dataset.naming=exact", "criteo")),
            (("kernels", "rounds=0"), ("rounds=0", "at least 1")),
            (("kernels", "round_seconds=0"), ("round_seconds=0", "above 0")),
            (("step", "ranks=none"), ("ranks=none", "at least 1")),
            (("step", "threads=[1,2]"), ("threads=[1, 2]", "kernels")),
            (("data", "transport=[gloo,shared_memory]"), ("data takes one",)),
            (("kernels", "workload=[]"), ("workload=[]",)),
            (("inference", "model=hugectr_d64"), ("model=hugectr_d64", "large, small")),
            (("inference", "quantize=int7"), ("quantize=int7", "int8")),
            (
                ("inference", "artefact=/no/such"),
                ("artefact=/no/such", "no such checkpoint or artefact"),
            ),
            (
                ("inference", "artefact=.", "model=small"),
                ("model=small", "name only one of the two"),
            ),
            (
                ("kernels", "bench.torchrec_python=/no/such/python"),
                ("bench.torchrec_python=/no/such/python", "no such program"),
            ),
            (
                ("step", f"bench.torchrec_python={sys.executable}"),
                ("bench.torchrec_python=", "cannot import torchrec"),
            ),
            (
                ("step", "bench.torchrec_python=/bin/false"),
                ("bench.torchrec_python=/bin/false", "cannot import torchrec"),
            ),
            (("speed",), ("unknown verb speed", "step")),
            (("step", "wrkload=W1"), ("wrkload", "workload")),
        ],
    ),
)
def test_a_mistake_is_one_line_before_anything_is_measured(refused, arguments, parts):
    line = refused(*arguments)
    assert line.startswith("error: ") and all(part in line for part in parts), line


def test_a_backend_that_is_not_there_is_refused(refused, monkeypatch):
    monkeypatch.setattr("recapp.kernels.backend.find_spec", lambda name: None)
    assert "numba is not installed" in refused("kernels", "backend=numba")
