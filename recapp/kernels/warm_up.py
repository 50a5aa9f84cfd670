"""Compiles what a collection will need before its first step, once per machine: results lie in numba's cache on disk.

Kernels are compiled for the types and widths they are called with. So each function is called here with one row of each width, the way the
engine calls it; a step that finds something new still compiles it then (sample weights do).
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

STREAMED_BYTES = 8 << 20        # an output of which results are written past the caches


@contextmanager
def told(speaks: bool) -> Iterator[None]:
    """Say that kernels are compiled when the first compilation begins, and in the end how long it took.

    Nothing is said where numba finds everything on disk, however long the disk takes.

    Args:
        speaks: whether this process says it.
    """
    if not speaks:
        yield
        return
    from recapp.kernels.numba_disk import heard_compilations

    began: list[float] = []

    def compiles() -> None:
        if not began:
            note("compiling kernels for this machine (first use; they are kept on disk) ...")
        began.append(time.monotonic())

    with heard_compilations(compiles):
        yield
    if began:
        note(f"compiled in {time.monotonic() - began[0]:.1f} s")


def warm_up(kernels: "Backend", routes: list[Routes], stored: list[torch.dtype], in_lines: list[bool], dtype: torch.dtype,
            payload: torch.dtype, rule: Rule, shares_state: bool) -> None:
    """Call every function once.

    Args:
        kernels: the backend.
        routes: of each group: its width and mode.
        stored: type of each group's rows.
        in_lines: whether each group's results may be written past the caches.
        dtype: what is computed in.
        payload: what travels.
        rule: what happens to touched rows.
        shares_state: whether strips of one row tell each other their sums of squares.
    """
    one = np.zeros(1, np.int64)
    if kernels.rows_of_ids is not None:
        kernels.rows_of_ids(torch.zeros(1, dtype=torch.int64), [0, 1], torch.ones(1, dtype=torch.int64), _zero(), _zero())
    for r, held, lines in zip(routes, stored, in_lines, strict=True):
        tiny = Routes(r.mode, r.width, [0], _zero(), one, _zero(), torch.ones(1, dtype=torch.int64), torch.tensor([0, 1]),
                      _zero(), _zero(), _zero(), r.row_dtype)
        bags = Bags(torch.zeros(1, dtype=torch.int32), torch.ones(1, 1, dtype=torch.int64), one, one + 1,
                    torch.zeros(1, dtype=torch.int32), None, None)
        learn = _requests(kernels, tiny, bags, dtype)
        for source, target in {(held, payload), (held, dtype), (payload, dtype), (dtype, payload)}:
            kernels.pool(torch.zeros(r.width, dtype=source), 1, r.width, learn, torch.zeros(r.width, dtype=target), dtype)
        big = torch.empty(STREAMED_BYTES // dtype.itemsize if lines else 0, dtype=dtype)
        for source in {held, payload} if lines else ():
            kernels.pool(torch.zeros(r.width, dtype=source), 1, r.width, learn, big, dtype, in_lines=True)
        if shares_state:
            squares = kernels.square_sums(torch.zeros(r.width, dtype=dtype), r.width, learn, dtype)
            piece, nth, _ = kernels.find_pieces(torch.zeros(1, dtype=r.row_dtype), _zero())
            kernels.place_parts(squares, _zero(), piece, nth, squares)
            kernels.mean_of_parts(squares, _zero()[None], piece, nth, _zero() + 1, dtype)
        state = [torch.zeros(1, r.width if kind == "element" else 1, dtype=dtype) for _, kind in rule.state]
        kernels.update(torch.zeros(r.width, dtype=payload), learn, torch.zeros(1, dtype=r.row_dtype), None,
                       torch.zeros(1, r.width, dtype=held), state, dtype, 0.0, rule)


def _requests(kernels: "Backend", r: Routes, bags: Bags, dtype: torch.dtype) -> Links:
    """One row asked, placed, linked, served and grouped."""
    take, one = Scratch(), np.zeros(1, np.int64)
    ids = torch.ones(2, dtype=r.row_dtype)
    pooled = r.mode == "pooled"
    if pooled:
        found, _ = kernels.route_bags(r, bags, 1, take)
        kernels.place_bags(r, bags, found, ids, one, one, None, torch.int32, take)
    else:
        distinct, _ = kernels.route_rows(r, bags, 1, take)
        at = kernels.place_rows(r, distinct, ids, one, one, torch.int32, take)
        kernels.link_rows(r, bags, distinct, at, dtype, take)
        kernels.link_rows(r, bags, distinct, distinct.row_U, dtype, take)
    served = kernels.serve(ids, one, np.array([[1, 1, 2 if pooled else 1]]), one, r.width, pooled, 0, dtype, torch.int32, take)
    learn: Links = kernels.group_rows(1, served, take)[1]
    return learn


def _zero() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int64)
