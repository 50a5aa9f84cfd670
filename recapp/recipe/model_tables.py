"""The tables of a model and their lookups, from the settings of tables and of the data set."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from recapp.dataset.data_settings import DataSettings
from recapp.dataset.schema import Schema, check_sizes
from recapp.errors import ConfigError, suggest
from recapp.settings.records import to_plain
from recapp.tables.config import DataType, EmbeddingBagConfig, IdRule, PoolingType
from recapp.tables.dynamic import DYNAMIC, EXPECTED_ROWS, DynamicRows
from recapp.tables.listed import listed_tables
from recapp.tables.lookups import TableLookup, lookups_of
from recapp.tables.table_settings import TableSettings, TablesOfDataset


def tables_and_lookups(
    tables: TableSettings, dataset: DataSettings, schema: Schema
) -> tuple[list[EmbeddingBagConfig], tuple[TableLookup, ...]]:
    """Return the tables of the model, and their lookups in output order.

    Args:
        tables: The group `tables`.
        dataset: The group `dataset`. With `tables=from_dataset` it sets the sizes of tables.
        schema: The columns of the data set.

    Raises:
        ConfigError: The number of sizes differs from the number of sparse columns.
    """
    if isinstance(tables, TablesOfDataset):
        made = _tables_of_dataset(dataset, tables, schema.sparse)
        return made, lookups_of(made)
    return listed_tables(to_plain(tables.tables), to_plain(tables.lookups))


def check_features(tables: Sequence[EmbeddingBagConfig], schema: Schema) -> None:
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
) -> list[EmbeddingBagConfig]:
    rule = tables.id_rule or (IdRule.ERROR if tables.grow else dataset.id_rule)
    dims = dataset.table_dims or {}
    check_sizes(dataset, features)
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
) -> EmbeddingBagConfig:
    if rule == "hash" and not tables.grow and tables.max_rows is not None:
        rows = min(rows, tables.max_rows)
    given: Any = DYNAMIC if tables.grow else rows
    return EmbeddingBagConfig(
        name=feature,
        num_embeddings=given,
        dynamic=_dynamic(tables, rows) if tables.grow else None,
        embedding_dim=dim,
        feature_names=[feature],
        pooling=PoolingType(tables.pooling),
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
