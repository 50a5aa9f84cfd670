"""Draw the pictures of the documents from the package's own objects: `python docs/draw.py`.

    configs, batches, plans -> docs/pictures/*.svg

Nothing is drawn that was not computed: shards are those of plans that the planner or HugeCTR's JSON
gave, numbers of a batch are those of a `KeyedJaggedTensor`, vectors are looked up and updated by
the collections. Equal packages draw equal pictures; run it after a change and commit what changed.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from shapes import ACCENT, PALE, RANKS, SHARED, Canvas

from recapp import (
    DLRM,
    EmbeddingBagCollection,
    EmbeddingBagCollectionSharder,
    EmbeddingBagConfig,
    EmbeddingShardingPlanner,
    KeyedJaggedTensor,
    ParameterConstraints,
    ShardingPlan,
    ShardingType,
    Topology,
    rowwise_adagrad,
    shard_model,
)
from recapp.compat.hugectr.plans import plan_from_values
from recapp.reporting.drawing import QUIET, Picture, sheet
from recapp.transport.join_ranks import make_comm

FOLDER = Path(__file__).parent / "pictures"
WIDTH = 9.0  # inches, of a page's column

USERS = EmbeddingBagConfig(name="users", num_embeddings=12, embedding_dim=4, feature_names=["user"])
ITEMS = EmbeddingBagConfig(name="items", num_embeddings=8, embedding_dim=4, feature_names=["item"])
BATCHES = (
    KeyedJaggedTensor(["user", "item"], [3, 11, 5, 2, 5], lengths=[1, 1, 2, 1]),
    KeyedJaggedTensor(["user", "item"], [7, 3, 2, 6], lengths=[1, 1, 0, 2]),
)
"""Two samples for each of two ranks; two users, and bags of none, one or two items."""

HUGECTR_PLAN = [
    [
        {
            "local_embedding_list": [0, 3],
            "global_embedding_list": [[0, 3], [1, 2]],
            "table_placement_strategy": "mp",
        },
        {
            "local_embedding_list": [4],
            "global_embedding_list": [[4], [4]],
            "table_placement_strategy": "dp",
        },
    ],
    [
        {
            "local_embedding_list": [1, 2],
            "global_embedding_list": [[0, 3], [1, 2]],
            "table_placement_strategy": "mp",
        },
        {
            "local_embedding_list": [4],
            "global_embedding_list": [[4], [4]],
            "table_placement_strategy": "dp",
        },
    ],
]


class Model(torch.nn.Module):
    """Tables alone, on the meta device: enough to plan for them."""

    def __init__(self, *tables: EmbeddingBagConfig) -> None:
        super().__init__()
        self.bags = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))


def planned(
    tables: Sequence[EmbeddingBagConfig], kinds: Mapping[str, str], world: int, hosts: int = 1
) -> ShardingPlan:
    """Let the planner lay out tables with the sharding type of each, by name or glob."""
    constraints = {
        name: ParameterConstraints(sharding_types=[kind], min_partition=1)
        for name, kind in kinds.items()
    }
    topology = Topology(world_size=world, hosts=hosts)
    planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints)
    return planner.plan(Model(*tables))


def numbers(values: Any) -> list[str]:
    """Write whole numbers as cells."""
    return [str(int(value)) for value in values]


# ---- tables and batches


def embedding_table() -> Picture:
    """A bag of ids, the rows that it names, and the vector that is their sum."""
    bags = EmbeddingBagCollection(tables=[ITEMS])
    batch = KeyedJaggedTensor(["item"], [2, 5], lengths=[2])
    ids = batch["item"].values().tolist()
    rows = bags.weight("items").tolist()
    pooled = bags(batch).values()[0].tolist()
    with sheet(WIDTH, 3.1, rows=0) as s:
        c = Canvas(s.axes[0], 3.1)
        c.heading(0.2, 0.25, "bag of ids")
        c.cells(0.2, 1.3, [numbers(ids)], 0.5, 0.32)
        c.note(0.2, 1.72, "feature item of\none sample")
        c.heading(2.35, 0.25, "table items: 8 rows x 4 columns")
        for r, row in enumerate(rows):
            chosen = r in ids
            c.text(2.25, 0.61 + r * 0.28, str(r), ha="right", color=QUIET)
            fill = RANKS[1] if chosen else "white"
            words = [[f"{value:.2f}" for value in row]]
            c.cells(2.35, 0.47 + r * 0.28, words, 0.62, 0.28, lambda _r, _c, f=fill: f)
            if chosen:
                c.arrow(1.3, 1.46, 2.05, 0.61 + r * 0.28)
                c.arrow(4.9, 0.61 + r * 0.28, 5.95, 1.46)
        c.text(5.3, 1.46, "sum", weight="bold")
        c.heading(6.05, 0.25, "pooled vector")
        words = [[f"{value:.2f}" for value in pooled]]
        c.cells(6.05, 1.3, words, 0.62, 0.32, lambda _r, _c: RANKS[1])
        c.note(
            6.05,
            1.72,
            "one vector of 4 columns, however many\nids the bag has; an empty bag gives\nzeros",
        )
        return s.finish(
            "embedding_table",
            "A lookup",
            f"A bag of the ids {ids} takes two rows of a table of eight; their sum is one vector.",
            "Numbers are the table's start values.",
        )


def jagged_tensor() -> Picture:
    """A batch as people see it and as one flat tensor, keys-major."""
    batch = KeyedJaggedTensor(["user", "item"], [3, 11, 7, 5, 2, 6], lengths=[1, 1, 1, 2, 1, 0])
    B = batch.stride()
    lengths = batch.lengths().tolist()
    wide = 0.62
    with sheet(WIDTH, 3.05, rows=0) as s:
        c = Canvas(s.axes[0], 3.05)
        c.heading(0.2, 0.25, "three samples")
        c.cells(0.2, 0.45, [["", *batch.keys()]], 0.85, 0.3, lambda _r, _c: PALE)
        for b in range(B):
            bags = [each.to_dense()[b].tolist() for each in batch.to_dict().values()]
            words = [f"sample {b}", *(" ".join(numbers(bag)) or "none" for bag in bags)]
            colors = (PALE, RANKS[2], RANKS[1])
            c.cells(0.2, 0.75 + b * 0.3, [words], 0.85, 0.3, lambda _r, i, f=colors: f[i])
        c.arrow(3.0, 1.2, 3.75, 1.2)
        c.heading(4.9, 0.25, "KeyedJaggedTensor: all of user, then all of item")
        split = batch.offset_per_key()[1]
        owners = [RANKS[2] if i < split else RANKS[1] for i in range(len(batch.values()))]
        c.text(4.75, 0.66, "values", ha="right")
        c.cells(4.9, 0.5, [numbers(batch.values())], wide, 0.32, lambda _r, i: owners[i])
        c.text(4.75, 1.31, "offsets", ha="right")
        offsets = batch.offsets().tolist()
        for offset in sorted(set(offsets)):
            x = 4.9 + offset * wide
            c.axes.plot([x, x], [0.86, 1.18], color=QUIET, linewidth=0.8)
            c.text(x, 1.31, ", ".join([str(offset)] * offsets.count(offset)))
        c.text(4.75, 1.91, "lengths", ha="right")
        keys = [RANKS[2]] * B + [RANKS[1]] * B
        c.cells(4.9, 1.75, [numbers(lengths)], wide, 0.32, lambda _r, i: keys[i])
        for i in range(len(lengths)):
            c.text(4.9 + (i + 0.5) * wide, 2.2, f"sample {i % B}", fontsize=8, color=QUIET)
        c.note(
            0.2,
            2.55,
            "A bag is a range of the flat values: bag i begins at offsets[i] and has lengths[i] "
            "ids. Keys lie one behind the\nother, so taking a feature out copies nothing. The "
            "last bag is empty: its offset repeats.",
            fontsize=9,
        )
        return s.finish(
            "jagged_tensor",
            "A batch of bags as one flat tensor",
            "Three samples with a user each and two, one and no items become six values, "
            f"lengths {lengths} and their running sums.",
            "Colours are keys.",
        )


# ---- plans


def parallelism() -> Picture:
    """One step's tables on two ranks under four ways to split the work."""
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=128, feature_names=[name])
        for name, rows in (("A", 8), ("B", 6), ("C", 4))
    ]
    shown = {
        "data_parallel": "every rank holds every table;\ngradients of touched rows\ngo to all",
        "table_wise": "a table lies whole on one rank;\nothers ask it for vectors",
        "row_wise": "every rank holds some rows\nof every table",
        "column_wise": "every rank holds some columns\nof every table",
    }
    with sheet(WIDTH, 3.55, rows=0) as s:
        c = Canvas(s.axes[0], 3.55)
        for i, (kind, words) in enumerate(shown.items()):
            plan = planned(tables, {"*": kind}, 2)
            left = 0.15 + i * 2.22
            c.heading(left, 0.2, kind)
            for rank in range(2):
                x = left + rank * 1.04
                c.box(x, 0.4, 0.98, 2.2, fill=PALE)
                c.text(x + 0.49, 0.53, f"rank {rank}", fontsize=8.5)
                held = [[p for p in plan.tables[t.name].shards if p.rank == rank] for t in tables]
                y = 0.68
                for t, shards in zip(tables, held, strict=True):
                    _table(c, t, shards, (x + 0.3, y, 0.5, t.num_embeddings * 0.085), RANKS[rank])
                    c.text(x + 0.16, y + t.num_embeddings * 0.0425, t.name, fontsize=8.5)
                    y += t.num_embeddings * 0.085 + 0.1
            c.note(left, 2.68, words)
        return s.finish(
            "parallelism",
            "Forms of parallelism",
            "Tables A, B and C on two ranks: copies on both, whole tables dealt, "
            "rows halved, columns halved.",
            "Filled is what a rank holds.",
        )


def _table(
    c: Canvas, table: EmbeddingBagConfig, shards: Any, at: Sequence[float], fill: str
) -> None:
    """Draw a table's outline and fill some of its shards."""
    x, y, wide, high = at
    c.box(x, y, wide, high, linestyle=":")
    for shard in shards:
        left = x + wide * shard.cols.start / table.embedding_dim
        top = y + high * shard.rows.start / table.num_embeddings
        c.box(
            left,
            top,
            wide * len(shard.cols) / table.embedding_dim,
            high * len(shard.rows) / table.num_embeddings,
            fill=fill,
        )


def tilings() -> Picture:
    """One table on four ranks of two hosts, cut by each of the six types."""
    table = EmbeddingBagConfig(
        name="wide", num_embeddings=1000, embedding_dim=256, feature_names=["wide"]
    )
    words = {
        ShardingType.TABLE_WISE: "one rectangle on one rank",
        ShardingType.COLUMN_WISE: "vertical strips,\ndealt over the ranks",
        ShardingType.ROW_WISE: "horizontal strips\nover all ranks",
        ShardingType.TABLE_ROW_WISE: "horizontal strips over\nthe ranks of one host",
        ShardingType.GRID_SHARD: "vertical strips, each cut over\nthe ranks of one host",
        ShardingType.DATA_PARALLEL: "the whole table\non every rank",
    }
    with sheet(WIDTH, 4.95, rows=0) as s:
        c = Canvas(s.axes[0], 4.95)
        for i, (kind, said) in enumerate(words.items()):
            plan = planned([table], {"*": kind.value}, 4, hosts=2)
            x = 0.35 + (i % 3) * 2.95
            y = 0.5 + (i // 3) * 2.15
            c.heading(x, y - 0.2, kind.value)
            whole = plan.tables["wide"].mode == "replicated"
            if whole:
                c.box(x, y, 2.2, 1.1, "ranks 0, 1, 2, 3", SHARED, fontsize=10)
            for shard in () if whole else plan.tables["wide"].shards:
                c.box(
                    x + 2.2 * shard.cols.start / 256,
                    y + 1.1 * shard.rows.start / 1000,
                    2.2 * len(shard.cols) / 256,
                    1.1 * len(shard.rows) / 1000,
                    str(shard.rank),
                    RANKS[shard.rank],
                    fontsize=10,
                )
            c.note(x, y + 1.16, said, fontsize=9)
        for rank in range(4):
            c.box(1.2 + rank * 1.75, 4.6, 0.22, 0.22, fill=RANKS[rank])
            c.text(1.5 + rank * 1.75, 4.71, f"rank {rank}, host {rank // 2}", ha="left")
        return s.finish(
            "tilings",
            "Six ways to cut a table of 1,000 rows and 256 columns",
            "A table on four ranks of two hosts under the six sharding types.",
            "Numbers are ranks.",
        )


def model_parallel() -> Picture:
    """A DLRM on two ranks: other tables, the same layers."""
    tables = [
        EmbeddingBagConfig(
            name=f"C{i}", num_embeddings=rows, embedding_dim=16, feature_names=[f"C{i}"]
        )
        for i, rows in ((1, 60_000), (2, 40_000), (3, 30_000), (4, 50_000))
    ]
    bags = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    model = DLRM(bags, 13, [64, 16], [64, 1])
    layers = [
        name for name, part in model.named_children() if next(part.parameters(), None) is not None
    ]
    dense = [name for name in layers if name != "embedding_bag_collection"]
    plan = planned(tables, {"*": "table_wise"}, 2)
    with sheet(WIDTH, 4.3, rows=0) as s:
        c = Canvas(s.axes[0], 4.3)
        for rank in range(2):
            x = 0.2 + rank * 5.1
            c.box(x, 0.45, 3.5, 3.45, fill=PALE)
            c.heading(x + 0.1, 0.28, f"rank {rank}: its own half of the batch")
            c.box(x + 0.2, 0.6, 3.1, 0.4, "loss of its samples", fontsize=9)
            c.box(x + 0.2, 1.2, 1.45, 0.6, f"{dense[-1]} MLP", SHARED)
            c.box(x + 1.85, 1.2, 1.45, 0.6, f"{dense[0]} MLP", SHARED)
            held = [t for t in tables if plan.tables[t.name].ranks == [rank]]
            for i, t in enumerate(held):
                words = f"table {t.name}\n{t.num_embeddings:,} x {t.embedding_dim}"
                c.box(x + 0.2 + i * 1.65, 2.8, 1.45, 0.85, words, RANKS[rank])
            c.text(x + 1.75, 2.3, "pooled vectors of its samples, from all tables", fontsize=8.5)
            c.arrow(x + 0.95, 2.75, x + 0.95, 2.42)
            c.arrow(x + 0.95, 2.18, x + 0.95, 1.85)
        c.arrow(3.8, 1.5, 5.2, 1.5, "all-reduce", arrowstyle="<|-|>")
        c.text(
            4.5, 1.72, "of dense gradients\n(data parallel)", fontsize=8.5, va="top", color=QUIET
        )
        c.arrow(3.8, 3.1, 5.2, 3.1, "all-to-all", arrowstyle="<|-|>", color=ACCENT)
        c.text(
            4.5,
            3.3,
            "of ids, vectors and\nvector gradients\n(model parallel)",
            fontsize=8.5,
            va="top",
            color=QUIET,
        )
        c.note(
            0.2,
            4.0,
            "The layers have the same weights on both ranks; a table exists once.",
            fontsize=9,
        )
        return s.finish(
            "model_parallel",
            "Model-parallel tables beside data-parallel layers",
            "Each rank holds all dense layers and half of the tables; dense gradients are "
            "all-reduced, ids and vectors go all-to-all.",
            "A DLRM of four tables on two ranks.",
        )


def workflow() -> Picture:
    """From a model to a sharded model: planner, plan, sharder."""
    plan = planned([USERS, ITEMS], {"users": "row_wise", "items": "table_wise"}, 2)
    lines = []
    for name, sharding in plan.tables.items():
        lines.append(f"{name}: {sharding.sharding_type}")
        lines += [f"    rank {p.rank}: rows {_span(p.rows)}" for p in sharding.shards]
    planner = EmbeddingShardingPlanner.__name__
    sharder = EmbeddingBagCollectionSharder.__name__
    with sheet(WIDTH, 4.15, rows=0) as s:
        c = Canvas(s.axes[0], 4.15)
        c.box(
            0.2,
            0.3,
            2.6,
            0.9,
            "your model with an\nEmbeddingBagCollection\non the meta device",
            PALE,
        )
        c.box(0.2, 1.4, 2.6, 0.55, "Topology: 2 ranks, 1 host", PALE)
        c.box(0.2, 2.1, 2.6, 0.55, "ParameterConstraints", PALE)
        c.box(0.2, 2.8, 2.6, 0.55, "ids seen in the logs", PALE)
        c.box(
            3.6,
            1.35,
            2.2,
            1.1,
            f"{planner}\n\nprices plans, takes\nthe cheapest that fits",
            RANKS[1],
            fontsize=8.5,
        )
        for y in (0.85, 1.68, 2.37, 3.07):
            c.arrow(2.8, y, 3.55, 1.9 + (y - 1.9) * 0.25)
        c.box(6.5, 0.75, 2.35, 1.8, fill=PALE)
        c.heading(6.62, 0.95, "ShardingPlan", fontsize=9)
        c.text(6.62, 1.15, "\n".join(lines), ha="left", va="top", fontsize=8.5, linespacing=1.4)
        c.arrow(5.8, 1.9, 6.45, 1.9)
        c.box(6.5, 2.95, 2.35, 0.5, "DistributedModelParallel", RANKS[1])
        c.arrow(7.67, 2.55, 7.67, 2.9)
        c.box(3.6, 2.95, 2.2, 0.5, f"{sharder}\nwhat happens to touched rows", PALE, fontsize=7.5)
        c.arrow(5.8, 3.2, 6.45, 3.2)
        c.note(
            6.5,
            3.52,
            "replaces the collection by a Sharded-\nEmbeddingBagCollection, wraps the\nrest in DDP",
        )
        return s.finish(
            "workflow",
            "Planner, plan, sharded model",
            "A model, machines, constraints and ids go into the planner; its plan and a sharder "
            "make a sharded model: " + "; ".join(line.strip() for line in lines) + ".",
            "The plan shown is the planner's.",
        )


# ---- a step


def exchange() -> Picture:
    """The way of the ids of a batch, of the vectors, and of the gradients back."""
    plan = planned([ITEMS], {"items": "row_wise"}, 2)
    owner = {row: p.rank for p in plan.tables["items"].shards for row in p.rows}
    unique = [sorted(set(batch["item"].values().tolist())) for batch in BATCHES]
    with sheet(WIDTH, 5.65, rows=0) as s:
        c = Canvas(s.axes[0], 5.65)
        steps = (
            "ids of the batch",
            "distinct rows",
            "rows asked of\neach owner",
            "vectors come back",
            "pooled per bag",
            "row gradients\nat the owner",
        )
        tops = (0.75, 1.5, 2.3, 3.3, 4.1, 5.0)
        for y, words in zip(tops, steps, strict=True):
            c.text(0.15, y + 0.15, words, ha="left", weight="bold")
        for rank, batch in enumerate(BATCHES):
            x = 1.85 + rank * 4.05
            c.heading(
                x,
                0.2,
                f"rank {rank}: holds rows " + _span([r for r, k in owner.items() if k == rank]),
            )
            c.box(x - 0.1, 0.4, 3.05, 5.1, fill="white", linestyle=":")
            bags = [bag.tolist() for bag in batch["item"].to_dense()]
            _bags(c, x, tops[0], bags, owner)
            _row(c, x, tops[1], unique[rank], owner)
            for other in range(2):
                asked = [row for row in unique[rank] if owner[row] == other]
                _row(c, x + other * 1.5, tops[2], asked, owner, f"of {other}:")
            served = [(k, row) for k in range(2) for row in unique[k] if owner[row] == rank]
            _row(c, x, tops[3], unique[rank], owner, "v")
            c.cells(x, tops[4], [[_sum_of(bag) for bag in bags]], 1.1, 0.3, lambda _r, _c: PALE)
            _sums(c, x, tops[5], served, RANKS[rank])
        for words, y, way in (
            ("1 counts\n2 ids", 2.45, "<|-|>"),
            ("3 vectors", 3.3, "<|-|>"),
            ("4 gradients", 4.75, "<|-|>"),
        ):
            c.arrow(4.85, y, 5.75, y, color=ACCENT, arrowstyle=way)
            c.text(5.3, y - 0.07, words, fontsize=8.5, color=ACCENT, va="bottom")
        return s.finish(
            "exchange",
            "The way of a batch through a table cut by rows over two ranks",
            f"Rank 0 asks for rows {unique[0]}, rank 1 for rows {unique[1]}; owners send vectors, "
            "bags are pooled at home, gradients go the same way back and each row is updated once.",
            "Colours are owners.",
        )


def _span(rows: Sequence[int]) -> str:
    return f"{min(rows)} to {max(rows)}"


def _sum_of(bag: Sequence[int]) -> str:
    return " + ".join(f"v{i}" for i in bag) or "zeros"


def _bags(c: Canvas, x: float, y: float, bags: Sequence[Any], owner: Mapping[int, int]) -> None:
    """Draw the bags of a batch, each id in the colour of its owner."""
    for b, bag in enumerate(bags):
        left = x + b * 1.5
        c.text(left, y - 0.13, f"sample {b}", ha="left", fontsize=8, color=QUIET)
        _row(c, left, y, bag, owner)


def _row(
    c: Canvas,
    x: float,
    y: float,
    rows: Sequence[int],
    owner: Mapping[int, int],
    words: str = "",
) -> None:
    """Draw row numbers in the colours of their owners; `words` are in front, or `v` of each."""
    letter = words if words == "v" else ""
    if words and not letter:
        c.text(x, y + 0.15, words, ha="left", fontsize=8.5)
        x += 0.4
    if not rows:
        c.text(x, y + 0.15, "none", ha="left", fontsize=8.5, color=QUIET)
    names = [[f"{letter}{row}" for row in rows]]
    c.cells(x, y, names, 0.4, 0.3, lambda _r, i: RANKS[owner[rows[i]]])


def _sums(c: Canvas, x: float, y: float, served: Sequence[tuple[int, int]], fill: str) -> None:
    """Draw which ranks' gradients each touched row of an owner sums."""
    for i, row in enumerate(sorted({row for _, row in served})):
        ranks = [k for k, asked in served if asked == row]
        said = " + ".join(f"g{row} of {k}" for k in ranks)
        wide = 1.42
        c.box(
            x + (i % 2) * wide,
            y + (i // 2) * 0.3,
            wide,
            0.3,
            f"row {row}: {said}",
            fill,
            fontsize=8,
        )


def fused_update() -> Picture:
    """One step of row-wise Adagrad: touched rows before and after; no gradient of the table."""
    model = Model(ITEMS)
    comm = make_comm(None, torch.device("cpu"))
    rule = rowwise_adagrad(lr=0.1)
    shard_model(model, planned([ITEMS], {"*": "table_wise"}, 1), comm, rule, backend="torch")
    ids = KeyedJaggedTensor(["item"], [2, 5, 2], lengths=[2, 1])
    before = _whole(model)
    model.bags(ids).values().sum().backward()
    after = _whole(model)
    touched = (before != after).any(1).tolist()
    with sheet(WIDTH, 3.5, rows=0) as s:
        c = Canvas(s.axes[0], 3.5)
        for x, words, rows in (
            (0.45, "rows before backward", before),
            (6.2, "rows after backward", after),
        ):
            c.heading(x, 0.22, words)
            for r, row in enumerate(rows.tolist()):
                c.text(x - 0.1, 0.59 + r * 0.28, str(r), ha="right", color=QUIET)
                fill = RANKS[1] if touched[r] else "white"
                names = [[f"{value:.2f}" for value in row]]
                c.cells(x, 0.45 + r * 0.28, names, 0.6, 0.28, lambda _r, _c, f=fill: f)
        used = ids.values().tolist()
        for r in sorted(set(used)):
            c.arrow(2.9, 0.59 + r * 0.28, 6.0, 0.59 + r * 0.28)
            count = f"{used.count(r)} gradient{'s' if used.count(r) > 1 else ''}"
            said = f"row {r}: {count} summed, one update"
            c.text(4.45, 0.55 + r * 0.28, said, fontsize=8.5, va="bottom")
        c.note(
            0.35,
            2.85,
            "The bags hold the ids 2, 5 and 2. Rows nobody asked for are neither read nor "
            "written, and no gradient of the\nwhole table ever exists. Row-wise Adagrad keeps "
            "one number for each row beside it.",
            fontsize=9,
        )
        return s.finish(
            "fused_update",
            "A fused update touches the rows of the batch, once each",
            f"Of eight rows those of the ids {sorted(set(used))} change.",
            "Computed by one backward of a sharded collection.",
        )


def _whole(model: Model) -> torch.Tensor:
    """Copy the one table of a model on one rank."""
    (((_, _, weight),),) = model.state_dict().values()
    return torch.as_tensor(weight).clone()


def checkpoint() -> Picture:
    """Rectangles that two ranks wrote and that three ranks of another plan read."""
    table = EmbeddingBagConfig(
        name="items", num_embeddings=12, embedding_dim=192, feature_names=["item"]
    )
    saved = planned([table], {"*": "row_wise"}, 2)
    wanted = planned([table], {"*": "column_wise"}, 3)
    with sheet(WIDTH, 3.2, rows=0) as s:
        c = Canvas(s.axes[0], 3.2)
        columns = (
            (0.2, "saved: row_wise, 2 ranks", saved),
            (6.5, "loaded: column_wise, 3 ranks", wanted),
        )
        for x, words, plan in columns:
            c.heading(x, 0.22, words)
            for shard in plan.tables["items"].shards:
                c.box(
                    x + 1.9 * shard.cols.start / table.embedding_dim,
                    0.45 + 1.9 * shard.rows.start / 12,
                    1.9 * len(shard.cols) / table.embedding_dim,
                    1.9 * len(shard.rows) / 12,
                    f"rank {shard.rank}",
                    RANKS[shard.rank],
                )
        c.heading(3.0, 0.22, "best.ckpt/")
        for i, p in enumerate(saved.tables["items"].shards):
            said = f"rows {_span(p.rows)}, columns {_span(p.cols)}"
            said = f"rank-{p.rank:05d}.safetensors\n{said}"
            c.box(2.95, 0.45 + i * 0.65, 2.85, 0.55, said, RANKS[p.rank], fontsize=8.5)
        c.box(
            2.95,
            1.75,
            2.85,
            0.6,
            "manifest.json\nwhich file has which rectangle",
            PALE,
            fontsize=8.5,
        )
        c.arrow(2.2, 1.4, 2.9, 1.4)
        c.arrow(5.9, 1.4, 6.4, 1.4)
        c.note(
            0.2,
            2.5,
            "A reader intersects the rectangles that it wants with those that are stored and "
            "reads the slices. Optimiser state\nis stored in the same way.",
            fontsize=9,
        )
        return s.finish(
            "checkpoint",
            "A checkpoint is rectangles of logical tables",
            "Two horizontal halves are stored; three ranks read a vertical third of each.",
            "Plans are the planner's.",
        )


# ---- HugeCTR


def hugectr() -> Picture:
    """A plan of two GPUs in HugeCTR's JSON, and the shards that it means."""
    reads = {"T0": ["a"], "T1": ["b", "d"], "T2": ["c"], "T3": ["e"]}
    tables = [
        EmbeddingBagConfig(name=n, num_embeddings=r, embedding_dim=4, feature_names=reads[n])
        for n, r in (("T0", 10), ("T1", 8), ("T2", 6), ("T3", 4))
    ]
    plan = plan_from_values(HUGECTR_PLAN, tables, "plan.json")
    with sheet(WIDTH, 4.3, rows=0) as s:
        c = Canvas(s.axes[0], 4.3)
        c.heading(0.2, 0.22, "plan.json")
        text = "[\n" + ",\n".join(_gpu_text(groups) for groups in HUGECTR_PLAN) + "\n]"
        c.text(
            0.2, 0.45, text, ha="left", va="top", family="monospace", fontsize=7.8, linespacing=1.25
        )
        for rank in range(2):
            x = 5.2 + rank * 1.95
            c.heading(x, 0.22, f"GPU {rank} = rank {rank}")
            c.box(x, 0.4, 1.75, 3.0, fill=PALE)
            y = 0.55
            for t in tables:
                shards = [p for p in plan.tables[t.name].shards if p.rank == rank]
                high = t.num_embeddings * 0.08
                _table(c, t, shards, (x + 0.15, y, 0.55, high), RANKS[rank])
                kind = plan.tables[t.name].sharding_type if shards else ""
                c.text(
                    x + 0.8,
                    y + high / 2,
                    f"{t.name}\n{kind}" if kind else t.name,
                    ha="left",
                    fontsize=8,
                )
                y += high + 0.15
        c.note(
            0.2,
            3.55,
            "Lookups 0, 1, 2, 3, 4 read tables T0, T1, T1, T2, T3. mp (model parallel): a table "
            "lies on one GPU, or in shards on several;\ndp (data parallel): on all of them. "
            "Lookups of one table stay together: 1 and 2 read T1, both on GPU 1.",
            fontsize=8.5,
        )
        return s.finish(
            "hugectr",
            "A HugeCTR plan of two GPUs",
            "Lookups 0 and 3 on GPU 0, 1 and 2 on GPU 1, lookup 4 on both: tables T0 and T2 lie on "
            "rank 0, T1 on rank 1, T3 on both.",
            "Shards are what the package reads from the JSON.",
        )


def _gpu_text(groups: Sequence[Mapping[str, Any]]) -> str:
    """Write a GPU's groups as JSON, a key on each line."""
    written = [
        ",\n".join(f"   {json.dumps(key)}: {json.dumps(value)}" for key, value in group.items())
        for group in groups
    ]
    return " [{\n" + "},\n  {\n".join(w for w in written) + "}]"


PICTURES: tuple[Callable[[], Picture], ...] = (
    embedding_table,
    jagged_tensor,
    parallelism,
    tilings,
    model_parallel,
    workflow,
    exchange,
    fused_update,
    checkpoint,
    hugectr,
)


def draw(folder: Path) -> Iterator[Path]:
    """Draw all pictures into a folder, which is made if it does not exist; yield the files."""
    folder.mkdir(parents=True, exist_ok=True)
    for make in PICTURES:
        yield make().write(folder)


if __name__ == "__main__":
    for path in draw(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER):
        print(path)
