"""The one module that the fork server of tests is told to import: what is imported and read here,
pools and commands have after their fork. A command starts in a third of the time so, .25 s less.
"""

import gc
import os
from contextlib import suppress
from importlib import import_module

from quick_settings import parse_once

from recapp.processes.stopping import loading

# the server found this module by the first directory, which is not for those that it forks
_, _, kept = os.environ.pop("PYTHONPATH", "").partition(os.pathsep)
if kept:
    os.environ["PYTHONPATH"] = kept

with loading():
    import jobs  # noqa: F401  (and with it the modules of pools and of commands)
    from ranks import early_modules

    for name in early_modules():
        with suppress(ImportError):  # a process that needs it says so
            import_module(name)
    from recapp.cli.compose import compose

    parse_once()
    for primary in ("train", "eval", "predict", "export"):
        compose(primary)
    compose("train", ["+plan=mixed"])
gc.freeze()  # else collectors of forks copied its pages
