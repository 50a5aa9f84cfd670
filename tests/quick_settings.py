"""The files of `conf/` and Hydra's own are read and merged once a process for each choice of
options: a command composes two dozen of them, which takes a tenth of a second. Single settings are
applied by every call, as Hydra applies them. Files of other folders may change between two calls
and are read by each.
"""

import pickle
from copy import deepcopy
from functools import cache
from pathlib import Path

import hydra
from hydra._internal import config_loader_impl
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.defaults_list import DefaultsList, Overrides
from omegaconf import OmegaConf

FOLDERS = (f"{Path(__file__).parents[1]}/conf/", f"{Path(hydra.__file__).parent}/conf/")
SOURCES = {"hydra.conf", FOLDERS[0].rstrip("/"), ""}  # the last: a class of Hydra's

load = OmegaConf.load
list_options = config_loader_impl.create_defaults_list
merge_options = ConfigLoaderImpl._compose_config_from_defaults_list
listed = {}
merged = {}


def parse_once():
    """Let Hydra take what it has read and merged before, in this process."""
    OmegaConf.load = staticmethod(_loaded)
    config_loader_impl.create_defaults_list = _listed
    ConfigLoaderImpl._compose_config_from_defaults_list = _merged


def _loaded(file):
    name = str(getattr(file, "name", file))
    return deepcopy(_parsed(name)) if name.startswith(FOLDERS) else load(file)


_parsed = cache(load)


def _files_of(repo):
    """What tells the files of its folders from others; None where that cannot be told."""
    found = []
    try:
        for source in repo.get_sources():
            found.append(source.path)
            if source.path not in SOURCES:
                folder = Path(source.path)
                files = sorted(folder.rglob("*.yaml"))
                found[-1] = tuple((str(f.relative_to(folder)), f.read_bytes()) for f in files)
    except OSError:
        return None
    return tuple(found)


def _listed(repo, config_name, overrides_list, **how):
    """The files of a choice of options; a choice that is refused is looked at by every call."""
    overrides = Overrides(repo=repo, overrides_list=overrides_list)
    single = {id(each) for each in overrides.config_overrides}
    options = [each.input_line for each in overrides_list if id(each) not in single]
    files = _files_of(repo)
    choice = (files, config_name, *options, *how.items())
    if files is None or choice not in listed:
        found = list_options(repo, config_name, overrides_list, **how)
        listed[choice] = pickle.dumps((found.defaults, found.overrides.known_choices))
        return found
    defaults, overrides.known_choices = pickle.loads(listed[choice])
    return DefaultsList(defaults, None, overrides.config_overrides, overrides)


def _merged(self, defaults, repo):
    """What those files come to; pickled, as a copy is made sooner so."""
    files = _files_of(repo)
    choice = (files, repr(defaults))
    if files is None or choice not in merged:
        merged[choice] = pickle.dumps(merge_options(self, defaults, repo))
    return pickle.loads(merged[choice])
