"""The rows of one group of tables on one rank, behind one interface.

The engine knows rows only by `RowStore`: requests locate rows in a store, lookup pools them, the
fused update changes them, and a checkpoint reads and writes the store's rectangles. So a quantised
table (`recapp/engine/read_only_store.py`), a table of keys without a fixed range, or a table in
slower memory needs only another store.

A store updates all touched rows in one kernel call. The rows of tables that were frozen after
sharding go along and are put back with their optimiser's state, bit for bit. Tables that are frozen
before sharding cost less: they have the rule `FROZEN`, and so a store of their own, without state
and without updates.

Rows miss steps under a rule of all rows (`l2_all_rows` of row rules). A dense optimiser with L2
changes every row of a table in every step. Here a step changes only the rows that the batch
touches. Every other row misses the step, and takes it later:

    looked up               the rows that are read catch up first, in training as in evaluation
    updated                 the touched rows catch up first: they may come from an earlier lookup
    read or written whole   all rows catch up: checkpoints, state dicts, exports, loads
    begins anew             the steps before no longer count

A missed step is the rule's step with a gradient of zero. It reads nothing but the row, its state
and the rate of the step, so the order of reads changes no bit: plans, ranks, look-ahead and
checkpoints do not either. The rates of the steps since all rows were last caught up are kept, at
most 24 bytes for each step. Rows have one number more, the steps that they have taken; checkpoints
do not store it, because all rows catch up before they are written.

The idea is that of "delayed" or "lazy" updates of regularised models (Langford et al. 2009, Duchi &
Singer 2009), whose missed steps have a closed form. Those of Adam have none.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import override

from recapp.engine.row_average import RowAverage
from recapp.errors import ConfigError
from recapp.kernels.backend import Backend
from recapp.kernels.links import Links
from recapp.kernels.quantised import QuantisedRows
from recapp.kernels.row_memory import RowMemory
from recapp.optim.rules import FROZEN, GRADIENT, Rate, RowRule
from recapp.sharding.layout import AVERAGE, RAW, WEIGHT, Block, Layout, Piece, Strip
from recapp.sparse.transfer import copy_to_device
from recapp.tables.config import EmbeddingConfig
from recapp.tables.initial import begun_rows, fill_initial
from recapp.tables.positions import RowOrder


class MissedSteps:
    """The rates of the latest steps of one row rule.

    Args:
        rule: The rule.
        device: The device of the rows.

    `first` is the number of steps before those of `rates_TK`, and `now` the number of all steps.
    """

    def __init__(self, rule: RowRule, device: torch.device) -> None:
        self.first = 0
        self.now = 0
        rate = rule.rate_of(rule.lr, 1)
        numbers = len(rate) if isinstance(rate, tuple) else 1
        self._held_TK = torch.empty(64, numbers, dtype=torch.float64, device=device)

    @property
    def rates_TK(self) -> Tensor:
        """Return the `lr` of each of the latest steps, fp64."""
        return self._held_TK[: self.now - self.first]

    def add(self, rate: Rate) -> None:
        """Add a step with this `lr`."""
        n = self.now - self.first
        if n == len(self._held_TK):
            self._held_TK = torch.cat([self._held_TK, torch.empty_like(self._held_TK)])
        numbers = rate if isinstance(rate, tuple) else (rate,)
        rate_K = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        self._held_TK[n] = copy_to_device(rate_K, self._held_TK.device)
        self.now += 1

    def begin_at(self, steps: int) -> None:
        """Go on from a number of steps that all rows have taken, and forget the rates before."""
        self.first = self.now = steps


def check_frozen(
    frozen: Collection[str], fixed: Sequence[str], dynamic: Iterable[set[str]]
) -> None:
    """Check that tables can be frozen, or trained again, after sharding.

    Args:
        frozen: The tables that are to be frozen.
        fixed: The tables that are to be trained, but were frozen when they were sharded.
        dynamic: The tables of each store of dynamic rows.

    Raises:
        ConfigError: A table has no optimiser to train with, or only some tables of a store of
            dynamic rows are frozen.
    """
    if fixed:
        raise ConfigError(
            f"table {fixed[0]} was frozen when it was sharded and has no optimiser: call "
            "requires_grad_(True) before sharding (or leave it out of tables.frozen); to train it "
            "later, freeze it after sharding"
        )
    for tables_of_store in dynamic:
        frozen_tables = tables_of_store.intersection(frozen)
        if frozen_tables and tables_of_store - frozen_tables:
            raise ConfigError(
                f"table {min(frozen_tables)} is dynamic and has one store with "
                f"{min(tables_of_store - frozen_tables)}, in which rows come and go: "
                "freeze it before the model is sharded, or freeze both"
            )


class FrozenRows:
    """The frozen tables of a store.

    Args:
        layout: The places of the rows of all tables.
        group: The number of the store's group.
        rank: The rank of the store.
        tables: The names of all frozen tables, which may belong to other groups.

    `names` has the frozen tables of the group, and `others` its other tables.
    """

    def __init__(self, layout: Layout, group: int, rank: int, tables: Collection[str]) -> None:
        names_of_group = dict.fromkeys(
            layout.tables[s.table].name for s in layout.strips if s.group == group
        )
        self.names = [name for name in names_of_group if name in tables]
        self.others = [name for name in names_of_group if name not in tables]
        self._spans = [
            (p.base, p.base + len(p.rows))
            for p in layout.pieces_of(rank, group)
            if layout.tables[layout.strips[p.strip].table].name in self.names
        ]

    def among(self, row_N: Tensor) -> Tensor:
        """Return whether each located row of the store belongs to a frozen table."""
        found_N = torch.full_like(row_N, bool(self.names and not self.others), dtype=torch.bool)
        if self.others:
            for first, last in self._spans:
                found_N |= (row_N >= first) & (row_N < last)
        return found_N

    @contextmanager
    def kept(self, tensors: Sequence[Tensor], row_U: Tensor) -> Iterator[None]:
        """Put frozen rows back at the end of the context.

        Args:
            tensors: The weights of the store and the state of their optimiser, by rows.
            row_U: The rows that change in the context.
        """
        if not self.names:  # as in most runs, which copy nothing and launch no kernel for it
            yield
            return
        row_F = row_U[self.among(row_U)].long()
        before = [tensor[row_F] for tensor in tensors]
        yield
        for tensor, rows in zip(tensors, before, strict=True):
            tensor[row_F] = rows

    def fill(self, values_R: Tensor, value: int) -> None:
        """Set the values of all frozen rows in a tensor with one value for each row."""
        if self.names:
            values_R[self.among(torch.arange(len(values_R), device=values_R.device))] = value


# The type of the number of steps that a row has taken.
STEPS = torch.int32


@dataclass(frozen=True)
class StoredGroup:
    """The group of rows of a store, and the kernels that compute with them.

    Args:
        layout: The places of the rows of all tables.
        number: Number of the group in the layout.
        rank: Rank that holds the store.
        dtype: The compute type; rows may be stored in a narrower type.
        device: Device of the rows.
        backend: Kernels for that device.
    """

    layout: Layout
    number: int
    rank: int
    dtype: torch.dtype
    device: torch.device
    backend: Backend

    @property
    def width(self) -> int:
        """Return the number of columns of a row."""
        return self.layout.groups[self.number].width

    @property
    def rows(self) -> int:
        """Return the number of rows of this group on the rank."""
        return self.layout.groups[self.number].rows_W[self.rank]

    @property
    def pieces(self) -> list[Piece]:
        """Return the pieces of tables that form these rows, in the order of the rows."""
        return self.layout.pieces_of(self.rank, self.number)

    @property
    def places(self) -> Iterator[tuple[Piece, Strip, EmbeddingConfig, RowOrder | None]]:
        """Yield these pieces, the strip and the table of each, and the order of its rows."""
        layout = self.layout
        for p in self.pieces:
            strip = layout.strips[p.strip]
            yield p, strip, layout.tables[strip.table], layout.orders[strip.table]

    @property
    def writes_blocks(self) -> bool:
        """Return whether this rank writes the blocks of the group. Of replicas only one rank
        does.
        """
        return self.layout.groups[self.number].mode != "replicated" or self.rank == 0


class StoreBytes(NamedTuple):
    """Bytes of memory that a store holds: its rows, and the state of their optimiser."""

    rows: int
    state: int


class RowStore(nn.Module, ABC):
    """The rows of one group on one rank, with the row numbers of the layout.

    Args:
        group: The group of the rows, and the kernels that compute with them.

    `rows` is larger than any located row that `pool` and `update` take. `finds_rows` is true where
    `locate` must search for rows. `needs_exact` is true where `update` takes no rows whose number
    only the device knows. Located rows are valid until `settled` changes. `average` is the average
    of the rows, if there is one, and `pooled` are the rows that `pool` reads.
    """

    pooled: Tensor | QuantisedRows
    average: RowAverage | None = None
    finds_rows = False
    needs_exact = True
    settled = 0

    def __init__(self, group: StoredGroup) -> None:
        super().__init__()
        self.group = group
        self.backend = group.backend
        self.width = group.width
        self.rows = group.rows

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "RowStore":
        """Leave the rows as the plan made them: `model.half()` and Lightning's `bf16-true` apply to
        the dense part.
        """
        return self

    def locate(self, row_N: Tensor, strip_N: Tensor | None = None, trains: bool = False) -> Tensor:
        """Return the places of the layout's rows in this store. By default a place is the row
        number.

        Where the store `finds_rows`, the call comes in the batch's own step. Else it may come ahead
        of the step, so it may not read or write values.

        Args:
            row_N: The row numbers of the layout.
            strip_N: The strip of each row, numbered within the group, int16, where the store
                `finds_rows`.
            trains: Whether the batch is trained.

        Returns:
            The located rows, for `pool` and `update`.
        """
        return row_N

    def piece_keys(self, row_U: Tensor) -> Tensor:
        """Return located rows in the numbers in which the pieces of the layout begin."""
        return row_U

    def trained(self, row_U: Tensor) -> Tensor | None:
        """Return which located rows a training batch updates; None: all of them."""
        return None

    def settle(self, step: int, stopped: Tensor | None = None) -> None:
        """End a step after its update.

        Args:
            step: The number of updates so far.
            stopped: An integer on the device: where it is set, nothing was updated.
        """

    def pool(self, links: Links, target: Tensor, in_lines: bool = False) -> None:
        """Sum rows along a sparse matrix: `pool` of the kernels, with this store as the source.

        Args:
            links: The sparse matrix, whose `index_N` has located rows.
            target: The flat buffer for the sums, in any dtype.
            in_lines: A hint that results fill whole cache lines and are not read soon.
        """
        rows = self.pooled
        source = rows if isinstance(rows, QuantisedRows) else rows.view(-1)
        width = self.width
        self.backend.pool(source, width, width, links, target, self.group.dtype, in_lines=in_lines)

    @abstractmethod
    def update(
        self, gradients: Tensor, links: Links, row_U: Tensor, mean_U: Tensor | None, lr: Rate
    ) -> None:
        """Sum the gradients of touched rows and apply the optimiser's rule to each row, once.

        Args:
            gradients: Flat buffer of gradients.
            links: The sparse matrix whose result is the gradient of each touched row.
            row_U: The touched rows, located and distinct.
            mean_U: The mean squares of the whole table rows, [U] or [K, U], where the store has
                only a strip of each row; None where rows are whole.
            lr: The learning rate of this update, in the form that the rule takes.

        Raises:
            ConfigError: The store is read-only.
        """

    def catch_up(self, row_N: Tensor | None = None) -> None:
        """Take the steps that rows have missed, before they are read or written. By default no row
        misses a step.

        Args:
            row_N: Rows, which may repeat; None: all rows.
        """

    def begin_at(self, steps: int) -> None:
        """Take the rows for rows that have taken this number of steps."""

    def begin_anew(self, tables: Collection[str], epoch: int) -> None:
        """Give the rows of some tables the start values of an epoch, and their optimiser's state
        its start values. By default rows are only read, and stay.

        Args:
            tables: The names of the tables.
            epoch: The number of the epoch, from 1 on.
        """

    def begin_rows(self, table: str, row_K: Tensor) -> None:
        """Write start values into some rows of a table, and leave their optimiser's state. By
        default rows are only read, and stay.

        Args:
            table: The name of the table.
            row_K: Rows of the table, of which others may be on other ranks.
        """

    def keep_average(self) -> None:
        """Make room for an average of the rows. By default rows are only read, and have none."""

    @abstractmethod
    def blocks(self, averaged: bool = False) -> Iterator[Block]:
        """Yield the store's rectangles, as views, for a checkpoint to write.

        Args:
            averaged: Whether the weights are the average, beside which the trained rows are `raw`.
        """

    def blocks_to_fill(self, averaged: bool = False) -> Iterator[Block]:
        """Yield the store's rectangles for a checkpoint to read.

        Args:
            averaged: Whether to yield the trained rows as `raw` and the average as `average`.
        """
        return self.blocks()

    @property
    @abstractmethod
    def nbytes(self) -> StoreBytes:
        """Return the memory that the store holds."""


class FloatRows(RowStore):
    """Rows in floating point and the state of their row rule, for stores with any memory layout.

    Args:
        group: The group of the rows, and the kernels that compute with them.
        rule: Optimiser of the rows; None for read-only rows.
        most: A function from the bytes of a row with its state to the largest number of rows.

    Under a rule of all rows, `missed` has the steps that rows may have missed. Stores of one rule
    share it; the fused update adds the steps. An update leaves rows and state of the tables of
    `frozen` as they are, which were frozen after the store was made.
    """

    def __init__(
        self, group: StoredGroup, rule: RowRule | None, most: Callable[[int], int]
    ) -> None:
        super().__init__(group)
        self.rule = rule
        self._kinds = rule.state if rule else ()
        stored = group.layout.groups[group.number].dtype
        widths = [self.width if kind == "element" else 1 for _, kind in self._kinds]
        follows_steps = rule is not None and rule.all_rows
        of_steps = STEPS.itemsize if follows_steps else 0
        self.missed: MissedSteps | None = None
        self.rows = most(
            self.width * stored.itemsize + sum(widths) * group.dtype.itemsize + of_steps
        )
        self._weights = RowMemory(self.rows, self.width, stored, group.device)
        self._state = [RowMemory(self.rows, n, group.dtype, group.device) for n in widths]
        self._steps = RowMemory(self.rows, 1, STEPS, group.device) if follows_steps else None
        self.freeze(())

    def freeze(self, tables: Collection[str]) -> None:
        """Let updates change all rows but those of some tables.

        Args:
            tables: The names of all frozen tables, which may belong to other stores.
        """
        self.frozen = FrozenRows(self.group.layout, self.group.number, self.group.rank, tables)

    @property
    def trains(self) -> bool:
        """Return whether an update changes rows."""
        return self.rule not in (None, FROZEN) and bool(self.frozen.others)

    @override
    def trained(self, row_U: Tensor) -> Tensor | None:
        return ~self.frozen.among(row_U) if self.frozen.names else None

    @property
    def needs_exact(self) -> bool:  # type: ignore[override]
        """Return whether more than one kernel of the device reads the rows of an update."""
        squares = self.rule is not None and self.rule.squares is not None
        return squares or self._steps is not None or bool(self.frozen.names)

    @property
    def weights(self) -> Tensor:
        """Return the rows that lookups read, [R, width]: those that train, or their average."""
        shown = None if self.average is None else self.average.shown
        return self._weights.rows if shown is None else shown

    @property
    def pooled(self) -> Tensor:  # type: ignore[override]
        """Return the rows that `pool` reads."""
        return self.weights

    @override
    def keep_average(self) -> None:
        self.average = RowAverage(self._weights, self.group.dtype)

    def _saved_weights(self, averaged: bool) -> list[tuple[str, Any]]:
        """Return by name the tensors of weights that a checkpoint writes, [R, width] each."""
        if self.average is None or not averaged:
            return [(WEIGHT, self.weights)]
        weights: list[tuple[str, Any]] = [
            (WEIGHT, self.average.rounded()),
            (RAW, self._weights.rows),
        ]
        return [*weights, (AVERAGE, self.average.rows)] if self.average.is_wider else weights

    def _filled_weights(self, averaged: bool) -> list[tuple[str, Any]]:
        """Return by name the tensors of weights that a checkpoint fills, [R, width] each."""
        if self.average is None or not averaged:
            return [(WEIGHT, self._weights.rows)]
        return [(RAW, self._weights.rows), (AVERAGE, self.average.rows)]

    @property
    def state(self) -> list[Tensor]:
        """Return the state tensors of the rule, in the rule's order."""
        return [memory.rows for memory in self._state]

    @property
    @override
    def nbytes(self) -> StoreBytes:
        memories = self._state if self._steps is None else [*self._state, self._steps]
        average = 0 if self.average is None else self.average.nbytes
        return StoreBytes(self._weights.nbytes, sum(memory.nbytes for memory in memories) + average)

    def _grow(self, rows: int) -> None:
        for memory in (self._weights, *self._state):
            memory.grow(rows)
        if self.average is not None:
            self.average.grow(rows)
        if self._steps is not None:
            before = self._steps.held
            self._steps.grow(rows)
            if self.missed is not None:
                self._steps.rows[before:rows] = self.missed.now

    @property
    def steps(self) -> Tensor | None:
        """Return the steps that each row has taken, [R]; None where no row misses a step."""
        return None if self._steps is None else self._steps.rows[: self._weights.held].view(-1)

    @override
    def catch_up(self, row_N: Tensor | None = None) -> None:
        steps = self.steps
        missed = self.missed
        if steps is None or missed is None or missed.now == missed.first:
            return
        assert self.rule is not None
        self.backend.catch_up(
            row_N,
            steps,
            self._weights.rows,
            self.state,
            self.group.dtype,
            missed.rates_TK,
            missed.first,
            self.rule,
        )

    @override
    def begin_at(self, steps: int) -> None:
        if (steps_R := self.steps) is not None:
            steps_R.fill_(steps)

    def _begin_steps(self, rows: Tensor | slice) -> None:
        """Make rows with start values begin with the next step."""
        if (steps_R := self.steps) is not None and self.missed is not None:
            steps_R[rows] = self.missed.now

    @override
    def pool(self, links: Links, target: Tensor, in_lines: bool = False) -> None:
        if self.average is None or self.average.shown is None:  # rows that are read catch up
            self.catch_up(links.index_N)
        super().pool(links, target, in_lines)

    @override
    def update(
        self, gradients: Tensor, links: Links, row_U: Tensor, mean_U: Tensor | None, lr: Rate
    ) -> None:
        assert self.rule is not None, "the fused update refuses tables without a rule"
        dtype = self.group.dtype
        self.catch_up(row_U)
        with self.frozen.kept([self.weights, *self.state], row_U):
            self.backend.update(
                gradients, links, row_U, mean_U, self.weights, self.state, dtype, lr, self.rule
            )
        if (steps := self.steps) is not None and self.missed is not None:
            steps.index_fill_(0, row_U.long(), self.missed.now + 1)
            self.frozen.fill(steps, self.missed.now + 1)  # no step is for frozen rows

    def squares(self, gradients: Tensor, links: Links, row_U: Tensor, lr: Rate) -> Tensor:
        """Return the fp64 sums of squares over the columns of the store, for the K row statistics
        of the rule: [K, U].

        Args:
            gradients: As for `update`.
            links: As for `update`.
            row_U: As for `update`.
            lr: As for `update`.
        """
        assert self.rule is not None
        dtype = self.group.dtype
        return self.backend.row_squares(
            gradients, links, row_U, self.weights, self.state, dtype, lr, self.rule
        )


class FloatStore(FloatRows):
    """Rows in floating point, [R, width], and the state of their row rule.

    Args:
        group: The group of the rows, and the kernels that compute with them.
        rule: Optimiser of the rows; None for read-only rows.
        seeds: Seed of the start values, by table. None leaves rows undefined, for a load.
    """

    def __init__(
        self,
        group: StoredGroup,
        rule: RowRule | None,
        seeds: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(group, rule, lambda _: group.rows)
        self._grow(self.rows)
        self._seeds = seeds
        for state, (_, _, start) in zip(self.state, rule.starts() if rule else (), strict=True):
            if start:  # pages of zeros take no memory before the first write
                state.fill_(start)
        if seeds is not None:
            self._write_start_values(seeds, seeds, 0)

    def _write_start_values(
        self, tables: Collection[str], seeds: Mapping[str, int], epoch: int
    ) -> None:
        compiled = self.backend.write_start_values
        for p, strip, table, order in self.group.places:
            if table.name in tables:
                here = self.weights[p.base : p.base + len(p.rows)]
                of_rows = p.rows, strip.cols, order, epoch, compiled
                fill_initial(here, table, seeds[table.name], *of_rows)

    @override
    def begin_anew(self, tables: Collection[str], epoch: int) -> None:
        assert self.rule is not None and self._seeds is not None, "rows that train have both"
        self._write_start_values(tables, self._seeds, epoch)
        for p, _, table, _ in self.group.places:
            if table.name in tables:
                here = slice(p.base, p.base + len(p.rows))
                self._begin_steps(here)
                for state, (_, _, start) in zip(self.state, self.rule.starts(), strict=True):
                    state[here] = start

    @override
    def begin_rows(self, table: str, row_K: Tensor) -> None:
        assert self._seeds is not None, "rows that train have seeds"
        weights = self._weights.rows
        for p, strip, config, order in self.group.places:
            if config.name != table:
                continue
            at_M, values = begun_rows(
                row_K, config, self._seeds[table], p.rows, strip.cols, order, weights.dtype
            )
            row_M = (at_M + p.base).to(weights.device)
            self.catch_up(row_M)
            weights[row_M] = values.to(weights)
            if self.average is not None:
                self.average.begin(row_M)

    @override
    def blocks(self, averaged: bool = False) -> Iterator[Block]:
        return self._blocks(self._saved_weights(averaged))

    @override
    def blocks_to_fill(self, averaged: bool = False) -> Iterator[Block]:
        return self._blocks(self._filled_weights(averaged))

    def _blocks(self, weights: list[tuple[str, Any]]) -> Iterator[Block]:
        owner = self.group.writes_blocks
        for p, strip, table, order in self.group.places:
            shape = (table.num_embeddings, table.embedding_dim)
            for tensor, rows in weights:
                data = rows.narrow(0, p.base, len(p.rows))
                weight = Block(table.name, tensor, shape, p.rows, strip.cols, data, owner, order)
                yield weight
            for (name, kind), state in zip(self._kinds, self.state, strict=True):
                if self.rule == GRADIENT:  # a gradient belongs to a step and is not stored
                    continue
                data = state[p.base : p.base + len(p.rows)]
                if kind == "element":
                    yield weight._replace(tensor=name, data=data)
                else:
                    yield weight._replace(
                        tensor=name,
                        shape=(shape[0], 1),
                        cols=range(1),
                        data=data,
                        owner=owner and strip.cols.start == 0,
                    )
