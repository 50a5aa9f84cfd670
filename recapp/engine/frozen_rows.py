"""The rows of tables that were frozen after sharding, when they lie in one store with others.

A store updates all touched rows in one kernel call. Frozen rows go along and are put back with
their optimiser's state, bit for bit. Tables that are frozen before sharding cost less: they have
the rule `FROZEN`, and so a store of their own, without state and without updates.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from recapp.errors import ConfigError
from recapp.sharding.layout import Layout


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
