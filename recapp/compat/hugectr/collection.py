"""HugeCTR's embedding collection. The embedding part of a program for HugeCTR runs as follows:

    from recapp import hugectr

    tables = [hugectr.EmbeddingTableConfig(table_id=k, max_vocabulary_size=n, ev_size=128,
                                           min_key=0, max_key=n) for k, n in enumerate(sizes)]
    planner = hugectr.EmbeddingPlanner()
    for k, table in enumerate(tables):
        planner.embedding_lookup(table, f"data{k}", f"emb_vec{k}", "sum")
    made = planner.create_embedding_collection("plan.json")

    model = MyModel(made.module(device="meta"))     # an EmbeddingBagCollection
    model = DistributedModelParallel(model, plan=made.plan)

Names and order of arguments are those of versions 3.7 to 25.03. The number of a lookup is its place
in the order of declaration. Programs import these names from `recapp.hugectr`
(`recapp/compat/foreign_paths.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recapp.compat.hugectr.plans import NO_MATRIX, Lists, printed, shown_plan
from recapp.compat.hugectr.program_settings import OptParams, rules_of_opt_params
from recapp.compat.hugectr.words import (
    LOOKUP_WORDS,
    CommunicationStrategy,
    NamedEnum,
    check_others,
    checked,
    combiner_of,
    plain,
    rows_of,
    table_name,
    under_recapp_names,
)
from recapp.console import note_once
from recapp.errors import ConfigError, PlanError, suggest
from recapp.optim.rules import RowRule
from recapp.settings.values import Natural
from recapp.sharding.plan_file import load_plan
from recapp.sharding.sharding_plan import ShardingPlan
from recapp.sparse.jagged_tensor import KeyedTensor
from recapp.tables.collections import EmbeddingBagCollection
from recapp.tables.config import (
    EmbeddingBagConfig,
    PoolingType,
    TableLookup,
    check_lookups,
    check_max_key,
)
from recapp.tables.positions import DYNAMIC

LOOKUP = ("table", "feature", "output", "combiner")
CONCAT = ("hotness", "truncates")
"""Arguments of a lookup that recapp adds to HugeCTR's."""
OPT_PARAMS = ("opt_params_py", "opt_params_or_empty")
MORE = ("data_type", "id_rule", "init_range", "dynamic")
PLAN = "create_embedding_collection"


class EmbeddingTableConfig:
    """One table, as HugeCTR describes it.

    Args:
        id_space: The number of the set of keys that index the table; by default the count of the
            tables in earlier lookups. Tables of one `id_space` share their keys, not their vectors.
            A text is the table's name, as in later versions.
        max_vocabulary_size: The number of rows; -1 makes a dynamic table, which takes any key and
            grows.
        ev_size: The number of columns.
        min_key: The key of row 0. Later versions have `opt_params` at this position.
        max_key: The largest key, or the number after it; it must fit the number of rows.
        opt_params: The return value of `CreateOptimizer`; None takes the optimiser of the model.
        table_id: The number of the table, used as its name; unique in a collection.
        name: The name of the table, unique in a collection.
        others: `opt_params` under its other names, and recapp's `data_type`, `id_rule`,
            `init_range` and `dynamic`.

    Raises:
        ConfigError: A value is not allowed, or an argument is unknown.
    """

    def __init__(
        self,
        id_space: int | str | None = None,
        max_vocabulary_size: int | None = None,
        ev_size: int | None = None,
        min_key: Any = 0,
        max_key: int | None = None,
        opt_params: OptParams | None = None,
        *,
        table_id: int | None = None,
        name: str | None = None,
        **others: Any,
    ) -> None:
        if isinstance(id_space, str):
            name = id_space if name is None else name
            id_space = None
        check = partial(checked, "EmbeddingTableConfig")
        name = None if name is None else check("name", name, str)
        if min_key is None or isinstance(min_key, OptParams):
            opt_params = opt_params or min_key
            min_key = 0
        self.id_space = check("id_space", id_space, Natural | None)
        self.table_id = check("table_id", table_id, Natural | None)
        self.name = name
        self.max_vocabulary_size = plain(max_vocabulary_size)
        self.ev_size = plain(ev_size)
        self.min_key = plain(min_key)
        self.max_key = plain(max_key)
        for key in OPT_PARAMS:
            opt_params = others.pop(key, None) or opt_params
        label = table_name(name, table_id, id_space, ())
        if not isinstance(opt_params, OptParams | None):
            raise ConfigError(
                f"EmbeddingTableConfig: {label}: opt_params={opt_params}: must be a result of "
                "CreateOptimizer"
            )
        self.opt_params = opt_params
        known = ("id_space", "table_id", "name", "max_key", "opt_params", *MORE)
        unknown = {key: value for key, value in others.items() if key not in MORE}
        check_others(f"EmbeddingTableConfig: {label}", unknown, {}, {}, known)
        self._more = others
        self.record(label, ["a feature"])

    def record(self, name: str, features: Sequence[str]) -> EmbeddingBagConfig:
        """Return recapp's record of the table.

        Args:
            name: The name of the table.
            features: The features that are looked up in the table.

        Raises:
            ConfigError: A value is missing or not allowed.
        """
        if self.max_vocabulary_size is None or self.ev_size is None:
            missing = "ev_size" if self.ev_size is None else "max_vocabulary_size"
            raise ConfigError(f"EmbeddingTableConfig: {name}: {missing} must be given")
        rows = rows_of(self.max_vocabulary_size)
        grows = rows == DYNAMIC
        if not grows and (not isinstance(rows, int) or isinstance(rows, bool) or rows < 1):
            raise ConfigError(
                f"EmbeddingTableConfig: {name}: max_vocabulary_size={rows}: must be a whole number "
                "of at least 1, or -1 for a table of any keys, which grows"
            )
        if grows and (self.min_key or self.max_key is not None):
            note_once(
                "max_vocabulary_size=-1: such a table takes any key: min_key and max_key have "
                "no effect"
            )
        config = EmbeddingBagConfig(
            name=name,
            num_embeddings=rows,
            embedding_dim=self.ev_size,
            feature_names=features,
            min_key=0 if grows else self.min_key,
            **self._more,
        )
        if self.max_key is not None and not grows:
            check_max_key(config, self.max_key)
        return config


@dataclass(frozen=True)
class EmbeddingCollection:
    """Tables, their lookups in the order of declaration, and a sharding plan.

    Args:
        tables: The tables.
        lookups: The lookups.
        plan: The sharding plan; None lets recapp plan. Tables for which it sets no mode get the
            mode `unique`.
        opt_params: The optimiser of each table that names one, by the table's name.
        unsized: The outputs of the concatenations without a `hotness`; until `sized` they have the
            hotness 1.
    """

    tables: tuple[EmbeddingBagConfig, ...]
    lookups: tuple[TableLookup, ...]
    plan: ShardingPlan | None = None
    opt_params: Mapping[str, OptParams] = field(default_factory=dict)
    unsized: frozenset[str] = frozenset()

    def sized(self, most_keys: Mapping[str, int]) -> "EmbeddingCollection":
        """Return the collection with the hotness of every concatenation.

        Args:
            most_keys: The most keys of a sample, by feature: the `nnz_per_slot` of an Input.
        """
        known = {
            x.output for x in self.lookups if x.output in self.unsized and x.feature in most_keys
        }
        lookups = tuple(
            replace(x, hotness=most_keys[x.feature]) if x.output in known else x
            for x in self.lookups
        )
        return replace(self, lookups=lookups, unsized=self.unsized - known)

    def module(
        self, device: torch.device | str | None = None, seed: int = 0
    ) -> EmbeddingBagCollection:
        """Return the collection for a model to hold; `DistributedModelParallel` shards it.

        Args:
            device: The device of the tables; `meta` allocates no memory yet.
            seed: The seed of the start values.

        Raises:
            ConfigError: A concatenation has no hotness.
        """
        if self.unsized:
            raise ConfigError(
                f"lookup {min(self.unsized)}: combiner=concat: embedding_lookup must get "
                "hotness, the most keys of a sample, as there is no Input with an nnz_per_slot"
            )
        return EmbeddingBagCollection(self.tables, device=device, seed=seed, lookups=self.lookups)

    def rules(self, others: RowRule) -> dict[str, RowRule]:
        """Return the row rule of every table, for `EmbeddingBagCollectionSharder(rule=...)`.

        Args:
            others: The rule of tables that name no optimiser. All tables use its learning rate,
                because HugeCTR's solver has only one.
        """
        return {"*": others} | rules_of_opt_params(self.opt_params, others.lr)

    def outputs(self, pooled: KeyedTensor) -> dict[str, Tensor]:
        """Return the vectors in the shapes that HugeCTR's layers take, by output of the lookups.

        Args:
            pooled: The output of the module.

        Returns:
            [B, 1, D] for a sum or an average, so that a concatenation of F of them along dimension
            1 has [B, F, D]; [B, hotness x D] for the combiner `concat`.
        """
        concatenated = {x.output for x in self.lookups if x.pooling is PoolingType.CONCAT}
        return {
            name: vectors_BD if name in concatenated else vectors_BD[:, None]
            for name, vectors_BD in pooled.to_dict().items()
        }

    def lists(self) -> Lists:
        """Return the plan as the plain values of HugeCTR's plan file.

        Raises:
            PlanError: There is no plan, or HugeCTR's format cannot express it.
        """
        if self.plan is None:
            raise PlanError(f"the embedding collection has no plan: give {PLAN} a plan file")
        return shown_plan(self.plan, self.tables, self.lookups)[0]


class _Lookups:
    def __init__(self) -> None:
        self._names: dict[EmbeddingTableConfig, str] = {}
        self._read: list[dict[str, Any]] = []

    def embedding_lookup(self, *values: Any, **named: Any) -> None:
        """Declare one lookup or several. The number of a lookup is the count of earlier ones.

        Args:
            values: By position: the table, the name of its input, the name of its output, and the
                combiner `sum`, `average` or `concat`. Lists of tables and inputs declare one lookup
                for each pair; a single output name then gets the index in the list as a suffix.
            named: The same by name: `table_config` or `emb_table`, `bottom_name` or `input`,
                `top_name` or `output`, `combiner`; for `concat` also `truncates` and `hotness`. A
                `Model` takes a hotness that is not given from the `nnz_per_slot` of its Input.

        Raises:
            ConfigError: An argument is missing or unknown, lists have different lengths, combiners
                in a list differ, or another table has the same name.
        """
        arguments = _arguments(values, named)
        tables = arguments["table"]
        if not isinstance(tables, list | tuple):
            self._declare(arguments)
            return
        count = len(tables)
        outputs = arguments["output"]
        combiners = arguments["combiner"]
        if isinstance(outputs, str):
            outputs = [f"{outputs}{k}" for k in range(count)]
        if isinstance(combiners, str):
            combiners = [combiners] * count
        if not count == len(arguments["feature"]) == len(outputs) == len(combiners):
            raise ConfigError(
                f"embedding_lookup: {count} tables, {len(arguments['feature'])} inputs, "
                f"{len(outputs)} outputs and {len(combiners)} combiners: "
                "must be lists of one length"
            )
        if len(set(combiners)) > 1:
            raise ConfigError(
                f"embedding_lookup: the combiners of one lookup differ ({', '.join(combiners)}): "
                "call it once for each combiner"
            )
        more = {key: arguments[key] for key in CONCAT if key in arguments}
        for part in zip(tables, arguments["feature"], outputs, combiners, strict=True):
            self._declare(dict(zip(LOOKUP, part, strict=True)) | more)

    def _declare(self, arguments: Mapping[str, Any]) -> None:
        table = arguments["table"]
        if not isinstance(table, EmbeddingTableConfig):
            raise ConfigError(
                f"embedding_lookup: table_config={table}: must be an EmbeddingTableConfig"
            )
        if table not in self._names:
            earlier_names = list(self._names.values())
            name = table_name(table.name, table.table_id, table.id_space, earlier_names)
            if name in earlier_names:
                raise ConfigError(
                    f"embedding_lookup: two tables are called {name}: give each a name or table_id "
                    "of its own, or look both up in one EmbeddingTableConfig"
                )
            self._names[table] = name
        where = f"lookup {len(self._read)} ({arguments['output']})"
        self._read.append({**arguments, "combiner": combiner_of(arguments["combiner"], where)})

    def _collection(self, plan: ShardingPlan | None = None) -> EmbeddingCollection:
        if not self._read:
            raise ConfigError("no lookup is declared: call embedding_lookup for each")
        features: dict[EmbeddingTableConfig, dict[str, None]] = {}
        for lookup in self._read:
            features.setdefault(lookup["table"], {})[lookup["feature"]] = None
        configs = {
            table: table.record(name, list(features[table])) for table, name in self._names.items()
        }
        unsized = frozenset(
            lookup["output"]
            for lookup in self._read
            if lookup["combiner"] is PoolingType.CONCAT and lookup.get("hotness") is None
        )
        lookups = tuple(
            TableLookup(
                configs[lookup["table"]],
                lookup["feature"],
                lookup["output"],
                lookup["combiner"],
                1 if lookup["output"] in unsized else lookup.get("hotness"),
                lookup.get("truncates", False),
            )
            for lookup in self._read
        )
        tables = tuple(configs.values())
        check_lookups(tables, lookups)
        opt_params = {name: t.opt_params for t, name in self._names.items() if t.opt_params}
        if plan is not None:
            plan = plan.with_modes(dict.fromkeys(plan.undecided, "unique"))
        return EmbeddingCollection(tables, lookups, plan, opt_params, unsized)


class EmbeddingPlanner(_Lookups):
    """Declares lookups, and makes a collection of them under a plan."""

    def create_embedding_collection(
        self, plan_file: str | Path | None = None, *matrix: Any, **others: Any
    ) -> EmbeddingCollection:
        """Return the collection of all lookups declared so far.

        Args:
            plan_file: A plan in HugeCTR's JSON or in recapp's YAML; None lets recapp plan.
            matrix: Must be empty: version 4.1 has a plan of another form as its arguments.
            others: No other argument is allowed.

        Raises:
            ConfigError: No lookup is declared, or one is wrong.
            PlanError: The plan is wrong or belongs to other tables, or is no file.
        """
        unknown = [n for n in others if "matrix" not in n and not n.startswith("emb_table_")]
        if unknown:
            raise PlanError(f"{PLAN}({unknown[0]}=...): {suggest(unknown[0], ['plan_file'])}")
        if matrix or others or not isinstance(plan_file, str | Path | None):
            raise PlanError(f"{PLAN} takes a plan_file alone: {NO_MATRIX}")
        bare = self._collection()
        if plan_file is None:
            return bare
        return self._collection(load_plan(plan_file, bare.tables, None, bare.lookups))


class EmbeddingCollectionConfig(_Lookups):
    """Declares lookups, in later versions; `collection` returns the result.

    Args:
        use_exclusive_keys: Whether no two tables have a key in common. HugeCTR sorts keys
            accordingly; recapp ignores it.
        comm_strategy: The way HugeCTR exchanges vectors; recapp ignores it and chooses by the
            ranks.
    """

    def __init__(
        self,
        use_exclusive_keys: bool = False,
        comm_strategy: NamedEnum = CommunicationStrategy.Uniform,
    ) -> None:
        super().__init__()
        if use_exclusive_keys or comm_strategy != CommunicationStrategy.Uniform:
            note_once(
                "EmbeddingCollectionConfig: use_exclusive_keys and comm_strategy have no "
                "effect: they select algorithms of HugeCTR with equal results"
            )

    def shard(self, *arguments: Any, **named: Any) -> None:
        """Refuse a sharding of the tables.

        Args:
            arguments: HugeCTR's arguments, without effect.
            named: The same by name.

        Raises:
            PlanError: Always; the error names the replacement.
        """
        raise PlanError(f"EmbeddingCollectionConfig.shard: {NO_MATRIX}")

    @property
    def collection(self) -> EmbeddingCollection:
        """Return the collection of all lookups declared so far.

        Raises:
            ConfigError: No lookup is declared, or one is wrong.
        """
        return self._collection()


def print_plan(plan: Sequence[Any] | EmbeddingCollection | ShardingPlan) -> None:
    """Print a plan in the format of HugeCTR's notebook.

    Args:
        plan: The plain values of a plan file, a collection under a plan, or a plan that carries its
            tables.

    Raises:
        PlanError: There is no plan or no table, or HugeCTR's lists cannot express it.
    """
    if isinstance(plan, EmbeddingCollection):
        lists = plan.lists()
    elif isinstance(plan, ShardingPlan):
        if plan.made_for is None:
            raise PlanError(
                "the plan does not have the tables that it was made for: print the embedding "
                "collection with this plan"
            )
        lists, _ = shown_plan(plan, plan.made_for.tables)
    else:
        lists = list(plan)
    print(printed(lists), end="")


def _arguments(values: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    for key in named:
        if key not in LOOKUP_WORDS:
            raise ConfigError(
                f"embedding_lookup: unknown argument {key}; {suggest(key, LOOKUP_WORDS)}"
            )
    if len(values) > len(LOOKUP):
        raise ConfigError(
            f"embedding_lookup: {len(values)} arguments: takes table_config, bottom_name, "
            "top_name, combiner"
        )
    by_place = dict(zip(LOOKUP, values, strict=False))
    arguments = under_recapp_names({**by_place, **named}, LOOKUP_WORDS, "embedding_lookup")
    for ours, theirs in zip(LOOKUP, ("table_config", "bottom_name", "top_name"), strict=False):
        if ours not in arguments:
            raise ConfigError(f"embedding_lookup: {theirs} must be given")
    return {"combiner": "sum", **arguments}
