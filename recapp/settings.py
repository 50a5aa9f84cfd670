"""Settings: `conf/*.yaml` and what the command line says, composed by Hydra, told in one line where they are wrong.

    conf/train.yaml        the groups, and one option of each as default      model: dlrm
    conf/model/dlrm.yaml   the settings of one option                         model.top_layers
    command line           group=option, key=value, +plan=option             +plan=mixed seed=2

A checkpoint keeps the settings it was made with. Going on from it, or evaluating it, means: those settings, and exactly what the
command line says replaces them (`compose_over`), not the defaults of today.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
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

from recapp.distributed.transport import TRANSPORTS
from recapp.errors import ConfigError, suggest
from recapp.kernels.backend import BACKENDS

HYDRA_VERSION_BASE = "1.3"
LEAST = {  # settings that are whole numbers, and the smallest that makes sense; those that may be null are left out when they are
    "seed": 0, "trainer.max_epochs": 1, "trainer.max_steps": 1, "trainer.val_check_interval": 1, "trainer.log_every_n_steps": 1,
    "trainer.look_ahead": 0,
    "dataset.batch_size": 1, "dataset.val_batch_size": 1, "dataset.lanes": 1, "dataset.shuffle_rows": 0, "dataset.num_workers": 0,
    "topology.hosts": 1, "topology.ranks": 1, "topology.memory_bytes": 0, "topology.reserve_bytes": 0, "tables.max_rows": 1,
}  # fmt: skip
ONE_OF = {"trainer.accelerator": ("auto", "cpu", "gpu", "cuda"), "topology.transport": TRANSPORTS,
          "topology.backend": BACKENDS, "topology.payload": ("full", "bf16", "fp16"), "trainer.compile": (False, True)}
PATHS = ((None, "ckpt_path"), ("dataset", "path"), ("dataset", "val_path"), ("dataset", "test_path"), ("topology", "hardware"),
         ("plan", "path"))
ADDED_GROUPS = ("plan",)  # in no defaults list: chosen with +plan=option, or not at all
ADVICE = (  # what Hydra says: what to do
    (r"default list use \+(\S+)", "{0}: nothing is chosen there by default, so it needs a plus: +{0}"),
    (
        r"^(?:Multiple values for )?(\S+?)(?: appears more than once|\. To override)",
        "{0}: chosen twice; a group that has a default is chosen without a plus: {0}=...",
    ),
    (r"already at '(.*)'", "{0} is set already: write it without the plus"),
    (r"Ambiguous value for argument '(.*)'", "{0}: put -m in front for one job for each value, or brackets around a list"),
    (r"Sweep parameters '(.*)' requires", "{0}: put -m in front for one job for each value"),
)
NO_END = ("trainer.max_epochs", "trainer.max_steps")  # -1 is allowed there
OF_THE_INVOCATION = ("format",)  # said for one command, never taken over from a checkpoint


def conf_dir() -> Path:
    """The directory of the configuration: inside the package where recapp is installed, beside it in a checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "conf"
    return installed if installed.is_dir() else package.parent / "conf"


def compose(primary: str, overrides: Sequence[str] = ()) -> DictConfig:
    """The settings `conf/<primary>.yaml` under some overrides, unresolved, Hydra's own under `hydra`."""
    if GlobalHydra.instance().is_initialized():
        return hydra.compose(primary, list(overrides), return_hydra_config=True)
    with hydra.initialize_config_dir(str(conf_dir()), version_base=HYDRA_VERSION_BASE):
        return hydra.compose(primary, list(overrides), return_hydra_config=True)


def choices(hydra_config: HydraConf | DictConfig) -> dict[str, str]:
    """The option chosen of each group, without Hydra's own groups: `{"model": "dlrm", "plan": "mixed"}`."""
    chosen = hydra_config.runtime.choices.items()
    return {str(group): str(option) for group, option in chosen if option and not str(group).startswith("hydra/")}


def names_checkpoint(config: DictConfig) -> bool:
    """Whether a checkpoint is named, which knows what the command line leaves open."""
    return "ckpt_path" in config and not OmegaConf.is_missing(config, "ckpt_path") and bool(config.ckpt_path)


def to_plain(config: DictConfig, *, whole: bool = True) -> dict[str, Any]:
    """Settings as plain dicts and lists, every reference resolved.

    Args:
        config: Composed settings.
        whole: Whether what must be given has to be there; where it is not, such a setting is `???`.

    Raises:
        ConfigError: A setting that must be given is not, or a reference leads nowhere.
    """
    try:
        missing = sorted(OmegaConf.missing_keys(config)) if whole else []
        plain = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {_first_line(error)}") from error
    if missing:
        raise ConfigError(f"{missing[0]} must be given: {missing[0]}=...")
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def check_values(config: Mapping[str, Any]) -> None:
    """Refuses numbers and words that Hydra takes and that only a later stage, or nobody, would stumble over.

    Raises:
        ConfigError: Naming the setting, its value and what is allowed.
    """
    if isinstance(dataset := config.get("dataset"), Mapping) and not dataset.get("path", True):
        raise ConfigError("dataset.path is empty: name a directory, a glob or Parquet files")
    for name in (*LEAST, *ONE_OF):
        group, _, key = name.rpartition(".")
        holder = config.get(group) if group else config
        value = holder.get(key) if isinstance(holder, Mapping) else None
        if value is None:
            continue
        if name in ONE_OF:
            if value not in ONE_OF[name]:
                raise ConfigError(f"{name}={value}: {suggest(str(value), [str(allowed).lower() for allowed in ONE_OF[name]])}")
        elif not isinstance(value, int) or isinstance(value, bool) or (value < LEAST[name] and not (name in NO_END and value == -1)):
            raise ConfigError(f"{name}={value}: must be a whole number of at least {LEAST[name]}")


def with_absolute_paths(config: Mapping[str, Any]) -> dict[str, Any]:
    """Plain settings whose paths (`PATHS`: a path, a glob, or a list of them) hold wherever they are read."""
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
            holder = {**holder, key: absolute(holder[key])}
            changed = holder if group is None else {**changed, group: holder}
    return changed


def refuse_unknown_additions(primary: str, overrides: Iterable[str]) -> None:
    """Raises ConfigError where a `+` adds a top-level setting that nothing reads: Hydra adds whatever stands behind it."""
    tops = [re.split(r"[=.@/]", override.lstrip("+"), maxsplit=1)[0] for override in overrides if override[:1] == "+"]
    if all(_is_group(top) for top in tops):
        return
    known = [*(str(key) for key in compose(primary) if key != "hydra"), *ADDED_GROUPS]
    for top in tops:
        if top not in known and not _is_group(top):
            raise ConfigError(f"unknown setting {top}: {suggest(top, known)}")


# ---- a checkpoint's settings


def stored_choices(primary: str, overrides: Sequence[str]) -> list[str]:
    """`group=option` for all that the checkpoint of `ckpt_path=DIR` was made with and the command line does not choose itself.

    Hydra refuses `model.depth=3` where the default model has no depth, whatever the checkpoint's model has: so the checkpoint's
    options are chosen first. A checkpoint that cannot be read is the error of its reader, not of this function.
    """
    paths = [override.partition("=")[2] for override in overrides if override.startswith("ckpt_path=")]
    try:
        manifest = json.loads((Path(paths[-1]).expanduser() / "manifest.json").read_text())
        stored = dict(manifest["config"]["choices"])
        default = compose(primary).hydra.runtime.choices        # null ones too
    except (IndexError, OSError, ValueError, KeyError, TypeError):
        return []
    said = {override.lstrip("+").partition("=")[0] for override in overrides}
    there = {group: option for group, option in stored.items() if (conf_dir() / group / f"{option}.yaml").is_file()}
    return [f"{'' if group in default else '+'}{group}={option}" for group, option in there.items() if group not in said]


def compose_over(stored: Mapping[str, Any], primary: str, overrides: Sequence[str]) -> dict[str, Any]:
    """A checkpoint's settings, with exactly what the command line says replaced.

    Args:
        stored: Plain settings, as `resolved.yaml` and the checkpoint's manifest hold them.
        primary: The command whose settings these become: what `conf/<primary>.yaml` has and `stored` has not is added.
        overrides: The command line: a group choice replaces the whole group, `+plan=x` the plan, `key=value` one setting.

    Raises:
        ConfigError: An override names a setting that neither has; with close matches.
    """
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    parsed = [override for override in parsed if not override.is_hydra_override()]
    groups = [override for override in parsed if _is_group(override.key_or_group)]
    result = {key: value for key, value in stored.items() if key not in OF_THE_INVOCATION}
    known: list[str] = []
    try:
        composed = compose(primary, [str(override.input_line) for override in groups])
        fresh: Any = OmegaConf.to_container(composed, resolve=False)
        result |= {key: value for key, value in fresh.items() if key not in result and key != "hydra"}
        for path in (path for override in groups for path in _written_by(override)):
            _take(result, fresh, path.split("."))
        config = OmegaConf.create(result)
        known = dotted(result)
        OmegaConf.set_struct(config, True)
        ConfigLoaderImpl._apply_overrides_to_config([value for value in parsed if value not in groups], config)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(in_one_line(error, known)) from error
    OmegaConf.set_struct(config, False)
    said = {override.key_or_group: override.value() for override in groups}
    config.choices = {**result.get("choices", {}), **{group: str(option) for group, option in said.items() if option}}
    return to_plain(config)


def _is_group(name: str) -> bool:
    return bool(name) and (conf_dir() / name).is_dir()


def _written_by(choice: Override) -> list[str]:
    """The settings (dotted) that a group choice decides: its own group, or what a global option such as an experiment lists."""
    group = choice.key_or_group
    file = conf_dir() / group / f"{choice.value()}.yaml"
    if not file.is_file() or "@package _global_" not in file.read_text().split("\n", 1)[0]:
        return [group.replace("/", ".")]
    content: Any = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    defaults = [entry for entry in content.pop("defaults", []) if isinstance(entry, dict)]
    others = [str(key).split()[-1].strip("/").replace("/", ".") for entry in defaults for key in entry]
    return [*others, *dotted(content, leaves_only=True)]


def _take(into: dict[str, Any], source: Mapping[str, Any], path: Sequence[str]) -> None:
    """Makes `into` have at `path` what `source` has there, or nothing."""
    *parents, last = path
    for parent in parents:
        into[parent] = dict(into.get(parent) or {})
        into, source = into[parent], source.get(parent) or {}
    into.pop(last, None)
    if last in source:
        into[last] = source[last]


# ---- what Hydra says, in one line


def dotted(config: Mapping[Any, Any], prefix: str = "", *, leaves_only: bool = False) -> list[str]:
    """Every key of plain nested settings, inner ones as `group.key`."""
    keys = []
    for key, value in config.items():
        inner = isinstance(value, dict)
        keys += [] if inner and leaves_only else [f"{prefix}{key}"]
        keys += dotted(value, f"{prefix}{key}.", leaves_only=leaves_only) if inner else []
    return keys


def known_settings(primary: str, overrides: Sequence[str]) -> list[str]:
    """The dotted settings there are under the group choices of a command line (or of none, where those are wrong)."""
    chosen = [override for override in overrides if _is_group(override.lstrip("+").partition("=")[0])]
    for attempt in (chosen, []):
        try:
            config: Any = OmegaConf.to_container(compose(primary, attempt), resolve=False)
            return dotted(config)
        except (HydraException, OmegaConfBaseException):
            continue
    return []


def in_one_line(error: HydraException | OmegaConfBaseException, known: Iterable[str]) -> str:
    """What is wrong with the settings, and what is close to it.

    Args:
        error: What Hydra or OmegaConf raised.
        known: The settings there are, dotted.
    """
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    if isinstance(error, OverrideParseException):
        return f"cannot read {error.override!r}: settings are key=value; a value with = , [ ] or blanks needs \"key='value'\""
    if isinstance(error, MissingConfigException):
        group, _, option = str(error.missing_cfg_file).rpartition("/")
        return f"{group}={option}: there is no such option; {suggest(option, error.options or ())}"
    text = str(error) or str(cause)
    for pattern, advice in ADVICE:
        if found := re.search(pattern, text):
            return advice.format(*found.groups())
    if found := re.search(r"Could not override '([^']+)'\.", text):
        return _unknown(found[1], list(known))
    if isinstance(cause, OmegaConfBaseException) and cause.full_key and "is not in struct" in str(cause):
        return _unknown(str(cause.full_key), list(known))
    return _first_line(cause if str(error) == "" else error)


def _unknown(name: str, known: Sequence[str]) -> str:
    top, (home, _, leaf) = name.partition(".")[0], name.rpartition(".")
    if top in ADDED_GROUPS and (top not in known or (home in known and home != top)):
        return f"{name}: nothing is set there by default, so it needs a plus: +{name}=..."
    if not name.startswith("hydra."):
        known = [key for key in known if key.partition(".")[0] != "hydra"]
    same = [key for key in known if key.rpartition(".")[2] == leaf]
    beside = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == home}
    close = [beside[match] for match in get_close_matches(leaf, beside)]
    return f"unknown setting {name}: {suggest(name, close or same or beside.values() or known)}"


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
