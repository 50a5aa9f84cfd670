"""The choice of a backend: one object with the engine's local functions, chosen once per
collection, and made ready before its first step.

| backend | device | what it is                                                                    |
|---------|--------|-------------------------------------------------------------------------------|
| torch   | any    | `reference.py`: plain torch, defines the result                               |
| numba   | CPU    | `numba_cpu.py`: compiled for the machine at first use, several times as fast; |
|         |        | results are kept on disk                                                      |
| triton  | GPU    | `triton_cuda.py`: arithmetic, and integers of all groups at once              |

`auto` takes the fastest backend that works; the setting is `engine.backend`. Faster backends give
the reference's results up to the order of sums (`sums.py`). Within one backend results have the
same bits under every plan and for every number of threads.

The kernels of a collection are compiled before its first step, once per machine: numba keeps them
in its cache on disk. It compiles a kernel for each combination of types and width, and once more
for work that several threads share. So `warm_up` calls each function for each width as the engine
does: with one row and, if a rank has several threads, with enough rows for several threads. A step
that needs another kernel compiles it then: for sample weights and for bags of many ids, which only
batches show.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recapp.console import note
from recapp.errors import ConfigError, suggest
from recapp.kernels.links import Bags, Links, Routes, Scratch
from recapp.kernels.quantised import QuantisedRows, quantise
from recapp.kernels.reference import TorchBackend
from recapp.optim.rules import RowRule

# An object with the functions of `TorchBackend`.
Backend = TorchBackend | Any

# The values of the setting: the names of the backends, and `auto`.
BACKENDS = ("auto", "numba", "torch", "triton")
# The name of the setting, for errors.
SETTING = "engine.backend"


def backend(name: str, device: torch.device) -> Backend:
    """Return the backend for tensors of a device.

    Args:
        name: `auto`, or a name of the table above to force that backend.
        device: The device of rows and messages.

    Raises:
        ConfigError: The name is unknown, or the named backend does not work on this device.
    """
    if name not in BACKENDS:
        raise ConfigError(f"{SETTING}={name}: unknown; {suggest(name, BACKENDS)}")
    obstacles = {"numba": _no_numba, "triton": _no_triton}
    if name in obstacles and (why := obstacles[name](device)):
        raise ConfigError(f"{SETTING}={name}: {why}; use auto or torch")
    if name == "triton" or (name == "auto" and device.type == "cuda" and not _no_triton(device)):
        from recapp.kernels.triton_cuda import TritonBackend

        return TritonBackend()
    if name == "numba" or (name == "auto" and not _no_numba(device)):
        from recapp.kernels.numba_cpu import NumbaBackend

        return NumbaBackend()
    return TorchBackend()


def slow_kernels_note(name: str, device: torch.device) -> str:
    """Return a line of text with the reason why `auto` found no fast kernels on a device.

    The line is empty if `auto` found fast kernels, or if the setting names a backend.

    Args:
        name: The setting, as `backend` takes it.
        device: The device of rows and messages.
    """
    why = _no_triton(device) if device.type == "cuda" else _no_numba(device)
    return (
        f"{why}: lookup and update run in plain torch, several times slower"
        if name == "auto" and why
        else ""
    )


def _no_numba(device: torch.device) -> str:
    """Return the reason why numba's kernels do not work on a device; empty if they work."""
    if device.type != "cpu":
        return f"the backend computes on the CPU, and the rows are on {device}"
    return "" if find_spec("numba") else "numba is not installed (pip install numba)"


def _no_triton(device: torch.device) -> str:
    """Return the reason why Triton's kernels do not work on a device; empty if they work.

    Triton's interpreter takes CPU tensors as well.
    """
    if not find_spec("triton"):
        return "triton is not installed (torch for CUDA brings it; pip install triton)"
    from triton import knobs

    if device.type == "cuda" or (device.type == "cpu" and knobs.runtime.interpret):
        return ""
    return f"the backend computes on a GPU, and the rows are on {device}"


KEPT = "first use; they are kept on disk"
LOST = "each time anew: set NUMBA_CACHE_DIR to a directory that can be written to"
STREAMED_BYTES = 8 << 20  # an output of this size is written past the caches


@contextmanager
def report_compilation(prints: bool) -> Iterator[None]:
    """Print a note when the first compilation of a kernel begins, and at the end the time of all.

    It prints nothing if numba finds all kernels on disk, however long the disk takes.

    Args:
        prints: Whether this process prints.
    """
    if not prints:
        yield
        return
    from recapp.kernels.numba_cache import kept_on_disk, listen_to_compilations

    began: list[float] = []

    def compiles() -> None:
        if not began:
            note(f"compiling kernels for this machine ({KEPT if kept_on_disk() else LOST}) ...")
        began.append(time.monotonic())

    with listen_to_compilations(compiles):
        yield
    if began:
        note(f"compiled in {time.monotonic() - began[0]:.1f} s")


def warm_up(
    kernels: Any,
    routes: list[Routes],
    world: int,
    stored: Sequence[Tensor | QuantisedRows],
    in_lines: list[bool],
    dtype: torch.dtype,
    payload: torch.dtype,
    scales: bool,
    rule_G: Sequence[RowRule | None],
    exchanged_G: Sequence[int],
) -> None:
    """Call every function of the numba backend, on one thread and on several.

    Args:
        kernels: The numba backend.
        routes: The routes of each group, for width and mode.
        world: The number of ranks.
        stored: The rows of each group's store, of which only the format matters.
        in_lines: Whether each group's results may be written past the caches.
        dtype: The type of the arithmetic.
        payload: The type of vectors in messages.
        scales: Whether bags have factors (means).
        rule_G: The rule that updates the rows of each group; None for rows that are not updated.
        exchanged_G: For each group, the number of sums of squares that the strips of one row
            exchange.
    """
    kernels.rows_of_ids(_zero(), [0, 1], _zero() + 1, _zero(), _zero())
    no_numbers = torch.zeros(1, 3, dtype=torch.int64)
    kernels.positions_of_rows(torch.zeros(1, dtype=torch.int32), [0, 1], no_numbers)
    if world == 1:
        payload = dtype  # without messages, the output's gradient updates the rows
    for r, rows, lines, rule, exchanged in zip(
        routes, stored, in_lines, rule_G, exchanged_G, strict=True
    ):
        of_floats = torch.float32 if isinstance(rows, QuantisedRows) else rows.dtype
        one_row = torch.zeros(1, r.width, dtype=of_floats)
        example = quantise(one_row, rows.bits) if isinstance(rows, QuantisedRows) else one_row
        if r.dynamic and isinstance(example, Tensor):
            _find_rows(kernels, example)
        for n, ids in kernels.sizes():
            _requests(kernels, r, world, ids, dtype, scales, rule is not None)
            links = Links(
                torch.zeros(n, dtype=torch.int32),
                torch.arange(n + 1, dtype=torch.int32),
                None,
                None,
                n,
            )
            _pools(kernels, example, links, r.row_dtype, lines, dtype, payload)
            if rule is not None and isinstance(example, Tensor):
                _update(kernels, r, links, example.dtype, dtype, payload, rule, exchanged > 0)


def _pools(
    kernels: Any,
    example: Tensor | QuantisedRows,
    links: Links,
    rows: torch.dtype,
    in_lines: bool,
    dtype: torch.dtype,
    payload: torch.dtype,
) -> None:
    """Pool rows of the store, vectors of a message and gradients, each in its own type. Rows have
    numbers of the type `rows`, vectors have numbers of the type of the links.
    """
    width = example.width if isinstance(example, QuantisedRows) else example.shape[1]
    stored = example if isinstance(example, QuantisedRows) else example.view(-1)
    travelling, computed = (torch.zeros(width, dtype=kind) for kind in (payload, dtype))
    of_rows = links._replace(index_N=links.index_N.to(rows))
    calls = (
        (stored, of_rows, payload),
        (stored, of_rows, dtype),
        (travelling, links, dtype),
        (computed, links, payload),
    )
    for source, read, written in calls:
        target = torch.zeros(links.bags * width, dtype=written)
        kernels.pool(source, 1, width, read, target, dtype)
    if in_lines:
        size = max(STREAMED_BYTES // dtype.itemsize, links.bags * width)
        big = torch.empty(size, dtype=dtype)
        for source, read, _ in calls[:3]:
            kernels.pool(source, 1, width, read, big, dtype, in_lines=True)


def _find_rows(kernels: Any, example: Tensor) -> None:
    """Add a row of a dynamic table, write its start values, find the row and remove it."""
    index = kernels.key_index([0], 8, example.device)
    position = _zero() - 2**63
    strip = torch.zeros(1, dtype=torch.int16)
    index.positions.grow(1)
    index.strips.grow(1)
    slot, _ = index.find_or_insert(position, strip, lambda n: torch.arange(n))
    index.remove(slot)
    if example.dtype == torch.float32:
        kernels.write_start_values(example.clone(), slot, position, 0, range(example.shape[1]), 0.0)


def _requests(
    kernels: Any,
    r: Routes,
    world: int,
    ids: int,
    dtype: torch.dtype,
    scales: bool,
    trains: bool,
) -> None:
    """Route, write, link, serve and group one row, which one bag has `ids` times."""
    take = Scratch()
    one = np.zeros(1, np.int64)
    pooled = r.mode == "pooled" and world > 1
    tiny = Routes(
        r.mode,
        r.width,
        [0],
        one,
        _zero(),
        torch.ones(1, dtype=torch.int64),
        torch.tensor([0, 1]),
        _zero(),
        _zero(),
        _zero(),
        r.row_dtype,
    )
    bag = Bags(
        torch.zeros(ids, dtype=r.row_dtype),
        torch.tensor([ids]),
        one,
        np.array([0, 1]),
        one,
        one + ids,
        torch.zeros(1, dtype=torch.int32),
        torch.ones(1, dtype=dtype) if scales else None,
        None,
    )
    request = torch.ones(ids + 1, dtype=r.row_dtype)
    if pooled:
        bag_rows, _ = kernels.route_bags(tiny, bag, 1, take)
        kernels.write_bag_requests(tiny, bag, bag_rows, request, one, one, None, torch.int32, take)
    else:
        unique, _ = kernels.route_rows(tiny, bag, 1, take)
        at = kernels.write_row_requests(tiny, unique, request, one, one, torch.int32, take)
        kernels.link_rows(tiny, bag, unique, at, dtype, take)
        kernels.link_rows(tiny, bag, unique, unique.row_U, dtype, take)
    counts = np.array([[ids, 1, ids + 1] if pooled else [1, 1, 1]])
    served = kernels.serve(request, one, counts, one, r.width, pooled, 0, dtype, torch.int32, take)
    if trains:
        kernels.group_rows(1, served, take)


def _update(
    kernels: Any,
    r: Routes,
    links: Links,
    weight_dtype: torch.dtype,
    dtype: torch.dtype,
    payload: torch.dtype,
    rule: RowRule,
    exchanges_squares: bool,
) -> None:
    """Update as many rows as there are bags of gradients."""
    rows = torch.arange(links.bags, dtype=r.row_dtype)
    weights = torch.zeros(links.bags, r.width, dtype=weight_dtype)
    rate = rule.rate_of(0.0, 1)
    state = [
        torch.zeros(links.bags, r.width if kind == "element" else 1, dtype=dtype)
        for _, kind in rule.state
    ]
    if exchanges_squares:
        summed = torch.zeros(r.width, dtype=dtype)
        squares, *_ = kernels.row_squares(summed, links, rows, weights, state, dtype, rate, rule)
        piece, nth, _ = kernels.find_pieces(torch.zeros(links.bags, dtype=r.row_dtype), _zero())
        kernels.mean_of_parts(squares, _zero()[None], piece, nth, _zero() + 1, dtype)
    # gradients whose squares were exchanged have been summed in `dtype`
    gradients = torch.zeros(r.width, dtype=dtype if exchanges_squares else payload)
    kernels.update(
        gradients,
        links,
        rows,
        None,
        weights,
        state,
        dtype,
        rate,
        rule,
    )
    if rule.all_rows:
        numbers = rate if isinstance(rate, tuple) else (rate,)
        missed_TK = torch.tensor([numbers], dtype=torch.float64)
        for read in (rows, None):
            steps = torch.zeros(links.bags, dtype=torch.int32)
            kernels.catch_up(read, steps, weights, state, dtype, missed_TK, 0, rule)


def _zero() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int64)
