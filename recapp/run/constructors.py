"""Call the constructors that settings name by `_target_`: any, row rules, sharding types, the task.

This file imports neither torch nor Lightning; what a constructor makes may.
"""

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from recapp.errors import ConfigError, RecappError, suggest
from recapp.optim.named_rules import RULES, Rules, table_rules
from recapp.optim.rules import RowRule
from recapp.planner.planner_settings import PlanSettings
from recapp.settings.records import TARGET, Constructor, constructor, find_constructor, told
from recapp.settings.values import check_arguments
from recapp.tasks.measures import GAUC, MetricSettings
from recapp.tasks.task import Task

REFUSALS = (TypeError, ValueError, ImportError)  # ImportError: a logger is not installed
MISCONFIGURED = "MisconfigurationException"  # Lightning's; scoring does not import it
GIVEN = {  # what recapp adds to the arguments of the settings; any other is a collection of tables
    "dense_in_features": "the number of dense columns, dataset=...",
    "names": "the metrics that are measured, metrics.names",
    "save_dir": "the run's directory, hydra.run.dir=DIR",
}
T = TypeVar("T")


def constructor_of(
    settings: Constructor,
    setting: str,
    extra: Iterable[str] = (),
    positional: int = 0,
    kind: type = object,
) -> Any:
    """Return the constructor that settings name, after a check of their arguments.

    Args:
        settings: The constructor and its arguments.
        setting: The dotted name of `settings`, for errors.
        extra: The names of the arguments that recapp adds.
        positional: The number of positional arguments that recapp adds.
        kind: The class of what it must make.

    Raises:
        ConfigError: The constructor does not exist, is another class, or does not take an argument
            or its type.
    """
    target = derived_constructor(kind, settings, setting)
    meanings = {
        name: GIVEN.get(name, "the tables of this collection, tables=...") for name in extra
    }
    check_arguments(target, settings.arguments, setting, extra=meanings, positional=positional)
    return target


def derived_constructor(kind: type, settings: Constructor, setting: str) -> Any:
    """Return the constructor that settings name: a class that is derived from another, or anything
    else that can be called, such as a function.

    Args:
        kind: The class from which it must be derived.
        settings: The constructor and its arguments.
        setting: The dotted name of `settings`, for errors.

    Raises:
        ConfigError: The constructor does not exist, or is another class.
    """
    target = find_constructor(settings.target, setting)
    if isinstance(target, type) and not issubclass(target, kind):
        raise _of_another_class(kind, settings, setting, target)
    return target


def _of_another_class(kind: type, settings: Constructor, setting: str, actual: type) -> ConfigError:
    package = kind.__module__.partition(".")[0]
    return ConfigError(
        f"{setting}.{TARGET}={settings.target}: makes a {actual.__name__}, and must make a "
        f"{kind.__name__} of {package}"
    )


def make(settings: Constructor, setting: str, /, *args: Any, **extra: Any) -> Any:
    """Call the constructor that settings name, with their arguments.

    Hydra's own `instantiate` would pass its list type instead of plain lists and wrap the
    exceptions of constructors.

    Args:
        settings: The constructor and its arguments.
        setting: The dotted name of `settings`, for errors.
        args: Positional arguments that recapp adds.
        extra: Keyword arguments that recapp adds.

    Raises:
        ConfigError: The constructor does not exist, does not take an argument, or refuses a value.
    """
    target = constructor_of(settings, setting, extra, len(args))
    where = f"{setting} ({settings.target})"
    return construct(target, where, *args, **settings.arguments, **extra)


def make_a(kind: type[T], settings: Constructor, setting: str, /, *args: Any, **extra: Any) -> T:
    """Call a constructor that must make an object of a class.

    Args:
        kind: The class. A class that is not derived from it is refused before it is called.
        settings: As those of `make`, and so are the following arguments.
        setting: The dotted name of `settings`, for errors.
        args: Positional arguments that recapp adds.
        extra: Keyword arguments that recapp adds.

    Raises:
        ConfigError: As `make`, or the constructor makes something else.
    """
    derived_constructor(kind, settings, setting)
    instance = make(settings, setting, *args, **extra)
    if isinstance(instance, kind):
        return instance
    raise _of_another_class(kind, settings, setting, type(instance))


def construct(target: Any, setting: str, /, *args: Any, **extra: Any) -> Any:
    """Call a constructor, and turn every exception of it into a ConfigError.

    An exception that is no usual refusal of arguments is shown with its type and its line.

    Args:
        target: The constructor.
        setting: The dotted name of the constructor's settings, for errors.
        args: Its positional arguments.
        extra: Its keyword arguments.

    Raises:
        ConfigError: The constructor refuses its arguments, or fails.
    """
    try:
        return target(*args, **extra)
    except (RecappError, MemoryError):
        raise
    except Exception as e:
        usual = isinstance(e, REFUSALS) or any(c.__name__ == MISCONFIGURED for c in type(e).__mro__)
        raise ConfigError(f"{setting}: {' '.join(str(e).split()) if usual else told(e)}") from e


def row_rules(sparse: Constructor) -> Rules:
    """Return the row rule of all tables, or rules by table name or glob if
    `optimizer.sparse.tables` names some.

    Args:
        sparse: The settings `optimizer.sparse`.

    Raises:
        ConfigError: A `_target_`, or the settings of a table, make no row rule.
    """
    rule = _rule(sparse.without("tables"), "optimizer.sparse")
    of_tables = table_rules(
        sparse.plain(),
        "optimizer.sparse",
        lambda plain, name: _rule(constructor(plain, name), name),
    )
    return {"*": rule, **of_tables} if of_tables else rule


def _rule(settings: Constructor, setting: str) -> RowRule:
    target = find_constructor(settings.target, setting)
    is_other = isinstance(target, type) and not issubclass(target, RowRule)  # an optimiser of torch
    rule = None if is_other else make(settings, setting)
    if not isinstance(rule, RowRule):
        raise ConfigError(
            f"{setting}._target_={settings.target}: must make a row rule, as those of "
            f"recapp.optim.rules do: {', '.join(RULES)}"
        )
    return rule


def register_own_types(plan: PlanSettings) -> None:
    """Register the sharding types of `plan.sharding_types`. Each target is a function that returns
    a `ShardingTypeRecord`.

    Raises:
        ConfigError: A target does not exist, fails, returns no record, or returns a record of
            another name.
        PlanError: A built-in type has the same name.
    """
    for name, own_type in (plan.sharding_types or {}).items():
        from recapp.sharding.sharding_types import ShardingTypeRecord, register  # imports numpy

        setting = f"plan.sharding_types.{name}"
        record = make_a(ShardingTypeRecord, own_type, setting)
        if record.name != name:
            raise ConfigError(
                f"{setting}: its record is named {record.name}: write "
                f"plan.sharding_types.{record.name}"
            )
        register(record)


# ---- the task


def build_task(
    settings: Constructor,
    names: Sequence[str] | None = None,
    metrics: MetricSettings | None = None,
) -> Task:
    """Return the task that settings name.

    Args:
        settings: The group `task`.
        names: The metrics to measure, `metrics.names`; None measures the task's usual metrics.
        metrics: The metrics to add to those of the task; None adds none.

    Raises:
        ConfigError: The task does not exist, refuses its settings or does not know a metric; its
            outputs are none or share a name; or its metrics do not fit together.
    """
    if metrics and names is not None:
        if GAUC in names and metrics.group is None:
            raise ConfigError(f"metrics.names has {GAUC}: set metrics.group=COLUMN, which adds it")
        names = [name for name in names if name not in (GAUC, *metrics.extra)]
    task = make_a(Task, settings, "task", names=names)  # type: ignore[type-abstract]
    if fault := _fault_of_outputs(task) or _fault_of_metrics(task):
        raise ConfigError(f"task._target_={settings.target}: {fault}")
    outputs = {output.name: output for output in task.outputs}
    name = metrics.output if metrics and metrics.output is not None else task.outputs[0].name
    if name not in outputs:
        raise ConfigError(f"metrics.output={name}: {suggest(name, outputs)}")
    if metrics and metrics.adds:
        from recapp.tasks.detail_metrics import added_metrics  # imports torch

        task.add(added_metrics(task, outputs[name], metrics, make))
    return task


def _fault_of_outputs(task: Task) -> str | None:
    if not task.outputs:
        return "it has no outputs: give it an Output(...) for each number that its model returns"
    names = [output.name for output in task.outputs]
    columns = [output.column for output in task.outputs]
    for kind, texts in (("name", names), ("column", columns)):
        if twice := next((one for one in texts if texts.count(one) > 1), None):
            return f"two outputs have the {kind} {twice}: give each Output(...) a {kind} of its own"
    for name, column in zip(names, columns, strict=True):
        if column != name and column in names:
            return (
                f"the output {name} has the column {column}, the name of another output: give "
                "the column another name"
            )
    return None


def _fault_of_metrics(task: Task) -> str | None:
    known = {measure.name: measure for measure in task.known}
    outputs = [output.name for output in task.outputs]
    for measure in task.known:
        if measure.output and measure.output not in outputs:
            says = suggest(measure.output, outputs)
            return f"the metric {measure.name} reads the output {measure.output}: {says}"
    for role, name in (("best", task.best), ("storage_metric", task.storage_metric or task.best)):
        if name not in known:
            return f"{role} is the metric {name}: {suggest(name, known)}"
        if known[name].better is None:
            return (
                f"{role} is the metric {name}, of which no value is better: give its Measure(...) "
                "max or min, or choose another metric"
            )
    return None
