"""Tables cut at random and held by ranks that are threads of the test's process."""

import json
import threading

import torch
from hypothesis import strategies as st

from recapp.sharding.layout import Block
from recapp.stored.checkpoint import write_checkpoint
from recapp.stored.manifest import sealed


class Comms:
    """A `Comm` for each of W threads."""

    def __init__(self, world):
        self.world = world
        self.barrier = threading.Barrier(world)
        self.slots = [None] * world

    def rank(self, rank):
        return Rank(self, rank)


class Rank:
    def __init__(self, comms, rank):
        self.comms = comms
        self.rank = rank
        self.world = comms.world

    def all_gather(self, value):
        self.comms.slots[self.rank] = value
        self.comms.barrier.wait(20)
        values = list(self.comms.slots)
        self.comms.barrier.wait(20)
        return values


def save(path, ranks_blocks, meta=None, manifest=None):
    """Save as `len(ranks_blocks)` ranks; return each rank's exception or None."""
    comms = Comms(len(ranks_blocks))
    outcomes = [None] * len(ranks_blocks)

    def one(rank):
        try:
            write_checkpoint(
                path,
                ranks_blocks[rank],
                comm=comms.rank(rank),
                meta=meta or {"step": 3},
                manifest=manifest or {"plan": "x"},
            )
        except Exception as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(ranks_blocks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def edit(path, **entries):
    """Change entries of a manifest, and its checksum with them."""
    manifest = json.loads((path / "manifest.json").read_text()) | entries
    manifest.pop("checksum", None)
    (path / "manifest.json").write_text(sealed(json.dumps(manifest)[:-1]))


def block(table, tensor, values, rows, cols, owner=True, order=None):
    """Return a held rectangle with its values in the whole tensor."""
    row_N = torch.arange(rows.start, rows.stop)
    row_N = order.rows_at(row_N) if order else row_N
    data = values[row_N, cols.start : cols.stop].clone()
    return Block(table, tensor, tuple(values.shape), rows, cols, data, owner, order)


def whole(table, tensor, values, owner=True):
    return block(table, tensor, values, range(values.shape[0]), range(values.shape[1]), owner)


def blank(held):
    """Return a rectangle like `held` that is not filled yet."""
    return held._replace(data=torch.full_like(held.data, -1))


@st.composite
def tilings(draw, rows, cols, world):
    """Draw rectangles that tile a table, each with a rank.

    The table is cut in two again and again, which gives strips, grids and mixtures of them.
    """

    def cut(rows, cols, depth):
        axes = [a for a, part in (("rows", rows), ("cols", cols)) if len(part) > 1]
        axis = draw(st.sampled_from([*axes, "none"])) if depth and axes else "none"
        if axis == "none":
            return [(draw(st.integers(0, world - 1)), rows, cols)]
        part = rows if axis == "rows" else cols
        at = draw(st.integers(part.start + 1, part.stop - 1))
        low = range(part.start, at)
        high = range(at, part.stop)
        if axis == "rows":
            return cut(low, cols, depth - 1) + cut(high, cols, depth - 1)
        return cut(rows, low, depth - 1) + cut(rows, high, depth - 1)

    return cut(range(rows), range(cols), 4)
