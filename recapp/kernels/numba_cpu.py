"""The compiled CPU backend: numba kernels behind the functions of `recapp/kernels/reference.py`,
several times as fast.

Tensors become arrays without a copy. Results are written to the caller's `Scratch`, whose memory is
used again from batch to batch. The reference documents the functions; `numba_integers.py`,
`numba_unique.py` and `numba_vectors.py` explain the fast algorithms.
"""

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from recapp.kernels import numba_catch_up as missed
from recapp.kernels import numba_integers as integers
from recapp.kernels import numba_unique as unique_kernels
from recapp.kernels import numba_vectors as vectors
from recapp.kernels.links import (
    Bags,
    Counts,
    Links,
    Routes,
    Scratch,
    Staged,
    decay_of,
    one_by_one,
)
from recapp.kernels.numba_integers import Strips
from recapp.kernels.numba_key_index import HashIndex, find_sorted
from recapp.kernels.numba_unique import Unique
from recapp.kernels.quantised import QuantisedRows
from recapp.kernels.reference import TorchBackend, rows_behind
from recapp.kernels.widths import CACHE_LINE_BYTES
from recapp.optim.rules import Rate, RowRule

STREAM_FROM_BYTES = 4 << 20  # smaller targets stay in the caches until they are read
# Waking a second thread takes 10 to 30 us: more than it gains with fewer bags or touched rows
THREADS_FROM_ROWS = 2048


def array(tensor: Tensor | None) -> Any:
    """Return a tensor's memory as an array; 16-bit floats get the integer types that `simd.py`
    reads.
    """
    if tensor is None:
        return None
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.int16)
    elif tensor.dtype == torch.float16:
        tensor = tensor.view(torch.uint16)
    return tensor.numpy()


def array_or_empty(tensor: Tensor | None, dtype: torch.dtype) -> Any:
    """Return a tensor's memory as an array, or an empty array of its type for None.

    So one compiled kernel serves both; None would need another kernel.
    """
    return _EMPTY[dtype] if tensor is None else tensor.numpy()


_EMPTY = {
    dtype: torch.empty(0, dtype=dtype).numpy()
    for dtype in (torch.int32, torch.float32, torch.float64)
}


def scalar(dtype: torch.dtype, value: float) -> Any:
    """Return a number in the type of the arithmetic."""
    return np.float64(value) if dtype == torch.float64 else np.float32(value)


def rate_argument(lr: Rate) -> Any:
    """Return learning rates in the form for kernels: a number or a tuple of numbers."""
    return tuple(map(float, lr)) if isinstance(lr, tuple) else float(lr)


def matrix(links: Links, dtype: torch.dtype) -> tuple[Any, ...]:
    """Return the fields of `Matrix`, with entries in the type of the arithmetic."""
    return (
        array(links.index_N),
        array_or_empty(links.offsets_M1, torch.int32),
        array_or_empty(links.weights_N, dtype),
    )


def touched(
    row_U: Tensor,
    mean_KU: Tensor | None,
    weights_RD: Tensor,
    state: Sequence[Tensor],
    dtype: torch.dtype,
    decay: float = 0.0,
) -> tuple[Any, ...]:
    """Return the fields of `Touched`: the rows of a store that a batch updates."""
    none = array_or_empty(None, dtype)
    state0, state1, *_ = [*(array(s.view(-1)) for s in state), none, none]
    means = none if mean_KU is None else array(mean_KU.view(-1))
    rows = array(row_U), means, array(weights_RD.view(-1))
    return *rows, state0, state1, float(decay), scalar(dtype, 0)


def threads_of_torch() -> int:
    """Return the number of threads that torch uses, at most those of numba's pool."""
    return min(torch.get_num_threads(), int(numba.config.NUMBA_NUM_THREADS))


def threads_of_pairs(pairs: int) -> int:
    """Return the number of threads that work on some (slot, id) pairs."""
    return threads_of_torch() if pairs >= THREADS_FROM_PAIRS else 1


def parts_of_bags(links: Links) -> Any:
    """Return where the bags of each thread begin; there is one part if there is too little work for
    several threads.
    """
    threads = threads_of_torch()
    if threads == 1 or links.bags < THREADS_FROM_ROWS:
        return 0, links.bags
    offsets_M1 = array_or_empty(links.offsets_M1, torch.int32)
    return vectors.split_bags(offsets_M1, links.bags, threads)


# Torch has loaded libgomp, which serves numba's OpenMP layer too: so there is one pool of threads.
# The threads of TBB or of numba's own layer would compete with this pool for the cores.
numba.config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]

# A bag's gradient is copied if it is read this often; with fewer reads a copy does not pay.
STAGE_FROM_READS = 3
# Waking a second thread takes 10 to 30 us: more than it gains with fewer ids, at 10 ns an id
THREADS_FROM_PAIRS = 16384


class NumbaBackend(TorchBackend):
    """The compiled backend for tensors on the CPU.

    Each collection has its own backend, because the grouping kernels share the backend's hash
    table.
    """

    name = "numba"
    key_index = HashIndex
    find_sorted = staticmethod(find_sorted)

    def __init__(self) -> None:
        self._bucket_H = np.full(1024, -1, np.int32)
        self._routes: dict[Routes, Strips] = {}
        self._copies = Scratch()

    def _buckets(self, n: int, threads: int = 1) -> Any:
        """Return the hash table for up to n rows on each thread, filled with -1, [T, H]."""
        n *= threads
        if len(self._bucket_H) < 4 * n:
            self._bucket_H = np.full(4 << max(n, 1).bit_length(), -1, np.int32)
        size = len(self._bucket_H) // threads
        return self._bucket_H[: threads * size].reshape(threads, size)

    def _strips(self, r: Routes) -> Strips:
        """Return the routes in the form for kernels; they are made once for each group."""
        if r not in self._routes:
            strip_S, *rest = map(
                array, (r.strip_S, r.rows_I, r.piece_I1, r.start_K, r.rank_K, r.base_K)
            )
            slot_I1 = np.searchsorted(strip_S, np.arange(len(r.rows_I) + 1))
            self._routes[r] = Strips(strip_S, slot_I1, *rest)
        return self._routes[r]

    def sizes(self) -> list[tuple[int, int]]:
        """Return the smallest batch of each kind that has kernels of its own: a small batch, and a
        batch that several threads share.

        Returns:
            (bags or touched rows, ids) of each such batch.
        """
        return [(1, 1), (THREADS_FROM_ROWS, THREADS_FROM_PAIRS)][: threads_of_torch()]

    def rows_of_ids(
        self, ids_L: Tensor, edges: Sequence[int], size_F: Tensor, rule_F: Tensor, changed_F: Tensor
    ) -> tuple[Tensor, int]:
        """Return the rows of raw ids by the id rules of all tables, in one pass.

        `recapp/tables/ids.py` documents the rules.

        Args:
            ids_L: The ids, feature by feature.
            edges: Feature f has ids edges[f] .. edges[f + 1].
            size_F: The rows of each feature's table.
            rule_F: The number of each feature's rule.
            changed_F: The counts of ids of each feature that a rule has clamped or dropped; they
                are increased.

        Returns:
            The rows, and the position of the first id that is an error, or -1.
        """
        rows_L = torch.empty(
            len(ids_L), dtype=torch.int32 if int(size_F.max()) < 2**31 else torch.int64
        )
        first = integers.rows_of_ids(
            array(ids_L),
            np.array(edges, np.int64),
            array(size_F),
            array(rule_F),
            array(changed_F),
            array(rows_L),
        )
        return rows_L, first

    def positions_of_rows(self, rows_L: Tensor, edges: Sequence[int], numbers_F3: Tensor) -> Tensor:
        """Return the positions of rows (`recapp/tables/positions.py`), in one pass.

        Args:
            rows_L: The rows, lookup by lookup.
            edges: Lookup f has rows edges[f] .. edges[f + 1].
            numbers_F3: Multiplier, shift and number of rows of each lookup's table; the number is 0
                for a table in natural order.
        """
        made_L = torch.empty_like(rows_L)
        integers.positions_of_rows(
            array(rows_L), np.array(edges, np.int64), array(numbers_F3), array(made_L)
        )
        return made_L

    def write_start_values(
        self,
        weights_RD: Tensor,
        slot_M: Tensor,
        key_M: Tensor,
        hashed: int,
        cols: range,
        start_range: float,
    ) -> None:
        """Write the start values of keys to fp32 rows (`recapp/tables/initial.py` defines them).

        Args:
            weights_RD: The rows by slot.
            slot_M: The slots.
            key_M: The keys of a dynamic table.
            hashed: The hash of the run's seed and the table's name.
            cols: The columns of the table that the rows hold.
            start_range: The largest distance of a value from 0.
        """
        integers.write_start_values(
            array(weights_RD.view(-1)),
            weights_RD.shape[1],
            array(slot_M),
            array(key_M),
            np.uint32(hashed),
            cols.start,
            np.float32(start_range / 2**24),
        )

    @override
    def route_rows(self, r: Routes, b: Bags, world: int, take: Scratch) -> tuple[Unique, Counts]:
        strips = self._strips(r)
        P = b.pairs
        pair_I1 = np.concatenate([[0], np.cumsum(b.last_S - b.first_S)])[strips.slot_I1]
        n_IW = np.zeros((len(r.rows_I), world), np.int64)
        number, rank, count, bucket = (
            take(name, P, torch.int32) for name in ("number", "rank", "count", "bucket")
        )
        row = take("row", P, r.row_dtype if int(r.rows_I.max()) < 2**31 else torch.int64)
        threads = threads_of_pairs(P)
        thread_I = vectors.assign_threads(np.diff(pair_I1), threads)
        row_arrays = (
            array(number),
            array(row),
            array(rank),
            array(count),
            array(bucket),
            n_IW,
            pair_I1,
            thread_I,
        )
        unique_kernels.route(
            (),
            (
                _slots(b),
                tuple(strips),
                row_arrays,
                self._buckets(int(np.diff(pair_I1).max(initial=1)), threads),
            ),
            np.arange(threads + 1),
        )
        row_I1 = np.concatenate([[0], n_IW.sum(1).cumsum()])
        U = int(row_I1[-1])
        if threads > 1:  # the rows of a strip stand where its pairs begin
            ends = (pair_I1[:-1] + np.diff(row_I1)).tolist()
            spans = [slice(*span) for span in zip(pair_I1[:-1].tolist(), ends, strict=True)]
            for rows in map(array, (row, rank, count)):
                rows[:U] = np.concatenate([rows[span] for span in spans])
        return Unique(number, row[:U], rank[:U], count[:U], pair_I1, row_I1, thread_I), n_IW

    @override
    def write_row_requests(
        self,
        r: Routes,
        unique: Unique,
        ids: Tensor,
        id_first_W: Counts,
        vector_first_W: Counts,
        offset_dtype: torch.dtype,
        take: Scratch,
    ) -> Tensor:
        at = take("at", len(unique.row_U), offset_dtype)
        unique_kernels.write_row_requests(
            array(unique.rank_U),
            array(unique.row_U),
            len(unique.row_U),
            r.width,
            vector_first_W.copy(),
            id_first_W.copy(),
            array(ids),
            array(at),
        )
        return at

    @override
    def link_rows(
        self,
        r: Routes,
        b: Bags,
        unique: Unique,
        source_U: Tensor,
        dtype: torch.dtype,
        take: Scratch,
    ) -> tuple[Links, Links]:
        P = b.pairs
        M = len(b.where_M)
        U = len(unique.row_U)
        start = take("start", U + 1, torch.int32)
        offsets = take("offsets", M + 1, torch.int32)
        index = take("index", P, source_U.dtype)
        order = take("order", P, b.where_M.dtype)
        use, use_T = (
            (None, None) if b.scale_M is None else (take("use", P, dtype), take("use_T", P, dtype))
        )
        staged, staged_S = self._staging(r, b, unique)
        unique_kernels.link(
            (),
            (
                _slots(b),
                tuple(self._strips(r)),
                tuple(array(x) if isinstance(x, Tensor) else x for x in unique),
                (
                    array(source_U),
                    array(b.where_M),
                    array_or_empty(b.scale_M, dtype),
                    array_or_empty(b.weights_L, dtype),
                    staged_S,
                    r.width,
                    array(offsets),
                    array(index),
                    array_or_empty(use, dtype),
                    array(start),
                    array(order),
                    array_or_empty(use_T, dtype),
                ),
            ),
            np.arange(threads_of_pairs(P) + 1),
        )
        return Links(index, offsets, use, b.where_M, M), Links(order, start, use_T, None, U, staged)

    def _staging(self, r: Routes, b: Bags, unique: Unique) -> tuple[Staged | None, Counts]:
        """Return the strips in which gradients are copied, and the places of slots in the copies.

        Returns:
            The strips, or None if copies cost more than they gain; and for each slot the number of
            its first bag within the copy of its strip.
        """
        strips = self._strips(r)
        if b.pairs < STAGE_FROM_READS * len(b.where_M) or len(r.rows_I) < threads_of_torch():
            return None, np.zeros(0, np.int64)
        bag_I1 = b.bags_S1[strips.slot_I1]
        return Staged(b.where_M, bag_I1, unique.row_I1), b.bags_S1[:-1] - bag_I1[strips.strip_S]

    @override
    def route_bags(
        self, r: Routes, b: Bags, world: int, take: Scratch
    ) -> tuple[tuple[int, Counts], Counts]:
        last_W, rows_W, vectors_W = np.zeros((3, world), np.int64)
        of_bags = _slots(b), tuple(self._strips(r)), last_W
        V = integers.walk_bags(*of_bags, rows_W, vectors_W, 1, None, None, None, None)
        counts_W2 = np.stack([rows_W, vectors_W], 1)
        return (V, counts_W2), counts_W2

    @override
    def write_bag_requests(
        self,
        r: Routes,
        b: Bags,
        bag_rows: tuple[int, Counts],
        ids: Tensor,
        id_first_W: Counts,
        vector_first_W: Counts,
        words_L: Tensor | None,
        offset_dtype: torch.dtype,
        take: Scratch,
    ) -> tuple[Links, Links]:
        V, counts_W2 = bag_rows
        M = len(b.where_M)
        offsets = take("offsets", M + 1, torch.int32)
        index = take("index", V, offset_dtype)
        source = take("source", V, b.where_M.dtype)
        use = None if b.scale_M is None else take("use", V, b.scale_M.dtype)
        array(offsets)[0] = 0
        end_W = id_first_W + counts_W2[:, 0]
        memory = map(array, (ids, b.where_M, offsets, index, source))
        integers.walk_bags(
            *(_slots(b), tuple(self._strips(r)), np.zeros(len(end_W), np.int64)),
            *(id_first_W.copy(), vector_first_W.copy(), r.width),
            (id_first_W, end_W - 1, end_W + counts_W2[:, 1], *memory),
            *map(array, (words_L, b.scale_M, use)),
        )
        return Links(index, offsets, use, b.where_M, M), Links(source, None, use, index, V)

    @override
    def serve(
        self,
        ids: Tensor,
        id_first_W: Counts,
        counts_W3: Counts,
        vector_first_W: Counts,
        width: int,
        pooled: bool,
        words: int,
        weights: torch.dtype,
        offset_dtype: torch.dtype,
        take: Scratch,
    ) -> Links:
        N, V, _ = counts_W3.sum(0).tolist()
        row = take("served_row", N, ids.dtype)
        at = take("served_at", V, offset_dtype)
        offsets = take("served_offsets", V + 1, torch.int32) if pooled else None
        use = take("served_use", N, weights) if words else None
        message = array(ids)
        parts = [
            (
                message[first : first + n],
                message[first + n : first + n + v],
                message[end - n * words : end],
            )
            for first, end, (n, v, _) in zip(
                id_first_W.tolist(),
                (id_first_W + counts_W3[:, 2]).tolist(),
                counts_W3.tolist(),
                strict=True,
            )
        ]
        vectors = zip(vector_first_W.tolist(), counts_W3[:, 1].tolist(), strict=True)
        np.concatenate([rows for rows, _, _ in parts], out=array(row))
        np.concatenate(
            [np.arange(first, first + v * width, width) for first, v in vectors],
            out=array(at),
            casting="same_kind",
        )
        if offsets is not None:
            before_W = counts_W3[:, 0].cumsum() - counts_W3[:, 0]
            ends = [ends + n for (_, ends, _), n in zip(parts, before_W.tolist(), strict=True)]
            np.concatenate([np.zeros(1, np.int64), *ends], out=array(offsets), casting="same_kind")
        if use is not None:
            np.concatenate([bits for _, _, bits in parts], out=array(use.view(ids.dtype)))
        return Links(row, offsets, use, at, V)

    @override
    def group_rows(
        self, rows: int, served: Links, take: Scratch, in_turn: bool = False
    ) -> tuple[Tensor, Links]:
        # rows are always in the order of their first requests
        N = len(served.index_N)
        row = take("grouped_row", N, served.index_N.dtype)
        start = take("grouped_start", N + 2, torch.int32)
        assert served.at_M is not None
        order = take("grouped_order", N, served.at_M.dtype)
        use_T = None if served.weights_N is None else take("grouped_use", N, served.weights_N.dtype)
        number = take("grouped_number", N, torch.int32)
        bucket = take("grouped_bucket", N, torch.int32)
        U = integers.group_rows(
            array(served.index_N),
            array(served.offsets_M1),
            array(served.at_M),
            served.bags,
            array(served.weights_N),
            rows,
            self._buckets(N)[0],
            array(row),
            array(start),
            array(order),
            array(use_T),
            array(number),
            array(bucket),
        )
        return row[:U], Links(order, start, use_T, None, U)

    @override
    def pool(
        self,
        source: Tensor | QuantisedRows,
        stride: int,
        width: int,
        links: Links,
        target: Tensor,
        dtype: torch.dtype,
        scale: float = 1.0,
        in_lines: bool = False,
    ) -> None:
        result = array(target), array_or_empty(links.at_M, torch.int32), scalar(dtype, scale)
        bits = 0
        memory = array(source) if isinstance(source, Tensor) else source.arrays
        if isinstance(source, QuantisedRows):
            bits = source.bits
            stride = source.packed_RK.shape[1]
        past_caches = (
            in_lines
            and target.nbytes >= STREAM_FROM_BYTES
            and target.data_ptr() % CACHE_LINE_BYTES == 0
        )
        made_for = width, past_caches, bits
        self._run(vectors.pool, made_for, width, memory, links, result, stride, dtype)

    @override
    def row_squares(
        self,
        gradients: Tensor,
        links: Links,
        row_U: Tensor,
        weights_RD: Tensor,
        state: Sequence[Tensor],
        dtype: torch.dtype,
        lr: Rate,
        rule: RowRule,
    ) -> Tensor:
        kinds = tuple(kind for _, kind in rule.state)
        means = 1 if rule.squares is None else rule.means
        total_KU = torch.empty(means, links.bags, dtype=torch.float64)
        width = weights_RD.shape[1]
        vectors.row_squares(rule.squares, tuple(rule.constants), kinds, means, width)(
            array(gradients),
            matrix(links, dtype),
            touched(row_U, None, weights_RD, state, dtype),
            rate_argument(lr),
            array(total_KU.view(-1)),
        )
        return total_KU

    @override
    def find_pieces(self, row_U: Tensor, base_K: Tensor) -> tuple[Tensor, Tensor, Counts]:
        piece_U, nth_U = torch.empty(2, len(row_U), dtype=torch.int32).unbind()
        n_K = np.zeros(len(base_K), np.int64)
        vectors.find_pieces(array(row_U), array(base_K), array(piece_U), array(nth_U), n_K)
        return piece_U, nth_U, n_K

    @override
    def mean_of_parts(
        self,
        parts: Tensor,
        begin_JK: Tensor,
        piece_U: Tensor,
        nth_U: Tensor,
        dim_K: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        mean_U = torch.empty(len(piece_U), dtype=dtype)
        vectors.mean_of_parts(
            array(parts),
            array(begin_JK),
            array(piece_U),
            array(nth_U),
            array(dim_K),
            array(mean_U),
        )
        return mean_U

    @override
    def update(
        self,
        gradients: Tensor,
        links: Links,
        row_U: Tensor,
        mean_U: Tensor | None,
        weights_RD: Tensor,
        state: Sequence[Tensor],
        dtype: torch.dtype,
        lr: Rate,
        rule: RowRule,
    ) -> None:
        width = weights_RD.shape[1]
        kinds = tuple(kind for _, kind in rule.state)
        others = rule.squares is not None
        decays = rule.decay > 0
        made_for = rule.step, tuple(rule.constants), decays, kinds, rule.means, others, width
        if mean_U is None and others:  # the rule reads gradients twice, so they are summed once
            flat = torch.empty(links.bags * width, dtype=dtype)
            self.pool(gradients, 1, width, links, flat, dtype)
            gradients = flat
            links = one_by_one(links.bags, width, flat.device)
            sums_KU = self.row_squares(gradients, links, row_U, weights_RD, state, dtype, lr, rule)
            mean_U = (sums_KU / width).to(dtype)
        rows = touched(row_U, mean_U, weights_RD, state, dtype, decay_of(lr, rule.decay))
        rate = rate_argument(lr)
        memory = array(gradients)
        self._run(vectors.update, made_for, width, memory, links, rows, rate, dtype)

    @override
    def catch_up(
        self,
        row_N: Tensor | None,
        steps_R: Tensor,
        weights_RD: Tensor,
        state: Sequence[Tensor],
        dtype: torch.dtype,
        rates_TK: Tensor,
        first: int,
        rule: RowRule,
    ) -> None:
        span = first, first + len(rates_TK)
        rows = len(steps_R) if row_N is None else len(row_N)
        threads = 1 if rows < THREADS_FROM_ROWS else threads_of_torch()
        if threads > 1 and row_N is not None:  # two threads may not have the same row
            row_N = rows_behind(row_N, steps_R, span[1])
            rows = len(row_N)
        made_for = (
            *(rule.step, tuple(rule.constants), len(state), rates_TK.shape[1]),
            *(weights_RD.shape[1], row_N is None),
        )
        arguments = (
            array(steps_R),
            touched(steps_R if row_N is None else row_N, None, weights_RD, state, dtype),
            array(rates_TK.view(-1)),
            span,
        )
        missed.catch_up(made_for, arguments, np.arange(threads + 1) * rows // threads)

    def _run(
        self,
        kernel: vectors.ThreadedKernel,
        made_for: tuple[Any, ...],
        width: int,
        source: Any,
        links: Links,
        result: tuple[Any, ...],
        number: Any,
        dtype: torch.dtype,
    ) -> None:
        """Run a kernel on a sparse matrix; where its source is copied, strip by strip, on as many
        threads as torch uses.

        Args:
            kernel: `pool` or `update`.
            made_for: The arguments that make the kernel.
            width: The columns of a vector.
            source: The source.
            links: The sparse matrix.
            result: The target of `pooling`, or the fields of `Touched`.
            number: The stride or the learning rate.
            dtype: The type of the arithmetic, and of the copies.
        """
        rest = matrix(links, dtype), result, number
        staged = links.staged
        if staged is None or links.offsets_M1 is None:
            kernel(made_for, (source, *rest), parts_of_bags(links))
            return
        threads = threads_of_torch()
        bags_I = np.diff(staged.bag_I1)
        size = int(bags_I.max()) * width
        copies = array(self._copies("copies", threads * size, dtype)).reshape(threads, size)
        entries_I = np.diff(array(links.offsets_M1)[staged.row_I1])
        results_I = np.diff(staged.row_I1)
        thread_I = vectors.assign_threads(bags_I + entries_I + results_I, threads)
        strips = array(staged.where_M), staged.bag_I1, staged.row_I1
        vectors.run_staged(
            (width, kernel.make, *made_for),
            ((source, *strips, thread_I, copies), *rest),
            np.arange(threads + 1),
        )


def _slots(b: Bags) -> tuple[Any, ...]:
    return array(b.rows_L), b.first_S, b.last_S, b.bag_S, b.bags_S1, array(b.lengths_N)
