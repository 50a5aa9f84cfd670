"""The task of a recipe.

This file imports neither torch nor Lightning; the file of a task may.
"""

from collections.abc import Sequence

from recapp.errors import ConfigError, suggest
from recapp.run.constructors import construct
from recapp.settings.check_settings import find_constructor
from recapp.settings.records import Constructor
from recapp.tasks.metric_settings import GAUC, MetricSettings
from recapp.tasks.task import Output, Task

CLICK = Constructor("recapp.tasks.click.ClickTask")
"""The task of settings that an older recapp stored, without a task."""


def build_task(
    settings: Constructor | None,
    names: Sequence[str] | None = None,
    metrics: MetricSettings | None = None,
) -> Task:
    """Return the task that settings name.

    Args:
        settings: The group `task`; None in settings that an older recapp stored, without a task.
        names: The metrics to measure, `metrics.names`; None measures the task's usual metrics.
        metrics: The metrics to add to those of the task; None adds none.

    Raises:
        ConfigError: The task does not exist, refuses its settings or does not know a metric; its
            outputs are none or share a name; or its metrics do not fit together.
    """
    given = settings or CLICK
    if metrics and names is not None:
        if GAUC in names and metrics.group is None:
            raise ConfigError(f"metrics.names has {GAUC}: set metrics.group=COLUMN, which adds it")
        names = [name for name in names if name not in (GAUC, *metrics.extra)]
    kind = find_constructor(given.target, "task")
    made = construct(kind, f"task ({given.target})", names=names, **given.arguments)
    if not isinstance(made, Task):
        raise ConfigError(
            f"task._target_={given.target}: must make a recapp.tasks.task.Task, as {CLICK.target} "
            "does"
        )
    if fault := _fault_of_outputs(made) or _fault_of_metrics(made):
        raise ConfigError(f"task._target_={given.target}: {fault}")
    output = _output_of(made, metrics.output) if metrics else None
    if metrics and output and metrics.adds:
        from recapp.run.added_metrics import added_metrics  # imports torch

        made.add(added_metrics(made, output, metrics))
    return made


def _output_of(task: Task, name: str | None) -> Output:
    """Return the output that `metrics.output` names; None is the first."""
    outputs = {output.name: output for output in task.outputs}
    if name is not None and name not in outputs:
        raise ConfigError(f"metrics.output={name}: {suggest(name, outputs)}")
    return task.outputs[0] if name is None else outputs[name]


def _fault_of_outputs(task: Task) -> str | None:
    """Return the reason why the outputs of a task cannot be told apart; None if they can."""
    if not task.outputs:
        return "it has no outputs: give it an Output(...) for each number that its model returns"
    names = [output.name for output in task.outputs]
    columns = [output.column for output in task.outputs]
    for kind, given in (("name", names), ("column", columns)):
        if twice := next((one for one in given if given.count(one) > 1), None):
            return f"two outputs have the {kind} {twice}: give each Output(...) a {kind} of its own"
    for name, column in zip(names, columns, strict=True):
        if column != name and column in names:
            return (
                f"the output {name} has the column {column}, the name of another output: give "
                "the column another name"
            )
    return None


def _fault_of_metrics(task: Task) -> str | None:
    """Return the reason why the metrics of a task cannot serve; None if they can."""
    known = {measure.name: measure for measure in task.known}
    outputs = [output.name for output in task.outputs]
    for measure in task.known:
        if measure.output and measure.output not in outputs:
            found = suggest(measure.output, outputs)
            return f"the metric {measure.name} reads the output {measure.output}: {found}"
    for role, name in (("best", task.best), ("storage_metric", task.storage_metric or task.best)):
        if name not in known:
            return f"{role} is the metric {name}: {suggest(name, known)}"
        if known[name].better is None:
            return (
                f"{role} is the metric {name}, of which no value is better: give its Measure(...) "
                "max or min, or choose another metric"
            )
    return None
