"""The tables of a model and its collections, from the settings of tables and of the data set."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import Parameter, signature

from recapp.dataset.data_settings import DataSettings, Derivation
from recapp.dataset.schema import Schema, check_sizes
from recapp.errors import ConfigError, suggest
from recapp.models.catalogue import MODELS
from recapp.settings.records import Constructor, find_constructor
from recapp.settings.values import shown
from recapp.tables.config import (
    DataType,
    EmbeddingConfig,
    IdRule,
    PoolingType,
    check_tables,
    lookups_of,
    table_config,
)
from recapp.tables.positions import DYNAMIC, EXPECTED_ROWS, DynamicRows
from recapp.tables.table_settings import (
    BAGS,
    SEQUENCES,
    WIDE,
    CollectionTables,
    FurtherTables,
    ModelTables,
    TableSettings,
    TablesOfDataset,
    listed_tables,
    model_tables,
    usual_collection,
)

# The settings that make lookups that do not pool.
UNPOOLED = (
    "tables.sequences=[column], or pooling: none of a listed table, combiner: none of a lookup"
)
# The kinds of parameters that take an argument of their name; a model's `*args` does not.
BY_NAME = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


def tables_of_model(
    tables: TableSettings, dataset: DataSettings, schema: Schema, model: Constructor
) -> ModelTables:
    """Return the tables of the model, by collection.

    Args:
        tables: The group `tables`.
        dataset: The group `dataset`. With `tables=from_dataset` it sets the sizes of tables.
        schema: The columns of the data set.
        model: The group `model`. A model that needs the collection `wide` gets it.

    Raises:
        ConfigError: The number of sizes differs from the number of sparse columns, or a setting
            names a column that the data set does not have.
    """
    if isinstance(tables, TablesOfDataset):
        return _TablesOfColumns(tables, dataset, schema).of_model(model)
    return listed_tables(tables)


def needed_collections(model: Constructor) -> Sequence[str]:
    """Return the collections that a model's constructor requires. Models of recapp are not imported
    for this.
    """
    if known := MODELS.get(model.target):
        return known.needs
    parameters = signature(find_constructor(model.target, "model")).parameters
    takes_any = any(each.kind is Parameter.VAR_KEYWORD for each in parameters.values())
    required = [
        name
        for name in (BAGS, SEQUENCES, WIDE)
        if name in parameters and parameters[name].default is Parameter.empty
    ]
    return [BAGS, *required] if takes_any or BAGS in parameters else required


def check_collections(model: Constructor, collections: Mapping[str, CollectionTables]) -> None:
    """Check that a model takes the collections that tables make, and that it needs no other.

    Args:
        model: The settings of the model.
        collections: The collections by name.

    Raises:
        ConfigError: It does not; the error names the collection and the settings that make it.
    """
    where = f"model._target_={model.target}"
    every = signature(find_constructor(model.target, "model")).parameters
    takes_any = any(each.kind is Parameter.VAR_KEYWORD for each in every.values())
    parameters = {name: each for name, each in every.items() if each.kind in BY_NAME}
    for name, collection in collections.items():
        outputs = ", ".join(lookup.output for lookup in collection.lookups)
        if not name.isidentifier() or name == "self":
            raise ConfigError(
                f"tables: collection: {name!r} ({outputs}) cannot be an argument of the model "
                f"({where}): give it a name of letters, digits and _, such as wide"
            )
        default = parameters[name].default if name in parameters else None
        setting = default is not None and default is not Parameter.empty
        if (setting and name not in (BAGS, SEQUENCES)) or name in (
            "dense_in_features",
            *model.arguments,
        ):
            raise ConfigError(
                f"tables: the collection {name} ({outputs}) has the name of another argument of "
                f"the model ({where}): give it a name of its own"
            )
        if name not in parameters and not takes_any:
            made_by = UNPOOLED if name == SEQUENCES else f"collection: {name} in tables"
            made_by = "lookups that pool" if name == BAGS else made_by
            raise ConfigError(
                f"{where}: takes no {name}, the collection of {outputs} ({made_by}): name it in "
                "the constructor, or change the tables"
            )
    for name, made_by in (
        (BAGS, "pool bags"),
        (SEQUENCES, f"do not pool: {UNPOOLED}"),
        (WIDE, "have one weight for each id: set tables.wide=true"),
    ):
        needed = name in parameters and parameters[name].default is Parameter.empty
        if needed and name not in collections:
            raise ConfigError(
                f"{where}: needs {name}, and the tables have no lookups that {made_by}"
            )


def check_features(tables: ModelTables, schema: Schema) -> None:
    """Check that the data set has every feature that a table reads, and that ids with weights are
    pooled.

    A plan on paper needs no such check, since it reads no data.

    Raises:
        ConfigError: A table reads a feature that the data set does not have, or a feature with
            weights is only a sequence.
    """
    for table in tables.tables:
        for feature in table.feature_names:
            if feature not in schema.features:
                raise ConfigError(
                    f"tables.{table.name} reads feature {feature}, which the data set does not "
                    f"have; {suggest(feature, schema.features)}; use tables=from_dataset or the "
                    "data set these tables are for (dataset=sample)"
                )
    pooled = {lookup.feature for lookup in tables.lookups if lookup.columns}
    if odd := [name for name in schema.id_weights if name not in pooled]:
        raise ConfigError(
            f"dataset.id_weights={{{odd[0]}: {schema.id_weights[odd[0]]}}}: no lookup pools "
            f"{odd[0]}, so that its weights have no effect: leave them out, or {odd[0]} out of "
            "tables.sequences"
        )


@dataclass(frozen=True)
class _TablesOfColumns:
    """The tables that `tables=from_dataset` makes.

    Args:
        settings: The group `tables`.
        dataset: The group `dataset`.
        schema: The columns of the data set.
    """

    settings: TablesOfDataset
    dataset: DataSettings
    schema: Schema

    def of_model(self, model: Constructor) -> ModelTables:
        """Return the tables of a model, by collection."""
        settings = self.settings
        check_sizes(self.dataset, self.schema)
        self._check_columns("tables.sequences", settings.sequences)
        needs = needed_collections(model)
        further = dict(settings.collections or {})
        if settings.wide or (settings.wide is None and WIDE in needs and WIDE not in further):
            further[WIDE] = FurtherTables(init_range=0.0)
        only_further = BAGS not in needs and bool(further) and not settings.sequences
        if only_further and settings.shared:
            raise ConfigError(
                f"tables.shared={shown(settings.shared)}: the model has further collections alone "
                f"({', '.join(further)}), and their columns share no tables: leave it null"
            )
        configs = [] if only_further else self._tables()
        named = [
            (
                usual_collection(self._pooling(x.feature)),
                replace(x, pooling=self._pooling(x.feature)),
            )
            for x in lookups_of(configs)
        ]
        order = {column: place for place, column in enumerate(self.schema.features)}
        named.sort(key=lambda each: order[each[1].feature])
        for name, collection in further.items():
            tables = self._further(name, collection)
            configs += tables
            named += [(name, replace(x, output=x.feature)) for x in lookups_of(tables)]
        check_tables(configs)
        return model_tables(configs, named)

    def _tables(self) -> list[EmbeddingConfig]:
        shared = self.settings.shared or {}
        self._check_columns("tables.shared", list(shared))
        for column, owner in shared.items():
            if owner not in self.schema.features or owner in shared:
                owners = [name for name in self.schema.features if name not in shared]
                raise ConfigError(
                    f"tables.shared={shown(shared)}: {column} reads the table of {owner}, which is "
                    f"no sparse column with a table of its own; {suggest(owner, owners)}"
                )
        dims = self.dataset.table_dims or {}
        for column in shared:
            if column in dims:
                raise ConfigError(
                    f"dataset.table_dims={shown(dims)}: {column} reads the table of "
                    f"{shared[column]} (tables.shared): leave it out, or name {shared[column]}"
                )
        tables = []
        for column in self.schema.features:
            if column in shared:
                continue
            readers = [column, *(name for name, owner in shared.items() if owner == column)]
            pooling = next((p for r in readers if (p := self._pooling(r)) != "none"), "none")
            rule = self.settings.dim_rule
            usual = self.settings.dim if rule is None else rule.dim(self._most_rows(readers))
            table_settings = FurtherTables(
                dim=dims.get(column) or usual,
                init_range=self.settings.init_range,
            )
            tables.append(self._table(column, readers, table_settings, pooling))
        return tables

    def _further(self, name: str, collection: FurtherTables) -> list[EmbeddingConfig]:
        setting = f"tables.collections.{name}.columns"
        if name in (BAGS, SEQUENCES):
            raise ConfigError(
                f"tables.collections.{name}: has the name of the columns' own tables: give it "
                "another, such as context"
            )
        if collection.columns == ():
            raise ConfigError(f"{setting}=[]: makes no table: name columns, or null for all")
        if collection.columns is not None:
            self._check_columns(setting, collection.columns)
        pooled = [
            column for column in self.schema.features if column not in self.settings.sequences
        ]
        columns = pooled if collection.columns is None else collection.columns
        return [
            self._table(f"{name}_{column}", [column], collection, collection.pooling)
            for column in columns
        ]

    def _pooling(self, column: str) -> PoolingType:
        return PoolingType("none" if column in self.settings.sequences else self.settings.pooling)

    def _check_columns(self, setting: str, named: Sequence[str]) -> None:
        for name in named:
            if name not in self.schema.features:
                raise ConfigError(
                    f"{setting} names {name}, which is no sparse column; "
                    f"{suggest(name, self.schema.features)}"
                )
            if list(named).count(name) > 1:
                raise ConfigError(f"{setting}={shown(named)}: names {name} twice: name it once")

    def _rows(self, column: str) -> int:
        """Return the number of rows of the table of a column: those of its vocabulary, else those
        that the settings give.
        """
        derived = self.schema.id_column(column)
        rows = derived.rows if derived else None
        if derived and derived.kind is Derivation.VOCABULARY and rows is not None:
            return rows
        place = self.schema.features.index(column)
        if self.dataset.table_rows and place < len(self.dataset.table_rows):
            return self.dataset.table_rows[place]
        if self.dataset.cardinality and place < len(self.dataset.cardinality):
            return self.dataset.cardinality[place] + 1
        if rows is not None:
            return rows
        return self.settings.max_rows or EXPECTED_ROWS  # until ids are counted, if they are

    def _id_rule(self, readers: Sequence[str]) -> str:
        settings = self.settings
        derived = [self.schema.id_column(reader) for reader in readers]
        if not settings.grow and any(one and one.kind is Derivation.CROSS for one in derived):
            return "hash"
        return settings.id_rule or (IdRule.ERROR if settings.grow else self.dataset.id_rule)

    def _most_rows(self, readers: Sequence[str]) -> int:
        settings = self.settings
        rows = max(self._rows(column) for column in readers)
        hashed = self._id_rule(readers) == "hash" and not settings.grow
        return min(rows, settings.max_rows) if hashed and settings.max_rows is not None else rows

    def _table(
        self, name: str, readers: Sequence[str], table_settings: FurtherTables, pooling: str
    ) -> EmbeddingConfig:
        settings = self.settings
        rows = self._most_rows(readers)
        dynamic = settings.dynamic or DynamicRows()
        if dynamic.expected_rows is None:
            dynamic = replace(dynamic, expected_rows=min(rows, dynamic.max_rows or rows))
        return table_config(
            name=name,
            num_embeddings=DYNAMIC if settings.grow else rows,
            dynamic=dynamic if settings.grow else None,
            embedding_dim=table_settings.dim,
            feature_names=list(readers),
            pooling=PoolingType(pooling),
            data_type=DataType(settings.data_type),
            id_rule=IdRule(self._id_rule(readers)),
            init_range=table_settings.init_range,
        )
