"""Lets plan files in HugeCTR's JSON be read wherever a plan file is.

Only the shape of the content is looked at here; the reader is imported when a file has it.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from recapp.sharding import plan_formats

if TYPE_CHECKING:
    from recapp.sharding.sharding_plan import ShardingPlan


def is_hugectr(values: Any) -> bool:
    """Return whether plain values are a HugeCTR plan: lists by GPU, or a matrix of GPUs and
    tables.
    """
    return isinstance(values, list) or (isinstance(values, Mapping) and "shard_matrix" in values)


def install() -> None:
    """Add HugeCTR's format to those of plan files, once."""
    if FORMAT not in plan_formats.FOREIGN:
        plan_formats.FOREIGN.append(FORMAT)


def _read(*given: Any) -> "ShardingPlan":
    from recapp.compat.hugectr_plan_lists import plan_from_hugectr  # imports numpy

    return plan_from_hugectr(*given)


FORMAT = plan_formats.PlanFormat(is_hugectr, _read, "export as=hugectr +plan=dp_and_localized")
"""The lists and matrices that `recapp/compat/hugectr_plan_lists.py` reads."""
