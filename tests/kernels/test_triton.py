"""What only the GPU backend does: bags longer than a block, room for more bags than there are,
rates in memory, compiling for a GPU that is not there, the choice between backends.

Kernels run in Triton's interpreter here; tests/kernels/test_on_gpu.py runs them where there is a
GPU.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from kernels.gradient_squares import square_sums
from parity.test_sharded_matches_unsharded import check

from recapp.errors import ConfigError
from recapp.kernels.backend import backend
from recapp.kernels.links import Links
from recapp.kernels.reference import TorchBackend
from recapp.kernels.sums import GPU_ORDER
from recapp.kernels.widths import SQUARE_BLOCK
from recapp.optim.rules import (
    adagrad,
    adam,
    ftrl,
    momentum_sgd,
    partial_row_wise_adam,
    rowwise_adagrad,
    sgd,
)

pytest.importorskip("triton", reason="triton is not installed")

from recapp.kernels.triton_launch import LAUNCHES
from recapp.kernels.triton_vectors import form, programs

TESTS = Path(__file__).parents[1]
# entries of a block in these tests: the interpreter takes a millisecond for each
BLOCK = 4
R = 9
LENGTHS = [
    [0, 3, 4, 5, 17, 0, 1, 9, 0],
    [25],
    [1, 16, 70, 0, 0, 13],
    pytest.param([5, 5, 5, 5], marks=pytest.mark.full),
    pytest.param([64, 65, 1, 66], marks=pytest.mark.full),
]
RULES = [sgd(), momentum_sgd(), adagrad(), rowwise_adagrad(weight_decay=0.1), adam(), ftrl()]
full = pytest.mark.full


def long_bags(lengths, weighted=False, width=5, dtype=torch.float32):
    generator = torch.Generator().manual_seed(sum(lengths))
    offsets_M1 = torch.tensor([0, *torch.tensor(lengths).cumsum(0)]).int()
    index_N = torch.randint(0, R, (int(offsets_M1[-1]),), generator=generator)
    weights_N = torch.rand(len(index_N), generator=generator, dtype=dtype) if weighted else None
    return torch.randn(R, width, generator=generator, dtype=dtype), Links(
        index_N, offsets_M1, weights_N, None, len(lengths)
    )


def one_by_one(rows_ND):
    total_D = torch.zeros_like(rows_ND[0])
    for row_D in rows_ND:
        total_D += row_D
    return total_D


def in_blocks(rows_ND):
    return torch.stack([one_by_one(part_ND) for part_ND in rows_ND.split(BLOCK)])


def block_by_block(rows_RD, links):
    """Return the defined sums: a bag is summed in blocks of BLOCK entries, these in blocks of
    BLOCK, and those one after the other.
    """
    edge = links.offsets_M1.tolist()
    out_MD = torch.zeros(links.bags, rows_RD.shape[1], dtype=rows_RD.dtype)
    for m in range(links.bags):
        part = slice(edge[m], edge[m + 1])
        rows_ND = rows_RD[links.index_N[part]]
        if links.weights_N is not None:
            rows_ND = rows_ND * links.weights_N[part, None]
        if len(rows_ND):
            out_MD[m] = one_by_one(in_blocks(in_blocks(rows_ND)))
    return out_MD


def squares_as_a_tree(values_UD):
    """Return sums of squares in which neighbours are added, then neighbouring pairs, and so on."""
    total_U = torch.zeros(len(values_UD), dtype=torch.float64)
    for block_UC in values_UD.double().split(SQUARE_BLOCK, 1):
        square_UC = torch.nn.functional.pad(block_UC**2, (0, SQUARE_BLOCK - block_UC.shape[1]))
        while square_UC.shape[1] > 1:
            square_UC = square_UC[:, ::2] + square_UC[:, 1::2]
        total_U += square_UC[:, 0]
    return total_U


@pytest.fixture
def kernels(interpreted, monkeypatch):
    monkeypatch.setattr("recapp.kernels.triton_vectors.BLOCK", BLOCK)
    return interpreted


def rounded_root(x):
    """Return the root rounded correctly, as on a GPU: torch's may be the number beside it."""
    return torch.from_numpy(np.sqrt(x.numpy()))


@pytest.fixture
def reference(monkeypatch):
    """Return the reference in the order of a GPU."""
    monkeypatch.setattr("recapp.kernels.reference.squares", squares_as_a_tree)
    monkeypatch.setattr(torch, "sqrt", rounded_root)
    backend = TorchBackend()
    backend.blocks = (BLOCK, BLOCK)
    return backend


def pooled(kernels, rows_RD, links):
    width = rows_RD.shape[1]
    out_MD = torch.full((links.bags, width), torch.nan, dtype=rows_RD.dtype)
    kernels.pool(rows_RD.view(-1), width, width, links, out_MD.view(-1), rows_RD.dtype)
    return out_MD


def updated(kernels, grad_RD, links, row_U, rule, rate):
    """Return the weights and state after an update with gradients in rows of `grad_RD`."""
    width = grad_RD.shape[1]
    weights_RD = torch.ones(20, width, dtype=grad_RD.dtype)
    state = [
        torch.zeros(20, width if kind == "element" else 1, dtype=grad_RD.dtype)
        for _, kind in rule.state
    ]
    links = links._replace(index_N=width * links.index_N)
    kernels.update(
        grad_RD.view(-1), links, row_U, None, weights_RD, state, grad_RD.dtype, rate, rule
    )
    return [weights_RD, *state]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_a_long_bag_is_summed_block_by_block(kernels, reference, lengths, weighted):
    rows_RD, links = long_bags(lengths, weighted)
    expected = block_by_block(rows_RD, links)
    assert torch.equal(pooled(kernels, rows_RD, links), expected)
    assert torch.equal(pooled(reference, rows_RD, links), expected)


def test_short_bags_have_the_bits_of_the_serial_sum():
    rows_RD, links = long_bags([0, 128, 1, 127, 50], width=16)
    on_gpu = TorchBackend()
    on_gpu.blocks = GPU_ORDER
    assert torch.equal(pooled(on_gpu, rows_RD, links), pooled(TorchBackend(), rows_RD, links))


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=full)])
@pytest.mark.parametrize("lengths", [LENGTHS[2], pytest.param(LENGTHS[0], marks=full)], ids=str)
@pytest.mark.parametrize(
    "rule",
    [r if r.name == "rowwise_adagrad" else pytest.param(r, marks=full) for r in RULES],
    ids=lambda rule: rule.name,
)
def test_an_update_has_the_bits_of_the_reference_in_the_order_of_a_gpu(
    kernels, reference, rule, lengths, dtype
):
    grad_RD, links = long_bags(lengths, weighted=True, dtype=dtype)
    row_U = torch.randperm(20)[: len(lengths)]
    rate = rule.rate_of(0.1, 1)
    found, expected = (updated(k, grad_RD, links, row_U, rule, rate) for k in (kernels, reference))
    assert all(map(torch.equal, found, expected))
    squares = [
        square_sums(k, grad_RD.view(-1), 5, links._replace(index_N=5 * links.index_N), dtype)
        for k in (kernels, reference)
    ]
    assert torch.equal(*squares)


def poisoned(links, room):
    """Return links with room for more bags and entries: whoever reads these reads out of memory."""
    far = torch.iinfo(torch.int64).max // 2
    return Links(
        torch.cat([links.index_N, torch.full((3 * room,), far)]),
        torch.cat([links.offsets_M1, torch.full((room,), 2**30, dtype=torch.int32)]),
        torch.cat([links.weights_N, torch.full((3 * room,), torch.nan)]),
        None,
        links.bags + room,
        used=torch.tensor([links.bags], dtype=torch.int32),
    )


@pytest.mark.parametrize("lengths", [LENGTHS[2], []], ids=str)
def test_nothing_behind_the_count_is_read_or_written(kernels, reference, lengths):
    rows_RD, links = long_bags(lengths, weighted=True)
    roomy = poisoned(links, 40)
    out_MD = pooled(kernels, rows_RD, roomy)
    assert torch.equal(out_MD[: links.bags], block_by_block(rows_RD, links))
    assert bool(out_MD[links.bags :].isnan().all())
    assert torch.equal(pooled(reference, rows_RD, roomy)[: links.bags], out_MD[: links.bags])
    row_U = torch.cat([torch.randperm(20)[: links.bags], torch.full((40,), 2**40)])
    rule = rowwise_adagrad()
    assert all(
        map(
            torch.equal,
            updated(kernels, rows_RD, roomy, row_U, rule, 0.1),
            updated(reference, rows_RD, links, row_U[: links.bags], rule, 0.1),
        )
    )


def test_rates_are_read_on_the_device_and_a_flag_stops_the_update(kernels):
    grad_RD, links = long_bags([2, 1, 3])
    row_U = torch.tensor([4, 0, 19])
    rules = [rowwise_adagrad(weight_decay=0.1), partial_row_wise_adam()]
    rates = [rule.rate_of(0.1, 3) for rule in rules]
    for rule, rate, there in zip(
        rules, rates, kernels.on_device(rates, rules, torch.device("cpu")), strict=True
    ):
        expected = updated(kernels, grad_RD, links, row_U, rule, rate)
        for stopped in (None, torch.zeros(1, dtype=torch.int32)):
            flagged = there._replace(stopped=stopped)
            found = updated(kernels, grad_RD, links, row_U, rule, flagged)
            assert all(map(torch.equal, found, expected))
        there.numbers.zero_()
        weights_RD, *_ = updated(kernels, grad_RD, links, row_U, rule, there)
        assert bool((weights_RD == 1).all())  # a rate and a decay of zero
        there.numbers.fill_(torch.nan)
        flagged = there._replace(stopped=torch.ones(1, dtype=torch.int32))
        weights_RD, *state = updated(kernels, grad_RD, links, row_U, rule, flagged)
        assert bool((weights_RD == 1).all()) and not any(x.any() for x in state)


def test_where_no_bag_can_be_long_no_sums_are_made_before(kernels):
    rows_RD, links = long_bags([3, 4, 1, 0, 4, 3, 4])
    before = LAUNCHES["sum_blocks"]
    out_MD = pooled(kernels, rows_RD, links._replace(longest=BLOCK))
    assert LAUNCHES["sum_blocks"] == before
    assert torch.equal(out_MD, pooled(kernels, rows_RD, links))
    assert LAUNCHES["sum_blocks"] == before + 2


def test_more_tiles_than_programs_share_them(kernels, monkeypatch):
    monkeypatch.setattr("recapp.kernels.triton_vectors.PROGRAMS", 2)
    monkeypatch.setattr("recapp.kernels.triton_vectors.TILE_BAGS", 2)
    rows_RD, links = long_bags([1] * 23)
    assert programs(23, form(5, torch.float32)) == 3
    assert torch.equal(pooled(kernels, rows_RD, links), rows_RD[links.index_N])


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


BFLOAT = "16 fp32 bf16 rowwise_adagrad adam"
LINES = "128 fp32 fp32 rowwise_adagrad adam"
ALL_RULES = [
    f"{case} sgd adagrad rowwise_adagrad adam"
    for case in ("1 fp32 fp32", "64 fp32 fp16", "200 fp64 fp64")
]


def compile_cases(folder):
    """Write the lines that tests/kernels/compile_for_gpu.py prints for all cases.

    It runs in a process of its own, in which Triton does not interpret.
    """
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)]),
    }
    done = subprocess.run(
        [sys.executable, "-m", "kernels.compile_for_gpu", BFLOAT, LINES, *ALL_RULES],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    (folder / "lines.txt").write_text(done.stdout)


@pytest.fixture
def compiled(stored):
    """Return a function: the kernels of a case, each a list of its name and what its code holds."""
    lines = (stored.made(compile_cases) / "lines.txt").read_text().splitlines()
    pairs = [line.split(": ") for line in lines]
    return lambda case: [kernel.split() for of_case, kernel in pairs if of_case == case]


@pytest.mark.full
def test_kernels_compile_for_a_gpu_that_is_not_here(compiled):
    made = compiled(BFLOAT)
    names = {"pool", "sum_blocks", "square_sums", "update", "catch_up"}
    assert {name for name, *_ in made} == names
    for name, *found in made:
        assert "fused" not in found and "approximate_root" not in found, name
        assert ("barrier" in found) or name != "update"


@pytest.mark.full
def test_rows_of_whole_lines_are_read_16_bytes_at_a_time_and_no_register_is_spilled(compiled):
    made = compiled(LINES)
    assert made and not any("spills" in found for _, *found in made)
    narrow = [name for name, *found in made if "lines" not in found]
    assert set(narrow) <= {"pool", "sum_blocks"} and len(narrow) <= 4  # of rows of 4 and 8 bits


@pytest.mark.full
@pytest.mark.parametrize("case", ALL_RULES)
def test_every_kernel_compiles_for_every_type_narrow_and_wide(compiled, case):
    made = compiled(case)
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
