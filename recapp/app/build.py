"""From settings to objects: the model and what it is made of.

    settings (plain dict) -> tables, lookups, rules of rows, model

What trains it is made in `recapp/app/build_training.py`: scores need no Lightning. A `_target_` in
the settings is a constructor and its keys are the constructor's arguments.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from recapp import console
from recapp.dataset.data_scale import scaled
from recapp.dataset.schema import check_sizes, schema_from
from recapp.dataset.synthetic import read_truth, write_criteo, write_sample, writer_arguments
from recapp.engine.dense_memory import check_room
from recapp.errors import ConfigError, RecappError, suggest
from recapp.optim.named_rules import RULES, table_rules
from recapp.optim.rules import RowRule
from recapp.optim.rules_by_table import Rules
from recapp.settings.check_settings import find_constructor
from recapp.tables.config import EmbeddingBagConfig, IdRule
from recapp.tables.dynamic import DYNAMIC, EXPECTED_ROWS, DynamicRows, dynamic_rows
from recapp.tables.embedding_bag import EmbeddingBagCollection
from recapp.tables.listed import listed_tables
from recapp.tables.lookups import TableLookup, lookups_of

Settings = Mapping[str, Any]
REFUSALS = (TypeError, ValueError, ImportError)  # the last one of a logger that is not installed
MISCONFIGURED = "MisconfigurationException"  # of Lightning, which scoring does without
PAYLOADS: dict[str, torch.dtype | None] = {
    "full": None,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
"""The type of each value of `engine.payload`; None is the type of the computation."""


def make(settings: Settings, setting: str, *args: Any, **extra: Any) -> Any:
    """Call the constructor that `_target_` names, with the other keys as arguments.

    Hydra's own `instantiate` would pass its list type instead of plain lists and wrap what a
    constructor raises.

    Args:
        settings: The constructor and its arguments.
        setting: The dotted name of `settings`, for errors.
        args: Arguments that recapp passes by position.
        extra: Arguments that recapp passes by name.

    Raises:
        ConfigError: There is no such constructor, it takes no such argument, or refuses its value.
    """
    wanted = {k: v for k, v in settings.items() if k != "_target_"}
    target = find_constructor(str(settings.get("_target_")), setting)
    try:
        signature(target).bind(*args, **wanted, **extra)
    except TypeError as e:
        raise ConfigError(f"{setting} ({settings['_target_']}): {e}") from None
    return construct(target, f"{setting} ({settings['_target_']})", *args, **wanted, **extra)


def construct(target: Any, setting: str, *args: Any, **extra: Any) -> Any:
    """Call a constructor, and turn what it raises into a ConfigError.

    Exceptions of libraries are mistakes in the settings as well.

    Args:
        target: The constructor.
        setting: The dotted name of its settings, for errors.
        args: Its arguments by position.
        extra: Its arguments by name.

    Raises:
        ConfigError: The constructor refuses its arguments.
    """
    try:
        return target(*args, **extra)
    except RecappError:
        raise
    except Exception as e:
        if isinstance(e, REFUSALS) or any(c.__name__ == MISCONFIGURED for c in type(e).__mro__):
            raise ConfigError(f"{setting}: {' '.join(str(e).split())}") from e
        raise


def build_tables(settings: Settings, *, of_dataset: bool = True) -> list[EmbeddingBagConfig]:
    """Return the tables of the model.

    Args:
        settings: `tables` and `dataset` of a command.
        of_dataset: Whether the data set must have the features that listed tables read; a plan on
            paper reads no data.

    Raises:
        ConfigError: A table reads a feature that the data set does not have.
    """
    return build_lookups(settings, of_dataset=of_dataset)[0]


def build_lookups(
    settings: Settings, *, of_dataset: bool = True
) -> tuple[list[EmbeddingBagConfig], tuple[TableLookup, ...]]:
    """Return the tables of the model, and what reads them, in output order.

    Args:
        settings: `tables` and `dataset` of a command.
        of_dataset: Whether the data set must have the features that listed tables read.

    Raises:
        ConfigError: A table reads a feature that the data set does not have.
    """
    tables = settings["tables"]
    features = schema_from(settings).sparse
    if tables["source"] == "from_dataset":
        made = _tables_of_dataset(settings["dataset"], tables, features)
        return made, lookups_of(made)
    made, lookups = listed_tables(tables["tables"], tables.get("lookups"))
    for table in made:
        for feature in table.feature_names:
            if of_dataset and feature not in features:
                raise ConfigError(
                    f"tables.{table.name} reads feature {feature}, which the data set does not "
                    f"have; {suggest(feature, features)}; use tables=from_dataset or the data set "
                    "these tables are for (dataset=sample)"
                )
    return made, lookups


def _tables_of_dataset(
    dataset: Settings, tables: Settings, features: Sequence[str]
) -> list[EmbeddingBagConfig]:
    grows = tables.get("num_embeddings") == DYNAMIC
    rule = tables["id_rule"] or (IdRule.ERROR if grows else dataset["id_rule"])
    dims: Mapping[str, int] = dataset["table_dims"] or {}
    check_sizes(dataset, features)
    made = []
    rows: Any
    for i, feature in enumerate(features):
        if dataset["table_rows"]:
            rows = int(dataset["table_rows"][i])
        elif dataset["cardinality"]:
            rows = int(dataset["cardinality"][i]) + 1
        else:
            rows = EXPECTED_ROWS if grows else tables["max_rows"]
        dynamic = _dynamic(tables, rows) if grows else None
        if grows:
            rows = DYNAMIC
        elif rule == "hash":
            rows = min(rows, tables["max_rows"])
        made.append(
            EmbeddingBagConfig(
                name=feature,
                num_embeddings=rows,
                dynamic=dynamic,
                embedding_dim=dims.get(feature) or int(tables["dim"]),
                feature_names=[feature],
                pooling=tables["pooling"],
                data_type=tables["data_type"],
                id_rule=rule,
                init_range=tables["init_range"],
            )
        )
    return made


def _dynamic(tables: Settings, rows: int) -> DynamicRows:
    """Return what is said of dynamic tables; a table's rows are expected where nothing else is."""
    said = dynamic_rows(tables["dynamic"] or {}, "tables.dynamic")
    if said.expected_rows is None:
        said = replace(said, expected_rows=min(rows, said.max_rows or rows))
    return said


def counts_ids(settings: Settings) -> bool:
    """Return whether tables get their sizes from the distinct ids of the training rows.

    That is so for hashed tables of which neither `cardinality` nor `table_rows` gives a size,
    except on generated data, whose `table_rows` define what is generated; and for dynamic ones,
    whose rows are then those that are expected.
    """
    tables = settings["tables"]
    dataset = settings["dataset"]
    if tables["source"] != "from_dataset":
        return False
    grows = tables.get("num_embeddings") == DYNAMIC
    hashed = grows or (tables["id_rule"] or dataset["id_rule"]) == "hash"
    sized = any(dataset[key] for key in ("table_rows", "cardinality", "generate"))
    return bool(hashed and not sized)


def build_rules(settings: Settings) -> Rules:
    """Return the row rule, what an update does to a row, or rules by table name or glob where
    `optimizer.sparse.tables` has some.

    Raises:
        ConfigError: What a `_target_` names makes no row rule, or a table's settings make none.
    """
    sparse = settings["optimizer"]["sparse"]
    rule = _rule({k: v for k, v in sparse.items() if k != "tables"}, "optimizer.sparse")
    of_tables = table_rules(sparse, "optimizer.sparse", _rule)
    return {"*": rule, **of_tables} if of_tables else rule


def _rule(wanted: Settings, setting: str) -> RowRule:
    target = find_constructor(str(wanted.get("_target_")), setting)
    rule = (
        None
        if isinstance(target, type) and issubclass(target, Optimizer)
        else make(wanted, setting)
    )
    if not isinstance(rule, RowRule):
        raise ConfigError(
            f"{setting}._target_={wanted['_target_']}: must make a row rule, as those of "
            f"recapp.optim.rules do: {', '.join(RULES)}"
        )
    return rule


def build_model(
    settings: Settings,
    tables: Sequence[EmbeddingBagConfig] | None = None,
    lookups: Sequence[TableLookup] | None = None,
    *,
    on_paper: bool = False,
) -> nn.Module:
    """Return the model, its tables on the meta device.

    Args:
        settings: Those of a command.
        tables: The tables; None takes those of the settings, and their lookups.
        lookups: What reads the tables; None takes what they declare.
        on_paper: Whether the dense part is on the meta device, too.

    Raises:
        ConfigError: The dense part is larger than this rank's memory, or what `model._target_`
            names makes no module.
    """
    made, read = build_lookups(settings) if tables is None else (list(tables), lookups)
    dense = len(schema_from(settings).dense)

    def build() -> nn.Module:
        collection = EmbeddingBagCollection(
            tables=made, device=torch.device("meta"), seed=settings["seed"], lookups=read
        )
        model = make(
            settings["model"], "model", embedding_bag_collection=collection, dense_in_features=dense
        )
        if not isinstance(model, nn.Module):
            raise ConfigError(
                f"model._target_={settings['model']['_target_']}: must make a torch.nn.Module"
            )
        return model

    if on_paper:
        with torch.device("meta"):
            return build()
    check_room(build)
    return build()


def write_generated(dataset: Settings) -> None:
    """Write the data set that the settings describe, unless it exists; progress is shown."""
    dataset = scaled(dataset)
    kind, wanted = writer_arguments(dataset["generate"], dataset["table_rows"])
    with console.progress(
        f"writing {console.short_path(dataset['path'])}", wanted["rows"]
    ) as advance:
        written = 0

        def show(done: int, _total: int) -> None:
            nonlocal written
            advance(done - written)
            written = done

        (write_criteo if kind == "criteo" else write_sample)(
            dataset["path"], progress=show, **wanted
        )


def click_model_auc(settings: Settings, val_rows: int) -> float | None:
    """Return the AUC of the click model that drew the labels, on the rows that validated.

    It is None where the data set was not generated, where the click model was measured on other
    rows (both validate on the last rows, so their numbers are compared), or where those rows are of
    one class.

    Args:
        settings: `dataset` and `trainer` of the run.
        val_rows: The rows that were cut off to validate on.
    """
    dataset = settings["dataset"]
    limit = settings["trainer"].get("limit_val_batches")
    every_row = limit is None or (isinstance(limit, float) and limit == 1)  # 1 is one batch
    if dataset["generate"] is None or dataset["val_path"] is not None or not every_row:
        return None
    truth = read_truth(scaled(dataset)["path"])["validation"]
    return None if truth["rows"] != val_rows or truth["auc"] is None else float(truth["auc"])
