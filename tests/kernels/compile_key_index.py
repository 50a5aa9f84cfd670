"""Compiles the kernels of dynamic tables for a Hopper GPU without having one.

    python -m kernels.compile_key_index

prints a line for each kernel: its name, and which atomic operations its code holds.
"""

import tempfile

import torch
import triton
from kernels.compile_for_gpu import NoDevice
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from recapp.kernels import triton_key_index
from recapp.kernels.batch_arrays import GroupPlace
from recapp.kernels.triton_key_index import DeviceKeyIndex
from recapp.kernels.triton_new_rows import begin_rows

KEYS = 10
SIGNS = {"swap": ".cas.b", "least": ".min.", "local_memory": ".local"}


def compile_only(run):
    def compiled(self, *args, grid, warmup, **options):
        ptx = run(self, *args, grid=grid, warmup=True, **options).asm["ptx"]
        print(self.fn.__name__, *(name for name, sign in SIGNS.items() if sign in ptx))

    return compiled


def call_everything():
    index = DeviceKeyIndex([0], 1 << 20, torch.device("cpu"))
    index.positions.grow(KEYS)
    index.strips.grow(KEYS)
    keys = torch.zeros(KEYS, dtype=torch.int64), torch.zeros(KEYS, dtype=torch.int16)
    index.find(*keys)
    index.find_or_insert(*keys, torch.arange)
    index.remove(keys[0])
    starts_I = keys[0], keys[0], torch.ones(1)
    group = torch.zeros(len(GroupPlace._fields), dtype=torch.int64)
    for dtype in (torch.float32, torch.bfloat16):
        rows_RD = torch.zeros(KEYS, 65, dtype=dtype)
        begin_rows(rows_RD, starts_I, (keys[0], *keys))
        times = torch.zeros(KEYS, dtype=torch.int32)
        for counter in (None, (index.numbers, *keys, times, keys[0])):
            of_step = group, 0, torch.zeros(1, dtype=torch.int32), (keys[0], keys[0])
            slot, *added = index.add(*keys, *of_step, counter)
            added += index.numbers, keys[0], keys[0], group, of_step[2]
            begin_rows(rows_RD, starts_I, (slot, *keys), added, 0, (times, times))


if __name__ == "__main__":
    driver.set_active(NoDevice())
    JITFunction.run = compile_only(JITFunction.run)
    # nothing is launched: the host reads so many new keys that the table has to grow
    triton_key_index.to_host = lambda counts: torch.tensor([1000])
    with tempfile.TemporaryDirectory() as cache:
        triton.knobs.cache.dir = cache
        call_everything()
