"""The base of the unsharded collections of bags and of sequences: tables as torch modules, and
their start values.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from recapp.errors import ConfigError
from recapp.tables.collections import compute_dtype
from recapp.tables.config import DataType, EmbeddingConfig
from recapp.tables.ids import IdRules
from recapp.tables.initial import fill_initial
from recapp.tables.lookups import TableLookup
from recapp.tables.module_by_name import ModuleByName, key_of


class UnshardedCollection(nn.Module):
    """A collection of tables on one process.

    A dynamic table has no rows here, because only sharded tables have dynamic rows. A lookup is an
    error until a sharded collection, on one process or many, replaces this one.

    Args:
        tables: The tables, with distinct names.
        lookups: The lookups, in the order of the output.
        device: The device of the tables; `torch.device("meta")` allocates none yet.
        seed: The seed of the start values (`recapp/tables/initial.py`).
        is_weighted: See `IdRules`.
        sparse: Whether gradients of the tables are sparse.
    """

    tables_of: ClassVar[str]
    """The attribute that holds the tables; its name is part of the state dict's keys."""
    own_ids = False
    """Whether the model calls the collection with ids of its own, although other collections may
    have features of the same names.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingConfig],
        lookups: Sequence[TableLookup],
        device: torch.device | str | None,
        seed: int,
        is_weighted: bool | None,
        sparse: bool,
    ) -> None:
        super().__init__()
        self._tables = list(tables)
        self.lookups = tuple(lookups)
        self.seed = seed
        self.sparse = sparse
        modules = {t.name: self.module_of(_without_values(t, device)) for t in tables}
        setattr(self, self.tables_of, ModuleByName(modules))
        self._is_weighted = is_weighted
        self.id_rules = IdRules(self.lookups, is_weighted=is_weighted)
        self.dtype = compute_dtype(tables)
        self._check_sparse()
        self.register_load_state_dict_pre_hook(_take_rows)  # type: ignore[no-untyped-call]
        self.reset_parameters()

    @abstractmethod
    def module_of(self, weight_RD: Tensor) -> nn.Module:
        """Return torch's module of a table's rows."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move or convert the tables, for `to`, `cuda` and `half`.

        Raises:
            ConfigError: The tables are on the meta device and have no rows to move.
        """
        try:
            return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if "meta tensor" not in str(error):
                raise
            raise ConfigError(
                f"table {self._tables[0].name} is on the meta device and has no rows yet: they are "
                "made where tables are sharded, on one process or many: train with "
                "Trainer(strategy=EmbeddingShardingStrategy()), wrap the model in "
                'DistributedModelParallel, or make the collection with device="cpu"'
            ) from error

    def reset_parameters(self) -> None:
        """Write the start values, unless the tables are on the meta device."""
        for t in self._tables:
            weight = self.weight(t.name)
            if weight.device.type != "meta":
                columns = range(t.embedding_dim)
                fill_initial(weight.data, t, self.seed, range(len(weight)), columns)

    def tables(self) -> list[EmbeddingConfig]:
        """Return the tables, in order."""
        return list(self._tables)

    @property
    def device(self) -> torch.device:
        """Return the device of the tables."""
        return self.weight(self._tables[0].name).device

    def store_as(self, data_types: Mapping[str, DataType]) -> None:
        """Set the types of stored rows for tables on the meta device. The type of the arithmetic
        stays the same.

        Args:
            data_types: The types by table; other tables keep theirs.
        """
        changed = {
            t.name: replace(t, data_type=data_types.get(t.name, t.data_type)) for t in self._tables
        }
        assert all(self.weight(name).device.type == "meta" for name in changed)
        self._tables = list(changed.values())
        self.lookups = tuple(replace(x, table=changed[x.table.name]) for x in self.lookups)

    def is_weighted(self) -> bool | None:
        """Return whether rows are multiplied by sample weights; None if batches decide."""
        return self._is_weighted

    def weight(self, table: str) -> Tensor:
        """Return a table's rows, [R, D]."""
        found: Any = getattr(self, self.tables_of)[table].weight
        assert isinstance(found, Tensor)
        return found

    def share(self, table: str, other: "UnshardedCollection") -> None:
        """Take a table's rows from another collection, so that both train the same rows."""
        getattr(self, self.tables_of)[table].weight = other.weight(table)

    def holder_of(self, table: str) -> object:
        """Return a table's weight. Collections with the same weight share the table."""
        return self.weight(table)

    def _check_sparse(self) -> None:
        """Check that torch has sparse gradients for the tables, if `sparse` asks for them.

        Raises:
            ConfigError: torch has none for a table, or `sparse` is no truth value.
        """
        if not isinstance(self.sparse, bool):
            raise ConfigError(f"sparse={self.sparse}: must be True or False")
        for t in self._tables:
            if self.sparse and t.data_type.dtype != self.dtype:
                raise ConfigError(
                    f"tables.{t.name}.data_type={t.data_type}: sparse gradients of torch need "
                    f"tables of the compute type, {self.dtype}: leave sparse out, or change "
                    "data_type"
                )

    def _check_has_rows(self, ids_L: Tensor) -> None:
        """Check that the tables have rows on this process.

        Raises:
            ConfigError: A table is dynamic (the message names it), or the ids have no values.
        """
        for t in self._tables:
            if t.dynamic is not None:
                raise ConfigError(
                    f"table {t.name} is dynamic: only a sharded collection makes its rows, also "
                    "on one process: wrap the model in DistributedModelParallel, or train it "
                    "with the EmbeddingShardingStrategy"
                )
        if ids_L.device.type == "meta" and self.device.type != "meta":
            raise ConfigError(
                f"ids are on the meta device, where they have no values, and tables on "
                f"{self.device}: give ids of that device, or for shapes alone make the collection "
                'with device="meta"'
            )


def _take_rows(collection: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Replace tables on the meta device, which have no memory to copy to, by the tables of a state
    dict.

    Raises:
        ConfigError: A table in the state dict is no tensor.
    """
    for table in collection.tables():
        held = getattr(collection, collection.tables_of)[table.name]
        rows = state.get(f"{prefix}{collection.tables_of}.{key_of(table.name)}.weight")
        if rows is not None and not isinstance(rows, Tensor):
            raise ConfigError(
                f"table {table.name}: load_state_dict: the state dict holds a "
                f"{type(rows).__name__}, not a tensor: one of a sharded model has the strips of "
                "its rank, which a sharded model takes; for this one save "
                "recapp.gathered_state_dict(model), whole tables"
            )
        if held.weight.is_meta and isinstance(rows, Tensor) and rows.shape == held.weight.shape:
            held.weight = nn.Parameter(rows.detach(), held.weight.requires_grad)


def _without_values(table: EmbeddingConfig, device: torch.device | str | None) -> Tensor:
    rows = table.num_embeddings if table.dynamic is None else 0
    shape = (rows, table.embedding_dim)
    if table.data_type.bits is None:
        return torch.empty(shape, dtype=table.data_type.dtype, device=device)
    if device is None or torch.device(device).type != "meta":
        raise ConfigError(
            f"tables.{table.name}.data_type={table.data_type}: rows of 8 or 4 bits are read-only "
            "copies of trained rows: train fp32, then export the checkpoint with "
            f"quantize={table.data_type}"
        )
    return torch.empty(shape, device=device)  # no torch module holds packed rows
