"""Steps of dense parts on CPUs in one pass over memory each (`numba_dense.py`), where torch takes
several, for the autograd functions of `recapp/models`.

A caller asks `fits` first, and computes in torch's words where the answer is no: on GPUs, without
numba, in 16 bits, while torch compiles or transforms functions. A kernel is compiled for the
machine at its first call and kept on disk.

Shapes: B batch, K columns of x, L = K / 2 columns of h, F fields, D columns of a vector, P pairs.
"""

from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from recapp.kernels.constants import SUMMED_ROWS

FLOATS = (torch.float32, torch.float64)
THREADS_FROM = 2**16  # numbers; waking a second thread takes as long as 10,000 or more


def fits(*tensors: Tensor) -> bool:
    """Return whether the kernels take these tensors now: plain contiguous floats of one type on a
    CPU, while autograd does not record.
    """
    dtype = tensors[0].dtype
    return (
        are_plain(*tensors)
        and not torch.is_grad_enabled()
        and dtype in FLOATS
        and all(
            x.dtype == dtype
            and x.is_contiguous()
            and not torch._C._functorch.is_legacy_batchedtensor(x)  # several gradients at once
            for x in tensors
        )
        and _has_numba()
    )


def are_plain(*tensors: Tensor) -> bool:
    """Return whether tensors are torch's own on a CPU, while torch neither compiles nor transforms
    functions (`torch.func`, derivatives in forward).
    """
    return (
        not torch.compiler.is_compiling()
        and all(type(x) in (Tensor, torch.nn.Parameter) for x in tensors)
        and all(x.device.type == "cpu" for x in tensors)
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
    )


@lru_cache(None)
def _has_numba() -> bool:
    return find_spec("numba") is not None


def dropped(entries: Tensor, bits: Tensor, least: int, factor: float) -> Tensor:
    """Return entries times a factor where 16 random bits are at least `least`, and times 0
    elsewhere.

    Args:
        entries: The entries, of any shape.
        bits: The random bits of each entry, int16.
        least: The threshold.
        factor: The factor of kept entries.
    """
    from recapp.kernels.numba_calls import scalar

    found = torch.empty_like(entries)
    numbers = (least, scalar(entries.dtype, factor), scalar(entries.dtype, 0))
    arrays = (_flat(entries), _flat(bits), _flat(found))
    _run("dropping", (), (*arrays, numbers), entries.numel(), entries.numel())
    return found


def masked(x: Tensor, factor: Tensor, half: Tensor, mask: Tensor, bias_K: Tensor) -> Tensor:
    """Return x + factor * ([h, h * mask] + bias).

    Args:
        x: What the layer adds to, [.., K].
        factor: What the gate multiplies, [.., K].
        half: h, [.., L].
        mask: The mask of h, [.., L].
        bias_K: The bias of the gate.
    """
    found = torch.empty_like(x)
    crossed = (_flat(x), _flat(factor))
    halves = (_flat(half), _flat(mask), half.shape[-1])
    arguments = (crossed, halves, _flat(bias_K), _flat(found))
    _run("masking", (), arguments, _blocks(half), x.numel())
    return found


def masked_back(
    grad: Tensor, factor: Tensor, half: Tensor, mask: Tensor, bias_K: Tensor, *, own: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of `masked`: for the factor, for h, for the mask, for the bias.

    Args:
        grad: The gradient of the result, [.., K].
        factor: As in `masked`, and so on.
        half: h.
        mask: The mask.
        bias_K: The bias.
        own: Whether x is the factor; its whole gradient is the first result then.
    """
    from recapp.kernels.numba_calls import scalar

    of_factor = torch.empty_like(grad)
    of_half = torch.empty_like(half)
    of_mask = torch.empty_like(half)
    of_bias = grad.new_zeros(_blocks(half), len(bias_K))
    given = (*map(_flat, (grad, factor, half, mask)), half.shape[-1])
    found = tuple(map(_flat, (of_factor, of_half, of_mask, of_bias)))
    arguments = (given, _flat(bias_K), found, scalar(grad.dtype, own))
    _run("masking_back", (), arguments, _blocks(half), grad.numel())
    return of_factor, of_half, of_mask, of_bias.sum(0)


def paired(vectors_BFFD: Tensor, own: bool) -> Tensor:
    """Return the dot products <v_i,j, v_j,i> of the pairs j < i of fields, [B, P].

    Args:
        vectors_BFFD: The vectors of field i for field j at [:, i, j].
        own: Whether the vectors of all fields for themselves come before them, [B, F D + P].
    """
    from recapp.kernels.numba_calls import scalar

    samples, fields, _, dim = vectors_BFFD.shape
    pairs = fields * (fields - 1) // 2
    found = vectors_BFFD.new_empty(samples, own * fields * dim + pairs)
    like = scalar(found.dtype, 0)
    arguments = (_flat(vectors_BFFD), _flat(found), fields, like)
    _run("pairing", (dim, int(own)), arguments, samples, vectors_BFFD.numel())
    return found


def paired_back(vectors_BFFD: Tensor, grad: Tensor, own: bool) -> Tensor:
    """Return the gradient of `paired` for the vectors, [B, F, F, D].

    Args:
        vectors_BFFD: The vectors.
        grad: The gradient of the result.
        own: As in `paired`.
    """
    from recapp.kernels.numba_calls import scalar

    samples, fields, _, dim = vectors_BFFD.shape
    found_BFFD = torch.empty_like(vectors_BFFD)
    numbers = (fields, scalar(grad.dtype, 0))
    arguments = (_flat(vectors_BFFD), _flat(grad), _flat(found_BFFD), numbers)
    _run("pairing_back", (dim, int(own)), arguments, samples, vectors_BFFD.numel())
    return found_BFFD


def _flat(tensor: Tensor) -> Any:
    return tensor.detach().view(-1).numpy()


def _blocks(half: Tensor) -> int:
    """Return the number of blocks of rows."""
    return -(-half.shape[:-1].numel() // SUMMED_ROWS)


def _run(
    name: str, made_for: tuple[int, ...], arguments: tuple[Any, ...], parts: int, size: int
) -> None:
    """Run a kernel on as many threads as torch uses, or on one if there is little work.

    Args:
        name: The function of `numba_dense.py` that makes the kernel.
        made_for: The arguments of that function.
        arguments: Its arguments before the parts.
        parts: The number of parts of the work.
        size: The numbers that it reads or writes, about.
    """
    import numba
    import numpy as np

    from recapp.kernels.numba_calls import threads_of_torch

    threads = min(threads_of_torch(), parts)
    if threads < 2 or size < THREADS_FROM:
        _maker(name, on_several=False)(*made_for)(*arguments, 0, parts)
        return
    numba.set_num_threads(threads)
    edge_T1 = np.arange(threads + 1) * parts // threads
    _maker(name, on_several=True)(*made_for)(*arguments, edge_T1)


@lru_cache(None)
def _maker(name: str, *, on_several: bool) -> Callable[..., Callable[..., None]]:
    """Return a function that compiles a kernel of `numba_dense.py` for one thread or several."""
    from recapp.kernels import numba_dense
    from recapp.kernels.numba_partition import on_one_thread, on_threads

    make = getattr(numba_dense, name)
    made: Callable[..., Callable[..., None]] = (on_threads if on_several else on_one_thread)(make)
    return made
