"""Compiles the GPU backend's kernels for a Hopper GPU without having one: the backend's own calls
compile and launch nothing.

    python -m kernels.compile_for_gpu WIDTH COMPUTED STORED RULE ...

prints a line for each kernel: its name, and what its code holds (fused multiplications and
additions, approximate roots, barriers).
"""

import sys
import tempfile

import torch
import triton
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
SIGNS = {"fused": "fma.", "approximate_root": "sqrt.approx", "barrier": "bar.sync"}
ROWS = 50
BAGS = 7
ENTRIES = 600


class NoDevice:
    """A driver with the answers that Triton needs before a launch."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def compile_only(run):
    def compiled(self, *args, grid, warmup, **options):
        ptx = run(self, *args, grid=grid, warmup=True, **options).asm["ptx"]
        print(self.fn.__name__, *(name for name, sign in SIGNS.items() if sign in ptx))

    return compiled


def call_everything(width, dtype, stored, names):
    kernels = TritonBackend()
    rows_RD = torch.zeros(ROWS, width, dtype=stored)
    offsets = torch.tensor([0, 0, 5, 400, 401, 401, 500, ENTRIES]).int()
    links = Links(
        torch.zeros(ENTRIES, dtype=torch.int32),
        offsets,
        torch.zeros(ENTRIES, dtype=dtype),
        None,
        BAGS,
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
        kernels.pool_quantised(
            quantise(rows_RD, bits),
            links,
            torch.zeros(BAGS * width, dtype=dtype),
            dtype,
        )
    kernels.square_sums(rows_RD.view(-1), width, links, dtype)
    for rule in [*(getattr(rules, name)() for name in names), rules.adagrad(weight_decay=0.1)]:
        state = [
            torch.zeros(ROWS, width if kind == "element" else 1, dtype=dtype)
            for _, kind in rule.state
        ]
        for mean_U in [None, torch.zeros(BAGS, dtype=dtype)][: 1 + rule.needs_row]:
            kernels.update(
                rows_RD.view(-1),
                links,
                links.index_N,
                mean_U,
                rows_RD,
                state,
                dtype,
                rule.rate_of(0.1, 1),
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
    JITFunction.run = compile_only(JITFunction.run)
    width, computed, stored, *names = sys.argv[1:]
    with tempfile.TemporaryDirectory() as cache:
        triton.knobs.cache.dir = cache
        call_everything(int(width), TYPES[computed], TYPES[stored], names)
