"""What every sharded collection is: the share of some lookups in the tables of a model."""

from collections.abc import Iterator, Mapping
from typing import ClassVar

import torch
from torch import nn

from recapp.engine.fused_optimizer import FusedOptimizer
from recapp.engine.sharded_state import put_tables_in_state
from recapp.engine.sharded_tables import ShardedTables
from recapp.engine.table_parameter import TableParameter
from recapp.sharding.layout import Block
from recapp.sharding.sharding_plan import ShardingPlan
from recapp.tables.config import EmbeddingConfig
from recapp.tables.module_by_name import ModuleByName, key_of


class ShardedCollection(nn.Module):
    """One collection of the tables of a model.

    Args:
        shared: The tables, and the exchange that all their collections share.
        member: Number of this collection among theirs.

    `parameters_of` are those of its tables that are parameters, by name.
    """

    tables_of: ClassVar[str]
    """The attribute that holds the tables of the unsharded collection, in names of weights."""

    def __init__(self, shared: ShardedTables, member: int = 0) -> None:
        super().__init__()
        self.shared = shared
        self.member = member
        self.lookups = shared.members[member].lookups
        self._tables = list({x.table.name: x.table for x in self.lookups}.values())
        self.tables_in_state = True
        own = {t.name for t in self._tables}
        held = {name: p for name, p in shared.parameters_of.items() if name in own}
        if held:
            setattr(self, self.tables_of, ModuleByName(held))
        self.parameters_of: Mapping[str, TableParameter] = held
        put_tables_in_state(self)

    @property
    def plan(self) -> ShardingPlan:
        """Return the plan of the tables."""
        return self.shared.plan

    @property
    def dtype(self) -> torch.dtype:
        """Return the type that is computed in and handed out."""
        return self.shared.dtype

    @property
    def device(self) -> torch.device:
        """Return the device of this rank, where outputs are."""
        return self.shared.comm.device

    def tables(self) -> list[EmbeddingConfig]:
        """Return the tables, in order."""
        return list(self._tables)

    def holder_of(self, table: str) -> object:
        """Return the tables of the model: its collections share those of one name."""
        return self.shared

    def weight_name(self, table: str) -> str:
        """Return the name that a table's weight has in the state dict of this collection."""
        return f"{self.tables_of}.{key_of(table)}.weight"

    def blocks(self) -> Iterator[Block]:
        """Yield the rectangles of its tables that this rank holds. Every rank calls it."""
        names = {t.name for t in self._tables}
        return (block for block in self.shared.blocks() if block.table in names)

    @property
    def fused_optimizer(self) -> FusedOptimizer:
        """Return the update of the tables as an optimiser object.

        Raises:
            ConfigError: The tables are only read.
        """
        return FusedOptimizer({"": self})

    def extra_repr(self) -> str:
        """Return which tables lie where."""
        comm = self.shared.comm
        lines = [f"plan={self.plan.name}, rank {comm.rank} of {comm.world}"]
        for t in self._tables:
            s = self.plan.tables[t.name]
            rows = f"{t.num_embeddings:,}" if t.dynamic is None else "dynamic"
            ranks = (
                "all ranks"
                if s.mode == "replicated"
                else f"rank{'s' if len(s.ranks) > 1 else ''} {', '.join(map(str, s.ranks))}"
            )
            lines.append(
                f"{t.name}: {rows} x {t.embedding_dim}, {s.sharding_type}, {s.mode}, {ranks}"
            )
        return "\n".join(lines)
