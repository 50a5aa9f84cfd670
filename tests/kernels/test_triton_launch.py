"""What a launch keeps, with a kernel that only tells how it was launched."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernels.launch_on_no_gpu import build

pytest.importorskip("triton", reason="triton is not installed")

from recapp.kernels.triton_launch import LAUNCHES, Launch


class Compiled:
    def __init__(self, calls):
        self.calls = calls

    def __getitem__(self, grid):
        return lambda *arguments: self.calls.append(("again", grid, arguments))


class Kernel:
    """As a decorated function: a launch compiles, unless nothing is compiled here."""

    def __init__(self, compiles=True):
        self.fn = self.told
        self.calls = []
        self.compiles = compiles

    def told(self):
        pass

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            self.calls.append(("anew", grid, arguments, options))
            return Compiled(self.calls) if self.compiles else None

        return launch


@pytest.fixture
def memory():
    """Eight numbers that begin at a multiple of 16 bytes."""
    numbers = torch.zeros(16)
    return numbers[-(numbers.data_ptr() // 4) % 4 :][:8]


def test_a_repeated_launch_goes_to_the_compiled_form_by_addresses(memory):
    kernel = Kernel()
    launch = Launch(kernel)
    before = LAUNCHES["told"]
    launch((3,), (memory, None, 5, 0.5), ("form", 128), 1)
    launch((4, 2), (memory[4:], None, 7, 0.25), ("form", 128), 1)
    assert kernel.calls == [
        (
            "anew",
            (3,),
            (memory, None, 5, 0.5, "form", 128),
            {"num_warps": 1, "enable_fp_fusion": False},
        ),
        ("again", (4, 2, 1, 1), (memory.data_ptr() + 16, None, 7, 0.25, "form", 128)),
    ]
    assert LAUNCHES["told"] == before + 2


@pytest.mark.parametrize(
    "other",
    [
        lambda x: ((x[1:], None, 5, 0.5), (128,), 4),  # not aligned
        lambda x: ((x.double(), None, 5, 0.5), (128,), 4),
        lambda x: ((x, x, 5, 0.5), (128,), 4),
        lambda x: ((x, None, 1, 0.5), (128,), 4),
        lambda x: ((x, None, 32, 0.5), (128,), 4),
        lambda x: ((x, None, 2**31 + 1, 0.5), (128,), 4),
        lambda x: ((x, None, 5, 0.5), (64,), 4),
        lambda x: ((x, None, 5, 0.5), (128,), 8),
    ],
)
def test_what_triton_tells_apart_is_compiled_anew(memory, other):
    kernel = Kernel()
    launch = Launch(kernel)
    launch((1,), (memory, None, 5, 0.5), (128,), 4)
    launch((1,), *other(memory))
    assert [how for how, *_ in kernel.calls] == ["anew", "anew"]


def test_without_a_compiled_form_nothing_is_kept(memory):
    kernel = Kernel(compiles=False)
    launch = Launch(kernel)
    for _ in range(2):
        launch((1,), (memory,), ())
    assert [how for how, *_ in kernel.calls] == ["anew", "anew"]


@pytest.mark.full
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler (apt-get install gcc)")
def test_a_kept_launch_reaches_the_driver_as_tritons_own(tmp_path):
    build(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "kernels.launch_on_no_gpu", str(tmp_path)],
        cwd=Path(__file__).parents[1],
        env=os.environ
        | {"TRITON_INTERPRET": "0", "LD_LIBRARY_PATH": str(tmp_path)}
        | {"TRITON_CACHE_DIR": str(tmp_path / "compiled")},
        capture_output=True,
        text=True,
    )
    assert not done.returncode, done.stderr
    kernels, found = zip(*(line.split(" ", 1) for line in done.stdout.splitlines()), strict=True)
    assert {*found} == {"same"}
    step = {"rows", "bags", "count_heads", "write_heads", "plan", "ask", "link", "serve"}
    others = {"pool", "sum_blocks", "update", "write_dots", "write_gradients", "find"}
    assert {*kernels} == step | others
