"""What a plan must respect, table by table or by pattern: names as TorchRec's users know them, and
a few more.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from typing import Any

from recapp.errors import PlanError, suggest
from recapp.planner.topology import Topology
from recapp.sharding.sharding_plan import Mode
from recapp.sharding.tilings import ShardingType
from recapp.tables.config import EmbeddingBagConfig
from recapp.tables.statistics import TableStatistics

MODES: tuple[Mode, ...] = ("unique", "pooled")
IN_ONE_PLACE = (
    ShardingType.TABLE_WISE.value,
    ShardingType.ROW_WISE.value,
    ShardingType.TABLE_ROW_WISE.value,
    ShardingType.DATA_PARALLEL.value,
)  # types that tables kept together can share


@dataclass(frozen=True)
class ParameterConstraints:
    """What is allowed for a table; None leaves it free.

    Args:
        sharding_types: values of `ShardingType`.
        modes: `unique`, `pooled` or both.
        ranks: its shards lie on these ranks only.
        hosts: its shards lie on these hosts only (counted from 0).
        together: tables with the same word here are cut alike and lie on the same ranks.
        apart: tables with the same word here share no rank.
        min_partition: least columns of a vertical strip.
        pooling_factors: mean ids of a bag, one for all features or one for each; for tables without
            statistics.
        statistics: of its ids, instead of measured ones.
        data_type: what its rows count as: "fp32", "bf16", ...
    """

    sharding_types: Sequence[str] | None = None
    modes: Sequence[str] | None = None
    ranks: Sequence[int] | None = None
    hosts: Sequence[int] | None = None
    together: str | None = None
    apart: str | None = None
    min_partition: int | None = None
    pooling_factors: Sequence[float] | None = None
    statistics: TableStatistics | None = None
    data_type: str | None = None

    def over(self, other: "ParameterConstraints") -> "ParameterConstraints":
        """This, and where it leaves something free, what `other` says."""
        mine = {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}
        return replace(other, **mine)


Constraints = Mapping[str, ParameterConstraints]
"""By table name or glob; a name wins over a glob, of globs the last."""


def constraints_of(
    tables: Sequence[EmbeddingBagConfig], constraints: Constraints, topology: Topology
) -> dict[str, ParameterConstraints]:
    """What holds for each table, checked.

    Raises:
        PlanError: a pattern that matches no table, an unknown type or mode, ranks or hosts that are
            not there, strips narrower than a column, tables together that lie apart or cannot share
            a type.
    """
    names = [t.name for t in tables]
    found = dict.fromkeys(names, ParameterConstraints())
    for pattern in sorted(constraints, key=lambda p: p in names):
        matching = [name for name in names if fnmatchcase(name, pattern)]
        if not matching:
            raise PlanError(f"constraints.{pattern}: no such table; {suggest(pattern, names)}")
        _check(pattern, constraints[pattern], topology)
        found |= {name: constraints[pattern].over(found[name]) for name in matching}
    _check_groups(found, topology)
    return found


def _check(pattern: str, c: ParameterConstraints, topology: Topology) -> None:
    where = f"constraints.{pattern}"
    known = [t.value for t in ShardingType]
    for kind in c.sharding_types or ():
        if kind not in known:
            raise PlanError(
                f"{where}.sharding_types: unknown type {kind}; {suggest(str(kind), known)}"
            )
    for mode in c.modes or ():
        if mode not in MODES:
            raise PlanError(f"{where}.modes: unknown mode {mode}; {suggest(str(mode), MODES)}")
    limits: list[tuple[str, Sequence[Any] | None, int]] = [
        ("ranks", c.ranks, topology.world_size),
        ("hosts", c.hosts, topology.hosts),
    ]
    for what, given, count in limits:
        for number in given or ():
            if not 0 <= number < count:
                raise PlanError(
                    f"{where}.{what}: {what[:-1]} {number} is not there: there "
                    f"{'is' if count == 1 else 'are'} {count} "
                    f"({what} 0..{count - 1}); use one of those or a topology that has more"
                )
        if given is not None and not given:
            raise PlanError(
                f"{where}.{what} is empty: name at least one of 0..{count - 1}, or leave it out"
            )
    if c.min_partition is not None and c.min_partition < 1:
        raise PlanError(f"{where}.min_partition={c.min_partition}: a strip has at least 1 column")
    if c.sharding_types is not None and not c.sharding_types:
        raise PlanError(
            f"{where}.sharding_types is empty: name at least one of {', '.join(known)}, or leave "
            "it out"
        )


def allowed_ranks(c: ParameterConstraints, topology: Topology) -> list[int]:
    """The ranks a table may lie on."""
    ranks = set(range(topology.world_size)) if c.ranks is None else set(c.ranks)
    if c.hosts is not None:
        hosts = topology.host_ranks()
        ranks &= {r for h in c.hosts for r in hosts[h]}
    return sorted(ranks)


def _check_groups(found: Mapping[str, ParameterConstraints], topology: Topology) -> None:
    groups: dict[str, list[str]] = {}
    for name, c in found.items():
        if not allowed_ranks(c, topology):
            raise PlanError(
                f"constraints.{name}: ranks {list(c.ranks or ())} are none of those of hosts "
                f"{list(c.hosts or ())}: "
                "let one of the two be free"
            )
        if c.together is not None:
            groups.setdefault(c.together, []).append(name)
    for word, names in groups.items():
        labels = [found[n].apart for n in names if found[n].apart is not None]
        if len(labels) > len(set(labels)):
            raise PlanError(
                f"constraints: tables {', '.join(names)} are to lie together ({word}) and apart "
                f"({labels[0]}) at once: "
                "take one of the two away"
            )
        shared = [
            k
            for k in IN_ONE_PLACE
            if all(
                found[n].sharding_types is None or k in (found[n].sharding_types or ())
                for n in names
            )
        ]
        if not shared:
            raise PlanError(
                f"constraints: tables {', '.join(names)} are to lie together ({word}) but have no "
                "type in common that allows "
                f"it ({', '.join(IN_ONE_PLACE)}): give them one in sharding_types"
            )
        if not set.intersection(*(set(allowed_ranks(found[n], topology)) for n in names)):
            raise PlanError(
                f"constraints: tables {', '.join(names)} are to lie together ({word}) but have no "
                "rank in common: "
                "give them one in ranks"
            )
