"""Describe errors of Hydra in one line, with what to write instead."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from recapp.errors import alike, suggest
from recapp.settings.check_settings import unknown
from recapp.settings.option_files import options
from recapp.settings.values import in_quotes, in_shell, typed
from recapp.trainer.trainer_settings import TrainerSettings

ADDED_GROUPS = ("plan",)  # in no defaults list: chosen only with +plan=option
OWN = {
    "model": "recapp has no model for retrieval or the next item, and one of your own is a class "
    "and a file of settings: docs/tour.md, A model of your own",
    "task": "a task of several labels, or with a loss of your own, is a class and a file of "
    "settings: CONTRIBUTING.md, A task",
}
LOGGERS = {  # Lightning's loggers that need another package
    "mlflow": "lightning.pytorch.loggers.MLFlowLogger",
    "wandb": "lightning.pytorch.loggers.WandbLogger",
}
SCHEDULE = "optimizer.schedule"
SCHEDULE_GROUP = "optimizer/schedule"
ADVICE = (  # pattern of Hydra's error -> advice to the user
    (
        r"default list use \+(\S+)",
        "{0}: nothing is chosen there by default, so it needs a plus: +{0}",
    ),
    (
        r"^(?:Multiple values for )?(\S+?)(?: appears more than once|\. To override)",
        "{0}: chosen twice; a group that has a default is chosen without a plus: {0}=...",
    ),
    (r"already at '(.*)'", "{0} is set already: write it without the plus"),
    (
        r"Ambiguous value for argument '(.*)'",
        "{0}: put -m in front for one job for each value, brackets around a list, or quotes around "
        "a text with commas: \"key='a,b'\"",
    ),
    (r"Sweep parameters '(.*)' requires", "{0}: put -m in front for one job for each value"),
)

_PLAIN = r"[^A-Za-z0-9_/\\.+$%*@?|: \t-]"  # signs that Hydra reads only in quotes or as brackets
OTHER_KIND = re.compile(r"Cannot merge \w+ with \w+\s+full_key: (\S*)\s+object_type=(list|dict)")


def no_such_option(group: str, option: str, known: Iterable[str]) -> str:
    """Return the error text for an unknown option of a group, with the known options.

    Args:
        group: The group.
        option: The option that was chosen.
        known: The names of the group's options.
    """
    text = f"{group}={option}: there is no such option; {suggest(option, known)}"
    if group == "dataset" and ("/" in option or Path(option).exists()):
        return (
            f"{text}; files of your own are read by dataset=custom {typed('dataset.path', option)}"
        )
    if group in OWN and not alike(option, known):
        return f"{text}; {OWN[group]}"
    if group == "logger" and not alike(option, known):
        target = LOGGERS.get(option, "package.Class")
        return (
            f"{text}; others are added by +logger.{option}._target_={target}, and recapp gives "
            "them the run's directory (save_dir)"
        )
    return text


def in_one_line(error: HydraException | OmegaConfBaseException, known: Iterable[str]) -> str:
    """Describe an error of Hydra in one line, with the names that are close.

    Args:
        error: The error of Hydra or OmegaConf.
        known: The settings that exist, dotted.
    """
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    if isinstance(error, OverrideParseException):
        return unreadable(str(error.override))
    if isinstance(error, MissingConfigException):
        group, _, option = str(error.missing_cfg_file).rpartition("/")
        return no_such_option(group, option, error.options or ())
    text = str(error) or str(cause)
    for pattern, advice in ADVICE:
        if match := re.search(pattern, text):
            return advice.format(*match.groups())
    if match := OTHER_KIND.search(f"{text}\n{cause}"):
        name, kind = match.groups()
        if not name:  # in the file of an option
            return (
                f"{text.partition(':')[0]}: a setting is a mapping where the chosen options have a "
                "list, or the reverse"
            )
        _, _, override = text.partition("Error merging override ")
        form = f"a list, {name}=[...]" if kind == "list" else f"a mapping, {name}={{NAME: ...}}"
        return f"{override.lstrip('+') or name}: the chosen options have another kind: give {form}"
    known = list(known)
    if match := re.search(r"Could not override '([^']+)'\.", text):
        return _unknown(match[1], known)
    if (
        isinstance(cause, OmegaConfBaseException)
        and cause.full_key
        and "is not in struct" in str(cause)
    ):
        return _unknown(str(cause.full_key), known)
    return first_line(cause if str(error) == "" else error)


def _unknown(name: str, known: Sequence[str]) -> str:
    top = name.partition(".")[0]
    home, _, _ = name.rpartition(".")
    if top in ADDED_GROUPS and (top not in known or (home in known and home != top)):
        return f"{name}: nothing is set there by default, so it needs a plus: +{name}=..."
    if home == SCHEDULE and not any(key.startswith(f"{SCHEDULE}.") for key in known):
        *most, last = options(SCHEDULE_GROUP)
        chosen = f"optimizer/schedule={', '.join(most)} or {last}"
        return (
            f"{name}: no schedule is chosen: choose {chosen}, or name one: "
            f'"{SCHEDULE}={{_target_: torch.optim.lr_scheduler.StepLR, step_size: 1000}}", or '
            f"write each of its settings with a plus: +{name}=..."
        )
    if top == "trainer" and name.rpartition(".")[2] in TrainerSettings.refused:
        return f"{name}: cannot be set: {TrainerSettings.refused[name.rpartition('.')[2]]}"
    if not name.startswith("hydra."):
        known = [key for key in known if key.partition(".")[0] != "hydra"]
    if name in known:
        return f"{name}: the chosen options do not set it, so it needs a plus: +{name}=..."
    plus = (
        "; a setting of Lightning's Trainer that is not listed by --help trainer needs a plus: "
        f"+{name}=..."
    )
    return unknown(name, known) + (plus if home == "trainer" else "")


def first_line(error: BaseException) -> str:
    """Return the first line of an error that is not empty, or its type."""
    return next(
        (line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__
    )


def unreadable(override: str) -> str:
    """Describe what is wrong with a setting that Hydra cannot read, and the form that works.

    Args:
        override: The setting, as in the command line.
    """
    name, equals, text = override.partition("=")
    begin = f"cannot read {override!r}: "
    if not equals or not _is_read(f"{name}=x"):
        return f"{begin}settings are key=value, and a key has letters, digits, _ and dots"
    signs = " ".join(dict.fromkeys(re.findall(_PLAIN, text)))
    needs = f"a value with {signs} needs quotes" if signs else "the value needs quotes"
    if text[:1] in ("[", "{"):
        needs = "a list is [a,b] and a mapping {a: b}; as one text it needs quotes"
    return f"{begin}{needs}: {in_shell(f'{name}={in_quotes(text, evaluated=False)}')}"


def _is_read(override: str) -> bool:
    try:
        OverridesParser.create().parse_override(override)
    except HydraException:
        return False
    return True
