"""The data module and the LightningModule of a recipe.

recipe -> data module, module
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from inspect import signature
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from recapp.dataset.data_settings import ScoringSettings
from recapp.errors import ConfigError
from recapp.run.constructors import make
from recapp.run.monitors import schedule_of
from recapp.run.recipe import Train
from recapp.run.run_rows import write_generated
from recapp.settings.check_settings import find_constructor
from recapp.settings.records import Constructor, constructor
from recapp.trainer.changed_optimizer import TOTAL, ChangedOptimizer
from recapp.trainer.datamodule import ClickData
from recapp.trainer.module import TaskModule

CYCLES = "cycle_momentum"  # of OneCycleLR and CyclicLR


def build_data(
    recipe: Train,
    set_table_rows: Callable[[list[int]], object] | None = None,
    scoring: ScoringSettings | None = None,
) -> ClickData:
    """Return the data module.

    Args:
        recipe: The recipe.
        set_table_rows: Called with the sizes of tables once the ids of the training rows are
            counted; None if no caller needs them.
        scoring: The settings of the rows to score; None without prediction.
    """
    generated = recipe.dataset.generate is not None
    return ClickData(
        recipe.dataset.scaled,
        recipe.schema if scoring else recipe.labelled_schema,
        recipe.order_seed,
        partial(write_generated, recipe.dataset) if generated else None,
        count_table_rows=recipe.counts_ids,
        set_table_rows=set_table_rows if recipe.counts_ids else None,
        max_table_rows=recipe.most_rows,
        scoring=scoring,
        resume_data=recipe.resume_data,
        number_rows=recipe.metrics.bootstrap is not None,
    )


def sized_by(recipe: Train, data: ClickData) -> Callable[[], Train]:
    """Return a function that gives the recipe with the sizes of tables and the fitted values of
    derived columns that the data module found.

    Until the data module is set up, the sizes are those of the settings.
    """
    return lambda: recipe.sized(data.table_rows, data.schema.values or None)


def build_module(recipe: Train, make_model: Callable[[], nn.Module]) -> TaskModule:
    """Return the LightningModule: task and optimiser around the model.

    Args:
        recipe: The recipe.
        make_model: Makes the model.
    """
    schedule = schedule_of(recipe)
    monitor = schedule.arguments.get("monitor") if schedule else None

    def total() -> int | None:
        data = module.trainer.datamodule  # type: ignore[attr-defined]
        return data.steps_of_run() if isinstance(data, ClickData) else None

    module = TaskModule(
        recipe.built_task,
        make_model,
        partial(_dense_optimizer, recipe.optimizer.dense),
        (lambda optimizer: make_schedule(schedule, optimizer, total)) if schedule else None,
        recipe.seed,
        monitor=monitor,
    )
    return module


def make_schedule(
    settings: Constructor, optimizer: Optimizer, total: Callable[[], int | None]
) -> LRScheduler:
    """Make the schedule of a run. A schedule that takes `total_steps` gets the number of steps of
    the run, if the settings leave it open.

    Args:
        settings: The settings of the schedule.
        optimizer: The optimiser; its param groups get the first rates.
        total: Returns the number of steps of the run.

    Raises:
        ConfigError: The schedule cannot be made.
    """
    parameters = signature(find_constructor(settings.target, "optimizer.schedule")).parameters
    wanted = settings.without("monitor")
    open_total = TOTAL in parameters and wanted.arguments.get(TOTAL) is None
    more = {TOTAL: total()} if open_total else {}
    try:
        made = make(wanted.without(*more), "optimizer.schedule", optimizer, **more)
    except ConfigError as error:
        if CYCLES not in parameters or not isinstance(error.__cause__, LookupError):
            raise
        raise ConfigError(
            f"optimizer.schedule ({settings.target}): cycles the momentum of all param groups, and "
            f"those of tables have none: add {CYCLES}: false to optimizer.schedule"
        ) from error
    assert isinstance(made, LRScheduler)
    return made


def changed_optimizer(before: Any, now: Mapping[str, Any]) -> ChangedOptimizer:
    """Return the callback that applies changed settings of the optimiser.

    Args:
        before: The group `optimizer` of the checkpoint's settings; a damaged file may hold any
            value there.
        now: That of this run's settings.
    """
    return ChangedOptimizer(
        before,
        now,
        lambda plain, optimizer, total: make_schedule(constructor(plain), optimizer, lambda: total),
    )


def _dense_optimizer(settings: Constructor, parameters: Iterable[nn.Parameter]) -> Optimizer:
    # a model of tables alone has no parameters, and torch's optimisers refuse an empty list
    held: list[Any] = list(parameters) or [{"params": []}]
    made = make(settings, "optimizer.dense", held)
    if not isinstance(made, Optimizer):
        raise ConfigError(
            f"optimizer.dense._target_={settings.target}: must make a torch optimiser, e.g. "
            "torch.optim.Adam"
        )
    return made
