"""From settings to plans: what training and `python -m recapp.plan` share.

    settings, tables, machine, ids -> Setting (what plans are priced for) -> ShardingPlan

`plan.path` names a file, `plan.rules` are rules by hand; where the settings have neither, the
planner decides within `planner.constraints`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from recapp.app.own_types import register_own_types
from recapp.errors import ConfigError, PlanError, suggest
from recapp.optim.rules import RowRule
from recapp.planner.constraints import MODES, Constraints, ParameterConstraints
from recapp.planner.cost import Dense, Setting
from recapp.planner.embedding_planner import Outcome, plan_tables
from recapp.planner.explain import explained
from recapp.planner.plan_rules import PlanRule, plan_by_rules, read_rule
from recapp.planner.rank_memory import check_memory
from recapp.planner.topology import Topology
from recapp.sharding.plan_file import load_plan
from recapp.sharding.sharding_plan import PlannedFor, ShardingPlan
from recapp.sharding.sharding_types import sharding_type
from recapp.tables.config import EmbeddingBagConfig
from recapp.tables.statistics import TableStatistics

Settings = Mapping[str, Any]
PAYLOAD_BYTES = {"full": 4, "bf16": 2, "fp16": 2}
"""Of a number that travels, by `topology.payload`."""


def priced_for(
    settings: Settings,
    topology: Topology,
    rule: RowRule | None,
    statistics: Mapping[str, TableStatistics] | None = None,
    dense: Dense | None = None,
    val_rows: int | None = None,
) -> Setting:
    """What plans are priced for: the machine, a rank's share of the global batch, the tables'
    optimiser, ids, the rest of the model.

    `val_rows` are those of the data set; where they are not known, validation batches are taken to
    be full.
    """
    batch = -(-settings["dataset"]["batch_size"] // topology.world_size)
    payload = PAYLOAD_BYTES[settings["topology"].get("payload", "full")]
    val_batch = _val_batch(settings, topology.world_size, val_rows)
    look_ahead = (settings.get("trainer") or {}).get("look_ahead", 1)
    return Setting(
        topology,
        batch,
        rule,
        dict(statistics or {}),
        dense or Dense(),
        payload,
        val_batch,
        look_ahead,
    )


def _val_batch(settings: Settings, world: int, rows: int | None) -> int:
    """A rank's share of the largest validation batch; 0 where nothing validates."""
    if (settings.get("trainer") or {}).get("limit_val_batches") == 0:
        return 0
    size = int(settings["dataset"].get("val_batch_size") or settings["dataset"]["batch_size"])
    return -(-(size if rows is None else min(size, rows)) // world)


def build_plan(
    settings: Settings, tables: Sequence[EmbeddingBagConfig], setting: Setting
) -> ShardingPlan:
    """The plan that the settings ask for, or the planner's.

    Raises:
        PlanError: it names what does not exist, or does not fit.
    """
    register_own_types(settings)
    plan = dict(settings.get("plan") or {})
    topology = setting.topology
    if "path" in plan:
        made = load_plan(plan["path"], tables, topology.world_size)
    elif "rules" in plan:
        made = plan_by_rules(
            tables,
            topology,
            _rules(plan),
            name=plan.get("name", "custom"),
            overrides=_overrides(plan),
            mode=plan.get("mode", "auto"),
            column_width=plan.get("column_width", 64),
            deal=plan.get("deal", "balanced"),
            statistics=setting.statistics,
            batch_per_rank=setting.batch_per_rank,
        )
    else:
        return best_plan(settings, tables, setting).plan
    check_memory(tables, made, setting.rule, topology)
    return made


def best_plan(
    settings: Settings, tables: Sequence[EmbeddingBagConfig], setting: Setting
) -> Outcome:
    """The planner's own plan, whatever `plan` says beside single tables.

    Raises:
        PlanError: constraints that cannot hold, or no plan fits.
    """
    register_own_types(settings)
    plan = settings.get("plan") or {}
    mode = plan.get("mode", settings["planner"]["mode"])
    return plan_tables(
        tables,
        setting,
        build_constraints(
            settings["planner"].get("constraints") or {}, tables, _overrides(plan), mode
        ),
    )


def made_for(
    plan: ShardingPlan, tables: Sequence[EmbeddingBagConfig], setting: Setting
) -> PlannedFor:
    """What a plan should carry, so that it can be explained elsewhere."""
    return PlannedFor(
        tuple(tables), setting.batch_per_rank, {t.name: setting.of(t).to_dict() for t in tables}
    )


def predicted(
    settings: Settings,
    tables: Sequence[EmbeddingBagConfig],
    plan: ShardingPlan,
    topology: Topology,
    rule: RowRule,
    statistics: Mapping[str, TableStatistics],
    dense: Dense,
    val_rows: int,
) -> dict[str, Any]:
    """What is expected of a run: its plan explained, without the roads not taken."""
    setting = priced_for(settings, topology, rule, statistics, dense, val_rows)
    return explained(tables, plan, setting, alternatives=False)


def build_constraints(
    plain: Settings, tables: Sequence[EmbeddingBagConfig], overrides: Mapping[str, str], mode: str
) -> Constraints:
    """Constraints from `planner.constraints`, with the types of single tables
    (`+plan.tables.C3=row_wise`) and the mode of all.

    Raises:
        ConfigError: an entry that no constraint has.
        PlanError: a mode or type that does not exist.
    """
    known = [name for name in ParameterConstraints.__dataclass_fields__ if name != "statistics"]
    found: dict[str, ParameterConstraints] = {}
    for pattern, said in plain.items():
        for key in said:
            if key not in known:
                raise ConfigError(
                    f"planner.constraints.{pattern}.{key}: unknown; {suggest(str(key), known)}"
                )
        found[str(pattern)] = ParameterConstraints(**said)
    if mode not in ("auto", *MODES):
        raise PlanError(f"planner.mode={mode}: {suggest(mode, ['auto', *MODES])}")
    for pattern, kind in overrides.items():
        sharding_type(kind, f"plan.tables.{pattern}={kind}")
        found[pattern] = ParameterConstraints(sharding_types=[kind]).over(
            found.get(pattern, ParameterConstraints())
        )
    if mode != "auto":
        every = ParameterConstraints(modes=[mode])
        found = {"*": every.over(found.pop("*", ParameterConstraints()))} | found
    return found if tables else {}


def _overrides(plan: Settings) -> dict[str, str]:
    return {str(k): str(v) for k, v in (plan.get("tables") or {}).items()}


def _rules(plan: Settings) -> list[PlanRule]:
    rules = [read_rule(r, f"plan.rules[{i}]") for i, r in enumerate(plan["rules"])]
    if "dp_max_rows" in plan and plan["dp_max_rows"] not in [r.rows_at_most for r in rules]:
        raise PlanError(
            f"plan.dp_max_rows={plan['dp_max_rows']}: no rule of this plan asks for it; choose "
            "+plan=dp_and_localized with it"
        )
    return rules
