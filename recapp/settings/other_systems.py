"""What recapp reads, writes and offers in the form of other systems, by the name of the module.

A module is imported when a file, a setting or a call in its form occurs, so nothing else needs it.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

# Modules of plan files, in the order in which they are tried. Each has
#
#     takes(values)                                       whether plain values are in its format
#     plan_from_values(values, tables, source, lookups)   the plan; `source` is the file, for errors
#     written_plan(plan, tables, lookups, indent)         the text of a plan file
#     shown_plan(plan, tables, lookups)                   the groups as plain values and as a text
#     AGAIN                                               arguments of `python -m recapp.plan` that
#                                                         write such a file
PLAN_FORMATS = {"hugectr": "recapp.compat.hugectr.plans"}

# The module whose `in_recapp_words` translates listed tables and lookups.
TABLE_WORDS = "recapp.compat.hugectr.words"


# The modules that read TorchRec's settings of fused kernels, and that offer the update of sharded
# tables as its optimiser object, by the names of function and class.
FUSED = {
    "rules_of_fused_params": "recapp.compat.torchrec.keyed",
    "FusedOptimizer": "recapp.compat.torchrec.keyed",
}


def plan_format(name: str) -> Any:
    """Return the module of a format of plan files."""
    return import_module(PLAN_FORMATS[name])


def format_of(values: Any) -> Any:
    """Return the module whose format the plain values of a plan file have, or None."""
    return next((form for form in map(plan_format, PLAN_FORMATS) if form.takes(values)), None)


def in_recapp_words(tables: Any) -> Any:
    """Return the settings of the group `tables` in recapp's words. Only listed tables have others.

    Raises:
        ConfigError: A listed table or lookup has a value that is not allowed or a setting that does
            not exist.
    """
    if not isinstance(tables, Mapping) or tables.get("source") != "list":
        return tables
    return import_module(TABLE_WORDS).in_recapp_words(tables)


def fused(name: str) -> Any:
    """Return a function or class of `FUSED`."""
    return getattr(import_module(FUSED[name]), name)
