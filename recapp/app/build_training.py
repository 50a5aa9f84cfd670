"""From settings to objects: what trains and measures a model, except its strategy and trainer.

settings (plain dict) -> data module, module
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from recapp.app.build import Settings, build_model, counts_ids, make, write_generated
from recapp.app.build_rows import data_settings, most_rows
from recapp.app.build_task import build_task, labelled_schema
from recapp.app.check_training import schedule_of
from recapp.dataset.prediction_input import ScoringSettings
from recapp.dataset.schema import schema_from
from recapp.errors import ConfigError
from recapp.trainer.datamodule import ClickData
from recapp.trainer.module import TaskModule


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
    if counts_ids(settings):

        def rows(counted: list[int]) -> None:
            dataset["table_rows"] = counted
            if sized is not None:
                sized()

    prepare = None if dataset["generate"] is None else partial(write_generated, dataset)
    return ClickData(
        data_settings(settings),
        schema_from(settings) if scoring else labelled_schema(settings),
        settings["seed"],
        prepare,
        set_table_rows=rows,
        max_table_rows=most_rows(settings["tables"]),
        scoring=scoring,
        resume_data=settings.get("resume_data", "check"),
    )


def build_module(
    settings: Settings, make_model: Callable[[], nn.Module] | None = None
) -> TaskModule:
    """Return the LightningModule: task and optimiser around the model.

    Args:
        settings: Those of a command.
        make_model: Makes the model; None makes it of the settings.
    """
    optimizer = dict(settings["optimizer"])
    schedule = schedule_of(settings) or {}
    monitor = schedule.pop("monitor", None)
    return TaskModule(
        build_task(settings),
        make_model or (lambda: build_model(settings)),
        partial(_dense_optimizer, optimizer["dense"]),
        partial(make, schedule, "optimizer.schedule") if schedule else None,
        settings["seed"],
        monitor=monitor,
    )


def _dense_optimizer(settings: Settings, parameters: Iterable[nn.Parameter]) -> Optimizer:
    # a model of tables alone has none, and torch's optimisers refuse an empty list
    held: list[Any] = list(parameters) or [{"params": []}]
    made = make(settings, "optimizer.dense", held)
    if not isinstance(made, Optimizer):
        raise ConfigError(
            f"optimizer.dense._target_={settings['_target_']}: must make a torch optimiser, e.g. "
            "torch.optim.Adam"
        )
    return made
