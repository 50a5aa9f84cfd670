"""Compiles the GPU backend's kernels for a Hopper GPU without having one: the backend's own calls
compile and launch nothing.

    python -m kernels.compile_for_gpu "WIDTH COMPUTED STORED RULE ..." ...

prints a line for each kernel of each case: the case, the name of the kernel, and what its code
holds (fused multiplications and additions, approximate roots, barriers, loads of 16 bytes, values
on the stack for want of registers).
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from kernels.gradient_squares import square_sums
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from recapp.kernels.links import Links
from recapp.kernels.quantised import quantise
from recapp.kernels.triton_cuda import TritonBackend
from recapp.optim import rules

TYPES = {
    "fp32": torch.float32,
    "fp64": torch.float64,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
SIGNS = {
    "fused": r"fma\.",
    "approximate_root": r"sqrt\.approx",
    "barrier": r"bar\.sync",
    "lines": r"ld\.global\.v(4\.b32|2\.b64)",
}
ROWS = 50
BAGS = 7
ENTRIES = 20_000  # more than a bag may have without blocks of blocks


class NoDevice:
    """A driver with the answers that Triton needs before a launch."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def stack_bytes(binary):
    """Return the bytes of a thread's stack."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "kernel").write_bytes(binary)
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", f"{folder}/kernel"]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", usage)[1])


def compile_only(run, case):
    def compiled(self, *args, grid, warmup, **options):
        code = run(self, *args, grid=grid, warmup=True, **options).asm
        found = [name for name, sign in SIGNS.items() if re.search(sign, code["ptx"])]
        found += ["spills"] * (stack_bytes(code["cubin"]) > 0)
        print(f"{case}:", self.fn.__name__, *found)

    return compiled


def call_everything(width, dtype, stored, names):
    kernels = TritonBackend()
    kernels.in_lines = width % 8 == 0
    rows_RD = torch.zeros(ROWS, width, dtype=stored)
    count = torch.ones(1, dtype=torch.int32)
    offsets = torch.tensor([0, 0, 5, 400, 401, 401, 500, ENTRIES]).int()
    links = Links(
        torch.zeros(ENTRIES, dtype=torch.int32),
        offsets,
        torch.zeros(ENTRIES, dtype=dtype),
        None,
        BAGS,
        used=count,
    )
    each = Links(links.index_N, None, None, links.index_N, ENTRIES)
    kernels.pool(
        rows_RD.view(-1), width, width, links, torch.zeros(BAGS * width, dtype=stored), dtype
    )
    kernels.pool(
        rows_RD.view(-1),
        1,
        width,
        each,
        torch.zeros(BAGS * width, dtype=dtype),
        dtype,
        0.5,
        in_lines=True,
    )
    for bits in (4, 8):
        kernels.pool(
            quantise(rows_RD, bits),
            width,
            width,
            links,
            torch.zeros(BAGS * width, dtype=dtype),
            dtype,
        )
    square_sums(kernels, rows_RD.view(-1), width, links, dtype)
    for rule in [*(getattr(rules, name)() for name in names), rules.adagrad(weight_decay=0.1)]:
        state = [
            torch.zeros(ROWS, width if kind == "element" else 1, dtype=dtype)
            for _, kind in rule.state
        ]
        for mean_U in [None, torch.zeros(BAGS, dtype=dtype)][: 1 + rule.needs_row]:
            (lr,) = kernels.on_device([rule.rate_of(0.1, 1)], [rule], torch.device("cpu"))
            kernels.update(
                rows_RD.view(-1),
                links,
                links.index_N,
                mean_U,
                rows_RD,
                state,
                dtype,
                lr._replace(stopped=count),
                rule,
            )
    rule = rules.adam(l2_all_rows=0.1)
    for row_N in (None, torch.tensor([0, 1, 1])):
        kernels.catch_up(
            *(row_N, torch.zeros(ROWS, dtype=torch.int32), rows_RD),
            *([torch.zeros(ROWS, width, dtype=dtype) for _ in rule.state], dtype),
            *(torch.ones(3, 3, dtype=torch.float64), 0, rule),
        )


if __name__ == "__main__":
    driver.set_active(NoDevice())
    run = JITFunction.run
    with tempfile.TemporaryDirectory() as cache:
        triton.knobs.cache.dir = cache
        for case in sys.argv[1:]:
            JITFunction.run = compile_only(run, case)
            width, computed, stored, *names = case.split()
            call_everything(int(width), TYPES[computed], TYPES[stored], names)
