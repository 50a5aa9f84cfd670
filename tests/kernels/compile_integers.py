"""Compiles the kernels of the integers of all groups for a Hopper GPU without having one.

    python -m kernels.compile_integers

prints a line for each kernel: its name, and what its code holds.
"""

import tempfile
from itertools import product

import torch
import triton
from kernels.compile_for_gpu import NoDevice
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from recapp.kernels import triton_integers as kernels
from recapp.kernels import triton_requests as exchange
from recapp.kernels.batch_arrays import Sizes
from recapp.kernels.triton_places import kept_ids, place_entries

SIGNS = {"least": ".min.", "local_memory": ".local", "approximate_division": "div.full"}
WORLD = 2
TYPES = torch.int32, torch.int64


def compile_only(run):
    def compiled(self, *args, grid, warmup, **options):
        ptx = run(self, *args, grid=grid, warmup=True, **options).asm["ptx"]
        print(self.fn.__name__, *(name for name, sign in SIGNS.items() if sign in ptx))

    return compiled


def take(name, n, dtype):
    return torch.zeros(n, dtype=dtype)


def call_everything(key, offset, scale, weighted):
    sizes = Sizes(2048, 2048, 2, torch.int32, key, offset)
    numbers = torch.zeros(4096, dtype=torch.int64)
    weights = torch.zeros(10, dtype=scale) if weighted else None
    batch = torch.zeros(10, dtype=key), numbers[:9], weights, 2
    of_slots = numbers, numbers, numbers
    place_entries(numbers[:9], 2, *of_slots)
    stopped = torch.zeros(1, dtype=torch.int32) if weighted else None
    owners = (numbers, numbers) if scale else (None, None)
    report = numbers, stopped
    kept = kept_ids(batch[0], numbers[:5], numbers[:9], 2, numbers[:8].view(4, 2), numbers, take)
    batch = batch[0], kept[0], kept[1] if weighted else None, *batch[2:]
    entries = kernels.entries_of_ids(*batch, *of_slots, owners, *report, scale, sizes, take)
    _, at_M, scale_M = kernels.bags_of(numbers[:9], 2, *of_slots, scale, sizes, take)
    positions = None if weighted else numbers[:2048]
    for several, position_P in ((False, None), (True, positions)):
        distinct = kernels.distinct_rows(entries, numbers, sizes, take, several, position_P)
    message = numbers[: WORLD * 12]
    counts = message, numbers[:10], numbers[:5], numbers[:5], numbers[:3]
    of_pieces = distinct, numbers, numbers, numbers
    ids = torch.zeros(10, dtype=torch.int32)
    wire = scale if weighted else None
    words = wire.itemsize // ids.dtype.itemsize if wire else 0
    exchange.count_requests(*of_pieces, WORLD, words, *counts)
    exchange.count_rows(*of_pieces, numbers[:3])
    exchange.find_pieces(*of_pieces, sizes, take)
    to_bags = numbers[: WORLD * 2], at_M, scale_M, ids if wire else None, words
    exchange.write_requests(*of_pieces, numbers, *to_bags, ids, sizes, take)
    exchange.first_sums(*of_pieces, sizes, take)
    exchange.entries_of_requests(ids, numbers, numbers, wire, scale or torch.float32, sizes, take)


if __name__ == "__main__":
    driver.set_active(NoDevice())
    JITFunction.run = compile_only(JITFunction.run)
    scales = (None, False), (torch.float32, True), (torch.float64, False)
    with tempfile.TemporaryDirectory() as cache:
        triton.knobs.cache.dir = cache
        for (key, offset), scale in zip(product(TYPES, TYPES), [*scales, scales[0]], strict=True):
            call_everything(key, offset, *scale)
