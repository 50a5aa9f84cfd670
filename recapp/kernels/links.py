"""The arguments of kernels: a group of tables as arrays, a batch as a group sees it, and sparse
matrices. The integer kernels of a backend make the matrices; the arithmetic kernels read them.

An *offset* counts elements of a flat buffer (a message, the output, its gradient): vectors of all
widths stand one after the other in one buffer, and none has to be moved or aligned. A *row* counts
in units of a store's width. Letters: S slots, I strips, K pieces, L ids, P (slot, id) pairs,
M output bags, V vectors, U distinct rows, N entries, W ranks.

No function loops over bags, and only `group` waits for the device: it reads the number of distinct
keys.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from recapp.optim.rules import Rate
from recapp.sparse.transfer import to_device, to_host, true_indices

STRETCH_BITS = 6  # the highest bits of a position: 0 is the stretch of the smallest positions


class Grouped(NamedTuple):
    """Equal keys brought together.

    Args:
        key_U: The distinct keys, ascending.
        number_N: The number u of each entry's key.
        order_N: The positions of the entries, key by key. The entries of `key[u]` have the
            positions `order[start[u] : start[u + 1]]`, in their original order.
        start_U1: Where the positions of each key begin and end.
    """

    key_U: Tensor
    number_N: Tensor
    order_N: Tensor
    start_U1: Tensor


def starts(counts_M: Tensor) -> Tensor:
    """Return the offsets 0, c0, c0 + c1, ... of counts: one more offset than counts."""
    return F.pad(counts_M.cumsum(0, dtype=counts_M.dtype), (1, 0))


def ranges(first_K: Tensor, count_K: Tensor, total: int) -> Tensor:
    """Return first0, first0 + 1, ... (count0 numbers), first1, ... as one tensor.

    Args:
        first_K: The first number of each range.
        count_K: The length of each range.
        total: The sum of the lengths, which the host knows.
    """
    return torch.repeat_interleave(
        first_K - starts(count_K)[:-1], count_K, output_size=total
    ) + torch.arange(total, device=first_K.device)


def numbered(kind_N: Tensor, kinds: int) -> tuple[Tensor, Tensor]:
    """Return the number of entries of the same kind before each entry, [N], and the number of
    entries of each of the kinds 0 .. kinds - 1, [kinds].
    """
    sorted_N, order_N = torch.sort(kind_N, stable=True)
    first_K1 = torch.searchsorted(
        sorted_N, torch.arange(kinds + 1, dtype=kind_N.dtype, device=kind_N.device)
    )
    nth_N = torch.arange(len(kind_N), device=kind_N.device) - first_K1[sorted_N]
    return torch.empty_like(nth_N).index_copy_(0, order_N, nth_N), first_K1.diff()


def group(key_N: Tensor) -> Grouped:
    """Bring equal keys together, the distinct keys in ascending order."""
    sorted_N, order_N = torch.sort(key_N, stable=True)
    new_N = torch.ones_like(sorted_N, dtype=torch.bool)
    torch.ne(sorted_N[1:], sorted_N[:-1], out=new_N[1:])
    first_U = true_indices(new_N)
    number_N = torch.empty_like(order_N, dtype=torch.int32).index_copy_(
        0, order_N, new_N.cumsum(0, dtype=torch.int32) - 1
    )
    return Grouped(
        sorted_N.index_select(0, first_U),
        number_N,
        order_N,
        F.pad(first_U, (0, 1), value=len(key_N)).int(),
    )


def gather(source: Tensor, stride: int, width: int, index_N: Tensor, dtype: torch.dtype) -> Tensor:
    """Return vectors of a flat buffer, source[index[n] * stride : +width], as [N, width].

    Args:
        source: The flat buffer.
        stride: The width where `index_N` holds rows of a store, 1 where it holds offsets.
        width: The elements of a vector.
        index_N: The rows or offsets.
        dtype: The type of the result.
    """
    if not len(index_N):
        return source.new_zeros(0, width, dtype=dtype)
    return (
        source.as_strided(((len(source) - width) // stride + 1, width), (stride, 1))
        .index_select(0, index_N)
        .to(dtype)
    )


# Integers on the host: counts, or offsets computed from counts.
Counts = NDArray[np.int64]


class Staged(NamedTuple):
    """The order for reading the source of a sparse matrix strip by strip: the vectors of a strip's
    bags are first copied side by side, then gathered from the copy.

    Bags of one table lie a whole output row apart; at such distances thousands of them fall into a
    few sets of a cache. Where each bag is read several times (bags of many ids), a copy that fits
    into the cache halves the time of the gather (measured).

    Args:
        where_M: The offset of each bag in the source.
        bag_I1: Strip i has bags bag[i] .. bag[i + 1]; entries of the matrix are offsets in the copy
            of these bags.
        row_I1: Strip i has rows row[i] .. row[i + 1] of the matrix.
    """

    where_M: Tensor
    bag_I1: Counts
    row_I1: Counts


class Links(NamedTuple):
    """A sparse matrix in CSR between flat buffers: bag m sums `weights[k] * source[index[k]]` over
    its entries k in offsets[m] .. offsets[m + 1].

    Args:
        index_N: The offset of each entry's vector in the source; its row where the source is a
            store; with `staged`, its offset in the copy of a strip's bags.
        offsets_M1: Where the entries of each bag begin and end; None: one entry per bag.
        weights_N: The weight of each entry; None: ones.
        at_M: The offset of each bag's result in the target; None: results stand side by side.
        bags: The number of bags M.
        staged: The strips in which the source is copied; None: it is not copied.
        used: The number of bags that have entries, int32 on the device, [1], where the host knows
            no more than `bags`, the largest possible number; None: all have. Nothing behind them
            is read, whatever room the arrays have.
        longest: A number of entries that no bag exceeds, if the host knows one below `index_N`'s.
    """

    index_N: Tensor
    offsets_M1: Tensor | None
    weights_N: Tensor | None
    at_M: Tensor | None
    bags: int
    staged: Staged | None = None
    used: Tensor | None = None
    longest: int | None = None

    def exact(self) -> "Links":
        """Return the matrix cut to its count, for which the host waits."""
        if self.used is None:
            return self
        bags = int(to_host(self.used))
        entries = bags if self.offsets_M1 is None else int(to_host(self.offsets_M1[bags]))
        return Links(
            self.index_N[:entries],
            None if self.offsets_M1 is None else self.offsets_M1[: bags + 1],
            None if self.weights_N is None else self.weights_N[:entries],
            None if self.at_M is None else self.at_M[:bags],
            bags,
        )


@dataclass(frozen=True, eq=False)
class Routes:
    """A group as arrays: its slots strip by strip, and the owner and place of every row of its
    strips. Integers are int64, on the group's device.

    Args:
        mode: The mode in which rows are requested.
        width: The columns of the group's strips.
        lookups: The lookup of each slot, on the host.
        column_S: The first column of each slot in a vector of its lookup, on the host.
        strip_S: The strip of each slot, numbered within the group.
        rows_I: The rows of each strip.
        piece_I1: Strip i is made of pieces piece[i] .. piece[i + 1].
        start_K: The first row of each piece within its strip.
        rank_K: The owner of each piece.
        base_K: The first row of each piece in the owner's store.
        row_dtype: The type of rows in requests: int32 where the rows of all stores fit. All groups
            of a collection have the same type, because their ids travel in one message.
        dynamic: Whether rows are positions of keys, which may be equal in different strips: then
            starts and bases are positions, and a request begins with the rows of each strip.
    """

    mode: str
    width: int
    lookups: list[int]
    column_S: Counts
    strip_S: Tensor
    rows_I: Tensor
    piece_I1: Tensor
    start_K: Tensor
    rank_K: Tensor
    base_K: Tensor
    row_dtype: torch.dtype
    dynamic: bool = False

    @cached_property
    def key_dtype(self) -> torch.dtype:
        """The type that numbers the rows of all strips one after the other: int32 where they fit,
        because a sort of int32 on a GPU passes over half as many bits.
        """
        return offset_dtype(int(to_host(self.rows_I.sum())))


@dataclass(slots=True)
class Bags:
    """A batch as a group sees it.

    Args:
        rows_L: The rows of the whole batch, lookup by lookup and bag by bag.
        lengths_N: The number of ids of each bag of the whole batch; a lookup may have any number
            of bags.
        bag_S: The first bag of each slot in `lengths_N`, on the host.
        bags_S1: Slot s has the bags bags[s] .. bags[s + 1] of `where_M`, on the host.
        first_S: Where the ids of each slot begin in `rows_L`, on the host.
        last_S: Where the ids of each slot end in `rows_L`, on the host.
        where_M: The offset of each bag in the output, slot by slot.
        scale_M: The factor of each bag: 1, or the factor of a mean; None without means and weights.
        weights_L: The weight of each id, or None.
    """

    rows_L: Tensor
    lengths_N: Tensor
    bag_S: Counts
    bags_S1: Counts
    first_S: Counts
    last_S: Counts
    where_M: Tensor
    scale_M: Tensor | None
    weights_L: Tensor | None

    @property
    def pairs(self) -> int:
        """The number of (slot, id) pairs that the group looks up, P."""
        return int((self.last_S - self.first_S).sum())

    @property
    def lengths_M(self) -> Tensor:
        """The number of ids of each bag, slot by slot."""
        return self.per_bag(self.lengths_N).long()

    def per_bag(self, value_N: Tensor) -> Tensor:
        """Return values of all bags of the batch as values of the group's bags, slot by slot."""
        if np.array_equal(self.bag_S, self.bags_S1[:-1]) and int(self.bags_S1[-1]) == len(value_N):
            return value_N  # the group's slots are the lookups of the batch
        bag_S, count_S = to_device(np.stack([self.bag_S, np.diff(self.bags_S1)]), value_N.device)
        return value_N[ranges(bag_S, count_S, int(self.bags_S1[-1]))]


class DeviceRate(NamedTuple):
    """The learning rates of an update on a GPU, which a recorded step reads anew.

    Args:
        numbers: The rates, filled up with zeros to three, then the part of its weights that a
            touched row loses before the rule is applied: fp64, [4].
        rates: The number of rates that the rule reads.
        stopped: A number, int32; where it is not zero, the update changes nothing. None: never.
    """

    numbers: Tensor
    rates: int
    stopped: Tensor | None = None


def rate_numbers(rate: Rate, decay: float) -> list[float]:
    """Return the numbers of a `DeviceRate`."""
    rates = rate if isinstance(rate, tuple) else (rate,)
    return [*(*rates, 0.0, 0.0)[:3], decay_of(rate, decay)]


def decay_of(lr: Rate, decay: float) -> float:
    """Return the part of its weights that a touched row loses before a rule is applied."""
    return (lr[0] if isinstance(lr, tuple) else lr) * decay


class Scratch:
    """Named arrays of a device, by default the CPU, whose memory later batches use again.

    A new array costs a page fault per 4 KB, more than the arithmetic on it (measured). A scratch
    belongs to one group of one batch in flight, so the arrays of the batch keep their contents
    until its backward has run.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device or torch.device("cpu")
        self._arrays: dict[str, Tensor] = {}
        self._locked: dict[str, Tensor] = {}
        self._copied: dict[str, torch.cuda.Event] = {}
        self._known: dict[str, Tensor] = {}

    def __call__(self, name: str, n: int, dtype: torch.dtype) -> Tensor:
        """Return an array whose contents are undefined.

        Args:
            name: The name of the array; a later call with this name returns the same memory.
            n: The number of elements.
            dtype: The type of the elements.
        """
        memory = self._arrays.get(name)
        if memory is None or memory.numel() < n or memory.dtype != dtype:
            memory = self._arrays[name] = with_room(n, dtype, self._device)
        return memory[:n]

    def on_device(self, name: str, numbers: Counts) -> Tensor:
        """Return integers of the host on the device, int64, without waiting for the copy.

        The page-locked memory of the copy is used again by the next call with this name, once the
        copy is done. A CUDA graph copies these integers anew in each run: after it was recorded,
        nobody may call with this name.

        Args:
            name: The name of the array on the device.
            numbers: The integers.
        """
        n = len(numbers)
        values = torch.from_numpy(numbers)
        if self._device.type != "cuda":
            return values
        recording = torch.cuda.is_current_stream_capturing()
        if name in self._copied and not recording:
            self._copied[name].synchronize()
        locked = self._locked.get(name)
        if locked is None or len(locked) < n:
            locked = torch.empty(2 * n, dtype=torch.int64, device="cpu", pin_memory=True)
            self._locked[name] = locked
        locked[:n] = values
        there = self(name, n, torch.int64).copy_(locked[:n], non_blocking=True)
        if not recording:
            self._copied[name] = torch.cuda.current_stream(self._device).record_event()
        return there

    def tensors(self) -> Iterable[Tensor]:
        """Return the arrays that are held."""
        return self._arrays.values()

    def take_new(self) -> list[Tensor]:
        """Return the arrays that are held since the last call, for a second stream to record."""
        known = self._known
        self._known = dict(self._arrays)
        return [memory for name, memory in self._known.items() if known.get(name) is not memory]


@torch.inference_mode(False)
def with_room(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return new memory for n elements, made outside of inference mode, because training cannot
    write to tensors that inference mode made.

    It has room for a fifth more elements, enough for batches with slightly more ids.
    """
    return torch.empty(n + n // 5 + 64, dtype=dtype, device=device)


def one_by_one(rows: int, width: int, device: torch.device) -> Links:
    """Return the sparse matrix for gradients in row order, one for each row."""
    number = torch.arange(rows + 1, dtype=offset_dtype(rows * width), device=device)
    return Links(number[:rows] * width, number, None, None, rows)


def offset_dtype(numel: int) -> torch.dtype:
    """Return the type of offsets in a buffer of `numel` elements."""
    return torch.int32 if numel < 2**31 else torch.int64
