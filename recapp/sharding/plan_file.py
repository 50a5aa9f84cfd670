"""Plan files: a plan as YAML that people read, edit and compare line by line.

    name: mixed
    ranks: 2
    batch_per_rank: 512
    tables:
      large_table:
        table: {rows: 1000000, dim: 128, data_type: fp32, features: [feature_1]}
        type: row_wise
        mode: unique
        shards:
          - {rank: 0, rows: [0, 500000]}
          - {rank: 1, rows: [500000, 1000000]}
      small_table:
        table: {rows: 100, dim: 16, data_type: fp32, features: [feature_2]}
        type: data_parallel
        mode: replicated
    statistics:
      large_table: {ids_per_sample: 1.0, bags_per_sample: 1.0, distinct: [[512, 400]],
                    load: [0.5, 0.5]}

Rows and columns are [first, one past the last]; the default is all rows or columns, so a whole
table is `{rank: 1}`. With `row_order: mixed` beside the mode, rows are positions
(`recapp/tables/row_order.py`). A replicated table needs no shards. `features`, the batch and the
statistics are those for which the plan was made (`PlannedFor`). A plan written by hand may omit
them, but not the sizes: they show without a model whether a file tiles its tables.

Writing a plan and reading it gives an equal plan. Reading a file and writing it gives an equal
text, without the comments.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from recapp.errors import PlanError, suggest
from recapp.settings.other_systems import format_of
from recapp.sharding.plan_entries import (
    PARTS,
    START,
    everywhere,
    plan_from_plain_values,
    read_plain_values,
    shard_text,
)
from recapp.sharding.sharding_plan import PlannedFor, ShardingPlan, TableSharding
from recapp.tables.config import EmbeddingBagConfig, EmbeddingConfig
from recapp.tables.dynamic import DynamicRows
from recapp.tables.lookups import TableLookup

HEADER = """\
# A sharding plan. To train with it: python -m recapp.train +plan=file plan.path=THIS_FILE \
trainer.devices={ranks}
# A shard is a rectangle on a rank: rows and cols are [first, one past the last]; left out, they \
are all there are.
"""
_AS_IT_IS = {f.name: f.default for f in fields(EmbeddingBagConfig)}
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")


# ---- writing


def plan_to_yaml(plan: ShardingPlan) -> str:
    """Return a plan as the text of a plan file.

    Raises:
        PlanError: A table is a parameter.
    """
    for name, sharding in plan.tables.items():
        if sharding.as_parameter:
            raise PlanError(
                f"table {name} is a parameter (as_parameter): only DistributedModelParallel "
                "makes parameters, and a plan file cannot have them"
            )
    made_for = plan.made_for or PlannedFor(())
    configs = {t.name: t for t in made_for.tables}
    lines = [f"name: {_word(plan.name)}", f"ranks: {plan.world_size}"]
    if made_for.batch_per_rank is not None:
        lines.append(f"batch_per_rank: {made_for.batch_per_rank}")
    if plan.notes:
        lines += ["notes:", *(f"  - {_word(note)}" for note in plan.notes)]
    lines.append("tables:")
    for name in configs or plan.tables:
        lines += _table_lines(name, plan.tables[name], configs.get(name), plan.world_size)
    if made_for.statistics:
        lines += [
            "statistics:",
            *(f"  {_word(name)}: {_flow(known)}" for name, known in made_for.statistics.items()),
        ]
    return HEADER.format(ranks=plan.world_size) + "\n".join(lines) + "\n"


def write_plan(plan: ShardingPlan, path: str | Path) -> None:
    """Write a plan file.

    Raises:
        PlanError: The file cannot be written.
    """
    try:
        Path(path).write_text(plan_to_yaml(plan), encoding="utf-8")
    except OSError as e:
        raise PlanError(f"{path}: cannot be written ({e.strerror}): choose another path") from None


def _said_of_rows(rows: DynamicRows) -> dict[str, Any]:
    """Return the settings of a dynamic table's rows, without defaults, as plain values."""
    usual = DynamicRows()
    return {
        f.name: str(value) if isinstance(value, str) else value
        for f in fields(rows)
        if (value := getattr(rows, f.name)) != getattr(usual, f.name)
    }


def _table_lines(
    name: str, sharding: TableSharding, config: EmbeddingConfig | None, world: int
) -> list[str]:
    rows, dim = (max(getattr(s, part).stop for s in sharding.shards) for part in PARTS)
    sizes: dict[str, Any] = {"rows": rows, "dim": dim}
    if config is not None:
        rows = config.plan_rows
        dim = config.embedding_dim
        sizes = {
            "rows": rows,
            "dim": dim,
            "data_type": str(config.data_type),
            "features": list(config.feature_names),
        }
        for key in ("pooling", "id_rule", *START, "min_key"):
            value = getattr(config, key)
            sizes |= (
                {key: str(value) if isinstance(value, str) else value}
                if value != _AS_IT_IS[key]
                else {}
            )
        if config.dynamic is not None:
            sizes["dynamic"] = _said_of_rows(config.dynamic)
    lines = [
        f"  {_word(name)}:",
        f"    table: {_flow(sizes)}",
        f"    type: {_word(sharding.sharding_type)}",
        f"    mode: {sharding.mode}",
        *(["    row_order: mixed"] if sharding.row_order == "mixed" else []),
    ]
    if sharding.mode == "replicated" and list(sharding.shards) == everywhere(rows, dim, world):
        return lines
    return [
        *lines,
        "    shards:",
        *(f"      - {shard_text(s, rows, dim)}" for s in sharding.shards),
    ]


def _flow(value: Any) -> str:
    """Return plain values in one line, in PyYAML's form and hundreds of times faster."""
    if isinstance(value, Mapping):
        return (
            "{"
            + ", ".join(f"{_word(str(key))}: {_flow(part)}" for key, part in value.items())
            + "}"
        )
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_flow, value)) + "]"
    if isinstance(value, float):
        text = repr(float(value))
        if not math.isfinite(value):
            return text.replace("inf", ".inf").replace("nan", ".nan")
        return text if "." in text else text.replace("e", ".0e")  # YAML reads 1e-05 as a text
    return _word(value) if isinstance(value, str) else json.dumps(value)


@lru_cache(maxsize=4096)
def _word(text: str) -> str:
    """Return a text in YAML's form: without quotes if YAML reads the same text back."""
    if _PLAIN.fullmatch(text) and yaml.safe_load(text) == text:
        return text
    return str(yaml.safe_dump(text, default_style='"', width=10**9, allow_unicode=True)).strip()


# ---- reading


def load_plan(
    path: str | Path,
    tables: Sequence[EmbeddingConfig],
    world_size: int | None,
    lookups: Sequence[TableLookup] | None = None,
) -> ShardingPlan:
    """Return the plan of a file for these tables on these ranks.

    Args:
        path: A plan file in YAML, or in a format of `recapp/settings/other_systems.py`, such as
            HugeCTR's JSON. The content decides the format.
        tables: The tables of the model.
        world_size: The number of ranks; None takes the number in the file.
        lookups: The lookups of the tables in the order of their declaration, by which HugeCTR's
            plans number them; None takes the lookups that the tables declare.

    Raises:
        PlanError: The file cannot be read, does not tile the tables, or was made for other tables
            or ranks. The message names file, table and entry.
    """
    values = read_plain_values(path)
    foreign = format_of(values)
    plan = (
        foreign.plan_from_values(values, tables, str(path), lookups)
        if foreign
        else plan_from_plain_values(values, str(path))
    )
    again = foreign.AGAIN if foreign else "export"
    world = plan.world_size if world_size is None else world_size
    check_made_for(
        plan, tables, world, str(path), f"python -m recapp.plan {again} trainer.devices={world}"
    )
    return plan


def read_plan(path: str | Path) -> ShardingPlan:
    """Return the plan of a plan file in YAML, complete. It tiles the tables that it names.

    Raises:
        PlanError: The file cannot be read or an entry is wrong; the message names file, table and
            entry.
    """
    return plan_from_plain_values(read_plain_values(path), str(path))


def check_made_for(
    plan: ShardingPlan,
    tables: Sequence[EmbeddingConfig],
    world_size: int,
    source: str,
    again: str,
) -> None:
    """Refuse a plan that was made for other ranks or other tables.

    Args:
        plan: A plan that tiles the tables that it names.
        tables: The tables of the model.
        world_size: The number of ranks.
        source: The plan's file.
        again: The command that makes a plan for these ranks and tables.

    Raises:
        PlanError: The plan was made for others; one line names the plan's ranks or tables and the
            fix.
    """
    if plan.world_size != world_size:
        raise PlanError(
            f"{source} was made for {plan.world_size} ranks, and there are {world_size}: "
            f"set trainer.devices={plan.world_size}, or make one for {world_size}: {again}"
        )
    names = [t.name for t in tables]
    for name in plan.tables:
        if name not in names:
            raise PlanError(
                f"{source}: tables.{name}: the model has no such table; {suggest(name, names)}"
            )
    for t in tables:
        if t.name not in plan.tables:
            raise PlanError(
                f"{source}: has no entry for table {t.name} ({t.num_embeddings} rows x "
                f"{t.embedding_dim}); add tables.{t.name}, or make it again: {again}"
            )
        had = [max(getattr(s, part).stop for s in plan.tables[t.name].shards) for part in PARTS]
        if had != [t.plan_rows, t.embedding_dim]:
            grows = " (a dynamic table is cut by its 64 runs)" if t.dynamic is not None else ""
            raise PlanError(
                f"{source}: tables.{t.name} was made for {had[0]} rows x {had[1]}, the model's "
                f"table has {t.plan_rows} x {t.embedding_dim}{grows}: make it again: {again}"
            )
