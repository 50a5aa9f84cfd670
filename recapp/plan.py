"""`python -m recapp.plan VERB`: sharding plans on paper, for any machine, without devices and
without data.

| verb        | does                                                                               |
|-------------|------------------------------------------------------------------------------------|
| `explain`   | a plan told: what lies where, what it costs, the next best, who sends what to      |
|             | whom; with `out=DIR` drawn                                                         |
| `types`     | the six sharding types: what each is for                                           |
| `compare`   | two plans side by side: `a=mixed b=row_wise`, names or files                       |
| `export`    | the plan as a file to edit and to train with, or `as=hugectr`                      |
| `check`     | what was predicted against what runs have measured: `path=RUN_OR_SWEEP`            |
| `calibrate` | times this machine and writes a hardware file for `topology.hardware=FILE`         |
| `scale`     | step time, memory and bytes as ranks grow; `path=RUN_OR_SWEEP` checks it against   |
|             | runs on few ranks                                                                  |

Without `+plan` it is about the plan that recapp would choose.
"""

if __name__ == "__main__":
    from recapp.processes.stopping import end_on_signals

    end_on_signals()  # what follows takes its time to import

from collections.abc import Callable, Sequence
from pathlib import Path
from shutil import get_terminal_size
from textwrap import fill
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from recapp import console
from recapp.app.command import Job, run, run_on_ranks
from recapp.app.compose import with_absolute_paths
from recapp.errors import ConfigError, suggest
from recapp.processes.launch import rank_count
from recapp.processes.rank_process import leave
from recapp.settings.option_files import Folders, option_file, options

if TYPE_CHECKING:
    from recapp.planner.cost import Setting
    from recapp.sharding.sharding_plan import ShardingPlan
    from recapp.tables.config import EmbeddingBagConfig

Settings = dict[str, Any]
STATISTICS = ("auto", "assumed")
FORMS = ("plan", "hugectr")
BEST = "best"  # the planner's own plan, where a name is asked for
# samples of a rank, and steps, of the run by which calibrate finds a step's overhead
RUN_BATCH = 512
RUN_STEPS = 60


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and answers its exit code.

    Args:
        argv: The arguments, by default those of the process.
    """

    def task(config: Settings, job: Job) -> None:
        console.check_format(config["format"])
        VERBS[job.verb](with_absolute_paths(config), job)

    return run("plan", task, verbs=tuple(VERBS), writes=False, argv=argv)


# ---- what a plan is about


def paper(
    settings: Settings, ranks: int | None = None
) -> tuple[list["EmbeddingBagConfig"], "Setting"]:
    """The tables, and what plans for them are priced for: on `ranks` ranks, or as many as topology
    or trainer say.
    """
    from recapp.app import build
    from recapp.app.planning_problem import priced_for
    from recapp.planner.cost import dense_of
    from recapp.planner.topology import hardware_of, topology_from

    if assumed := build.size_on_paper(settings):
        console.note(assumed)
    tables = build.build_tables(settings, of_dataset=False)
    machine = dict(settings["topology"])
    hardware = hardware_of(machine["hardware"])
    on = hardware.compute_device if hardware else settings["trainer"]["accelerator"]
    device = "cuda" if on in ("cuda", "gpu") else "cpu"
    devices = settings["trainer"]["devices"]
    world = (
        ranks
        or machine["ranks"]
        or (devices if isinstance(devices, int) and devices > 0 else rank_count(devices))
    )
    topology = topology_from(machine | {"ranks": world}, world, device)
    model = build.build_model(settings, tables, on_paper=True)
    return tables, priced_for(
        settings,
        topology,
        build.build_rule(settings),
        statistics_of(settings, tables),
        dense_of(model),
    )


def statistics_of(settings: Settings, tables: Sequence["EmbeddingBagConfig"]) -> dict[str, Any]:
    """Measured on the first training rows where the data are there, kept beside them; else
    nothing.
    """
    from recapp.app import build

    if settings["statistics"] not in STATISTICS:
        raise ConfigError(
            f"statistics={settings['statistics']}: "
            f"{suggest(str(settings['statistics']), STATISTICS)}"
        )
    return {} if settings["statistics"] == "assumed" else build.build_statistics(settings, tables)


def plan_named(settings: Settings, name: str | None, folders: Folders = ()) -> Settings:
    """The settings with another plan: an option of the group `plan`, a file, or the planner's
    own.
    """
    if name is None:
        raise ConfigError(
            "a and b must be given: names of plans, files, or best: a=mixed b=row_wise"
        )
    if name == BEST:
        return {k: v for k, v in settings.items() if k != "plan"}
    if Path(name).suffix in (".yaml", ".yml", ".json"):
        return settings | {"plan": {"path": str(Path(name).absolute())}}
    known = [option for option in options("plan", folders) if option != "file"]
    if name not in known:
        raise ConfigError(
            f"plan {name}: neither a file nor a plan of conf/plan; {suggest(name, [*known, BEST])}"
        )
    whole = OmegaConf.create({"plan": OmegaConf.load(str(option_file("plan", name, folders)))})
    return settings | {"plan": OmegaConf.to_container(whole, resolve=True)["plan"]}  # type: ignore[call-overload, index]


def chosen_plan(
    settings: Settings, tables: Sequence["EmbeddingBagConfig"], setting: "Setting"
) -> tuple["ShardingPlan", float | None]:
    """The plan that the settings ask for, and the least time of a step where the planner has looked
    for one.
    """
    from recapp.app.planning_problem import best_plan, build_plan

    plan = settings.get("plan") or {}
    if "path" in plan or "rules" in plan:
        return build_plan(settings, tables, setting), None
    with console.progress(
        f"planning {len(tables):,} tables on {setting.topology.world_size:,} ranks", 1
    ) as advance:
        outcome = best_plan(settings, tables, setting)
        advance(1)
    return outcome.plan, outcome.lower_bound_seconds


# ---- verbs


def explain(settings: Settings, job: Job) -> None:
    """Tell a plan."""
    from recapp.planner.explain import explained
    from recapp.planner.tell import tell

    tables, setting = paper(settings)
    plan, bound = chosen_plan(settings, tables, setting)
    told = explained(tables, plan, setting, lower_bound_seconds=bound)
    if settings["format"] == "json":
        console.emit_document(told)
    else:
        tell(told)
    if settings["out"]:
        from recapp.reporting.plan_figures import draw_plan
        from recapp.reporting.plan_page import plan_page

        folder = Path(settings["out"])
        for path in [*draw_plan(told, folder), plan_page(told, folder / "plan.html")]:
            console.note(f"written {console.short_path(path)}")


def types(settings: Settings, job: Job) -> None:
    """What the six types are for."""
    from recapp.planner.types import TYPES

    rows = [t._asdict() for t in TYPES]
    if settings["format"] == "json":
        console.emit(rows, "json")
        return
    for row in rows:
        print(f"{row['type']}: {row['description']}")
        for heading, key in (("best for", "best_for"), ("+", "pros"), ("-", "cons")):
            print(
                fill(
                    row[key],
                    get_terminal_size((80, 24)).columns,
                    initial_indent=f"  {heading:10}",
                    subsequent_indent=" " * 12,
                )
            )
        print()


def compare(settings: Settings, job: Job) -> None:
    """Two plans side by side."""
    from recapp.planner.explain import explained
    from recapp.planner.tell import difference, tell_difference

    tables, setting = paper(settings)
    plans = (
        chosen_plan(plan_named(settings, name, job.folders), tables, setting)[0]
        for name in (settings["a"], settings["b"])
    )
    a, b = (explained(tables, plan, setting, alternatives=False) for plan in plans)
    rows = difference(a, b)
    if settings["format"] == "json":
        console.emit(rows, "json")
    else:
        tell_difference(a, b, rows)


def export(settings: Settings, job: Job) -> None:
    """The plan as a file."""
    from dataclasses import replace

    from recapp.app.planning_problem import made_for
    from recapp.sharding.hugectr import hugectr_json
    from recapp.sharding.plan_file import plan_to_yaml

    if settings["as"] not in FORMS:
        raise ConfigError(f"as={settings['as']}: {suggest(str(settings['as']), FORMS)}")
    tables, setting = paper(settings)
    plan, _ = chosen_plan(settings, tables, setting)
    plan = replace(plan, made_for=made_for(plan, tables, setting))
    text = hugectr_json(plan, tables) if settings["as"] == "hugectr" else plan_to_yaml(plan)
    if settings["path"] is None:
        print(text.rstrip("\n"))
        return
    path = Path(settings["path"])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.rstrip("\n") + "\n")
    except OSError as error:
        raise ConfigError(f"path={path}: cannot be written ({error.strerror})") from error
    console.note(f"written {console.short_path(path)}")


def check(settings: Settings, job: Job) -> None:
    """What was predicted of runs against what they measured."""
    from recapp.planner.check import STEP, compared, order_of_plans, told_apart

    if settings["path"] is None:
        raise ConfigError(
            "path must be given: a run or a sweep of recapp.train, path=outputs/first"
        )
    rows = compared(measured_runs(settings["path"]))
    tau = order_of_plans(rows)
    steps = [row for row in rows if row["what"] == STEP]
    apart, right = told_apart(rows)
    if settings["format"] == "json":
        console.emit_document(
            {"rows": rows, "kendall_tau": tau, "pairs_told_apart": apart, "pairs_in_order": right}
        )
        return
    columns = [
        console.Column("run", "run"),
        console.Column("plan", "plan"),
        console.Column("what", "what"),
        console.Column("predicted", "predicted", ",.3f"),
        console.Column("measured", "measured", ",.3f"),
        console.Column("error", "error", "+.1%"),
    ]
    if any(row["runs"] > 1 for row in rows):
        columns[5:5] = [
            console.Column("least", "least", ",.3f"),
            console.Column("most", "most", ",.3f"),
        ]
    console.print_table(rows, columns, title="Predicted and measured")
    if tau is not None:
        print(
            f"\nKendall's tau of {len(steps)} plans' step times: {tau:.2f} (1: the order of plans "
            "is right, -1: it is reversed)"
        )
        if any(row["runs"] > 1 for row in steps):
            pairs = len(steps) * (len(steps) - 1) // 2
            print(
                f"Pairs of plans whose runs do not overlap: {apart} of {pairs}; in the predicted "
                f"order: {right}"
            )


def measured_runs(path: str) -> list[tuple[str, Settings, Settings]]:
    """Name, prediction and measurement of every run that lies somewhere below."""
    from recapp.reporting.performance import (
        PERFORMANCE_FILE,
        PREDICTED_FILE,
        read_document,
        read_performance,
    )

    found = [
        (str(d.relative_to(path)) if d != Path(path) else d.name, told, measured)
        for d in sorted({f.parent for f in Path(path).rglob(PERFORMANCE_FILE)})
        if (told := read_document(d / PREDICTED_FILE)) is not None
        and (measured := read_performance(d)) is not None
    ]
    if not found:
        raise ConfigError(
            f"path={path}: no run there has {PERFORMANCE_FILE} and {PREDICTED_FILE}: name a run "
            "or a sweep of "
            "python -m recapp.train"
        )
    return found


def calibrate(settings: Settings, job: Job) -> None:
    """Time this machine and write its hardware file."""
    from dataclasses import replace
    from tempfile import TemporaryDirectory

    from recapp.benchmarks.calibrate import settings_for, with_overhead
    from recapp.processes.rank_environment import external_rank
    from recapp.reporting.performance import PREDICTED_FILE, read_document, read_performance

    told = settings_for(settings, settings["path"])
    with TemporaryDirectory(prefix="recapp_calibrate_") as folder:
        rows = run_on_ranks(
            told, replace(job, directory=Path(folder)), "recapp.benchmarks.bench_worker"
        )["rows"]
        if external_rank() is None:  # ranks that others have started train once
            run = Path(folder) / "run"
            run.mkdir()
            run_on_ranks(
                _short_run(settings, told["path"], Path(folder) / "logs"),
                replace(job, directory=run),
                "recapp.worker",
            )
            measured = read_performance(run)
            predicted = read_document(run / PREDICTED_FILE)
            assert measured is not None and predicted is not None
            rows.append(with_overhead(Path(told["path"]), measured, predicted))
    if settings["format"] == "json":
        console.emit(rows, "json")
        return
    columns = [
        console.Column("name", "what"),
        console.Column("us", "µs", ",.1f"),
        console.Column("items_per_second", "M items\n/ s", ",.1f", 1e6),
        console.Column("gb_per_s", "GB/s", ",.2f"),
        console.Column("gflop_per_s", "GFLOP/s", ",.1f"),
        console.Column("share", "share", ".2f"),
        console.Column("error", "error", ".0%"),
    ]
    console.print_table(
        rows,
        columns,
        title=f"What this machine's steps cost, written to {console.short_path(told['path'])}",
    )
    print(f"\nPlan with it: topology.hardware={console.short_path(told['path'])}")


def _short_run(settings: Settings, hardware: str, data: Path) -> Settings:
    """Of recapp.train on data made for it, to be priced with a hardware file: the settings."""
    from recapp.app.compose import compose, to_plain

    ranks = rank_count(settings["trainer"]["devices"], settings["trainer"]["accelerator"])
    asked = {
        "dataset.path": data,
        "dataset.batch_size": RUN_BATCH * ranks,
        "trainer.max_steps": RUN_STEPS,
        "dataset.generate.rows": RUN_BATCH * ranks * RUN_STEPS * 5 // 4,
        "trainer.limit_val_batches": 1,
        "callbacks": "none",
        "logger": "none",
        "trainer.enable_progress_bar": False,
        "trainer.log_every_n_steps": RUN_STEPS,
        "+plan": "row_wise",
    }
    config = compose(
        "train",
        [
            f"{key}={str(value).lower() if isinstance(value, bool) else value}"
            for key, value in asked.items()
        ],
    )
    train = to_plain(
        OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    ) | {"choices": {}, "format": "json"}
    for group, kept in (
        ("trainer", ("devices", "accelerator")),
        ("topology", ("transport", "backend")),
        ("launch", settings["launch"]),
    ):
        train[group] |= {key: settings[group][key] for key in kept}
    train["topology"]["hardware"] = hardware
    return with_absolute_paths(train)


def scale(settings: Settings, job: Job) -> None:
    """Step time, memory and bytes as ranks grow."""
    from recapp.app import build
    from recapp.planner.check import compared_by_ranks
    from recapp.planner.constraints import MODES
    from recapp.planner.hardware import default_hardware
    from recapp.planner.scale import scaled
    from recapp.planner.topology import hardware_of
    from recapp.sharding.tilings import ShardingType

    ranks = settings["ranks"]
    plans = settings["plans"]
    known = [BEST, *(t.value for t in ShardingType)]
    if (
        not isinstance(ranks, list)
        or not ranks
        or any(not isinstance(r, int) or r < 1 for r in ranks)
    ):
        raise ConfigError(
            f"ranks={ranks}: must be a list of numbers of ranks, such as ranks=[8,16,32]"
        )
    for name in plans if isinstance(plans, list) else [plans]:
        if name not in known:
            raise ConfigError(f"plans={name}: {suggest(str(name), known)}")
    checked = (
        compared_by_ranks(measured_runs(settings["path"])) if settings["path"] is not None else []
    )
    hardware = hardware_of(settings["topology"]["hardware"]) or default_hardware("cpu")
    chosen = plans if isinstance(plans, list) else [plans]
    with console.progress("planning, sizes", 2 * len(MODES) * len(ranks) * len(chosen)) as advance:
        rows = scaled(
            sorted(ranks),
            chosen,
            hardware,
            build.build_rule(settings),
            settings["weak_batch"],
            advance,
        )
    if settings["format"] == "json":
        console.emit_document({"rows": rows, "checked": checked})
        return
    columns = [
        console.Column("growth", "growth"),
        console.Column("plan", "plan"),
        console.Column("mode", "mode"),
        console.Column("ranks", "ranks"),
        console.Column("step_ms", "step\nms", ",.2f"),
        console.Column("efficiency", "effi-\nciency", ".0%"),
        console.Column("bytes_per_rank", "GB a\nrank", ",.1f", 1e9),
        console.Column("sent_per_rank", "MB sent\na rank", ",.1f", 1e6),
        console.Column("least_sent_per_rank", "at\nleast", ",.1f", 1e6),
    ]
    console.print_table(rows, columns, title=f"MLPerf's tables on {hardware.name}; -: no room")
    _tell_checked(checked, hardware.name)
    if settings["out"]:
        from recapp.reporting.scale_figure import draw_scale

        for path in draw_scale(rows, Path(settings["out"])):
            console.note(f"written {console.short_path(path)}")


def _tell_checked(rows: list[Settings], hardware: str) -> None:
    if not rows:
        print("\nNot checked: recapp.train -m trainer.devices=1,2,4, then path=SWEEP here")
        return
    columns = [
        console.Column("plan", "plan"),
        console.Column("ranks", "ranks"),
        console.Column("batch_per_rank", "batch a\nrank", ","),
        console.Column("step_ms", "step\nms", ",.2f"),
        console.Column("predicted_step_ms", "pre-\ndicted", ",.2f"),
        console.Column("step_error", "error", "+.0%"),
        console.Column("sent_per_rank", "MB sent\na rank", ",.3f", 1e6),
        console.Column("predicted_sent_per_rank", "pre-\ndicted", ",.3f", 1e6),
        console.Column("sent_error", "error", "+.1%"),
    ]
    print()
    console.print_table(rows, columns, title="Checked against runs: measured and predicted")
    others = sorted({r["hardware"] for r in rows} - {hardware})
    if others:
        print(
            fill(
                f"The runs' predictions are priced for {', '.join(others)}; "
                "topology.hardware=FILE in training takes what growth is "
                "priced with.",
                get_terminal_size((80, 24)).columns,
            )
        )


VERBS: dict[str, Callable[[Settings, Job], None]] = {
    "explain": explain,
    "types": types,
    "compare": compare,
    "export": export,
    "check": check,
    "calibrate": calibrate,
    "scale": scale,
}


if __name__ == "__main__":
    leave(main())
