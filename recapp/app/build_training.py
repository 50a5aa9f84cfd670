"""From settings to objects: what trains and measures a model, except its strategy and trainer.

settings (plain dict) -> data module, statistics, module
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from recapp.app.build import Settings, build_model, counts_ids, make, write_generated
from recapp.dataset.data_scale import scaled
from recapp.dataset.first_rows import COUNTED_ROWS
from recapp.dataset.prediction_input import ScoringSettings
from recapp.dataset.schema import schema_from
from recapp.errors import ConfigError, DataError
from recapp.metrics import click_metrics
from recapp.tables.config import EmbeddingBagConfig
from recapp.tables.dynamic import DYNAMIC, EXPECTED_ROWS
from recapp.tables.lookups import TableLookup
from recapp.tables.statistics import TableStatistics
from recapp.trainer.datamodule import ClickData, DataSettings
from recapp.trainer.module import ClickModule


def build_data(
    settings: Settings,
    sized: Callable[[], object] | None = None,
    scoring: ScoringSettings | None = None,
) -> ClickData:
    """Return the data module.

    Args:
        settings: Those of a command. Where tables are sized by their ids, `dataset.table_rows` is
            set in them once the training rows were counted, so that model and checkpoints agree.
        sized: Called after that; None where nobody waits for it.
        scoring: The rows that are to be scored; None where nothing is predicted.
    """
    dataset = settings["dataset"]
    rows = None
    small = scaled(dataset)
    chosen = DataSettings(**{k: small[k] for k in DataSettings.__dataclass_fields__})
    if counts_ids(settings):

        def rows(counted: list[int]) -> None:
            dataset["table_rows"] = counted
            if sized is not None:
                sized()

    prepare = None if dataset["generate"] is None else partial(write_generated, dataset)
    return ClickData(
        chosen,
        schema_from(settings),
        settings["seed"],
        prepare,
        set_table_rows=rows,
        max_table_rows=_most_rows(settings["tables"]),
        scoring=scoring,
    )


def _most_rows(tables: Settings) -> int | None:
    """Return the most rows of a table that is sized by its ids; None where tables grow, or none is
    sized so.
    """
    return None if tables.get("num_embeddings") == DYNAMIC else tables.get("max_rows")


def build_statistics(
    settings: Settings,
    tables: Sequence[EmbeddingBagConfig],
    lookups: Sequence[TableLookup] | None = None,
) -> dict[str, TableStatistics]:
    """Return id statistics of the data set's first training rows, by table; nothing where its files
    do not exist.
    """
    data = build_data(settings)
    features = {f for t in tables for f in t.feature_names}
    if not features <= set(data.schema.sparse):
        return {}  # tables that this data set does not have
    try:
        data.setup("fit")
    except DataError:
        return {}
    return data.statistics(tables, lookups)


def size_on_paper(settings: Settings) -> str:
    """Size tables by their ids as training would, and return a note of what was assumed or counted.

    Nothing is counted where `statistics=assumed`, or where the data do not exist. The note is empty
    where sizes do not depend on ids.
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
    if settings["tables"].get("num_embeddings") == DYNAMIC:
        return f"every dynamic table is assumed to have {EXPECTED_ROWS:,} rows: {why}"
    most = settings["tables"]["max_rows"]
    return f"every table is assumed to have tables.max_rows={most} rows, no ids were counted: {why}"


def build_module(
    settings: Settings, make_model: Callable[[], nn.Module] | None = None
) -> ClickModule:
    """Return the LightningModule: loss, optimiser and metrics around the model.

    Args:
        settings: Those of a command.
        make_model: Makes the model; None makes it of the settings.
    """
    optimizer = dict(settings["optimizer"])
    return ClickModule(
        make_model or (lambda: build_model(settings)),
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
