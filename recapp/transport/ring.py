"""Compiled transport through shared memory: a ring of bytes from each rank to each other rank, with
two counters and no locks.

    sent     bytes written to the ring so far: a counter that the sender sets after writing
    taken    bytes read from it so far: a counter that the receiver sets after reading
    ring     |....oooooooo......|     o: sent - taken bytes that wait,
                                      the next to be read at `taken % size`

A message passes in pieces as the ring has room, so a message may have any size. Both ends know the
length, so a message has no header. The counters skip the rest of the last cache line, so that every
message begins at a cache line.

A lane is this rank's end of a ring: lane r sends to rank r, lane W + r receives from rank r. Work
is a list of messages in order; messages of one lane pass one after the other. This file handles
only addresses: the caller keeps the memory alive.

Counters are read with acquire order and written with release order. So a rank that sees a new
counter also sees the bytes, on every processor. Importing this file needs numba.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from recapp.kernels.numba_cache import kept_on_disk

LINE = 64  # bytes of a cache line
# bytes per update of the counter: one core copies a piece out while the other copies the next in
PIECE_BYTES = 1 << 18
SPINS = 200  # vain looks before the thread yields its core: microseconds
# vain looks before `pump` returns to Python, which handles signals: some 30 microseconds, or the
# time of 50 other threads
LOOKS = SPINS + 50
TURN_BYTES = 1 << 26  # bytes moved before `pump` returns to Python: about ten milliseconds
# the results of `pump`: all messages of the swap have passed; bytes were moved, but others are
# left; nothing could be moved
DONE, MOVED, IDLE = range(3)
# columns of the work: number of the lane, address, bytes left to move, number of the swap
LANE, ADDRESS, LEFT, SWAP = range(4)
# columns of the lanes: addresses of the ring, of this end's counter, of the other end's counter
RING, MINE, THEIRS = range(3)

Numbers = NDArray[np.int64]
_sched_yield = types.ExternalFunction("sched_yield", types.intc())


@intrinsic
def _load(_typing: Any, _address: Any) -> Any:
    def build(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.load_atomic(
            builder.inttoptr(args[0], ir.IntType(64).as_pointer()), "acquire", 8
        )

    return types.int64(types.int64), build


@intrinsic
def _store(_typing: Any, _address: Any, _value: Any) -> Any:
    def build(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        builder.store_atomic(
            args[1], builder.inttoptr(args[0], ir.IntType(64).as_pointer()), "release", 8
        )
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), build


@intrinsic
def _copy(_typing: Any, _to: Any, _source: Any, _count: Any) -> Any:
    def build(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        byte = ir.IntType(8).as_pointer()
        overlapping = ir.Constant(ir.IntType(1), 0)
        memcpy = builder.module.declare_intrinsic("llvm.memcpy", [byte, byte, ir.IntType(64)])
        builder.call(
            memcpy,
            [
                builder.inttoptr(args[0], byte),
                builder.inttoptr(args[1], byte),
                args[2],
                overlapping,
            ],
        )
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), build


@njit(nogil=True, cache=kept_on_disk())
def _advance(message: Numbers, lane: Numbers, sends: bool, ring_bytes: int) -> int:
    """Move one piece of a message if the ring has room or bytes for it. Return the number of bytes
    moved.
    """
    mine = _load(lane[MINE])
    theirs = _load(lane[THEIRS])
    left = message[LEFT]
    room = ring_bytes - (mine - theirs) if sends else theirs - mine
    at = mine % ring_bytes
    count: int = min(room, ring_bytes - at, left, PIECE_BYTES)
    if count <= 0:
        return 0
    if sends:
        _copy(lane[RING] + at, message[ADDRESS], count)
    else:
        _copy(message[ADDRESS], lane[RING] + at, count)
    message[ADDRESS] += count
    message[LEFT] -= count
    _store(lane[MINE], mine + (count + LINE - 1) // LINE * LINE)
    return count


@njit(nogil=True, cache=kept_on_disk())
def pump(
    work_N4: Numbers, lanes_L3: Numbers, busy_L: Numbers, ring_bytes: int, swap: int, looks: int
) -> int:
    """Move bytes until all messages of one swap have passed.

    Args:
        work_N4: The messages [N, 4], in order. `pump` updates the addresses and the bytes left.
        lanes_L3: The lanes [2 W, 3]: the sending and receiving ends of this rank's rings.
        busy_L: Scratch memory with a number per lane.
        ring_bytes: The size of a ring, in whole cache lines.
        swap: The number of the swap to wait for. Messages of other swaps move meanwhile.
        looks: The number of vain looks before the return.

    Returns:
        `DONE`; else `MOVED` or `IDLE`, after which the caller checks for signals and ended ranks
        before it calls again.
    """
    idle = 0
    moved = 0
    while True:
        busy_L[:] = 0
        step = 0
        waiting = False
        for i in range(len(work_N4)):
            lane = work_N4[i, LANE]
            if work_N4[i, LEFT] > 0 and busy_L[lane] == 0:
                busy_L[lane] = 1
                step += _advance(work_N4[i], lanes_L3[lane], lane < len(lanes_L3) // 2, ring_bytes)
            waiting |= work_N4[i, SWAP] == swap and work_N4[i, LEFT] > 0
        moved = moved + step
        idle = 0 if step else idle + 1
        if not waiting:
            return DONE
        if moved > TURN_BYTES or idle > looks:
            return MOVED if moved else IDLE
        if idle > SPINS:
            _sched_yield()
