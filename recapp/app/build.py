"""From settings to objects: tables, schema, rule, data module, model, module.

    settings (plain dict) -> tables, row rule, statistics, data module, model, module

A `_target_` in the settings is a constructor and its keys are the constructor's arguments.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from inspect import signature
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from recapp import console
from recapp.dataset.first_rows import COUNTED_ROWS
from recapp.dataset.schema import check_sizes, schema_from
from recapp.dataset.synthetic import read_truth, write_criteo, write_sample, writer_arguments
from recapp.engine.dense_memory import check_room
from recapp.errors import ConfigError, DataError, RecappError, suggest
from recapp.metrics import click_metrics
from recapp.optim.rules import RowRule
from recapp.tables.config import EmbeddingBagConfig
from recapp.tables.embedding_bag import EmbeddingBagCollection
from recapp.tables.statistics import TableStatistics
from recapp.trainer.datamodule import ClickData, DataSettings
from recapp.trainer.module import ClickModule

Settings = Mapping[str, Any]
PAYLOADS: dict[str, torch.dtype | None] = {
    "full": None,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
"""`engine.payload`; other values are refused before ranks start."""


def make(settings: Settings, setting: str, *args: Any, **extra: Any) -> Any:
    """Call the constructor that `_target_` names with the other keys as arguments.

    Plain values in, plain errors out: Hydra's own `instantiate` would hand over its list type and
    wrap what a constructor raises.

    Raises:
        ConfigError: there is no such constructor, it takes no such argument, or refuses its value.
    """
    wanted = {k: v for k, v in settings.items() if k != "_target_"}
    target = target_of(settings, setting)
    try:
        signature(target).bind(*args, **wanted, **extra)
    except TypeError as e:
        raise ConfigError(f"{setting} ({settings['_target_']}): {e}") from None
    return construct(target, f"{setting} ({settings['_target_']})", *args, **wanted, **extra)


def construct(target: Any, setting: str, *args: Any, **extra: Any) -> Any:
    """Call a constructor; what others than recapp refuse with exceptions of their own is still a
    mistake in the settings.
    """
    try:
        return target(*args, **extra)
    except RecappError:
        raise
    # ImportError: a logger that is not installed
    except (TypeError, ValueError, ImportError, MisconfigurationException) as e:
        raise ConfigError(f"{setting}: {' '.join(str(e).split())}") from e


def target_of(settings: Settings, setting: str) -> Any:
    """Import what `_target_` names.

    Raises:
        ConfigError: there is no such module, or nothing of that name in it.
    """
    home, _, name = str(settings.get("_target_")).rpartition(".")
    try:
        module = import_module(home)
    except (ImportError, ValueError):
        raise ConfigError(
            f"{setting}._target_={settings.get('_target_')}: no such constructor: there is no "
            f"module {home}"
        ) from None
    if not hasattr(module, name):
        known = [n for n in dir(module) if not n.startswith("_")]
        raise ConfigError(
            f"{setting}._target_={settings['_target_']}: no such constructor in {home}; "
            f"{suggest(name, known)}"
        )
    return getattr(module, name)


def build_tables(settings: Settings, *, of_dataset: bool = True) -> list[EmbeddingBagConfig]:
    """The tables of the model.

    Args:
        settings: `tables` and `dataset`.
        of_dataset: whether the data set must have what listed tables read; on paper nothing is
            read.

    Raises:
        ConfigError: a table reads a feature that the data set does not have.
    """
    tables = settings["tables"]
    features = schema_from(settings).sparse
    if tables["source"] == "from_dataset":
        return _tables_of_dataset(settings["dataset"], tables, features)
    made = [EmbeddingBagConfig(**t) for t in tables["tables"]]
    for table in made:
        for feature in table.feature_names:
            if of_dataset and feature not in features:
                raise ConfigError(
                    f"tables.{table.name} reads feature {feature}, which the data set does not "
                    f"have; {suggest(feature, features)}; use tables=from_dataset or the data set "
                    "these tables are for (dataset=sample)"
                )
    return made


def _tables_of_dataset(
    dataset: Settings, tables: Settings, features: Sequence[str]
) -> list[EmbeddingBagConfig]:
    rule = tables["id_rule"] or dataset["id_rule"]
    dims: Mapping[str, int] = dataset["table_dims"] or {}
    check_sizes(dataset, features)
    made = []
    for i, feature in enumerate(features):
        if dataset["table_rows"]:
            rows = int(dataset["table_rows"][i])
        elif dataset["cardinality"]:
            rows = int(dataset["cardinality"][i]) + 1
        else:
            rows = tables["max_rows"]
        if rule == "hash":
            rows = min(rows, tables["max_rows"])
        made.append(
            EmbeddingBagConfig(
                name=feature,
                num_embeddings=rows,
                embedding_dim=dims.get(feature) or int(tables["dim"]),
                feature_names=[feature],
                pooling=tables["pooling"],
                data_type=tables["data_type"],
                id_rule=rule,
                init_range=tables["init_range"],
            )
        )
    return made


def counts_ids(settings: Settings) -> bool:
    """Whether tables get their sizes from the ids that are there.

    Hashed ones do, where neither cardinality nor table_rows says more. Not those of generated data,
    whose `table_rows` say what is generated.
    """
    tables = settings["tables"]
    dataset = settings["dataset"]
    if tables["source"] != "from_dataset":
        return False
    hashed = (tables["id_rule"] or dataset["id_rule"]) == "hash"
    sized = any(dataset[key] for key in ("table_rows", "cardinality", "generate"))
    return bool(hashed and not sized)


def build_rule(settings: Settings) -> RowRule:
    """What happens to touched rows."""
    wanted = settings["optimizer"]["sparse"]
    target = target_of(wanted, "optimizer.sparse")
    rule = (
        None
        if isinstance(target, type) and issubclass(target, Optimizer)
        else make(wanted, "optimizer.sparse")
    )
    if not isinstance(rule, RowRule):
        raise ConfigError(
            f"optimizer.sparse._target_={wanted['_target_']}: must make a row rule, as those of "
            "recapp.optim.rules do: sgd, adagrad, rowwise_adagrad, adam"
        )
    return rule


def build_statistics(
    settings: Settings, tables: Sequence[EmbeddingBagConfig]
) -> dict[str, TableStatistics]:
    """Id statistics of the data set's first training rows; nothing where its files are not
    there.
    """
    data = build_data(settings)
    features = {f for t in tables for f in t.feature_names}
    if not features <= set(data.schema.sparse):
        return {}  # tables that this data set does not have
    try:
        data.setup("fit")
    except DataError:
        return {}
    return data.statistics(tables)


def build_model(
    settings: Settings,
    tables: Sequence[EmbeddingBagConfig] | None = None,
    *,
    on_paper: bool = False,
) -> nn.Module:
    """The model, its tables on the meta device: those of the settings unless others are given. On
    paper all of it is there.

    Raises:
        ConfigError: the dense part is larger than this rank's memory, or what `_target_` names
            makes no module.
    """
    made = build_tables(settings) if tables is None else list(tables)
    dense = len(schema_from(settings).dense)

    def build() -> nn.Module:
        collection = EmbeddingBagCollection(
            tables=made, device=torch.device("meta"), seed=settings["seed"]
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


def build_data(settings: Settings, sized: Callable[[], object] | None = None) -> ClickData:
    """Where rows come from.

    Args:
        settings: where tables are to be sized by their ids, `dataset.table_rows` is set in them
            once the training rows are there, so that the model, checkpoints and all others agree.
        sized: called then.
    """
    dataset = settings["dataset"]
    rows = None
    chosen = DataSettings(**{k: dataset[k] for k in DataSettings.__dataclass_fields__})
    if counts_ids(settings):

        def rows(counted: list[int]) -> None:
            dataset["table_rows"] = counted
            if sized is not None:
                sized()

    generate = dataset["generate"]
    prepare = None if generate is None else partial(write_generated, dataset)
    return ClickData(
        chosen,
        schema_from(settings),
        settings["seed"],
        prepare,
        set_table_rows=rows,
        max_table_rows=settings["tables"].get("max_rows"),
    )


def size_on_paper(settings: Settings) -> str:
    """Size tables by their ids as training would, where the data are there; says what was assumed.

    Without a look at the data where `statistics` says so.
    """
    if not counts_ids(settings):
        return ""
    why = "statistics=assumed"
    if settings["statistics"] != "assumed":
        try:
            build_data(settings).setup("fit")
            return (
                f"tables are sized by the distinct ids of the first {COUNTED_ROWS:,} "
                "training rows, as in training"
            )
        except DataError as error:
            why = str(error)
    most = settings["tables"]["max_rows"]
    return f"every table is assumed to have tables.max_rows={most} rows, no ids were counted: {why}"


def write_generated(dataset: Settings) -> None:
    """Write the data set that the settings describe, unless it is there; progress is shown."""
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
    """What the model that drew the labels scores on the rows that validated.

    None where the data set was not generated, where its generator scored other rows (both validate
    on the last rows, so their number tells), or where those are of one class.

    Args:
        settings: `dataset` and `trainer`.
        val_rows: rows that were cut off to validate on.
    """
    dataset = settings["dataset"]
    limit = settings["trainer"].get("limit_val_batches")
    every_row = limit is None or (isinstance(limit, float) and limit == 1)  # 1 is one batch
    if dataset["generate"] is None or dataset["val_path"] is not None or not every_row:
        return None
    truth = read_truth(dataset["path"])["validation"]
    return None if truth["rows"] != val_rows or truth["auc"] is None else float(truth["auc"])


def build_module(settings: Settings) -> ClickModule:
    """Loss, optimiser and metrics around the model."""
    optimizer = dict(settings["optimizer"])
    return ClickModule(
        lambda: build_model(settings),
        partial(_dense_optimizer, optimizer["dense"]),
        partial(click_metrics, settings["metrics"]["names"]),
        _schedule(optimizer["schedule"]),
        settings["seed"],
    )


def _dense_optimizer(settings: Settings, parameters: Iterable[nn.Parameter]) -> Optimizer:
    made = make(settings, "optimizer.dense", parameters)
    if not isinstance(made, Optimizer):
        raise ConfigError(
            f"optimizer.dense._target_={settings['_target_']}: must make a torch optimiser, e.g. "
            "torch.optim.Adam"
        )
    return made


def _schedule(settings: Settings | None) -> Callable[[Optimizer], LRScheduler] | None:
    if settings is None:
        return None
    return partial(make, settings, "optimizer.schedule")
