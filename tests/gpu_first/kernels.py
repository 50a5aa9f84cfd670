"""`python -m tests.gpu_first.kernels`: the arithmetic kernels of a step, and the dots of a DLRM, in
the milliseconds that a GPU works: 8,192 samples of 26 bags of one id and of ten, 128 fp32 columns.

R rows of the store, M bags, N entries, U distinct rows, B samples, F vectors of D columns, K
columns of their dots.
"""

import json

import torch

from recapp.benchmarks.session import rule
from recapp.kernels.backend import backend
from recapp.kernels.links import Links, group
from recapp.kernels.triton_dense import pair_dots, pair_dots_backward
from recapp.models.layers import DotInteraction
from recapp.models.linear_stack import whole_columns

CALLS = 20


def times(device, measure, samples=8192, tables=26, rows=2_000_000, width=128):
    """Return the result of each kernel and number of ids.

    Args:
        device: The device of the kernels.
        measure: A function that gets a call of a kernel, and returns its result.
        samples: The samples of a batch.
        tables: The tables, with a bag of each sample.
        rows: The rows of all tables.
        width: The columns.
    """
    kernels = backend("triton", device)
    kernels.in_lines = True  # as the engine finds of tables of 128 columns
    weights_RD = torch.zeros(rows, width, device=device)
    state_R1 = torch.zeros(rows, 1, device=device)
    bags = samples * tables
    sums = torch.empty(bags * width, device=device)
    found = {}
    for ids in (1, 10):
        # ids as skewed as those of logs: half of them are a few hundred rows
        skewed_N = rows ** torch.rand(bags * ids, generator=torch.Generator().manual_seed(ids))
        row_N = skewed_N.long().sub_(1).to(device)
        offsets_M1 = torch.arange(0, bags * ids + 1, ids, device=device, dtype=torch.int32)
        links = Links(row_N.int(), offsets_M1, None, None, bags, longest=samples * ids)
        equal = group(row_N)
        offset_N = (equal.order_N // ids * width).int()
        gradient_links = Links(offset_N, equal.start_U1, None, None, len(equal.key_U))
        found[f"pool, {ids} ids"] = measure(
            lambda links=links: kernels.pool(
                weights_RD.view(-1), width, width, links, sums, torch.float32, in_lines=True
            )
        )
        found[f"update, {ids} ids"] = measure(
            lambda links=gradient_links, row_U=equal.key_U: kernels.update(
                *(sums, links, row_U, None, weights_RD, [state_R1], torch.float32),
                *(rule().rate_of(rule().lr, 1), rule()),
            )
        )
    return found | dots_times(device, measure, samples, tables + 1, width)


def dots_times(device, measure, samples, count, width):
    """Return the results of the kernels for dots of pairs, and of torch's functions forward."""
    vectors_BFD = torch.zeros(samples, count, width, device=device)
    layer = DotInteraction(count).to(device)
    columns = whole_columns(width + layer.pairs)
    grad_BK = torch.zeros(samples, columns, device=device)

    def of_torch():
        dots_BP = vectors_BFD.bmm(vectors_BFD.mT).flatten(1).index_select(1, layer.pair_P)
        return torch.cat([vectors_BFD[:, 0], dots_BP], 1)

    return {
        "dots": measure(lambda: pair_dots(vectors_BFD, columns, True)),
        "dots backward": measure(lambda: pair_dots_backward(vectors_BFD, grad_BK, True)),
        "dots by torch": measure(of_torch),
    }


def main():
    """Print the times as JSON."""
    torch.set_float32_matmul_precision("high")
    from ..speed.torchrec_worker import profiled

    def measure(call):
        for _ in range(3):
            call()
        return profiled(lambda number: call(), CALLS)

    print(json.dumps(times(torch.device("cuda"), measure)))


if __name__ == "__main__":
    main()
