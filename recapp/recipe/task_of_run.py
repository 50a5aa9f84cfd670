"""The task of a recipe. It imports neither torch nor Lightning, as long as the task's own file does
not.
"""

from collections.abc import Sequence

from recapp.errors import ConfigError, RecappError
from recapp.settings.check_settings import find_constructor
from recapp.settings.records import Constructor
from recapp.tasks.task import Task

CLICK = Constructor("recapp.tasks.click.ClickTask")
"""The task of settings that were stored before there were others."""


def build_task(settings: Constructor | None, names: Sequence[str] | None = None) -> Task:
    """Return the task that settings name.

    Args:
        settings: The group `task`; None where settings were stored before there was one.
        names: The metrics that are measured, `metrics.names`; None takes all of the task.

    Raises:
        ConfigError: There is no such task, it does not take its settings, or it does not know a
            metric.
    """
    given = settings or CLICK
    kind = find_constructor(given.target, "task")
    try:
        made = kind(names=names, **given.arguments)
    except RecappError:
        raise
    except Exception as error:
        raise ConfigError(f"task ({given.target}): {' '.join(str(error).split())}") from error
    if not isinstance(made, Task):
        raise ConfigError(
            f"task._target_={given.target}: must make a recapp.tasks.task.Task, as {CLICK.target} "
            "does"
        )
    return made
