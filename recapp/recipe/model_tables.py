"""The tables of a model and its collections, from the settings of tables and of the data set."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from inspect import Parameter, signature
from typing import Any

from recapp.dataset.data_settings import DataSettings
from recapp.dataset.schema import Schema, check_sizes
from recapp.errors import ConfigError, suggest
from recapp.settings.check_settings import find_constructor
from recapp.settings.records import Constructor, to_plain
from recapp.settings.values import shown
from recapp.tables.config import DataType, EmbeddingConfig, IdRule, PoolingType, table_config
from recapp.tables.dynamic import DYNAMIC, EXPECTED_ROWS, DynamicRows
from recapp.tables.listed import listed_tables
from recapp.tables.lookups import lookups_of
from recapp.tables.named_collections import (
    BAGS,
    SEQUENCES,
    CollectionTables,
    ModelTables,
    model_tables,
    usual_collection,
)
from recapp.tables.table_settings import TableSettings, TablesOfDataset

UNPOOLED = (
    "tables.sequences=[column], or pooling: none of a listed table, combiner: none of a lookup"
)
"""The settings that make lookups that do not pool."""


def tables_of_model(tables: TableSettings, dataset: DataSettings, schema: Schema) -> ModelTables:
    """Return the tables of the model, by collection.

    Args:
        tables: The group `tables`.
        dataset: The group `dataset`. With `tables=from_dataset` it sets the sizes of tables.
        schema: The columns of the data set.

    Raises:
        ConfigError: The number of sizes differs from the number of sparse columns, or a setting
            names a column that the data set does not have.
    """
    if isinstance(tables, TablesOfDataset):
        made = _tables_of_dataset(dataset, tables, schema.sparse)
        return model_tables(made, [(usual_collection(x.pooling), x) for x in lookups_of(made)])
    return listed_tables(to_plain(tables.tables), to_plain(tables.lookups))


def check_collections(model: Constructor, collections: Mapping[str, CollectionTables]) -> None:
    """Check that a model takes the collections that tables make, and that it needs no other.

    Args:
        model: The settings of the model.
        collections: The collections by name.

    Raises:
        ConfigError: It does not; the error names the collection and the settings that make it.
    """
    where = f"model._target_={model.target}"
    parameters = signature(find_constructor(model.target, "model")).parameters
    takes_any = any(each.kind is Parameter.VAR_KEYWORD for each in parameters.values())
    for name, own in collections.items():
        outputs = ", ".join(lookup.output for lookup in own.lookups)
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
    for name, made_by in ((BAGS, "pool bags"), (SEQUENCES, f"do not pool: {UNPOOLED}")):
        needed = name in parameters and parameters[name].default is Parameter.empty
        if needed and name not in collections:
            raise ConfigError(
                f"{where}: needs {name}, and the tables have no lookups that {made_by}"
            )


def check_features(tables: Sequence[EmbeddingConfig], schema: Schema) -> None:
    """Check that the data set has every feature that a table reads.

    A plan on paper needs no such check, since it reads no data.

    Raises:
        ConfigError: A table reads a feature that the data set does not have.
    """
    for table in tables:
        for feature in table.feature_names:
            if feature not in schema.sparse:
                raise ConfigError(
                    f"tables.{table.name} reads feature {feature}, which the data set does not "
                    f"have; {suggest(feature, schema.sparse)}; use tables=from_dataset or the data "
                    "set these tables are for (dataset=sample)"
                )


def _tables_of_dataset(
    dataset: DataSettings, tables: TablesOfDataset, features: Sequence[str]
) -> list[EmbeddingConfig]:
    rule = tables.id_rule or (IdRule.ERROR if tables.grow else dataset.id_rule)
    dims = dataset.table_dims or {}
    check_sizes(dataset, features)
    for name in tables.sequences:
        if name not in features:
            raise ConfigError(
                f"tables.sequences names {name}, which is no sparse column; "
                f"{suggest(name, features)}"
            )
        if tables.sequences.count(name) > 1:
            raise ConfigError(
                f"tables.sequences={shown(tables.sequences)}: names {name} twice: name it once"
            )
    return [
        _table(feature, _rows(dataset, tables, i), rule, dims.get(feature) or tables.dim, tables)
        for i, feature in enumerate(features)
    ]


def _rows(dataset: DataSettings, tables: TablesOfDataset, column: int) -> int:
    """Return the number of rows that the settings give to the table of a sparse column."""
    if dataset.table_rows:
        return dataset.table_rows[column]
    if dataset.cardinality:
        return dataset.cardinality[column] + 1
    if tables.grow:
        return EXPECTED_ROWS
    assert tables.max_rows is not None
    return tables.max_rows


def _table(
    feature: str, rows: int, rule: str, dim: int, tables: TablesOfDataset
) -> EmbeddingConfig:
    if rule == "hash" and not tables.grow and tables.max_rows is not None:
        rows = min(rows, tables.max_rows)
    given: Any = DYNAMIC if tables.grow else rows
    return table_config(
        name=feature,
        num_embeddings=given,
        dynamic=_dynamic(tables, rows) if tables.grow else None,
        embedding_dim=dim,
        feature_names=[feature],
        pooling=PoolingType("none" if feature in tables.sequences else tables.pooling),
        data_type=DataType(tables.data_type),
        id_rule=IdRule(rule),
        init_range=tables.init_range,
    )


def _dynamic(tables: TablesOfDataset, rows: int) -> DynamicRows:
    """Return the settings of a dynamic table. `rows` is the default of `expected_rows`."""
    said = tables.dynamic or DynamicRows()
    if said.expected_rows is not None:
        return said
    return replace(said, expected_rows=min(rows, said.max_rows or rows))
