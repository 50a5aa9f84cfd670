"""Check the `_target_` names in stored settings before they are imported, so that a checkpoint or
an artefact cannot run code.

| place                                    | names that are allowed                                |
|------------------------------------------|-------------------------------------------------------|
| optimizer.sparse                         | recapp's row rules, by name                           |
| optimizer.sparse.tables.NAME             | the same                                              |
| optimizer.dense                          | a class of torch.optim                                |
| optimizer.schedule                       | recapp's schedules, by name; a class of               |
|                                          | torch.optim.lr_scheduler                              |
| callbacks.NAME                           | a class of lightning.pytorch.callbacks                |
| logger.NAME                              | recapp's, Lightning's CSVLogger and TensorBoardLogger |
| model                                    | recapp's models, by name                              |
| metrics.extra.NAME                       | a class of torchmetrics                               |
| task                                     | recapp's tasks, by name                               |
| dataset.format                           | recapp's formats, by name                             |
| anywhere else, in arguments and in lists | a class of any of these homes, of torch.nn or of      |
|                                          | torchmetrics                                          |

recapp's own models, tasks, schedules and loggers are those that its `conf/` names.

A class is allowed if a home module has it under a public name and it is derived from the home's
base class; functions are never allowed. Only the modules of this list are homes, so a file cannot
cause other imports. Other loggers could send curves to the author of the file. Settings of the
command line and of the user's own conf are not checked. `trust=[package]` also allows the classes
that this package defines and that are derived from the base class of their place; it allows neither
functions nor names that the package has imported.

Settings of a file must be plain: Hydra's own keys and paths out of the run's directory are refused
as well. References (`${...}`) are texts like others (`literal`), and refused in targets, callbacks
and loggers.
"""

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from pkgutil import resolve_name
from typing import Any, NamedTuple, cast

from recapp.errors import CheckpointError, ConfigError, one_line
from recapp.optim.named_rules import RULES as RULE_NAMES
from recapp.settings.option_files import named_targets

TARGET = "_target_"
MARK = "\N{LOCK}"  # the prefix of a target from a file, until it is checked
DEEPEST = 32  # the most levels of nested settings
MOST_VALUES = 2**16  # 4,000 tables with all settings; composing takes .1 ms a value
WIDE = re.compile(r"\{[^{}]*:[^{}]*\d{4}")  # a format field with a huge width
HYDRAS = ("_args_", "_partial_", "_recursive_", "_convert_")
PATHLESS = ("callbacks", "logger")  # groups whose paths must stay in the run's directory
NOT_THE_USERS = ("recapp", "torch", "lightning", "torchmetrics", "hydra", "omegaconf", "numpy")


class Home(NamedTuple):
    """A public module, and the base class of its classes that a file may name."""

    module: str
    base: str


LOGGERS = (
    "lightning.pytorch.loggers.CSVLogger",
    "lightning.pytorch.loggers.csv_logs.CSVLogger",
    "lightning.pytorch.loggers.TensorBoardLogger",
    "lightning.pytorch.loggers.tensorboard.TensorBoardLogger",
)
LOGGER = "lightning.pytorch.loggers.Logger"
OPTIMIZERS = Home("torch.optim", "torch.optim.Optimizer")
SCHEDULERS = Home("torch.optim.lr_scheduler", "torch.optim.lr_scheduler.LRScheduler")
CALLBACKS = Home("lightning.pytorch.callbacks", "lightning.pytorch.callbacks.Callback")
MODULES = Home("torch.nn", "torch.nn.Module")
METRICS = Home("torchmetrics", "torchmetrics.Metric")
OF_CLICKS = tuple(
    Home(f"torchmetrics.{room}", "torchmetrics.Metric")
    for room in ("classification", "regression", "retrieval")
)


class TrustedPlace(NamedTuple):
    """The names that a file may use in one place of the settings.

    Args:
        names: The names.
        homes: The homes of further classes.
        bases: Base classes for classes of a trusted package, beside those of the homes; without
            any, functions stand there.
    """

    names: Sequence[str] = ()
    homes: Sequence[Home] = ()
    bases: Sequence[str] = ()


def _ours(room: str) -> tuple[str, ...]:
    return tuple(name for name in named_targets() if name.startswith(f"recapp.{room}."))


@cache
def slots() -> tuple[Mapping[str, TrustedPlace], TrustedPlace]:
    """Return what a file may name in each place, and in all others."""
    rules = tuple(f"recapp.optim.rules.{name}" for name in RULE_NAMES)
    schedules = _ours("optim.schedule")
    models = (*_ours("models"), "recapp.compat.hugectr.graph.LayerGraph")
    callbacks = ("recapp.compat.hugectr.iteration_lines.IterationLines",)
    formats = ("recapp.dataset.delimited_text.DelimitedText", "recapp.dataset.json_lines.JsonLines")
    loggers = (*_ours("trainer.curves"), *LOGGERS)
    places = {
        "optimizer.sparse": TrustedPlace(rules),
        "optimizer.sparse.tables.*": TrustedPlace(rules),
        "optimizer.dense": TrustedPlace(homes=[OPTIMIZERS]),
        "optimizer.schedule": TrustedPlace(schedules, [SCHEDULERS]),
        "callbacks.*": TrustedPlace(callbacks, [CALLBACKS]),
        "logger.*": TrustedPlace(loggers, bases=[LOGGER]),
        "model": TrustedPlace(models, bases=[MODULES.base]),
        "metrics.extra.*": TrustedPlace(homes=[METRICS, *OF_CLICKS]),
        "dataset.format": TrustedPlace(formats, bases=["recapp.dataset.data_file.Format"]),
        "task": TrustedPlace(_ours("tasks"), bases=["recapp.tasks.task.Task"]),
    }
    names = (*rules, *schedules, *models, *callbacks, *loggers, *formats)
    return places, TrustedPlace(names, [OPTIMIZERS, SCHEDULERS, CALLBACKS, MODULES, METRICS])


def marked(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Check that settings of a file are plain, and return them with a mark on each `_target_`.

    Other settings may then override these. The mark stays on a target that no other setting
    replaces; `judged` removes it.

    Raises:
        CheckpointError: The settings are not plain.
    """
    settings: dict[str, Any] = _marked(stored, "", 0)
    if _count(stored) > MOST_VALUES:
        raise _not_plain("", f"are more than {MOST_VALUES:,} values")
    if not isinstance(stored.get("choices", {}), Mapping):
        raise _not_plain("choices", "are no options of groups")
    return settings


def judged(settings: Mapping[str, Any], trust: Sequence[str]) -> dict[str, Any]:
    """Check all marked targets, and return the settings without marks.

    Args:
        settings: Plain settings; settings of a file come from `marked`.
        trust: Own packages of the user that a file may name.

    Raises:
        ConfigError: `trust` is not a list of packages.
        CheckpointError: A target is not allowed; the text names the fix.
    """
    if not isinstance(trust, list | tuple) or not all(
        isinstance(p, str) and _is_dotted(p) for p in trust
    ):
        raise ConfigError(f"trust={trust}: must be a list of packages, e.g. trust=[mypackage]")
    return cast(dict[str, Any], _judged(settings, "", trust))


def _inner(value: Any, where: str) -> Iterator[tuple[Any, str, Any]]:
    """Yield key or index, dotted name and value of each item of a container."""
    if isinstance(value, Mapping):
        yield from (
            (key, f"{where}.{key}" if where else str(key), part) for key, part in value.items()
        )
    else:
        yield from ((i, f"{where}[{i}]", part) for i, part in enumerate(value))


def _marked(value: Any, where: str, depth: int) -> Any:
    if depth > DEEPEST:
        raise _not_plain(where, "is nested too deeply")
    if isinstance(value, Mapping):
        settings = {}
        for key, name, part in _inner(value, where):
            if not isinstance(key, str) or key in HYDRAS or "${" in key:
                raise _not_plain(name, "is no setting")
            if key == TARGET and not isinstance(part, str):
                raise _not_plain(name, "is no name")
            inner = _marked(part, name, depth + 1)
            settings[key] = f"{MARK}{inner}" if key == TARGET else inner
        return settings
    if isinstance(value, list | tuple):
        return [_marked(part, name, depth + 1) for _, name, part in _inner(value, where)]
    if isinstance(value, str):
        pathless = where.partition(".")[0] in PATHLESS
        if "${" in value and (pathless or where.endswith(TARGET)):
            raise _not_plain(where, "refers to something else")
        if pathless and _leads_out(value):
            raise _not_plain(where, f"is {one_line(value)}, which leads out of the run's directory")
        if pathless and WIDE.search(value):
            raise _not_plain(where, f"is {one_line(value)}, which makes a name of any length")
    elif value is not None and not isinstance(value, bool | int | float):
        raise _not_plain(where, f"is a {type(value).__name__}")
    return value


def _count(value: Any) -> int:
    if isinstance(value, Mapping | list | tuple):
        return 1 + sum(_count(part) for _, _, part in _inner(value, ""))
    return 1


def _judged(value: Any, where: str, trust: Sequence[str]) -> Any:
    if isinstance(value, Mapping):
        settings = {}
        for key, name, part in _inner(value, where):
            if key == TARGET and isinstance(part, str) and part.startswith(MARK):
                settings[key] = part.removeprefix(MARK)
                _judge(settings[key], where, trust)
            else:
                settings[key] = _judged(part, name, trust)
        return settings
    if isinstance(value, list):
        return [_judged(part, name, trust) for _, name, part in _inner(value, where)]
    return value


def _judge(target: str, where: str, trust: Sequence[str]) -> None:
    slot = re.sub(r"^(callbacks|logger|metrics\.extra)\.[^.\[\]]+$", r"\1.*", where)
    slot = re.sub(r"^(optimizer\.sparse\.tables)\..+$", r"\1.*", slot)
    places, elsewhere = slots()
    names, homes, bases = places.get(slot, elsewhere)
    if target in names or any(_is_class_of(target, home) for home in homes):
        return
    trusted = next((name for name in trust if target.startswith(f"{name}.")), None)
    if trusted and _is_dotted(target):
        _check_own_class(target, where, trusted, [*bases, *(home.base for home in homes)])
        return
    package = target.partition(".")[0]
    group = where.partition(".")[0].partition("[")[0]
    fix = f"choose another on the command line ({group}=...)"
    if _is_dotted(target) and package not in {*sys.stdlib_module_names, *NOT_THE_USERS}:
        fix = f"if that package is yours, say trust=[{','.join([*trust, package])}]"
    raise CheckpointError(
        f"{where}.{TARGET}={one_line(target)} stands in the checkpoint and is not run: "
        f"{_may(names, homes)}; {fix}"
    )


def _check_own_class(target: str, where: str, trusted: str, bases: Sequence[str]) -> None:
    home, _, name = target.rpartition(".")
    refusal = f"{where}.{TARGET}={one_line(target)} stands in the checkpoint and is not run: "
    try:
        value = vars(import_module(home)).get(name)
    except Exception as error:
        why = one_line(str(error))
        raise CheckpointError(
            f"{refusal}{home} cannot be imported ({why}); start the command where it can be"
        ) from None
    defined = isinstance(value, type) and f"{value.__module__}.".startswith(f"{trusted}.")
    if not defined or not issubclass(cast(type, value), tuple(map(resolve_name, bases))):
        kinds = (
            f"that are derived from {' or '.join(bases)}" if bases else "where classes may stand"
        )
        raise CheckpointError(
            f"{refusal}trust=[{trusted}] vouches for classes that are defined there, {kinds}; say "
            f"{where}.{TARGET}=... on the command line if you want it"
        )


def _may(names: Sequence[str], homes: Sequence[Home]) -> str:
    if len(homes) > 1:
        return "only recapp's own and classes of torch, lightning and torchmetrics are"
    class_names = dict.fromkeys(name.rpartition(".")[2] for name in names)
    modules = {name.rpartition(".")[0] for name in names}
    parts = (
        [", ".join(class_names) + (f" of {modules.pop()}" if len(modules) == 1 else "")]
        if class_names
        else []
    )
    return f"only {' and '.join([*parts, *(f'classes of {home.module}' for home in homes)])} are"


def _is_class_of(target: str, home: Home) -> bool:
    """Return whether a name is a public class of a home, by the home's path or its own."""
    name = target.rpartition(".")[2]
    if not target.startswith(f"{home.module}.") or name.startswith("_") or not _is_dotted(target):
        return False
    if target in named_targets():  # without importing Lightning, which takes seconds
        return True
    value = vars(import_module(home.module)).get(name)
    if not isinstance(value, type) or not issubclass(value, resolve_name(home.base)):
        return False
    return target in (f"{home.module}.{name}", f"{value.__module__}.{value.__qualname__}")


def _is_dotted(name: str) -> bool:
    return all(part.isidentifier() for part in name.split("."))


def _leads_out(text: str) -> bool:
    uri = "://" in text or "::" in text or text.startswith(("file:", "local:", "data:"))
    return uri or os.path.isabs(text) or text.startswith("~") or ".." in re.split(r"[/\\]", text)


def _not_plain(where: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint's settings are not plain: {one_line(where) or 'they'} {why}; use another "
        "checkpoint"
    )
