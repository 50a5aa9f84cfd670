"""Plan files in formats of other systems, which rooms above this one read.

`load_plan` (`recapp/sharding/plan_file.py`) reads recapp's own YAML, and other content by the
format in this list that takes it. `import recapp` adds that of HugeCTR
(`recapp/compat/hugectr_plan_format.py`), so this file imports next to nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from recapp.sharding.sharding_plan import ShardingPlan
    from recapp.tables.config import EmbeddingConfig
    from recapp.tables.lookups import TableLookup

    Read = Callable[
        [Any, Sequence[EmbeddingConfig], str, Sequence[TableLookup] | None], ShardingPlan
    ]


class PlanFormat(NamedTuple):
    """A format of plan files.

    Args:
        takes: Returns whether the plain values of a file are a plan in this format.
        read: Returns the plan of such values, of the tables, the file's name for messages, and the
            lookups in the order in which they are declared.
        again: The arguments of `python -m recapp.plan` that write such a file, for messages.
    """

    takes: Callable[[Any], bool]
    read: Read
    again: str


FOREIGN: list[PlanFormat] = []
"""The formats of other systems, tried in this order."""
