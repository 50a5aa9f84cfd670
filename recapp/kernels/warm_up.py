"""Compiles what a collection will need before its first step, once per machine: results lie in
numba's cache on disk.

Kernels are compiled for the types and widths they are called with, and anew for work that is dealt
to threads. So each function is called here for each width, the way the engine calls it: with one
row and, where a rank has several threads, with as many as they share. A step that finds something
new still compiles it then: sample weights do, and bags of many ids, of which a collection hears
from batches only.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch

from recapp.console import note
from recapp.kernels.links import Bags, Links, Routes, Rule, Scratch

if TYPE_CHECKING:
    from recapp.kernels.backend import Backend

STREAMED_BYTES = 8 << 20  # an output of which results are written past the caches


@contextmanager
def told(speaks: bool) -> Iterator[None]:
    """Say that kernels are compiled when the first compilation begins, and in the end how long it
    took.

    Nothing is said where numba finds everything on disk, however long the disk takes.

    Args:
        speaks: whether this process says it.
    """
    if not speaks:
        yield
        return
    from recapp.kernels.numba_cache import heard_compilations

    began: list[float] = []

    def compiles() -> None:
        if not began:
            note("compiling kernels for this machine (first use; they are kept on disk) ...")
        began.append(time.monotonic())

    with heard_compilations(compiles):
        yield
    if began:
        note(f"compiled in {time.monotonic() - began[0]:.1f} s")


def warm_up(
    kernels: "Backend",
    routes: list[Routes],
    world: int,
    stored: list[torch.dtype],
    in_lines: list[bool],
    dtype: torch.dtype,
    payload: torch.dtype,
    scales: bool,
    rule: Rule | None,
    shares_state: bool,
) -> None:
    """Call every function once, and once more on threads.

    Args:
        kernels: the backend.
        routes: of each group: its width and mode.
        world: ranks.
        stored: type of each group's rows.
        in_lines: whether each group's results may be written past the caches.
        dtype: what is computed in.
        payload: what travels.
        scales: whether bags are scaled (means).
        rule: what happens to touched rows; None where none will be.
        shares_state: whether strips of one row tell each other their sums of squares.
    """
    if kernels.rows_of_ids is not None:
        kernels.rows_of_ids(
            torch.zeros(1, dtype=torch.int64),
            [0, 1],
            torch.ones(1, dtype=torch.int64),
            _zero(),
            _zero(),
        )
    if world == 1:
        payload = dtype  # nothing travels: rows learn from the output's gradient
    for r, held, lines in zip(routes, stored, in_lines, strict=True):
        for n, ids in kernels.sizes():
            _requests(kernels, r, world, ids, dtype, scales, rule is not None)
            bags = Links(
                torch.zeros(n, dtype=torch.int32),
                torch.arange(n + 1, dtype=torch.int32),
                None,
                None,
                n,
            )
            for source, target in {
                (held, payload),
                (held, dtype),
                (payload, dtype),
                (dtype, payload),
            }:
                kernels.pool(
                    torch.zeros(r.width, dtype=source),
                    1,
                    r.width,
                    bags,
                    torch.zeros(n * r.width, dtype=target),
                    dtype,
                )
            big = torch.empty(
                max(STREAMED_BYTES // dtype.itemsize, n * r.width) if lines else 0, dtype=dtype
            )
            for source in {held, payload} if lines else ():
                kernels.pool(
                    torch.zeros(r.width, dtype=source), 1, r.width, bags, big, dtype, in_lines=True
                )
            if rule is not None:
                _learn(kernels, r, bags, held, dtype, payload, rule, shares_state)


def _requests(
    kernels: "Backend",
    r: Routes,
    world: int,
    ids: int,
    dtype: torch.dtype,
    scales: bool,
    learns: bool,
) -> None:
    """One row asked, placed, linked, served and grouped, which one bag names so many times."""
    take = Scratch()
    one = np.zeros(1, np.int64)
    pooled = r.mode == "pooled" and world > 1
    tiny = Routes(
        r.mode,
        r.width,
        [0],
        _zero(),
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
        torch.zeros(ids, dtype=torch.int32),
        torch.tensor([[ids]]),
        one,
        one + ids,
        torch.zeros(1, dtype=torch.int32),
        torch.ones(1, dtype=dtype) if scales else None,
        None,
    )
    request = torch.ones(ids + 1, dtype=r.row_dtype)
    if pooled:
        found, _ = kernels.route_bags(tiny, bag, 1, take)
        kernels.place_bags(tiny, bag, found, request, one, one, None, torch.int32, take)
    else:
        distinct, _ = kernels.route_rows(tiny, bag, 1, take)
        at = kernels.place_rows(tiny, distinct, request, one, one, torch.int32, take)
        kernels.link_rows(tiny, bag, distinct, at, dtype, take)
        kernels.link_rows(tiny, bag, distinct, distinct.row_U, dtype, take)
    counts = np.array([[ids, 1, ids + 1] if pooled else [1, 1, 1]])
    served = kernels.serve(request, one, counts, one, r.width, pooled, 0, dtype, torch.int32, take)
    if learns:
        kernels.group_rows(1, served, take)


def _learn(
    kernels: "Backend",
    r: Routes,
    bags: Links,
    held: torch.dtype,
    dtype: torch.dtype,
    payload: torch.dtype,
    rule: Rule,
    shares_state: bool,
) -> None:
    """As many rows updated as there are bags of gradients."""
    if shares_state:
        squares = kernels.square_sums(torch.zeros(r.width, dtype=dtype), r.width, bags, dtype)
        piece, nth, _ = kernels.find_pieces(torch.zeros(bags.bags, dtype=r.row_dtype), _zero())
        kernels.place_parts(squares, _zero(), piece, nth, squares)
        kernels.mean_of_parts(squares, _zero()[None], piece, nth, _zero() + 1, dtype)
    state = [
        torch.zeros(bags.bags, r.width if kind == "element" else 1, dtype=dtype)
        for _, kind in rule.state
    ]
    # those were brought together for their squares
    gradients = torch.zeros(r.width, dtype=dtype if shares_state else payload)
    kernels.update(
        gradients,
        bags,
        torch.arange(bags.bags, dtype=r.row_dtype),
        None,
        torch.zeros(bags.bags, r.width, dtype=held),
        state,
        dtype,
        0.0,
        rule,
    )


def _zero() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int64)
