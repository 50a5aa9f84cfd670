"""Sharded collections of tables, placed by a plan, and the function that shards a finished model:
it replaces every collection of tables by its sharded twin.

Each is the twin of an unsharded collection: same input and same output under every plan. All
collections of a model share one `ShardedTables`, which looks up, exchanges and updates rows. A
collection is one member of them, and converts the vectors to the output of its unsharded twin.

Sharded tables in the optimisers of a module's own.

with tables_as_parameters(module):
    optimizer = torch.optim.Adam(module.parameters())    # has a weight for each table
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor, nn

from recapp.engine.dynamic_keys import ALWAYS_LOADED, KEYS
from recapp.engine.row_store import RowStore, StoredGroup
from recapp.engine.sharded_state import TableStrips, load_dynamic, load_strips, stored_names
from recapp.engine.sharded_tables import ShardedTables
from recapp.engine.state import Member
from recapp.engine.table_weights import MethodOf, TableParameter
from recapp.errors import ConfigError
from recapp.optim.named_rules import Rules, rules_of
from recapp.optim.rules import RowRule
from recapp.optim.table_rule import check_same_rule, rule_in_backward, with_frozen_of
from recapp.settings.other_systems import fused
from recapp.sharding.layout import Block, copy_rows
from recapp.sharding.sharding_plan import ShardingPlan
from recapp.sparse.jagged_tensor import JaggedTensor, KeyedTensor
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.tables.bags_of_samples import pooled_of_samples
from recapp.tables.collections import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    ModuleByName,
    SequenceTables,
    UnshardedCollection,
    embedding_tables,
    key_of,
    sequences,
)
from recapp.tables.config import EmbeddingConfig, TableLookup, lookups_of
from recapp.transport.communicator import Comm

Forward = TypeVar("Forward", bound=Callable[..., Any])


_disabled = cache(torch.compiler.disable)


def _outside_graphs(function: Forward) -> Forward:
    """Return a function at which torch.compile breaks its graph: it compiles neither the function
    nor anything that it calls. Messages and compiled kernels cannot be part of a graph.

    torch's own decorator would import the compiler, which takes seconds, in every process that
    looks rows up.
    """

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        compiles = "torch._dynamo" in sys.modules
        return (_disabled(function) if compiles else function)(*args, **kwargs)

    vars(call)["_torchdynamo_disable"] = True  # what the compiler asks of a function that it meets
    return call  # type: ignore[return-value]


class ShardedCollection(nn.Module):
    """One sharded collection of a model.

    Args:
        shared: The tables, and the exchange that all collections share.
        member: The number of this collection among those that share the tables.

    `plan` is the plan of the tables. `dtype` is the compute type, which is also the type of
    outputs, and `device` the device of this rank and of outputs. `parameters_of` has the
    collection's tables that are parameters, by name.
    """

    # The attribute of the unsharded collection that holds its tables; names of weights contain it.
    tables_of: ClassVar[str]

    def __init__(self, shared: ShardedTables, member: int = 0) -> None:
        super().__init__()
        self.member = member
        self.plan = shared.plan
        self.dtype = shared.dtype
        self.device = shared.comm.device
        self.lookups = shared.members[member].lookups
        self._tables = list({x.table.name: x.table for x in self.lookups}.values())
        self.tables_in_state = True
        self.attach(shared)
        # torch calls them in `state_dict` and `load_state_dict` of every module around
        self.register_state_dict_post_hook(  # type: ignore[no-untyped-call]
            ShardedCollection._save_tables
        )
        self.register_load_state_dict_pre_hook(  # type: ignore[no-untyped-call]
            ShardedCollection._load_tables
        )

    def attach(self, shared: ShardedTables) -> None:
        """Look up rows in sharded tables, which have those of the collection."""
        self.shared = shared
        names = [t.name for t in self._tables]
        parameters = shared.parameters_of
        self.parameters_of: Mapping[str, TableParameter] = {
            n: parameters[n] for n in names if n in parameters
        }
        modules: dict[str, nn.Module] = {**shared.updated, **parameters}
        setattr(self, self.tables_of, ModuleByName({name: modules[name] for name in names}))

    def tables(self) -> list[EmbeddingConfig]:
        """Return the tables, in order."""
        return list(self._tables)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Freeze the tables of the collection, or train them again, as on the unsharded twin. Every
        rank calls it between two steps.

        Raises:
            ConfigError: A table cannot be frozen now, or not be trained again
                (`ShardedTables.freeze`).
        """
        super().requires_grad_(requires_grad)  # of tables that are parameters
        names = [t.name for t in self._tables if t.name not in self.parameters_of]
        self.shared.freeze(names, not requires_grad)
        return self

    def holder_of(self, table: str) -> object:
        """Return the owner of a table: the shared tables, in which collections share tables of one
        name.
        """
        return self.shared

    def weight_name(self, table: str) -> str:
        """Return the name of a table's weight in the state dict of this collection."""
        return f"{self.tables_of}.{key_of(table)}.weight"

    def blocks(self) -> Iterator[Block]:
        """Yield this rank's rectangles of the collection's tables. Every rank calls it."""
        names = {t.name for t in self._tables}
        return (block for block in self.shared.blocks() if block.table in names)

    def _weights(self, prefix: str) -> dict[str, tuple[EmbeddingConfig, list[Block]]]:
        """Return the table of each weight, and this rank's rectangles of it that a state dict has,
        by the name of the weight.
        """
        blocks: dict[str, list[Block]] = {t.name: [] for t in self._tables}
        for block in self.blocks():
            if block.tensor in ALWAYS_LOADED:
                blocks[block.table].append(block)
        return {prefix + self.weight_name(t.name): (t, blocks[t.name]) for t in self._tables}

    def _of_parameters(self, prefix: str) -> dict[str, Tensor]:
        """Return the rows of the tables that are parameters, by the names of their weights."""
        return {
            prefix + self.weight_name(table): parameter.weight.detach()
            for table, parameter in self.parameters_of.items()
        }

    def _save_tables(self, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        """Put this rank's strips of each table into a state dict. Every rank calls it."""
        if not self.tables_in_state:
            for name in self._of_parameters(prefix):
                state.pop(name, None)
            return
        for name, (table, blocks) in self._weights(prefix).items():
            if table.name in self.parameters_of:  # torch has saved the whole table
                continue
            for stored in stored_names(name, table):
                tensor = "weight" if stored == name else KEYS
                state[stored] = TableStrips.of(
                    [b for b in blocks if b.tensor == tensor],
                    table,
                    table.embedding_dim if stored == name else 1,
                    self.shared.state.layout,
                    self.shared.comm.rank,
                )

    def _load_tables(
        self,
        state: dict[str, Any],
        prefix: str,
        metadata: Any,
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        """Copy the tables of a state dict to this rank's rows, and remove them from the dict,
        because torch does not know their names.
        """
        if not self.tables_in_state:
            state.update(self._of_parameters(prefix))
            return
        for name, (table, blocks) in self._weights(prefix).items():
            shape = (table.num_embeddings, table.embedding_dim)
            dtype = table.data_type.dtype
            stored = stored_names(name, table)
            lacking = [n for n in stored if n not in state]
            fault = ""
            if table.name in self.parameters_of:
                if not lacking:  # the rows get the strips, and torch loads the rows into themselves
                    fault = load_strips(state[name], blocks, shape, dtype)
                    state[name] = self.parameters_of[table.name].weight.detach()
            else:
                missing.extend(lacking)
                values = [state.pop(n, None) for n in stored]
                if table.dynamic is not None:  # all ranks take part, because they agree first
                    fault = load_dynamic(self.shared, table, values[0], values[1], bool(lacking))
                elif not lacking:
                    fault = load_strips(values[0], blocks, shape, dtype)
            if fault and not lacking:
                errors.append(f"table {table.name} ({name}): {fault}")

    @property
    def fused_optimizer(self) -> Any:
        """Return the update of the tables as an optimiser object.

        Raises:
            ConfigError: The tables are read-only.
        """
        return fused("FusedOptimizer")({"": self})

    def extra_repr(self) -> str:
        """Return the tables and their places."""
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


@contextmanager
def without_tables(collections: Sequence[ShardedCollection]) -> Iterator[None]:
    """Leave tables out of state dicts inside the context, so that a state dict without tables
    loads. The tables are stored elsewhere.
    """
    before = [collection.tables_in_state for collection in collections]
    for collection in collections:
        collection.tables_in_state = False
    try:
        yield
    finally:
        for collection, in_state in zip(collections, before, strict=True):
            collection.tables_in_state = in_state


class ShardedEmbeddingBagCollection(ShardedCollection):
    """A sharded `EmbeddingBagCollection`, placed by a plan. Arguments as for
    `ShardedCollection`.
    """

    tables_of = "embedding_bags"

    def is_weighted(self) -> bool | None:
        """Return whether rows are multiplied by sample weights; None where each batch decides."""
        return self.shared.members[self.member].is_weighted

    def embedding_bag_configs(self) -> list[EmbeddingConfig]:
        """Return the tables, in order, like TorchRec's method."""
        return self.tables()

    @property
    def width(self) -> int:
        """Return the number of columns of a sample's vectors."""
        return self.shared.members[self.member].columns

    @property
    def room(self) -> int:
        """Return the number of free columns before the first vector of a sample."""
        return self.shared.state.outputs.room[self.member]

    def leave_room(self, columns: int) -> None:
        """Leave columns free before the first vector of a sample, from the next lookup on.
        `KeyedTensor.prepend` writes to them.
        """
        self.shared.state.leave_room(self.member, columns)

    @_outside_graphs
    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pool every bag. Every rank calls it with its own batch, which may be empty.

        Args:
            features: Raw ids, which include all features of the tables.

        Returns:
            [B, sum of columns], keyed by output (a feature, or `feature@table` where several tables
            read one feature). Where the batch has inverse indices, the rows are its samples, and
            the indices name the bags of each sample.

        Raises:
            IdError: On all ranks, if one rank has an id outside a table with the id rule `error`.
        """
        (values_BD,), _ = self.shared(features, self.member)
        return pooled_of_samples(self.lookups, values_BD, features, self.room)


class ShardedEmbeddingCollection(SequenceTables, ShardedCollection):
    """A sharded `EmbeddingCollection`, placed by a plan. Arguments as for `ShardedCollection`.

    With `need_indices`, the weights of an output are the rows that were looked up.
    """

    tables_of = "embeddings"

    def __init__(self, shared: ShardedTables, member: int = 0, need_indices: bool = False) -> None:
        super().__init__(shared, member)
        self._need_indices = need_indices

    @_outside_graphs
    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Look up every id. Every rank calls it with its own batch, which may be empty.

        Args:
            features: Raw ids, which include all features of the tables; weights are ignored.

        Returns:
            For each feature (`feature@table` where several tables read one feature) the vectors [L,
            D] and the lengths of the bags.

        Raises:
            IdError: On all ranks, if one rank has an id outside a table with the id rule `error`.
        """
        vectors, rows = self.shared(features, self.member)
        return sequences(self.lookups, vectors, rows, self._need_indices, features)


def shard_bags(
    tables: Sequence[EmbeddingConfig],
    plan: ShardingPlan,
    comm: Comm,
    rule: Rules | None,
    seed: int = 0,
    backend: str = "auto",
    trains: bool = True,
    make_store: Callable[[StoredGroup], RowStore] | None = None,
    lookups: Sequence[TableLookup] | None = None,
) -> ShardedEmbeddingBagCollection:
    """Return a sharded collection of bags that shares its tables with no other. Every rank calls
    it.

    Args:
        tables: As for the unsharded collection.
        plan: As for `ShardedTables`, like `comm`, `rule`, `seed`, `backend`, `trains` and
            `make_store`.
        lookups: The lookups of the tables, in output order; None takes the lookups that the tables
            declare.
    """
    member = Member(lookups_of(tables) if lookups is None else tuple(lookups))
    shared = ShardedTables(
        list(tables), plan, comm, rule, seed, backend, None, trains, make_store, [member]
    )
    return ShardedEmbeddingBagCollection(shared)


def embedding_collections(module: nn.Module) -> list[tuple[str, UnshardedCollection]]:
    """Return every unsharded collection in a model, with its path. A collection with two paths is
    listed twice.
    """
    return [
        (path, m)
        for path, m in module.named_modules(remove_duplicate=False)
        if isinstance(m, UnshardedCollection)
    ]


def sharded_collections(module: nn.Module) -> list[ShardedCollection]:
    """Return every sharded collection in a model."""
    return [m for m in module.modules() if isinstance(m, ShardedCollection)]


def sharded_tables(module: nn.Module) -> list[ShardedTables]:
    """Return the sharded tables of a model's collections, without duplicates."""
    return [m for m in module.modules() if isinstance(m, ShardedTables)]


def weight_names(module: nn.Module) -> dict[str, str]:
    """Return the table of each weight, by the weight's name in the state dict of the unsharded
    model.
    """
    return {
        f"{path}.{part.weight_name(table.name)}".lstrip("."): table.name
        for path, part in module.named_modules(remove_duplicate=False)
        if isinstance(part, ShardedCollection)
        for table in part.tables()
    }


def shard_model(
    module: nn.Module,
    plan: ShardingPlan,
    comm: Comm,
    rule: Rules | None,
    backend: str = "auto",
    payload: torch.dtype | None = None,
    trains: bool = True,
    make_store: Callable[[StoredGroup], RowStore] | None = None,
) -> nn.Module:
    """Replace every unsharded collection in a model, in place. Sharded collections stay.

    The collections of a model share one exchange, so they send no more messages than one
    collection.

    Args:
        module: The model.
        plan: The sharding plan of the model's tables.
        comm: Communicator of the ranks.
        rule: Optimiser of the rows, or rules by table name or glob; None for read-only tables.
        backend: As for `ShardedTables`.
        payload: As for `ShardedTables`.
        trains: As for `ShardedTables`.
        make_store: As for `ShardedTables`.

    The rows of a collection on a real device are copied. A collection on the meta device has no
    rows: its twin gets start values from the collection's seed, the same under every plan.

    Returns:
        The model; or its twin, where the model itself is a collection.

    Raises:
        PlanError: The plan does not cover the tables of the model, or is for another number of
            ranks.
        ConfigError: Another optimiser was applied in backward to the tables, or rules name tables
            that the model does not have.
    """
    paths_and_collections = embedding_collections(module)
    in_backward = rule_in_backward(module)
    if in_backward and rule:
        check_same_rule(in_backward, rule, "the rule that shards them")
    rules: dict[str, RowRule] = {}
    if paths_and_collections:
        tables = embedding_tables(module)
        plan.check(tables)
        rules = rules_of(rule and with_frozen_of(rule, module), [t.name for t in tables])
    together: dict[torch.dtype, list[UnshardedCollection]] = {}
    for collection in dict.fromkeys(collection for _, collection in paths_and_collections):
        together.setdefault(collection.dtype, []).append(collection)
    _check_shared(together)
    twins: dict[UnshardedCollection, ShardedCollection] = {}
    for collections in together.values():  # only vectors of one dtype can share a buffer
        group_rules = (
            {t.name: rules[t.name] for c in collections for t in c.tables()} if rules else None
        )
        new_twins = sharded_twins(
            collections, plan, comm, group_rules, backend, payload, trains, make_store
        )
        twins |= zip(collections, new_twins, strict=True)
    for path, collection in paths_and_collections:
        parent, _, name = path.rpartition(".")
        if path:
            setattr(module.get_submodule(parent), name, twins[collection])
        else:
            module = twins[collection]
    for around in modules_around_tables(module):
        if type(around).requires_grad_ is nn.Module.requires_grad_:
            around.requires_grad_ = MethodOf(around, _requires_grad_)  # type: ignore[method-assign]
    return module


def modules_around_tables(module: nn.Module) -> list[nn.Module]:
    """Return the modules of a model that have sharded collections inside."""
    inside = {
        id(part) for collection in sharded_collections(module) for part in collection.modules()
    }
    return [m for m in module.modules() if id(m) not in inside and sharded_collections(m)]


def _requires_grad_(module: nn.Module, requires_grad: bool = True) -> nn.Module:
    """Freeze a module or train it, with its sharded tables, which are no parameters of it."""
    for collection in sharded_collections(module):
        collection.requires_grad_(requires_grad)
    return nn.Module.requires_grad_(module, requires_grad)


def sharded_twins(
    collections: Sequence[UnshardedCollection],
    plan: ShardingPlan,
    comm: Comm,
    rule: Rules | None,
    backend: str = "auto",
    payload: torch.dtype | None = None,
    trains: bool = True,
    make_store: Callable[[StoredGroup], RowStore] | None = None,
) -> list[ShardedCollection]:
    """Return the sharded twins of collections. The twins share one exchange. Arguments as for
    `shard_model`.
    """
    tables: dict[str, tuple[EmbeddingConfig, int]] = {}
    for c in collections:
        for t in c.tables():
            tables.setdefault(t.name, (t, c.seed))
    shared = ShardedTables(
        [t for t, _ in tables.values()],
        plan.part(list(tables)),
        comm,
        rule,
        {name: seed for name, (_, seed) in tables.items()},
        backend,
        payload,
        trains,
        make_store,
        members=[Member(c.lookups, c.is_weighted(), c.own_ids) for c in collections],
        dtype=collections[0].dtype,
    )
    twins = [_twin(c, shared, number) for number, c in enumerate(collections)]
    for twin, collection in zip(twins, collections, strict=True):
        _take_over_rows(twin, collection)
    return twins


def _check_shared(together: Mapping[torch.dtype, Sequence[UnshardedCollection]]) -> None:
    """Check that collections with a common table have one compute type.

    Raises:
        ConfigError: They have several; the text names the table.
    """
    dtype_of: dict[str, torch.dtype] = {}
    for dtype, collections in together.items():
        for name in (t.name for c in collections for t in c.tables()):
            if dtype_of.setdefault(name, dtype) != dtype:
                raise ConfigError(
                    f"table {name} is shared by collections that compute in {dtype_of[name]} and "
                    f"{dtype}: give the tables of both collections one data_type"
                )


def _twin(collection: UnshardedCollection, shared: ShardedTables, number: int) -> ShardedCollection:
    if isinstance(collection, EmbeddingCollection):
        return ShardedEmbeddingCollection(shared, number, collection.need_indices())
    assert isinstance(collection, EmbeddingBagCollection)
    twin = ShardedEmbeddingBagCollection(shared, number)
    twin.leave_room(collection.room)
    return twin


def _take_over_rows(twin: ShardedCollection, collection: UnshardedCollection) -> None:
    """Copy the rows of a collection on a real device to its twin."""
    for name, parameter in twin.parameters_of.items():
        parameter.weight.requires_grad_(collection.weight(name).requires_grad)
    dynamic = {t.name for t in collection.tables() if t.dynamic is not None}  # no rows to copy
    for block in twin.blocks():
        if block.table in dynamic:
            continue
        whole = collection.weight(block.table)
        if block.tensor == "weight" and whole.device.type != "meta":
            rows, cols = map(range, whole.shape)
            copy_rows(block, whole.detach(), rows, cols, None)


@contextmanager
def tables_as_parameters(module: nn.Module) -> Iterator[None]:
    """Let every sharded table of a model be one of its parameters, inside the context, with the
    name of the unsharded model. A table that is frozen, or without a row rule, requires no
    gradient.
    """
    tables = [t for shared in sharded_tables(module) for t in shared.updated.values()]
    for table in tables:
        table.offer(True)
    try:
        yield
    finally:
        for table in tables:
            table.offer(False)


def change_rules(module: nn.Module, rules: Mapping[str, RowRule]) -> None:
    """Give the sharded tables of a model other row rules, with new state. The rows and the plan
    stay. Every rank calls it.

    Args:
        module: The model.
        rules: The new row rules by table; other tables keep theirs.

    Raises:
        ConfigError: A table is dynamic, and its rows cannot be moved.
    """
    collections = sharded_collections(module)
    for old in sharded_tables(module):
        names = [t.name for t in old.tables()]
        if any(t.dynamic is not None for t in old.tables()):
            raise ConfigError(
                f"tables {', '.join(names)} were sharded with another row rule, and some of them "
                "are dynamic: call fit of a new module, or name their rule by "
                "EmbeddingShardingStrategy(rule=...)"
            )
        new = ShardedTables(
            old.tables(),
            old.plan,
            old.comm,
            {name: rule for name, rule in {**old.rules, **rules}.items() if name in names},
            old.seeds,
            old.state.backend.name,
            old.state.payload,
            members=old.members,
            dtype=old.dtype,
        )
        rows = [block for block in old.blocks() if block.tensor == "weight"]
        for block in new.blocks():
            for source in rows if block.tensor == "weight" else ():
                if source.table == block.table:
                    copy_rows(block, source.data, source.rows, source.cols, source.order)
        for collection in collections:
            if collection.shared is old:
                collection.attach(new)
        new.freeze(old.frozen)
