"""The task of a recipe.

This file imports neither torch nor Lightning; the file of a task may.
"""

from collections.abc import Sequence

from recapp.errors import ConfigError, RecappError
from recapp.settings.check_settings import find_constructor
from recapp.settings.records import Constructor
from recapp.tasks.task import Task

CLICK = Constructor("recapp.tasks.click.ClickTask")
"""The task of settings that an older recapp stored, without a task."""


def build_task(settings: Constructor | None, names: Sequence[str] | None = None) -> Task:
    """Return the task that settings name.

    Args:
        settings: The group `task`; None in settings that an older recapp stored, without a task.
        names: The metrics to measure, `metrics.names`; None measures all of the task's metrics.

    Raises:
        ConfigError: The task does not exist, refuses its settings, does not know a metric, or has
            two outputs of one column.
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
    columns = [output.column for output in made.outputs]
    if twice := next((name for name in columns if columns.count(name) > 1), None):
        raise ConfigError(
            f"task._target_={given.target}: two outputs have the column {twice}: give each "
            "Output(...) a column of its own"
        )
    return made
