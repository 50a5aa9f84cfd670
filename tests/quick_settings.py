"""The files of `conf/` and Hydra's own are parsed once a process: composing the settings of a
command reads two dozen of them, which takes a third of its time. Files of other folders may change
between two calls.
"""

from copy import deepcopy
from functools import cache
from pathlib import Path

import hydra
from omegaconf import OmegaConf

FOLDERS = (f"{Path(__file__).parents[1]}/conf/", f"{Path(hydra.__file__).parent}/conf/")
load = OmegaConf.load


def parse_once():
    """Let `OmegaConf.load` return a copy of what it has parsed, in this process."""
    OmegaConf.load = staticmethod(_loaded)


def _loaded(file):
    name = str(getattr(file, "name", file))
    return deepcopy(_parsed(name)) if name.startswith(FOLDERS) else load(file)


_parsed = cache(load)
