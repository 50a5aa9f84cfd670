"""The interface of every collection of tables, sharded or not, the search for collections in a
model, and the unsharded collections of bags and of sequences. They are the oracles of every parity
test.

The unsharded collection of bags: plain `torch.nn.EmbeddingBag`s, one after the other.

    features            tables                       output [B, sum of dims]
    C1: [7] [2 9] []    t1 (dim 4) reads C1          | t1(C1)  | t2(C1) | t2(C2) |
    C2: [5] []    [1]   t2 (dim 3) reads C1 and C2

The collection knows no ranks. `DistributedModelParallel` or the trainer's strategy replaces it by a
sharded collection. On `torch.device("meta")` it takes no memory until then. Names are those of
TorchRec's `EmbeddingBagCollection`.

The unsharded collection of sequences: one vector per id, in the order of the ids.

    features            tables                        output
    C1: [7] [2 9] []    t1 (dim 4) reads C1 and C2    C1: [v7] [v2 v9] []
    C2: [5] []    [1]                                 C2: [v5] [] [v1]

Names are those of TorchRec's `EmbeddingCollection`. Tables may differ in width, which TorchRec
refuses.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from recapp.errors import ConfigError
from recapp.sparse.jagged_tensor import JaggedTensor, KeyedTensor
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.tables.bags_of_samples import pooled_of_samples, sequences_of_samples
from recapp.tables.config import (
    DataType,
    EmbeddingConfig,
    PoolingType,
    TableLookup,
    check_lookups,
    check_tables,
    common_dim,
    compute_type,
    lookups_of,
    outputs_by_table,
    sequence_table,
)
from recapp.tables.ids import IdRules, LookupRows
from recapp.tables.initial import fill_initial
from recapp.tables.positions import keys_of


class ModuleByName(nn.ModuleDict):
    """`torch.nn.ModuleDict` for any names without slashes: names come from data, and logs have
    columns called `items`, `type` or `user.id`.

    torch refuses such names, because submodules are attributes too (`module.items` is a method, a
    dot separates a path). Here a module is found by its key, and in the state dict as
    `<dict>.<name>.weight` with a slash for each dot of the name, but not as an attribute.
    """

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Add a module, whatever its name."""
        modules: dict[str, nn.Module | None] = self._modules  # type: ignore[assignment]
        modules[key_of(name)] = module

    def __getitem__(self, name: str) -> nn.Module:
        return super().__getitem__(key_of(name))

    def __contains__(self, name: Any) -> bool:
        return super().__contains__(key_of(str(name)))


def key_of(name: str) -> str:
    """Return the form of a name in the state dict."""
    return name.replace(".", "/")


def compute_dtype(tables: Sequence[EmbeddingConfig]) -> torch.dtype:
    """Return the dtype of a collection's arithmetic and output (`compute_type`)."""
    return compute_type(tables).dtype


@runtime_checkable
class TableCollection(Protocol):
    """The interface of every collection of tables, sharded or not, for models and planners."""

    lookups: tuple[TableLookup, ...]

    def tables(self) -> list[EmbeddingConfig]:
        """Return the tables, in order."""
        ...

    def holder_of(self, table: str) -> object:
        """Return the object that holds a table's rows. Two collections with the same object share
        the table.
        """
        ...


class BagCollection(TableCollection, Protocol):
    """A collection whose bags are pooled, sharded or not."""

    def leave_room(self, columns: int) -> None:
        """Leave columns free before the first vector of a sample, for `KeyedTensor.prepend`.

        A collection may ignore this.

        Args:
            columns: The number of columns.
        """
        ...

    def __call__(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Return the pooled vectors, [B, sum of columns], in the order of the lookups."""
        ...


class SequenceCollection(TableCollection, Protocol):
    """A collection whose ids each give a vector, sharded or not."""

    def __call__(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Return the vectors of each lookup by output name."""
        ...


def collections_in(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Walk a model and yield its collections of tables, sharded or not, with their paths.

    A collection that is a submodule under two paths is yielded once.
    """
    for path, part in module.named_modules():
        if isinstance(part, TableCollection):
            yield path, part


def embedding_lookups(module: nn.Module) -> list[TableLookup]:
    """List the lookups of all collections of a model, in the order of the walk.

    Outputs of different collections may have the same name.
    """
    return [lookup for _, collection in collections_in(module) for lookup in collection.lookups]


def embedding_tables(module: nn.Module) -> list[EmbeddingConfig]:
    """List all tables of a model, in the order of the walk.

    Two collections share a table if their modules share the weight, like tied weights in torch:

        model.sequences.embeddings["users"].weight = model.bags.embedding_bags["users"].weight

    Raises:
        ConfigError: Two collections have a table of the same name and do not share it, or share a
            table with different configs.
    """
    distinct_tables: dict[tuple[str, int], EmbeddingConfig] = {}
    for _, collection in collections_in(module):
        for t in collection.tables():
            first = distinct_tables.setdefault((t.name, id(collection.holder_of(t.name))), t)
            for key in ("data_type", "init_range", "weight_init_max", "weight_init_min", "init_fn"):
                if getattr(first, key) != getattr(t, key):
                    raise ConfigError(
                        f"table {t.name} is shared by two collections, which give it a different "
                        f"{key}: give both the same {key}"
                    )
    tables = list(distinct_tables.values())
    if tables:
        check_tables(tables)
    return tables


def read_from_data(module: nn.Module) -> tuple[list[EmbeddingConfig], list[TableLookup]]:
    """List the tables and lookups of a model that read the ids of the data: those of all
    collections but the ones that the model calls with ids of its own.
    """
    own = {
        t.name
        for _, collection in collections_in(module)
        if getattr(collection, "own_ids", False)
        for t in collection.tables()
    }
    return (
        [t for t in embedding_tables(module) if t.name not in own],
        [x for x in embedding_lookups(module) if x.table.name not in own],
    )


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

    # The attribute that holds the tables; its name is part of the state dict's keys.
    tables_of: ClassVar[str]
    # Whether the model calls the collection with ids of its own, although other collections may
    # have features of the same names.
    own_ids = False

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
        rows: Any = getattr(self, self.tables_of)[table].weight
        assert isinstance(rows, Tensor)
        return rows

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
        embedding = getattr(collection, collection.tables_of)[table.name]
        rows = state.get(f"{prefix}{collection.tables_of}.{key_of(table.name)}.weight")
        if rows is not None and not isinstance(rows, Tensor):
            raise ConfigError(
                f"table {table.name}: load_state_dict: the state dict holds a "
                f"{type(rows).__name__}, not a tensor: one of a sharded model has the strips of "
                "its rank, which a sharded model takes; for this one save "
                "recapp.gathered_state_dict(model), whole tables"
            )
        if (
            embedding.weight.is_meta
            and isinstance(rows, Tensor)
            and rows.shape == embedding.weight.shape
        ):
            embedding.weight = nn.Parameter(rows.detach(), embedding.weight.requires_grad)


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


class EmbeddingBagCollection(UnshardedCollection):
    """Pool bags of ids into vectors: KeyedJaggedTensor -> KeyedTensor.

    Args:
        tables: The tables. Their order and the order of their features is the order of the output.
        is_weighted: True: rows are multiplied by the sample weights of their ids, which must have
            some. False: sample weights are ignored, with a note. None: rows are multiplied if a
            batch has sample weights.
        device: The device of the tables; `torch.device("meta")` allocates none yet.
        seed: The seed of the start values (`recapp/tables/initial.py`).
        lookups: The lookups, in the order of the output; None takes one lookup for each table and
            feature, with the table's pooling.
        sparse: True: gradients of the tables are sparse and hold only the rows that were read, as
            `torch.optim.SparseAdam` needs them. False: they are dense, as in TorchRec, for any
            optimiser and `clip_grad_norm_`.

    Raises:
        ConfigError: There are no tables, two tables have one name, lookups do not fit the tables,
            `is_weighted` is no truth value, or a table cannot have sparse gradients.
    """

    tables_of = "embedding_bags"

    def __init__(
        self,
        tables: Sequence[EmbeddingConfig],
        is_weighted: bool | None = False,
        device: torch.device | str | None = None,
        seed: int = 0,
        *,
        lookups: Sequence[TableLookup] | None = None,
        sparse: bool = False,
    ) -> None:
        check_tables(tables)
        if not isinstance(is_weighted, bool | None):
            raise ConfigError(
                f"is_weighted={is_weighted}: must be True, False or None; name device and seed by "
                "keyword"
            )
        read = lookups_of(tables) if lookups is None else tuple(lookups)
        check_lookups(tables, read)
        for lookup in read:
            if lookup.pooling is PoolingType.NONE:
                raise ConfigError(
                    f"lookup {lookup.output} of table {lookup.table.name} does not pool its bags: "
                    "make the table an EmbeddingBagConfig, or for sequences the collection an "
                    "EmbeddingCollection"
                )
        super().__init__(tables, read, device, seed, is_weighted, sparse)
        self.room = 0

    def embedding_bag_configs(self) -> list[EmbeddingConfig]:
        """Return the tables, in order, like TorchRec's method."""
        return self.tables()

    @override
    def module_of(self, weight_RD: Tensor) -> nn.EmbeddingBag:
        rows, columns = weight_RD.shape
        return nn.EmbeddingBag(rows, columns, mode="sum", sparse=self.sparse, _weight=weight_RD)

    def leave_room(self, columns: int) -> None:
        """Store the number of columns for the sharded collection that replaces this one.

        This collection leaves no room: its output is concatenated from the lookups' vectors.
        """
        self.room = columns

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pool every bag.

        Args:
            features: Raw ids of at least the tables' features, with weights or without.

        Returns:
            [B, sum of dims], keyed by feature (`feature@table` if several tables read one), in the
            collection's compute dtype. With inverse indices B counts samples, else bags.

        Raises:
            IdError: An id is outside of a table whose rule is `error`.
            ConfigError: The collection is weighted and the ids have no weights; a table is dynamic,
                and only sharded tables have dynamic rows; features have different numbers of bags
                without inverse indices; or the ids are on the meta device, and the tables are not.
        """
        rows = self.id_rules(features)
        self._check_has_rows(rows.rows_L)
        weights = (
            [None] * len(rows.per_F)
            if rows.weights_L is None
            else torch.split(rows.weights_L.to(self.dtype), rows.per_F)
        )
        parts = []
        for lookup, rows_N, lengths_B, weights_N in zip(
            self.lookups,
            torch.split(rows.rows_L, rows.per_F),
            rows.lengths_FB,
            weights,
            strict=True,
        ):
            lengths_M = lengths_B
            if lookup.hotness:  # a bag of one id or none for each vector of a concatenation
                number_H = torch.arange(lookup.hotness, device=lengths_B.device)
                lengths_M = (lengths_B[:, None] > number_H).view(-1)
            pooled_BD = F.embedding_bag(
                rows_N,
                self.weight(lookup.table.name).to(self.dtype),
                F.pad(lengths_M.cumsum(0), (1, 0)).long(),
                mode="sum",
                include_last_offset=True,
                per_sample_weights=weights_N,
                sparse=self.sparse,
            )
            if lookup.pooling is PoolingType.MEAN:
                pooled_BD = pooled_BD * lengths_B.clamp(min=1).to(self.dtype).reciprocal()[:, None]
            parts.append(pooled_BD.view(lengths_B.shape[0], lookup.columns))
        return pooled_of_samples(self.lookups, torch.cat(parts, 1), features)


class SequenceTables:
    """The questions of TorchRec's programs to a collection of sequences, sharded or not."""

    lookups: tuple[TableLookup, ...]
    _tables: list[EmbeddingConfig]
    _need_indices: bool

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """Return the tables, in order, like TorchRec's method."""
        return list(self._tables)

    def need_indices(self) -> bool:
        """Return whether the weights of an output are the looked-up rows."""
        return self._need_indices

    def embedding_dim(self) -> int:
        """Return the columns D of every table.

        Raises:
            ConfigError: The tables have different widths, which TorchRec's cannot have.
        """
        return common_dim(self._tables)

    def embedding_names_by_table(self) -> list[list[str]]:
        """Return the outputs of each table, in the order of the tables."""
        return outputs_by_table(self.lookups)


class EmbeddingCollection(SequenceTables, UnshardedCollection):
    """Looks up a vector for every id: KeyedJaggedTensor -> a JaggedTensor of vectors per feature.

    Args:
        tables: The tables. Their order and the order of their features is the order of the output.
            The pooling of an `EmbeddingBagConfig` has no meaning here.
        device: The device of the tables; `torch.device("meta")` allocates none yet.
        need_indices: Whether the weights of an output are the looked-up rows. For the id rule
            `error` and for dynamic tables these are the ids themselves.
        seed: The seed of the start values (`recapp/tables/initial.py`).
        lookups: The lookups, in the order of the output, which do not pool; None takes one lookup
            for each table and feature.
        sparse: See `EmbeddingBagCollection`.

    Raises:
        ConfigError: There are no tables, two tables have one name, lookups do not fit the tables or
            pool their bags, or a table cannot have sparse gradients.
    """

    tables_of = "embeddings"

    def __init__(
        self,
        tables: Sequence[EmbeddingConfig],
        device: torch.device | str | None = None,
        need_indices: bool = False,
        seed: int = 0,
        *,
        lookups: Sequence[TableLookup] | None = None,
        sparse: bool = False,
    ) -> None:
        check_tables(tables)
        configs = {t.name: sequence_table(t) for t in tables}
        read = lookups_of(list(configs.values()))
        if lookups is not None:
            check_lookups(tables, lookups)
            read = tuple(replace(x, table=configs[x.table.name]) for x in lookups)
        for lookup in read:
            if lookup.pooling is not PoolingType.NONE:
                raise ConfigError(
                    f"lookup {lookup.output} of table {lookup.table.name} pools its bags "
                    f"({lookup.pooling}): give it pooling none, or make the collection an "
                    "EmbeddingBagCollection"
                )
        super().__init__(list(configs.values()), read, device, seed, False, sparse)
        self._need_indices = need_indices

    @override
    def module_of(self, weight_RD: Tensor) -> nn.Embedding:
        rows, columns = weight_RD.shape
        return nn.Embedding(rows, columns, sparse=self.sparse, _weight=weight_RD)

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Look up every id.

        Args:
            features: Raw ids of at least the tables' features; weights are ignored.

        Returns:
            For each feature (`feature@table` where several tables read one) its vectors [L, D],
            with the lengths of its bags, in the collection's compute dtype.

        Raises:
            IdError: An id is outside of a table whose rule is `error`.
            ConfigError: A table is dynamic, and only sharded tables have dynamic rows; or the ids
                are on the meta device, and the tables are not.
        """
        rows = self.id_rules(features)
        self._check_has_rows(rows.rows_L)
        vectors = [
            nn.functional.embedding(row_N, self.weight(x.table.name), sparse=self.sparse).to(
                self.dtype
            )
            for x, row_N in zip(self.lookups, torch.split(rows.rows_L, rows.per_F), strict=True)
        ]
        return sequences(self.lookups, vectors, rows, self._need_indices, features)


def sequences(
    lookups: Sequence[TableLookup],
    vectors_F: Sequence[Tensor],
    rows: LookupRows,
    need_indices: bool,
    features: KeyedJaggedTensor,
) -> dict[str, JaggedTensor]:
    """Return the output of a sequence collection.

    Args:
        lookups: The lookups of the collection.
        vectors_F: The vectors of each lookup, [L, D].
        rows: The rows of these lookups, and the lengths of their bags.
        need_indices: See `EmbeddingCollection`.
        features: The ids that were looked up.
    """
    outputs: dict[str, Any] = {}
    rows_F = torch.split(rows.rows_L, rows.per_F)
    for x, vectors_LD, row_L, lengths_B in zip(
        lookups, vectors_F, rows_F, rows.lengths_FB, strict=True
    ):
        indices_L = None
        if need_indices:
            indices_L = row_L.long() if x.table.dynamic is None else keys_of(row_L)
        outputs[x.output] = JaggedTensor.unchecked(
            *sequences_of_samples(x.feature, vectors_LD, indices_L, lengths_B, features)
        )
    return outputs
