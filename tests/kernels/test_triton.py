"""What only the GPU backend does: bags longer than a run, compiling for a GPU that is not there,
the choice between backends.

Kernels run in Triton's interpreter here; tests/kernels/test_on_gpu.py runs them where there is a
GPU.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from parity.test_sharded_matches_unsharded import check

from recapp.errors import ConfigError
from recapp.kernels.backend import backend
from recapp.kernels.links import Links
from recapp.kernels.reference import TorchBackend
from recapp.optim.rules import adam, rowwise_adagrad

TESTS = Path(__file__).parents[1]
# entries of a run in these tests: the interpreter takes a millisecond for each
RUN = 4
R = 9
LENGTHS = [[0, 3, 4, 5, 17, 0, 1, 9, 0], [25], [5, 5, 5, 5], [1, 8, 12, 0, 0, 13], [4, 4, 4]]


def long_bags(lengths, weighted=False, width=5):
    generator = torch.Generator().manual_seed(sum(lengths))
    offsets_M1 = torch.tensor([0, *torch.tensor(lengths).cumsum(0)]).int()
    index_N = torch.randint(0, R, (int(offsets_M1[-1]),), generator=generator)
    weights_N = torch.rand(len(index_N), generator=generator) if weighted else None
    return torch.randn(R, width, generator=generator), Links(
        index_N, offsets_M1, weights_N, None, len(lengths)
    )


def run_by_run(rows_RD, links):
    """Return the defined sums: a bag of more than RUN entries is summed in runs of so many, and
    these one after the other.
    """
    edge = links.offsets_M1.tolist()
    out_MD = torch.zeros(links.bags, rows_RD.shape[1])
    for m in range(links.bags):
        for first in range(edge[m], edge[m + 1], RUN):
            total_D = torch.zeros(rows_RD.shape[1])
            for k in range(first, min(first + RUN, edge[m + 1])):
                total_D += rows_RD[links.index_N[k]] * (
                    1 if links.weights_N is None else links.weights_N[k]
                )
            out_MD[m] += total_D
    return out_MD


@pytest.fixture
def kernels(interpreted, monkeypatch):
    monkeypatch.setattr("recapp.kernels.triton_vectors.RUN", RUN)
    return interpreted


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_a_long_bag_is_summed_run_by_run(kernels, lengths, weighted):
    rows_RD, links = long_bags(lengths, weighted)
    out_MD = torch.full((len(lengths), 5), torch.nan)
    kernels.pool(rows_RD.view(-1), 5, 5, links, out_MD.view(-1), torch.float32)
    assert torch.equal(out_MD, run_by_run(rows_RD, links))


@pytest.mark.parametrize("lengths", LENGTHS[:2], ids=str)
def test_rows_with_many_gradients_learn_as_in_the_reference(kernels, lengths):
    grad_RD, gradient_links = long_bags(lengths, weighted=True)
    gradient_links = gradient_links._replace(index_N=5 * gradient_links.index_N)
    row_U = torch.randperm(20)[: len(lengths)]
    squares = [
        k.square_sums(grad_RD.view(-1), 5, gradient_links, torch.float32)
        for k in (kernels, TorchBackend())
    ]
    torch.testing.assert_close(*squares, rtol=1e-6, atol=0)  # of gradients in single precision
    for rule in (rowwise_adagrad(weight_decay=0.1), adam()):
        found = []
        for k in (kernels, TorchBackend()):
            weights_RD = torch.ones(20, 5)
            state = [torch.zeros(20, 5 if kind == "element" else 1) for _, kind in rule.state]
            k.update(
                grad_RD.view(-1),
                gradient_links,
                row_U,
                None,
                weights_RD,
                state,
                torch.float32,
                rule.rate_of(0.1, 1),
                rule,
            )
            found.append([weights_RD, *state])
        torch.testing.assert_close(*found)


def test_a_hint_that_results_fill_lines_changes_no_result(kernels):
    rows_RD = torch.randn(R, 16)
    at = (32 * torch.arange(R)).int()
    target = torch.full((R, 2, 16), torch.nan)
    kernels.pool(
        rows_RD.view(-1),
        16,
        16,
        Links(torch.arange(R), None, None, at, R),
        target.view(-1),
        torch.float32,
        in_lines=True,
    )
    assert torch.equal(target[:, 0], rows_RD) and bool(target[:, 1].isnan().all())


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "world", "mode", "rule"),
    [
        ("mixed", 2, "unique", "rowwise_adagrad"),
        ("mixed", 2, "unique", "adam"),
        ("column_wise", 1, "pooled", "rowwise_adagrad"),
    ],
)
def test_a_model_trains_on_these_kernels_as_one_process_does(
    interpreted, ranks, kind, world, mode, rule
):
    check(ranks, 1, kind, world, "mean", True, mode, rule, "triton", "natural")


# ---- the compiler


def compiled(*cases):
    """Return the lines that tests/kernels/compile_for_gpu.py prints for its cases.

    It runs in a process of its own, in which Triton does not interpret.
    """
    pytest.importorskip("triton", reason="triton is not installed")
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)]),
    }
    done = subprocess.run(
        [sys.executable, "-m", "kernels.compile_for_gpu", *cases],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.splitlines()]


@pytest.mark.full
def test_kernels_compile_for_a_gpu_that_is_not_here():
    made = compiled("16", "fp32", "bf16", "rowwise_adagrad", "adam")
    names = {"pool", "sum_runs", "square_sums", "update", "catch_up"}
    assert {name for name, *_ in made} == names
    for name, *found in made:
        assert "fused" not in found and "approximate_root" not in found, name
        assert ("barrier" in found) or name != "update"


@pytest.mark.full
@pytest.mark.parametrize(
    "case",
    ["1 fp32 fp32", "200 fp32 fp32", "64 fp32 fp16", "1 fp32 bf16", "200 fp64 fp64"],
)
def test_every_kernel_compiles_for_every_type_narrow_and_wide(case):
    made = compiled(*case.split(), "sgd", "adagrad", "rowwise_adagrad", "adam")
    assert made and not any("fused" in found or "approximate_root" in found for _, *found in made)


# ---- the choice


def test_auto_takes_the_kernels_for_tensors_of_a_gpu_only(interpreted, monkeypatch):
    assert (
        backend("auto", torch.device("cuda")).name == "triton"
        and backend("auto", torch.device("cpu")).name == "numba"
    )
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(
        ConfigError,
        match=(
            r"engine\.backend=triton: the backend computes on a GPU, and the rows are on cpu; use "
            r"auto or torch"
        ),
    ):
        backend("triton", torch.device("cpu"))
