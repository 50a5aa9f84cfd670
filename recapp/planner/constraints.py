"""The constraints of a plan, by table or by pattern, checked against tables and ranks."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from recapp.errors import PlanError, suggest
from recapp.planner.planner_settings import ParameterConstraints
from recapp.planner.topology import Topology
from recapp.sharding.sharding_plan import Mode
from recapp.sharding.sharding_types import BUILT_IN, SHARDING_TYPES, sharding_type
from recapp.tables.config import EmbeddingConfig
from recapp.tables.row_order import ROW_ORDERS

MODES: tuple[Mode, ...] = ("unique", "pooled")


Constraints = Mapping[str, ParameterConstraints]
"""Constraints by table name or glob. A name wins over a glob, and the last glob over earlier
ones.
"""


def constraints_of(
    tables: Sequence[EmbeddingConfig], constraints: Constraints, topology: Topology
) -> dict[str, ParameterConstraints]:
    """Check the constraints, and return those of each table, by name.

    Raises:
        PlanError: A pattern matches no table, a type or mode is unknown, ranks or hosts do not
            exist, strips are narrower than a column, or tables that must lie together must also lie
            apart or share no allowed type.
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
    for name in c.sharding_types or ():
        sharding_type(str(name), f"{where}.sharding_types")
    words = (("modes", "mode", c.modes, MODES), ("row_orders", "order", c.row_orders, ROW_ORDERS))
    for key, noun, wanted, known in words:
        for word in wanted or ():
            if word not in known:
                says = suggest(str(word), known)
                raise PlanError(f"{where}.{key}: unknown {noun} {word}; {says}")
    limits: list[tuple[str, Sequence[Any] | None, int]] = [
        ("ranks", c.ranks, topology.world_size),
        ("hosts", c.hosts, topology.hosts),
    ]
    for what, given, count in limits:
        for number in given or ():
            if not 0 <= number < count:
                raise PlanError(
                    f"{where}.{what}: {what[:-1]} {number} does not exist: there "
                    f"{'is' if count == 1 else 'are'} {count} ({what} 0..{count - 1}); name one "
                    "of these, or use a topology that has more"
                )
        if given is not None and not given:
            raise PlanError(
                f"{where}.{what} is empty: name at least one of 0..{count - 1}, or leave it out"
            )
    if c.min_partition is not None and c.min_partition < 1:
        raise PlanError(f"{where}.min_partition={c.min_partition}: a strip has at least 1 column")
    if c.sharding_types is not None and not c.sharding_types:
        raise PlanError(
            f"{where}.sharding_types is empty: name at least one of {', '.join(SHARDING_TYPES)}, "
            "or leave it out"
        )


def allowed_ranks(c: ParameterConstraints, topology: Topology) -> list[int]:
    """Return the ranks that are allowed for a table, ascending."""
    ranks = set(range(topology.world_size)) if c.ranks is None else set(c.ranks)
    if c.hosts is not None:
        hosts = topology.host_ranks()
        ranks &= {r for h in c.hosts for r in hosts[h]}
    return sorted(ranks)


def _check_groups(found: Mapping[str, ParameterConstraints], topology: Topology) -> None:
    one_block = [name for name, record in SHARDING_TYPES.items() if not record.cuts_columns]
    usual = [record.name for record in BUILT_IN]
    groups: dict[str, list[str]] = {}
    for name, c in found.items():
        if not allowed_ranks(c, topology):
            raise PlanError(
                f"constraints.{name}: ranks {list(c.ranks or ())} are not on hosts "
                f"{list(c.hosts or ())}: leave ranks or hosts out"
            )
        if c.together is not None:
            groups.setdefault(c.together, []).append(name)
    for label, names in groups.items():
        others = [found[n].apart for n in names if found[n].apart is not None]
        if len(others) > len(set(others)):
            raise PlanError(
                f"constraints: tables {', '.join(names)} must lie together ({label}) and apart "
                f"({others[0]}) at the same time: leave one of the two out"
            )
        shared = [
            type_name
            for type_name in one_block
            if all(type_name in (found[n].sharding_types or usual) for n in names)
        ]
        if not shared:
            raise PlanError(
                f"constraints: tables {', '.join(names)} must lie together ({label}), but they "
                f"have no sharding type in common that allows this ({', '.join(one_block)}): "
                "give them one of these in sharding_types"
            )
        if not set.intersection(*(set(allowed_ranks(found[n], topology)) for n in names)):
            raise PlanError(
                f"constraints: tables {', '.join(names)} must lie together ({label}), but they "
                "have no rank in common: give them a common rank in ranks"
            )
