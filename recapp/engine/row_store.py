"""The rows of one group of tables on one rank, behind one interface.

Everything that the engine knows of rows is `RowStore`: requests ask a store where rows lie, lookup
asks it to pool them, the fused update asks it to change them, a checkpoint asks it for its
rectangles. So a quantised table (`recapp/engine/read_only_store.py`), a table of keys without a
fixed range or a table on slower memory is another store and nothing else.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from recapp.kernels.backend import Backend
from recapp.kernels.links import Links
from recapp.kernels.quantised import QuantisedRows
from recapp.kernels.row_memory import RowMemory
from recapp.optim.rules import GRADIENT, Rate, RowRule
from recapp.sharding.layout import Block, Layout, Piece
from recapp.tables.initial import fill_initial


@dataclass(frozen=True)
class StoredGroup:
    """Which rows a store holds, and what computes with them.

    Args:
        layout: Where the rows of all tables lie.
        number: Number of the group in the layout.
        rank: Rank that holds the store.
        dtype: Type that is computed in; rows may be stored narrower.
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
        """Return how many columns a row has."""
        return self.layout.groups[self.number].width

    @property
    def rows(self) -> int:
        """Return how many rows the rank holds of this group."""
        return self.layout.groups[self.number].rows_W[self.rank]

    @property
    def pieces(self) -> list[Piece]:
        """Return the pieces of tables whose rows these are, in the order of the rows."""
        return self.layout.pieces_of(self.rank, self.number)

    @property
    def writes_blocks(self) -> bool:
        """Return whether this rank writes the group's blocks: of copies on all ranks one does."""
        return self.layout.groups[self.number].mode != "replicated" or self.rank == 0


class StoreBytes(NamedTuple):
    """Bytes of memory that a store holds: its rows, and the state of their optimiser."""

    rows: int
    state: int


class RowStore(nn.Module, ABC):
    """Rows of one group on one rank, numbered as the layout numbers them.

    Args:
        group: Which rows, and what computes with them.

    `rows` is more than any number by which `pool` and `update` know a row. `finds_rows` says
    whether rows have to be found, by `locate`. What `locate` returned holds until `settled`
    changes.
    """

    finds_rows = False
    settled = 0

    def __init__(self, group: StoredGroup) -> None:
        super().__init__()
        self.group = group
        self.backend = group.backend
        self.width = group.width
        self.rows = group.rows

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "RowStore":
        """Leave the rows as the plan made them: `model.half()` or Lightning's `bf16-true` is meant
        for the dense part.
        """
        return self

    def locate(self, row_N: Tensor, strip_N: Tensor | None = None, trains: bool = False) -> Tensor:
        """Return where rows of the layout lie in this store: in their own order, unless a store
        keeps them elsewhere.

        A store that `finds_rows` is asked when the batch's turn has come; others ahead of that, so
        they may not read or write values.

        Args:
            row_N: Rows as the layout numbers them.
            strip_N: The strip of each, numbered within the group, int16, where the store
                `finds_rows`.
            trains: Whether the batch will be trained.

        Returns:
            The rows by which `pool` and `update` know them.
        """
        return row_N

    def piece_keys(self, row_U: Tensor) -> Tensor:
        """Return located rows by the numbers in which the layout's pieces begin."""
        return row_U

    def trained(self, row_U: Tensor) -> Tensor | None:
        """Return which located rows of a training batch learn of it; None: all do."""
        return None

    def settle(self, step: int) -> None:
        """End a step, after its update, whose number this is."""

    @abstractmethod
    def pool(
        self, links: Links, target: Tensor, scale: float = 1.0, in_lines: bool = False
    ) -> None:
        """Sum rows along a sparse matrix: `pool` of the kernels, with this store as the source.

        Args:
            links: The sparse matrix; its `index_N` holds located rows.
            target: Flat buffer, written in its own type.
            scale: Factor of all sums.
            in_lines: Hint that results fill whole cache lines and are not read soon.
        """

    @abstractmethod
    def update(
        self, gradients: Tensor, links: Links, row_U: Tensor, mean_U: Tensor | None, lr: Rate
    ) -> None:
        """Sum the gradients of touched rows and apply the optimiser's rule to each row, once.

        Args:
            gradients: Flat buffer of gradients.
            links: The sparse matrix whose result is the gradient of each touched row.
            row_U: Touched rows, located and distinct.
            mean_U: Mean squares of the whole table row, [U] or [K, U], where the row here is a
                strip of it; None where rows are whole.
            lr: Learning rate of this update, as the rule wants it.

        Raises:
            ConfigError: The store is read-only.
        """

    def squares(self, gradients: Tensor, links: Links, row_U: Tensor, lr: Rate) -> Tensor:
        """Return the fp64 sums of squares, over the columns here, of what the rule wants to know of
        whole rows: [K, U], the gradients' unless the rule says more.

        Args:
            gradients: As of `update`.
            links: As of `update`.
            row_U: As of `update`.
            lr: As of `update`.
        """
        dtype = self.group.dtype
        return self.backend.square_sums(gradients, self.width, links, dtype)[None]

    @abstractmethod
    def blocks(self) -> Iterator[Block]:
        """Yield the rectangles held here, as views: what a checkpoint reads and writes."""

    @property
    @abstractmethod
    def nbytes(self) -> StoreBytes:
        """Return the memory that the store holds."""

    @property
    @abstractmethod
    def example(self) -> Tensor | QuantisedRows:
        """Return one row as the kernels see rows of this store: kernels are compiled with it."""


class FloatRows(RowStore):
    """Rows of floating-point numbers, and the state of the rule that trains them, wherever a store
    keeps them.

    Args:
        group: Which rows, and what computes with them.
        rule: Optimiser of the rows; None for rows that are only read.
        most: Gets the bytes of a row and of its state, and returns how many rows there can be.
    """

    def __init__(
        self, group: StoredGroup, rule: RowRule | None, most: Callable[[int], int]
    ) -> None:
        super().__init__(group)
        self.rule = rule
        stored = group.layout.groups[group.number].dtype
        widths = [self.width if kind == "element" else 1 for _, kind in self._kinds]
        self.rows = most(self.width * stored.itemsize + sum(widths) * group.dtype.itemsize)
        self._weights = RowMemory(self.rows, self.width, stored, group.device)
        self._state = [RowMemory(self.rows, n, group.dtype, group.device) for n in widths]

    @property
    def weights(self) -> Tensor:
        """Return the rows, [R, width]."""
        return self._weights.rows

    @property
    def state(self) -> list[Tensor]:
        """Return the rule's state tensors, in its order."""
        return [memory.rows for memory in self._state]

    @property
    def nbytes(self) -> StoreBytes:
        """Return the memory of the weights and of the rule's state."""
        return StoreBytes(self._weights.nbytes, sum(memory.nbytes for memory in self._state))

    def _grow(self, rows: int) -> None:
        """Have room for a number of rows."""
        for memory in (self._weights, *self._state):
            memory.grow(rows)

    @property
    def _kinds(self) -> tuple[tuple[str, str], ...]:
        return () if self.rule is None else self.rule.state

    @property
    def example(self) -> Tensor:
        """Return a row of zeros in the stored type, on the CPU."""
        return torch.zeros(1, self.width, dtype=self.weights.dtype, device="cpu")

    def pool(
        self, links: Links, target: Tensor, scale: float = 1.0, in_lines: bool = False
    ) -> None:
        """Sum rows along a sparse matrix (`RowStore.pool`)."""
        self.backend.pool(
            self.weights.view(-1),
            self.width,
            self.width,
            links,
            target,
            self.group.dtype,
            scale,
            in_lines,
        )

    def update(
        self, gradients: Tensor, links: Links, row_U: Tensor, mean_U: Tensor | None, lr: Rate
    ) -> None:
        """Train touched rows (`RowStore.update`)."""
        assert self.rule is not None, "the fused update refuses tables without a rule"
        dtype = self.group.dtype
        self.backend.update(
            gradients, links, row_U, mean_U, self.weights, self.state, dtype, lr, self.rule
        )

    def squares(self, gradients: Tensor, links: Links, row_U: Tensor, lr: Rate) -> Tensor:
        """Sum what the rule squares (`RowStore.squares`)."""
        if self.rule is None or self.rule.squares is None:
            return super().squares(gradients, links, row_U, lr)
        dtype = self.group.dtype
        return self.backend.row_squares(
            gradients, links, row_U, self.weights, self.state, dtype, lr, self.rule
        )

    @property
    def _described(self) -> str:
        dtype = str(self.weights.dtype).removeprefix("torch.")
        rule = "read-only" if self.rule is None else self.rule.name
        return f"rows x {self.width}, {dtype}, {rule}"


class FloatStore(FloatRows):
    """Rows of floating-point numbers, [R, width], and the state of the rule that trains them.

    Args:
        group: Which rows, and what computes with them.
        rule: Optimiser of the rows; None for rows that are only read.
        seed: Seed of the start values, one or one by table; None leaves them undefined, for rows
            that are loaded.
    """

    def __init__(
        self,
        group: StoredGroup,
        rule: RowRule | None,
        seed: int | Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(group, rule, lambda _: group.rows)
        self._grow(self.rows)
        for held, (_, _, start) in zip(self.state, rule.starts() if rule else (), strict=True):
            if start:  # pages of zeros take no memory before they are touched
                held.fill_(start)
        if seed is not None:
            self._fill(seed)

    def _fill(self, seed: int | Mapping[str, int]) -> None:
        """Write the start values of every piece."""
        layout = self.group.layout
        for p in self.group.pieces:
            strip = layout.strips[p.strip]
            here = self.weights[p.base : p.base + len(p.rows)]
            table = layout.tables[strip.table]
            own = seed if isinstance(seed, int) else seed[table.name]
            fill_initial(here, table, own, p.rows, strip.cols, layout.orders[strip.table])

    def blocks(self) -> Iterator[Block]:
        """Yield the weights and the rule's state of every piece."""
        layout = self.group.layout
        owner = self.group.writes_blocks
        for p in self.group.pieces:
            strip = layout.strips[p.strip]
            table = layout.tables[strip.table]
            shape = (table.num_embeddings, table.embedding_dim)
            order = layout.orders[strip.table]
            data = self.weights[p.base : p.base + len(p.rows)]
            weight = Block(table.name, "weight", shape, p.rows, strip.cols, data, owner, order)
            yield weight
            for (name, kind), held in zip(self._kinds, self.state, strict=True):
                if self.rule == GRADIENT:  # it belongs to a step and is not kept
                    continue
                data = held[p.base : p.base + len(p.rows)]
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

    def extra_repr(self) -> str:
        """Return the number of rows, their width, type and rule."""
        return f"{self.rows:,} {self._described}"
