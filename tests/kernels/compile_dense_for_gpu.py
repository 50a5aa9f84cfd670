"""Compiles the kernels of dense layers for a Hopper GPU without having one.

    python -m kernels.compile_dense_for_gpu

prints a line for each kernel and case: their names, and what the code holds.
"""

import tempfile

import torch
import triton
from kernels.compile_for_gpu import NoDevice
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from recapp.kernels.triton_dense import pair_dots, pair_dots_backward

SIGNS = {
    "wide_loads": ("ld.global.v4",),
    "tensor_cores": ("mma.sync", "wgmma"),
    "fma": ("fma.rn",),
    "local_memory": (".local ",),
}
CASES = [
    (27, 128, torch.float32),
    (27, 128, torch.bfloat16),
    (27, 16, torch.float32),
    (40, 100, torch.float32),
    (100, 128, torch.float16),
    (9, 512, torch.bfloat16),
]


def compile_only(run, case):
    def compiled(self, *args, grid, warmup, **options):
        ptx = run(self, *args, grid=grid, warmup=True, **options).asm["ptx"]
        signs = (name for name, words in SIGNS.items() if any(word in ptx for word in words))
        print(self.fn.__name__, case, *signs)

    return compiled


if __name__ == "__main__":
    driver.set_active(NoDevice())
    torch.set_float32_matmul_precision("high")
    run = JITFunction.run
    with tempfile.TemporaryDirectory() as cache:
        triton.knobs.cache.dir = cache
        for vectors, width, dtype in CASES:
            JITFunction.run = compile_only(run, f"{vectors}x{width}x{dtype}")
            vectors_BFD = torch.zeros(4, vectors, width, dtype=dtype)
            columns = width + vectors * (vectors - 1) // 2
            out_BK = pair_dots(vectors_BFD, -(-columns // 8) * 8, keeps_first=True)
            pair_dots_backward(vectors_BFD, out_BK, keeps_first=True)
