"""From settings to the task. It imports neither torch nor Lightning, as long as the task's own file
does not.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from recapp.errors import ConfigError, RecappError
from recapp.settings.check_settings import TARGET, find_constructor
from recapp.tasks.task import Task

if TYPE_CHECKING:
    from recapp.dataset.schema import Schema

CLICK: Mapping[str, Any] = {TARGET: "recapp.tasks.click.ClickTask"}
"""The task of settings that were stored before there were others."""


def build_task(settings: Mapping[str, Any]) -> Task:
    """Return the task of a run, with the metrics that `metrics.names` chooses.

    Args:
        settings: `task` and `metrics` of a command.

    Raises:
        ConfigError: There is no such task, it does not take its settings, or it does not know a
            metric.
    """
    given = dict(settings.get("task") or CLICK)
    target = given.pop(TARGET, None)
    kind = find_constructor(str(target), "task")
    names = (settings.get("metrics") or {}).get("names")
    try:
        made = kind(names=names, **given)
    except RecappError:
        raise
    except Exception as error:
        raise ConfigError(f"task ({target}): {' '.join(str(error).split())}") from error
    if not isinstance(made, Task):
        raise ConfigError(
            f"task._target_={target}: must make a recapp.tasks.task.Task, as {CLICK[TARGET]} does"
        )
    return made


def labelled_schema(settings: Mapping[str, Any]) -> "Schema":
    """Return the schema of rows that the task of a run is trained on or measured on.

    Args:
        settings: Those of a run.

    Raises:
        ConfigError: The data do not have the labels of the task.
    """
    from recapp.dataset.schema import schema_from  # imports numpy

    schema = schema_from(settings)
    return replace(schema, real_labels=build_task(settings).check_labels(schema.labels))
