"""Read and write HugeCTR's plans: JSON lists of GPUs, groups and lookups. The rules are those of
HugeCTR's planner.

    [                                            one list for each GPU, in order
      [{"local_embedding_list": [0, 2],          a group: the lookups whose rows this GPU holds,
        "global_embedding_list": [[0, 2], [1]],  those of every GPU,
        "table_placement_strategy": "mp"},       model ("localized" in v3.7) or data parallel ("dp")
       {"local_embedding_list": [3],
        "global_embedding_list": [[3], [3]],
        "table_placement_strategy": "dp"}],
      [...]
    ]

| rule |                                                                                           |
|------|-------------------------------------------------------------------------------------------|
| 1    | one list of groups for each GPU                                                           |
| 2    | numbers are lookups, in the order of declaration, not tables                              |
| 3    | a group has its two lists and its placement                                               |
| 4    | `shards_count` (`num_sharding` in v3.7) is 1 and `shard_id` (`sharding_id`) 0 unless      |
|      | given; the id is below the count                                                          |
| 5    | a dp group has one shard                                                                  |
| 6    | all GPUs have the same number of groups; group k has one placement and one global list on |
|      | all of them                                                                               |
| 7    | a local list is the GPU's own entry of the global list, without duplicates                |
| 8    | a dp group has one local list on all GPUs                                                 |
| 9    | GPUs with one local list of an mp group are the n shards of its tables: n is the count,   |
|      | the ids are 0..n-1; other GPUs of the group hold other lookups. A GPU that holds nothing  |
|      | may have an empty list                                                                    |
| 10   | all lookups of a table are in one group, on the same GPUs                                 |
| 11   | a dp group may hold several lookups of a table (HugeCTR's code refuses them, but its own  |
|      | example has such a group)                                                                 |
| 12   | every lookup is in exactly one group                                                      |

HugeCTR puts a row on the shard whose id is key mod n. recapp mixes the rows of the table
(`recapp/tables/positions.py`), and shard s of n is the s-th of n equal strips. A shard has the same
number of rows and the same balance in both, but other rows. Later versions of HugeCTR have a matrix
of GPUs and tables instead, which is refused.

HugeCTR's notebook writes plans with the key names of v3.7, in its own order, indented by four
spaces. `written_plan(..., indent=4)` writes the same bytes, and `printed` returns the text that the
notebook's `print_plan` prints.

Sources: `HugeCTR/embedding/embedding_planner.cpp` and `common.cpp` of v3.7, the layer book of v3.8.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from recapp.errors import PlanError, suggest
from recapp.sharding.sharding_plan import Shard, ShardingPlan, TableSharding
from recapp.sharding.sharding_types import equal_ranges
from recapp.tables.config import EmbeddingConfig, TableLookup, lookups_of

PLACEMENT = "table_placement_strategy"
WORDS = {"mp": "mp", "localized": "mp", "dp": "dp"}
REQUIRED = ("local_embedding_list", "global_embedding_list", PLACEMENT)
LOCAL = REQUIRED[0]
EVERY = REQUIRED[1]
COUNT = ("shards_count", "num_sharding")
ID = ("shard_id", "sharding_id")
AGAIN = "export as=hugectr +plan=dp_and_localized"
"""The arguments of `python -m recapp.plan` that write such a file
(`recapp/settings/other_systems.py`).
"""
Lists = list[list[dict[str, Any]]]
"""The groups of every GPU as plain values of JSON."""

MODULO = (
    "HugeCTR puts row r of a sharded table on shard r mod n; here rows are mixed and shard s of n "
    "holds the s-th of n equal strips: as many rows, as evenly dealt, other ones"
)


@dataclass(frozen=True)
class _PlanGroup:
    """A group in the list of one GPU.

    Args:
        word: "mp" or "dp".
        local: The lookups whose tables have a shard on this GPU.
        every: The lookups of every GPU.
        count: The number of shards of each table of the group.
        id: The number of the shard that this GPU holds.
    """

    word: str
    local: tuple[int, ...]
    every: tuple[tuple[int, ...], ...]
    count: int
    id: int


NO_MATRIX = (
    "recapp does not read plans that are a matrix of GPUs and tables (shard_matrix): leave the "
    "matrix out, and recapp plans itself, or give a plan file (docs/from_hugectr.md)"
)


def takes(values: Any) -> bool:
    """Return whether plain values have a form of HugeCTR's plans: lists by GPU, or a matrix of GPUs
    and tables, which `plan_from_values` refuses.
    """
    return isinstance(values, list) or (isinstance(values, Mapping) and "shard_matrix" in values)


def plan_from_values(
    values: Any,
    tables: Sequence[EmbeddingConfig],
    source: str,
    lookups: Sequence[TableLookup] | None = None,
) -> ShardingPlan:
    """Return a HugeCTR plan as recapp's plan, with one rank for each GPU. The modes of sharded
    tables stay open.

    Args:
        values: The plan as plain values of JSON.
        tables: The tables of the model.
        source: The file, for messages.
        lookups: The lookups in the order of declaration, to which the numbers of the plan refer;
            None takes those that the tables declare.

    Raises:
        PlanError: The plan breaks a rule; the error names the GPU, group, lookup and rule. Or it is
            a matrix.
    """
    if isinstance(values, Mapping):
        raise PlanError(f"{source}: {NO_MATRIX}")
    shardings = _Lists(values, tables, source, lookups).plan()
    split = any(
        s.mode != "replicated" and len({p.rows.start for p in s.shards}) > 1
        for s in shardings.values()
    )
    return ShardingPlan(shardings, len(values), "hugectr", (MODULO,) if split else ())


class _Lists:
    def __init__(
        self,
        values: Any,
        tables: Sequence[EmbeddingConfig],
        source: str,
        lookups: Sequence[TableLookup] | None,
    ) -> None:
        self.tables = tables
        self.source = source
        declarations = lookups_of(tables) if lookups is None else lookups
        self.table_of = [x.table.name for x in declarations]
        if not isinstance(values, list) or not values:
            raise PlanError(
                f"{source}: must be a list of GPUs, each with a list of its groups (rule 1)"
            )
        for g, groups in enumerate(values):
            if not isinstance(groups, list):
                raise PlanError(
                    f"{source}: GPU {g}: must be a list of groups, not {json.dumps(groups)} (rule "
                    "1)"
                )
        self.gpus = [
            [self._group(g, k, group) for k, group in enumerate(groups)]
            for g, groups in enumerate(values)
        ]

    def plan(self) -> dict[str, TableSharding]:
        """Return the sharding of every table, by its name."""
        self._check_alike()
        for k, group in enumerate(self.gpus[0]):
            if group.word == "mp":
                self._check_mp(k)
        home = self._homes()
        shardings = {}
        for t in self.tables:
            k, lookup = home[t.name]
            holders = {
                groups[k].id: g for g, groups in enumerate(self.gpus) if lookup in groups[k].local
            }
            replicated = self.gpus[0][k].word == "dp"
            shardings[t.name] = _sharding(
                t, None if replicated else [holders[i] for i in sorted(holders)], len(self.gpus)
            )
        return shardings

    def _fail(self, g: int, k: int, text: str, rule: int, more: str = "") -> NoReturn:
        raise PlanError(f"{self.source}: GPU {g}, group {k}: {text} (rule {rule}){more}")

    def _lookup(self, i: int) -> str:
        return f"lookup {i} ({self.table_of[i]})"

    def _group(self, g: int, k: int, values: Any) -> _PlanGroup:
        """Return a group after checking rules 2 to 5."""
        if not isinstance(values, Mapping):
            self._fail(
                g, k, f"must be an object with {', '.join(REQUIRED)}, not {json.dumps(values)}", 3
            )
        for key in values:
            if key not in (known := (*REQUIRED, *COUNT, *ID)):
                self._fail(g, k, f"unknown key {key}; {suggest(str(key), known)}", 3)
        for key in REQUIRED:
            if key not in values:
                self._fail(g, k, f"{key} must be given", 3)
        word = values[PLACEMENT]
        if not isinstance(word, str) or word not in WORDS:
            self._fail(g, k, f"{PLACEMENT}={word}: {suggest(str(word), WORDS)}", 3)
        local = self._numbers(g, k, LOCAL, values[LOCAL])
        if not isinstance(values[EVERY], list):
            self._fail(g, k, f"{EVERY} must be a list of lists of lookups", 3)
        every = tuple(
            self._numbers(g, k, f"{EVERY}[{i}]", numbers) for i, numbers in enumerate(values[EVERY])
        )
        count = self._number(g, k, values, COUNT, 1)
        shard = self._number(g, k, values, ID, 0)
        if count < 1 or not 0 <= shard < count:
            self._fail(g, k, f"shard id {shard} of {count} shards: ids are 0..n-1", 4)
        if WORDS[word] == "dp" and count > 1:
            self._fail(
                g,
                k,
                f"{count} shards of a dp group, which is whole on every GPU: leave {COUNT[0]} out",
                5,
            )
        return _PlanGroup(WORDS[word], local, every, count, shard)

    def _numbers(self, g: int, k: int, key: str, values: Any) -> tuple[int, ...]:
        if not isinstance(values, list) or set(map(type, values)) - {int}:
            self._fail(g, k, f"{key} must be a list of lookups, not {json.dumps(values)}", 3)
        if values and not (min(values) >= 0 and max(values) < len(self.table_of)):
            wrong = next(i for i in values if not 0 <= i < len(self.table_of))
            self._fail(
                g,
                k,
                f"lookup {wrong} in {key}: the model has lookups 0..{len(self.table_of) - 1}, a "
                "(table, feature) each",
                2,
            )
        return tuple(values)

    def _number(
        self, g: int, k: int, values: Mapping[str, Any], names: Sequence[str], default: int
    ) -> int:
        entries = {key: values[key] for key in names if key in values}
        value = next(iter(entries.values()), default)
        if not isinstance(value, int) or isinstance(value, bool) or len(set(entries.values())) > 1:
            self._fail(
                g,
                k,
                f"{' and '.join(f'{key}={v}' for key, v in entries.items())}: must be one whole "
                "number",
                4,
            )
        return value

    def _check_alike(self) -> None:
        """Check rules 6 to 8."""
        first = self.gpus[0]
        for g, groups in enumerate(self.gpus):
            if len(groups) != len(first):
                raise PlanError(
                    f"{self.source}: GPU {g} has {len(groups)} groups, GPU 0 has {len(first)}: "
                    "all GPUs must have the same number; a GPU without tables of a group has an "
                    f"empty {LOCAL} (rule 6)"
                )
            for k, group in enumerate(groups):
                if group.word != first[k].word:
                    self._fail(
                        g,
                        k,
                        f"is {group.word}, on GPU 0 it is {first[k].word}: a group has one "
                        "placement",
                        6,
                    )
                if group.every != first[k].every:
                    self._fail(g, k, f"{EVERY} is not that of GPU 0: a group has one", 6)
                if len(group.every) != len(self.gpus):
                    self._fail(
                        g, k, f"{EVERY} has {len(group.every)} lists for {len(self.gpus)} GPUs", 7
                    )
                if group.local != group.every[g]:
                    self._fail(
                        g,
                        k,
                        f"{LOCAL} {list(group.local)} is not {EVERY}[{g}] {list(group.every[g])}",
                        7,
                    )
                for i in _twice(group.local):
                    self._fail(g, k, f"{self._lookup(i)} stands twice in {LOCAL}", 7)
                if group.word == "dp" and group.local != first[k].local:
                    self._fail(
                        g,
                        k,
                        f"{LOCAL} {list(group.local)} is not that of GPU 0, "
                        f"{list(first[k].local)}: a dp group has one list",
                        8,
                    )

    def _check_mp(self, k: int) -> None:
        """Check rule 9."""
        sets: dict[tuple[int, ...], list[int]] = {}
        owner: dict[int, int] = {}
        for g, groups in enumerate(self.gpus):
            local = groups[k].local
            for i in local:
                if self.gpus[owner.setdefault(i, g)][k].local != local:
                    self._fail(
                        g,
                        k,
                        f"{self._lookup(i)} is on GPU {owner[i]}, too, whose list is another one: "
                        "GPUs that share a lookup share the whole list",
                        9,
                    )
            if local:
                sets.setdefault(local, []).append(g)
        for local, gpus in sets.items():
            holders = (
                f"{self._lookup(local[0])} lies on GPU{'s' if len(gpus) > 1 else ''} "
                f"{', '.join(map(str, gpus))}"
            )
            for g in gpus:
                if (n := self.gpus[g][k].count) != len(gpus):
                    self._fail(g, k, f"{holders}, but {COUNT[0]} is {n}: it must be {len(gpus)}", 9)
            for shard in _twice([self.gpus[g][k].id for g in gpus]):
                g = [g for g in gpus if self.gpus[g][k].id == shard][1]
                self._fail(
                    g,
                    k,
                    f"{holders}, and {ID[0]} {shard} stands twice: the ids must be "
                    f"0..{len(gpus) - 1}",
                    9,
                )

    def _homes(self) -> dict[str, tuple[int, int]]:
        """Return the group and one lookup of every table after checking rules 10 and 12."""
        places: dict[int, tuple[int, int]] = {}  # the first GPU and group of each lookup
        for g, groups in enumerate(self.gpus):
            for k, group in enumerate(groups):
                for i in group.local:
                    if places.setdefault(i, (g, k))[1] != k:
                        self._fail(
                            g,
                            k,
                            f"{self._lookup(i)} is in group {places[i][1]} of GPU {places[i][0]}, "
                            "too: it may be in one",
                            12,
                        )
        home: dict[str, tuple[int, int]] = {}
        for i, name in enumerate(self.table_of):
            if i not in places:
                raise PlanError(
                    f"{self.source}: {self._lookup(i)} is in no group of any GPU: add it to a "
                    "group (rule 12)"
                )
            k, other = home.setdefault(name, (places[i][1], i))
            both = f"{self._lookup(i)} and lookup {other} read one table, which is sharded once, "
            apart = f": {self._where(other)}, {self._where(i)}"
            if places[i][1] != k:
                self._fail(*places[i], f"{both}but lookup {other} is in group {k}", 10, apart)
            for g, groups in enumerate(self.gpus):
                if (i in groups[k].local) != (other in groups[k].local):
                    self._fail(g, k, f"{both}but only one of them is here", 10, apart)
        return home

    def _where(self, i: int) -> str:
        gpus = [g for g, groups in enumerate(self.gpus) if any(i in k.local for k in groups)]
        return f"lookup {i} lies on GPU{'s' if len(gpus) > 1 else ''} {', '.join(map(str, gpus))}"


def _sharding(table: EmbeddingConfig, gpus: list[int] | None, world: int) -> TableSharding:
    """Return the sharding of a table on some GPUs, in the order of the shards' ids; None replicates
    the table on all. Rows of several GPUs are mixed, which balances them like HugeCTR's key mod n.
    """
    rows = range(table.plan_rows)
    columns = range(table.embedding_dim)
    if gpus is None:
        replicas = tuple(Shard(g, rows, columns) for g in range(world))
        return TableSharding(replicas, "replicated", "data_parallel")
    parts = zip(gpus, equal_ranges(len(rows), len(gpus)), strict=False)
    shards = tuple(Shard(g, part, columns) for g, part in parts)
    if len(gpus) == 1:
        return TableSharding(shards, "auto", "table_wise")
    kind = "row_wise" if gpus == list(range(world)) else "custom"
    return TableSharding(shards, "auto", kind, "natural" if table.dynamic else "mixed")


def _twice(numbers: Iterable[int]) -> list[int]:
    return sorted(i for i, count in Counter(numbers).items() if count > 1)


# ---- writing


def written_plan(
    plan: ShardingPlan,
    tables: Sequence[EmbeddingConfig],
    lookups: Sequence[TableLookup] | None = None,
    indent: int | None = None,
) -> str:
    """Return a plan as HugeCTR's JSON: whole tables, rows over ranks in equal strips, replicas.

    Args:
        plan: The plan.
        tables: The tables of the model.
        lookups: The lookups in the order of declaration, which gives their numbers; None takes
            those that the tables declare.
        indent: None writes a group in each line, with the key names of v3.8. A number of spaces
            writes `notebook_lists` without a line break at the end; the notebook has 4.

    Raises:
        PlanError: Such a file cannot express the sharding of a table; the error names the table and
            the reason.
    """
    lists = hugectr_lists(plan, tables, lookups)
    if indent is not None:
        return json.dumps(notebook_lists(lists), indent=indent)
    return (
        "[\n"
        + ",\n".join(
            " [\n" + ",\n".join("  " + json.dumps(group) for group in groups) + "\n ]"
            for groups in lists
        )
        + "\n]\n"
    )


def hugectr_lists(
    plan: ShardingPlan,
    tables: Sequence[EmbeddingConfig],
    lookups: Sequence[TableLookup] | None = None,
) -> Lists:
    """Return the groups of every GPU as plain values; the arguments are those of `written_plan`.

    Groups, and the lookups in a group, follow the order in which lookups are declared, not the
    order of the tables.

    Raises:
        PlanError: Such lists cannot express the sharding of a table; the error names the table and
            the reason.
    """
    plan.check(tables)
    numbers_of_table: dict[str, list[int]] = {}
    for i, lookup in enumerate(lookups_of(tables) if lookups is None else lookups):
        numbers_of_table.setdefault(lookup.table.name, []).append(i)
    config = {t.name: t for t in tables}
    # for each mp group, the lookups by the GPUs that hold them
    groups: list[dict[tuple[int, ...], list[int]]] = []
    replicated: list[int] = []
    for name, numbers in numbers_of_table.items():
        if plan.tables[name].mode == "replicated":
            replicated += numbers
            continue
        gpus = _holders(config[name], plan.tables[name], plan.world_size)
        free = (
            group
            for group in groups
            if gpus in group or not set(gpus) & {g for holders in group for g in holders}
        )
        group = next(free, None)
        if group is None:
            groups.append(group := {})
        group.setdefault(gpus, []).extend(numbers)
    for members in (*(members for group in groups for members in group.values()), replicated):
        members.sort()
    lists = [
        [_written_mp(group, g, plan.world_size) for group in groups] for g in range(plan.world_size)
    ]
    for entries in lists:
        entries += (
            [{LOCAL: replicated, EVERY: [replicated] * plan.world_size, PLACEMENT: "dp"}]
            if replicated
            else []
        )
    return lists


def shown_plan(
    plan: ShardingPlan,
    tables: Sequence[EmbeddingConfig],
    lookups: Sequence[TableLookup] | None = None,
) -> tuple[Lists, str]:
    """Return the groups with the notebook's keys, and the text that `print_plan` prints of them.

    Raises:
        PlanError: Such lists cannot express the sharding of a table.
    """
    lists = notebook_lists(hugectr_lists(plan, tables, lookups))
    return lists, printed(lists)


def notebook_lists(lists: Lists) -> Lists:
    """Return the groups with the keys of HugeCTR's notebook, in the notebook's order."""
    v37 = {COUNT[0]: COUNT[1], ID[0]: ID[1]}
    order = (LOCAL, PLACEMENT, ID[1], COUNT[1], EVERY)
    v37_lists = [
        [{v37.get(key, key): part for key, part in group.items()} for group in groups]
        for groups in lists
    ]
    return [
        [{key: group[key] for key in order if key in group} for group in groups]
        for groups in v37_lists
    ]


def printed(lists: Lists) -> str:
    """Return the groups of every GPU as the text that `print_plan` of HugeCTR's notebook prints.

    Keys keep the order of `lists`; pass the result of `notebook_lists` for the notebook's order.
    """
    lines = []
    for gpu, groups in enumerate(lists):
        lines.append(f"single_gpu_plan index = {gpu}")
        for key, part in (entry for group in groups for entry in group.items()):
            first, *others = part if key == EVERY else [part]
            lines.append(f"\t{key}:{first}")
            lines += [f"\t{' ' * len(key)}:{other}" for other in others]
    return "\n".join(lines) + "\n"


def _holders(table: EmbeddingConfig, sharding: TableSharding, world: int) -> tuple[int, ...]:
    """Return the GPUs of a table's shards in the order of the shards' ids."""
    cells = sharding.cells(table, world)
    fail = f"table {table.name} ({sharding.sharding_type}) cannot be written for HugeCTR"
    if any(len(s.cols) < table.embedding_dim for s in cells):
        raise PlanError(
            f"{fail}: HugeCTR's lists cannot cut columns; choose "
            f"+plan.tables.{table.name}=table_wise or row_wise"
        )
    gpus = [s.rank for s in cells]
    for n in (world, len(cells)):
        # more shards than rows: the last ones are empty
        whole = gpus + [g for g in range(world) if g not in gpus][: n - len(cells)]
        if len(set(whole)) == n and cells == [
            Shard(g, rows, s.cols)
            for g, rows, s in zip(gpus, equal_ranges(table.plan_rows, n), cells, strict=False)
        ]:
            return tuple(whole)
    raise PlanError(
        f"{fail}: its rows must be cut into equal parts, one for each GPU, as row_wise cuts them"
    )


def _written_mp(group: Mapping[tuple[int, ...], list[int]], gpu: int, world: int) -> dict[str, Any]:
    """Return the entry of a group in the list of GPU `gpu`. GPUs without lookups of the group
    count as shards of an empty list, as in HugeCTR.
    """
    idle = tuple(g for g in range(world) if not any(g in gpus for gpus in group))
    entry_of_gpu = {
        g: (gpus, lookups) for gpus, lookups in (*group.items(), (idle, [])) for g in gpus
    }
    gpus, lookups = entry_of_gpu[gpu]
    shards = {COUNT[0]: len(gpus), ID[0]: gpus.index(gpu)} if len(gpus) > 1 else {}
    return {
        LOCAL: lookups,
        EVERY: [entry_of_gpu[g][1] for g in range(world)],
        PLACEMENT: "mp",
    } | shards
