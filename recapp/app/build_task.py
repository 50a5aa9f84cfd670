"""From settings to the task. It imports neither torch nor Lightning, as long as the task's own file
does not.
"""

from collections.abc import Mapping
from typing import Any

from recapp.errors import ConfigError, RecappError
from recapp.settings.check_settings import TARGET, find_constructor
from recapp.tasks.task import Task

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
