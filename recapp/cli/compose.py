"""Compose settings from `conf/*.yaml` and the command line by Hydra; each mistake becomes one line.

    conf/train.yaml        the groups, and one option of each as default      model: dlrm
    conf/model/dlrm.yaml   the settings of one option                         model.top_layers
    command line           group=option, key=value, +plan=option             +plan=mixed seed=2

A checkpoint keeps the settings that it was trained with. A run that resumes from a checkpoint, or
evaluates it, takes these settings and replaces only those that the command line sets
(`compose_over`); today's defaults are not used.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.conf import HydraConf
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from recapp.cli.stored_recipe import stored_settings
from recapp.errors import ConfigError, RecappError, alike, first_line, suggest
from recapp.processes.rank_environment import new_directory
from recapp.run.constructors import build_task
from recapp.run.recipe import COMMANDS, read_settings
from recapp.settings import option_files, uris
from recapp.settings.option_files import Folders, is_group, named_folders, option_file, options
from recapp.settings.other_systems import in_recapp_words
from recapp.settings.records import (
    TARGET,
    constructor,
    leaves,
    may_be_set,
    names_of,
    override_names,
    unknown,
)
from recapp.settings.values import in_quotes, in_shell, literal, typed
from recapp.stored.store import read_manifest_text
from recapp.stored.trust import judged
from recapp.trainer.trainer_settings import TrainerSettings

HYDRA_VERSION_BASE = "1.3"
PATHS = (
    (None, "ckpt_path"),
    (None, "checkpoints"),
    (None, "artefact"),
    (None, "input"),
    (None, "output"),
    ("dataset", "path"),
    ("dataset", "val_path"),
    ("dataset", "test_path"),
    ("tables", "values"),
    ("topology", "hardware"),
    ("plan", "path"),
)
# values that are no option, since Hydra needs a word
NO_OPTION = re.compile(r"|null|true|false|[-+.0-9].*")
NULLABLE_GROUPS = ("experiment", "optimizer/schedule")
# a checkpoint may name only files of conf/
GROUP = re.compile(r"\w+(?:/\w+)*")
OPTION = re.compile(r"[\w-]+")
# a backslash before a reference makes it a plain text
OF_ENVIRONMENT = re.compile(r"(?<!\\)(?:\\\\)*\$\{.*?oc\.env\s*:\s*([^,}\s]+)")
# for conf/command.yaml; resolved once for a command and all jobs of its sweep
OmegaConf.register_new_resolver("new_directory", new_directory, use_cache=True, replace=True)


def best(key: str, *, _root_: DictConfig) -> str:
    """Return the metric that chooses the best checkpoint for the task of the settings: `monitor` is
    its name, `mode` its direction. Files of `conf/` use it as `${best:monitor}`.
    """
    settings: Any = OmegaConf.to_container(_root_.task, resolve=True)
    measures = build_task(constructor(settings, "task")).measures
    return measures.objective if key == "monitor" else measures.mode


OmegaConf.register_new_resolver("best", best, replace=True)


def compose(primary: str, overrides: Sequence[str] = (), folders: Folders = ()) -> DictConfig:
    """Compose `conf/<primary>.yaml` with overrides, unresolved. Hydra's own settings are under
    `hydra`.

    Args:
        primary: The command.
        overrides: Overrides, as in a command line.
        folders: Directories with further options, besides recapp's own. In a job, Hydra knows them
            already.
    """
    if GlobalHydra.instance().is_initialized():
        return hydra.compose(primary, list(overrides), return_hydra_config=True)
    more = [in_quotes(f"file://{folder}", evaluated=False) for folder in folders]
    search_path = [f"hydra.searchpath=[{','.join(more)}]"] if more else []
    with hydra.initialize_config_dir(str(option_files.conf_dir()), version_base=HYDRA_VERSION_BASE):
        return hydra.compose(primary, [*overrides, *search_path], return_hydra_config=True)


def choices(hydra_config: HydraConf | DictConfig) -> dict[str, str]:
    """Return the chosen option of each group except Hydra's own: `{"model": "dlrm", "plan":
    "mixed"}`.
    """
    runtime_choices = hydra_config.runtime.choices.items()
    return {
        str(group): str(option)
        for group, option in runtime_choices
        if option and not str(group).startswith("hydra/")
    }


def without_hydra(config: DictConfig) -> DictConfig:
    """Return composed settings without Hydra's own."""
    return OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])


def names_checkpoint(config: DictConfig) -> bool:
    """Return whether the settings name a checkpoint, whose settings then replace the defaults."""
    return (
        "ckpt_path" in config
        and not OmegaConf.is_missing(config, "ckpt_path")
        and bool(config.ckpt_path)
    )


def to_plain(config: DictConfig, *, whole: bool = True) -> dict[str, Any]:
    """Return settings as plain dicts and lists: references resolved, HugeCTR's words replaced.

    Args:
        config: Composed settings.
        whole: Whether a missing required setting is an error; if not, its value is `???`.

    Raises:
        ConfigError: A required setting is missing, a reference cannot be resolved, or a constructor
            would get a text of the environment.
    """
    try:
        missing = sorted(OmegaConf.missing_keys(config)) if whole else []
        plain: Any = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        cause: BaseException | None = error
        while cause is not None:  # `best` has refused the task, deep below
            if isinstance(cause, RecappError):
                raise cause from None
            cause = cause.__cause__ or cause.__context__
        raise ConfigError(f"{error.full_key}: {first_line(error)}") from error
    if missing:
        raise ConfigError(f"{missing[0]} must be given: {missing[0]}=...")
    # Settings are stored in checkpoints and `resolved.yaml`, and logged. What a setting of recapp's
    # own takes from the environment, such as a path, is one of them. But only the class that a
    # `_target_` names knows whether an argument is a secret.
    written = OmegaConf.to_container(config, resolve=False)
    for name, variable in _texts(written, plain, "", of_constructor=False):
        raise ConfigError(
            f"{name}=${{oc.env:{variable}}}: its value would be stored and logged, and may be a "
            f'secret: leave it out, and let the class read os.environ["{variable}"], as most '
            "loggers do by themselves"
        )
    named = {str(key): value for key, value in plain.items()}
    return named | ({"tables": in_recapp_words(named["tables"])} if "tables" in named else {})


def _texts(
    written: Any, resolved: Any, name: str, *, of_constructor: bool
) -> Iterator[tuple[str, str]]:
    """Yield the dotted name and the variable of each text that a constructor would get."""
    if isinstance(written, dict) and isinstance(resolved, dict):
        within = of_constructor or TARGET in written
        for key in written.keys() & resolved.keys():
            inner = f"{name}.{key}" if name else str(key)
            yield from _texts(written[key], resolved[key], inner, of_constructor=within)
    elif isinstance(written, list) and isinstance(resolved, list):
        for one, other in zip(written, resolved, strict=True):
            yield from _texts(one, other, name, of_constructor=of_constructor)
    elif of_constructor and isinstance(resolved, str):
        yield from ((name, variable) for variable in OF_ENVIRONMENT.findall(str(written))[:1])


def with_absolute_paths(config: Mapping[str, Any]) -> dict[str, Any]:
    """Make the paths in plain settings absolute, so that they hold in any working directory.

    `PATHS` lists the settings. Each is a path, a glob, a list of them, or `tables.values`, which
    has a path for each table.
    """
    here = Path.cwd()

    def absolute(value: Any) -> Any:
        if isinstance(value, list):
            return [absolute(item) for item in value]
        if not isinstance(value, str) or not value or "://" in value:  # its reader refuses a URI
            return value
        return str(here / Path(value).expanduser())

    changed = dict(config)
    for group, key in PATHS:
        holder = changed if group is None else changed.get(group)
        if isinstance(holder, dict) and key in holder:
            value = holder[key]
            of_tables = group == "tables" and isinstance(value, dict)
            paths = {t: absolute(p) for t, p in value.items()} if of_tables else absolute(value)
            holder = {**holder, key: paths}
            changed = holder if group is None else {**changed, group: holder}
    return changed


def refuse_secrets(overrides: Sequence[str], folders: Folders = ()) -> None:
    """Refuse passwords and keys in the URIs of a command line and of a user's files of settings,
    before Hydra writes them to a file.

    Args:
        overrides: The command line.
        folders: Directories with options of the user; those of groups with paths are read.

    Raises:
        DataError: A setting of `PATHS`, or a file, names one.
    """
    groups = [folder / group for folder in folders for group in ("dataset", "experiment", "tables")]
    for file in (file for group in groups for file in group.rglob("*.yaml") if file.is_file()):
        for uri in uris.IN_TEXT.findall(file.read_text(errors="replace")):
            uris.refuse_secrets(uri, str(file))
    settings = {key if group is None else f"{group}.{key}" for group, key in PATHS}
    for override in overrides:
        name, _, value = override.lstrip("+").partition("=")
        for uri in uris.IN_TEXT.findall(value) if name in settings else ():
            uris.refuse_secrets(uri, name)


# ---- a checkpoint's settings


def stored_choices(overrides: Sequence[str], folders: Folders = ()) -> list[str]:
    """Return `group=option` for each choice of the checkpoint `ckpt_path=DIR` that the command line
    does not make.

    Hydra refuses `model.depth=3` if the default model has no depth, even if the checkpoint's model
    has one. So the checkpoint's options are chosen first. A checkpoint that cannot be read gives no
    choices; its reader raises the error later. Options that no longer exist are left out.

    Args:
        overrides: The command line.
        folders: Directories with further options, besides recapp's own.
    """
    names_typed = override_names(overrides)
    paths = [override for override in overrides if override.startswith("ckpt_path=")]
    try:
        (named,) = OverridesParser.create().parse_overrides(paths[-1:])
        (path,) = OmegaConf.create([str(named.value())])  # without the escapes of quotes
        manifest = json.loads(read_manifest_text(uris.path_to(path).expanduser()))
        stored = dict(manifest["config"]["choices"])
        # a group of `ADDED_GROUPS`, or of the user's own, has no default
        return [
            f"{'' if is_group(group) and group not in ADDED_GROUPS else '+'}{group}={option}"
            for group, option in stored.items()
            if GROUP.fullmatch(group)
            and OPTION.fullmatch(option)
            and group not in names_typed
            and option_file(group, option, folders)
        ]
    except (
        LookupError,
        RecappError,
        OSError,
        ValueError,
        TypeError,
        RecursionError,
        HydraException,
        OmegaConfBaseException,
    ):
        return []


def compose_over(
    stored: Mapping[str, Any],
    primary: str,
    overrides: Sequence[str],
    folders: Folders = (),
    composed: DictConfig | None = None,
) -> dict[str, Any]:
    """Return the plain settings of a stored model. The command line replaces only the
    settings that it names.

    Args:
        stored: Plain settings, as `resolved.yaml` and the checkpoint's manifest hold them.
        primary: The command. Settings of `conf/<primary>.yaml` that `stored` lacks are added.
        overrides: The command line. A choice replaces the whole group, `+plan=x` the plan,
            `key=value` one setting.
        folders: Directories with further options, besides recapp's own.
        composed: What Hydra has composed of the command line; None composes it.

    Raises:
        ConfigError: An override names a setting that does not exist; the error names close matches.
        CheckpointError: The checkpoint's settings name a constructor that may not be called
            (`recapp/stored/trust.py`).
    """
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    settings = stored_settings(stored, primary)
    choices = dict(settings.pop("choices", {}))
    result = literal(settings)
    parsed = [override for override in parsed if not override.is_hydra_override()]
    groups = [override for override in parsed if is_group(override.key_or_group, folders)]
    known: list[str] = []
    try:
        whole = composed or compose(primary, [str(each.input_line) for each in groups], folders)
        fresh: Any = OmegaConf.to_container(whole, resolve=False)
        new = [str(key) for key in fresh if key not in result and key != "hydra"]
        new += [path for override in groups for path in _written_by(override, folders)]
        for path in new:
            _take(result, fresh, path.split("."))
        config = OmegaConf.create(result)
        known = list(dict.fromkeys([*dotted(result), *may_be_set(result, COMMANDS[primary])]))
        OmegaConf.set_struct(config, True)
        # what has come from `composed` has these values already
        taken_over = tuple(f"{path}." for path in new) if composed else ()
        changes = [
            value
            for value in parsed
            if value not in groups and not f"{value.key_or_group}.".startswith(taken_over)
        ]
        ConfigLoaderImpl._apply_overrides_to_config(changes, config)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(in_one_line(error, known)) from error
    OmegaConf.set_struct(config, False)
    named = {override.key_or_group: override.value() for override in groups}
    new_choices = {**choices, **{group: str(option) for group, option in named.items() if option}}
    packages = config.get("trust") or []
    trust: Any = OmegaConf.to_container(packages) if OmegaConf.is_config(packages) else packages
    if config.get("task"):  # `${best:...}` needs the task
        config.task = judged({"task": to_plain(config.task)}, trust)["task"]
    plain = judged(to_plain(config), trust)  # before any `_target_` is imported
    return plain | {"choices": new_choices}


def recipe_over(
    stored: Mapping[str, Any],
    primary: str,
    overrides: Sequence[str],
    folders: Folders = (),
    composed: DictConfig | None = None,
) -> Any:
    """Return the recipe of a stored model, changed by a command line, with absolute paths.

    Arguments and errors are those of `compose_over`.
    """
    plain = compose_over(stored, primary, overrides, folders, composed)
    return read_settings(with_absolute_paths(plain), primary)


def check_groups(primary: str, arguments: Sequence[str]) -> None:
    """Check choices of groups that Hydra would refuse without naming the group or option.

    Args:
        primary: The command.
        arguments: The command line.

    Raises:
        ConfigError: A group has no option but needs one, or is one of recapp.train alone, or an
            experiment does not exist.
    """
    folders = named_folders(arguments)
    others = set(names_of(COMMANDS["train"])) - set(names_of(COMMANDS[primary]))
    for name in override_names(arguments):
        if (top := re.split(r"[./@]", name)[0]) in others and is_group(top, folders):
            command = primary.replace("_", " ")
            raise ConfigError(f"{name}: recapp.{command} reads no setting of {top}: leave it out")
    elsewhere = any(argument.startswith("hydra.searchpath") for argument in arguments)
    for name, _, value in (argument.partition("=") for argument in arguments):
        there = options(name, folders) if is_group(name, folders) else []
        if (
            there
            and NO_OPTION.fullmatch(value)
            and value not in there
            and name not in NULLABLE_GROUPS
        ):
            raise ConfigError(f"{name}={value}: choose one of {', '.join(there)}")
        if value.startswith("[") and is_group(group := name.lstrip("+"), folders):
            there = options(group, folders)
            if not {each.strip() for each in value.strip("[]").split(",")} <= {*there}:
                raise ConfigError(f"{name}={value}: choose one of {', '.join(there)}")
        # Hydra would split group and option at another slash
        if there and "/" in value and not elsewhere and not option_file(name, value, folders):
            raise ConfigError(no_such_option(name, value, there))
        if (
            name.lstrip("+") == "experiment"
            and OPTION.fullmatch(value)
            and value not in ("null", *(known := options("experiment", folders)))
            and not elsewhere
        ):
            raise ConfigError(
                f"experiment={value}: there is no such option; write experiment/{value}.yaml, "
                "with `# @package _global_` on top, into a folder of your own and add --config-dir "
                f"FOLDER, or choose one of {', '.join(known)}"
            )


def _written_by(choice: Override, folders: Folders) -> list[str]:
    """Return the dotted settings that a choice sets: its own group, or those in the file of a
    global option such as an experiment.
    """
    group = choice.key_or_group
    file = option_file(group, str(choice.value()), folders)
    if file is None or "@package _global_" not in file.read_text().split("\n", 1)[0]:
        return [group.replace("/", ".")]
    content: Any = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    defaults = [entry for entry in content.pop("defaults", []) if isinstance(entry, dict)]
    others = [
        str(key).split()[-1].strip("/").replace("/", ".") for entry in defaults for key in entry
    ]
    return [*others, *(name for name, _ in leaves(content) if name)]


def _take(into: dict[str, Any], source: Mapping[str, Any], path: Sequence[str]) -> None:
    """Copy the value at `path` from `source` into `into`; delete it if `source` has none."""
    *parents, last = path
    for parent in parents:
        into[parent] = dict(into.get(parent) or {})
        into = into[parent]
        source = source.get(parent) or {}
    into.pop(last, None)
    if last in source:
        into[last] = source[last]


# ---- the settings that exist


def dotted(config: Mapping[Any, Any], prefix: str = "") -> list[str]:
    """Return every key of plain nested settings, inner ones as `group.key`."""
    keys = []
    for key, value in config.items():
        keys.append(f"{prefix}{key}")
        keys += dotted(value, f"{prefix}{key}.") if isinstance(value, dict) else []
    return keys


def known_settings(primary: str, overrides: Sequence[str]) -> list[str]:
    """Return the dotted settings that exist with the choices of a command line, or with the
    defaults if the choices are wrong.
    """
    folders = named_folders(overrides)
    named = zip(override_names(overrides), overrides, strict=True)
    group_overrides = [override for name, override in named if is_group(name, folders)]
    for attempt in (group_overrides, []):
        try:
            config: Any = OmegaConf.to_container(compose(primary, attempt, folders), resolve=False)
            return list(dict.fromkeys([*dotted(config), *may_be_set(config, COMMANDS[primary])]))
        except (HydraException, OmegaConfBaseException):
            continue
    return []


# ---- errors of Hydra in one line, with what to write instead

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
        example = f"optimizer/schedule={', '.join(most)} or {last}"
        return (
            f"{name}: no schedule is chosen: choose {example}, or name one: "
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
