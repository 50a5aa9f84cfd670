"""A plan in words and tables for a terminal of 80 columns: what `explained` knows, said to
people.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from shutil import get_terminal_size
from textwrap import fill
from typing import Any

from recapp.console import Column, print_table, readable
from recapp.planner.cost import PHASES
from recapp.planner.rank_memory import human
from recapp.planner.types import TYPES

# of the longest bar
BAR = "█"
WIDTH = 24
MATRIX_RANKS = 8  # up to which every pair is shown
MOST_TABLES = 60  # in a list; JSON and the page have all

Explained = Mapping[str, Any]


def tell(told: Explained) -> None:
    """Print a plan: its step, tables, runner-ups, ranks, traffic and types."""
    _say(_headline(told))
    for note in told["notes"]:
        _say(f"note: {note}")
    rows = told["rows"][:MOST_TABLES]
    more = (
        f" (the first {MOST_TABLES} of {len(told['rows']):,}; format=json has all)"
        if len(told["rows"]) > MOST_TABLES
        else ""
    )
    print()
    print_table([_table_line(r, told["world_size"]) for r in rows], _TABLE, title=f"Tables{more}")
    print()
    print_table(rows, _TIMES, title="Milliseconds by phase, each table as if it were alone")
    if any(r["runner_up"] or r["why"] for r in rows):
        print()
        print_table(
            [{"table": r["table"], "type": r["type"], "why": r["why"]} for r in rows],
            [
                Column("table", "table"),
                Column("type", "type"),
                Column("why", "why, and what the next best type would change"),
            ],
        )
    print()
    _tell_ranks(told)
    print()
    _tell_traffic(told)
    print()
    _tell_types(told)


_TABLE = [
    Column("table", "table"),
    Column("size", "rows x dim"),
    Column("type", "type"),
    Column("ranks", "ranks"),
    Column("bytes", "bytes"),
    Column("predicted_ms", "ms", ".3f"),
]
_TIMES = [
    Column("table", "table"),
    *(Column(f"{p}_ms", p, ".3f") for p in PHASES if p != "dense"),
    Column("predicted_ms", "all", ".3f"),
]


def _say(text: str, after: str = "") -> None:
    """A sentence, broken where the terminal ends."""
    print(fill(readable(text), get_terminal_size((80, 24)).columns, subsequent_indent=after))


def _headline(told: Explained) -> str:
    world = told["world_size"]
    hosts = len(told["hosts"])
    said = (
        f"plan {told['name']} on {world} "
        f"rank{'s' if world > 1 else ''}{f' of {hosts} hosts' if hosts > 1 else ''} "
        f"({told['hardware']}), {told['batch_per_rank']:,} samples a rank: step "
        f"{told['step_ms']:.2f} ms predicted"
    )
    if told["lower_bound_ms"]:
        gap = told["step_ms"] / told["lower_bound_ms"] - 1
        said += (
            f", at most {gap:.1%} above the least possible"
            if gap > 5e-4
            else ", the least possible"
        )
    return said


def _table_line(row: Mapping[str, Any], world: int) -> dict[str, Any]:
    kind = (
        row["type"] if row["mode"] in ("unique", "replicated") else f"{row['type']} {row['mode']}"
    )
    return {
        **row,
        "size": f"{row['rows']:,} x {row['dim']}",
        "type": kind,
        "ranks": ranks_text(row["ranks"], world),
        "bytes": human(row["bytes"]),
    }


def ranks_text(ranks: Sequence[int], world: int) -> str:
    """`all`, `0-3,6`: ranks as people write them."""
    if len(ranks) == world:
        return "all"
    parts = []
    first = None
    for i, rank in enumerate(ranks):
        first = rank if first is None else first
        if i + 1 == len(ranks) or ranks[i + 1] != rank + 1:
            parts.append(str(first) if first == rank else f"{first}-{rank}")
            first = None
    return ",".join(parts)


def _tell_ranks(told: Explained) -> None:
    ranks = told["ranks"]
    most_bytes = max(r["bytes"] for r in ranks) or 1
    most_ms = max(r["predicted_ms"] for r in ranks) or 1
    shown = (
        ranks if len(ranks) <= MOST_TABLES else sorted(ranks, key=lambda r: -r["predicted_ms"])[:10]
    )
    lines = [
        {
            "rank": r["rank"],
            "bytes": human(r["bytes"]),
            "memory": BAR * max(1, round(WIDTH / 2 * r["bytes"] / most_bytes)),
            "ms": r["predicted_ms"],
            "time": BAR * max(1, round(WIDTH / 2 * r["predicted_ms"] / most_ms)),
        }
        for r in shown
    ]
    title = "Ranks" if shown is ranks else f"The ten slowest of {len(ranks):,} ranks"
    print_table(
        lines,
        [
            Column("rank", "rank"),
            Column("bytes", "bytes"),
            Column("memory", ""),
            Column("ms", "ms", ".2f"),
            Column("time", ""),
        ],
        title=title,
    )
    for what, values in (
        ("memory", [r["bytes"] for r in ranks]),
        ("time", [r["predicted_ms"] for r in ranks]),
    ):
        mean = sum(values) / len(values)
        if mean:
            print(
                f"{what}: the fullest rank has {max(values) / mean:.2f} times the mean"
                if what == "memory"
                else f"time: the slowest rank takes {max(values) / mean:.2f} times the mean"
            )


def _tell_traffic(told: Explained) -> None:
    world = told["world_size"]
    sent = {(b["source"], b["target"]): b["bytes"] for b in told["between_ranks"]}
    if not sent:
        print("Nothing travels between ranks.")
    elif world <= MATRIX_RANKS:
        lines = [
            {
                "from": a,
                **{str(b): "-" if a == b else human(sent.get((a, b), 0)) for b in range(world)},
            }
            for a in range(world)
        ]
        print_table(
            lines,
            [Column("from", "from \\ to"), *(Column(str(b), str(b)) for b in range(world))],
            title="Bytes of a step",
        )
    else:
        out = Counter[int]()
        for (a, _), n in sent.items():
            out[a] += n
        _say(
            f"A step sends {human(sum(out.values()))} between ranks, {human(max(out.values()))} "
            "from the busiest and "
            f"{human(min(out[a] for a in range(world)))} from the idlest; largest pair "
            f"{human(max(sent.values()))}."
        )


def _tell_types(told: Explained) -> None:
    counts = Counter(r["type"] for r in told["rows"])
    for facts in TYPES:
        if counts[facts.type]:
            _say(
                f"{counts[facts.type]} x {facts.type}: {facts.description}. + {facts.pros}. - "
                f"{facts.cons}.",
                "  ",
            )
    for other in sorted(counts.keys() - {f.type for f in TYPES}):
        print(f"{counts[other]} x {other}: rectangles that no named type makes")


# ---- two plans


def difference(a: Explained, b: Explained) -> list[dict[str, Any]]:
    """A record for each table on which two plans differ: type, mode and ranks of each, and by how
    much its own time changes.
    """
    others = {r["table"]: r for r in b["rows"]}
    found = []
    for mine in a["rows"]:
        theirs = others[mine["table"]]
        if mine["shards"] != theirs["shards"] or mine["mode"] != theirs["mode"]:
            found.append(
                {
                    "table": mine["table"],
                    **{
                        f"a_{k}": mine[k]
                        for k in ("type", "mode", "ranks", "bytes", "predicted_ms")
                    },
                    **{
                        f"b_{k}": theirs[k]
                        for k in ("type", "mode", "ranks", "bytes", "predicted_ms")
                    },
                    "change_ms": theirs["predicted_ms"] - mine["predicted_ms"],
                }
            )
    return found


def tell_difference(a: Explained, b: Explained, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print two plans' tables where they differ, then their phases and ranks side by side."""
    world = a["world_size"]
    _say(
        f"a = {a['name']}: {a['step_ms']:.2f} ms; b = {b['name']}: {b['step_ms']:.2f} ms; "
        f"{len(rows)} of {len(a['rows'])} tables differ"
    )
    print()
    if rows:
        lines = [
            {
                **r,
                "a": f"{r['a_type']} {ranks_text(r['a_ranks'], world)}",
                "b": f"{r['b_type']} {ranks_text(r['b_ranks'], world)}",
            }
            for r in rows[:MOST_TABLES]
        ]
        print_table(
            lines,
            [
                Column("table", "table"),
                Column("a", "a"),
                Column("b", "b"),
                Column("a_predicted_ms", "a ms", ".3f"),
                Column("b_predicted_ms", "b ms", ".3f"),
                Column("change_ms", "b - a", "+.3f"),
            ],
        )
        print()
    phases = [
        {
            "phase": p,
            "a": max(r[f"{p}_ms"] for r in a["ranks"]),
            "b": max(r[f"{p}_ms"] for r in b["ranks"]),
        }
        for p in PHASES
    ]
    print_table(
        [
            {**r, "change": r["b"] - r["a"]}
            for r in [*phases, {"phase": "step", "a": a["step_ms"], "b": b["step_ms"]}]
        ],
        [
            Column("phase", "phase, ms"),
            Column("a", "a", ".3f"),
            Column("b", "b", ".3f"),
            Column("change", "b - a", "+.3f"),
        ],
    )
    fullest = [max(r["bytes"] for r in x["ranks"]) for x in (a, b)]
    sent = [sum(r["bytes"] for r in x["between_ranks"]) for x in (a, b)]
    print()
    _say(
        f"fullest rank {human(fullest[0])} and {human(fullest[1])}; sent in a step "
        f"{human(sent[0])} and {human(sent[1])}"
    )
