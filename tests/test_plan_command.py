"""`python -m recapp.plan`: every verb answers people and machines, on paper; wrong words are
refused in one line.
"""

import json
from hashlib import sha256

import pytest
from documents import commands, fenced, own_files
from jobs import recipe, resolved
from tiers import one_of

from recapp import calibration, plan
from recapp.benchmarks import calibrate, kernel_costs, session
from recapp.benchmarks.workloads import MODELS
from recapp.planner.hardware import read_hardware
from recapp.reporting.plan_report import analyze_plan
from recapp.reporting.run_record import read_metrics
from recapp.run.recipe import read_settings
from recapp.settings.records import to_plain
from recapp.sharding.plan_file import read_plan

IN_PAGES = [c for c in commands(fenced("sh")) if c.name == "plan"]


@pytest.fixture(autouse=True)
def base(tmp_path, monkeypatch):
    """An empty working directory without data."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def answer(capsys):
    """`answer(verb, *settings)`: the JSON document of a command."""

    def run(*arguments):
        assert plan.main([*arguments, "format=json"]) == 0, capsys.readouterr().err
        return json.loads(capsys.readouterr().out)

    return run


@pytest.mark.full
@pytest.mark.parametrize("command", IN_PAGES, ids=lambda c: " ".join(c.arguments)[:40])
def test_the_commands_of_the_pages_answer(command, base, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    own_files(base)
    before = {p.name for p in base.rglob("*") if p.is_file()}
    assert plan.main(list(command.arguments)) == 0
    said = capsys.readouterr().out
    written = {p.name for p in base.rglob("*") if p.is_file()} - before
    assert said or written
    if command.arguments[0] in ("explain", "types", "scale"):
        assert max(map(len, said.splitlines())) <= 80
    if "out=drawn" in command.arguments:
        assert "plan.html" in written and any(name.endswith(".svg") for name in written)


def test_an_explanation_has_a_row_per_table_its_ranks_and_what_travels(answer):
    report = answer("explain", "+plan=mixed", "tables=sample", "trainer.devices=2")
    assert [(r["table"], r["type"]) for r in report["rows"]] == [
        ("large_table", "row_wise"),
        ("wide_table", "column_wise"),
        ("small_table", "table_wise"),
    ]
    assert {"mode", "ranks", "bytes", "predicted_ms", "runner_up", "why"} <= set(report["rows"][0])
    assert [r["weights"] for r in report["ranks"]] == [308_480_000, 307_200_000]
    assert {(b["source"], b["target"]) for b in report["between_ranks"]} == {
        (0, 1),
        (1, 0),
    } and report["step_ms"] > 0
    assert "rules[0] of mixed" in report["rows"][0]["why"]


def test_without_a_plan_it_explains_recapps_own_which_is_no_slower_than_any_named_one(answer):
    own = answer("explain", "trainer.devices=4")
    assert (
        own["name"] == "automatic"
        and own["world_size"] == 4
        and own["lower_bound_ms"] <= own["step_ms"]
    )
    for name in ("mixed", "row_wise", "table_wise", "data_parallel", "guidelines"):
        assert own["step_ms"] <= answer("explain", f"+plan={name}", "trainer.devices=4")[
            "step_ms"
        ] * (1 + 1e-9)


def test_a_machine_on_paper_brings_its_ranks_hosts_and_memory(answer):
    report = answer("explain", "topology=dgx_h100_x2", "tables=sample")
    assert (
        report["world_size"] == 16
        and [len(h) for h in report["hosts"]] == [8, 8]
        and report["ranks"][0]["capacity"] > 10**10
    )


def test_the_steps_of_one_gpu_are_priced_as_graphs_unless_there_are_none(answer):
    machine = "topology=dgx_h100", "topology.ranks=1", "topology.hosts=1"
    recorded, launched = (
        answer("explain", *machine, f"engine.graph={graph}") for graph in ("auto", "off")
    )
    assert "a step is priced as one CUDA graph" in recorded["notes"][-1] and not launched["notes"]
    assert 2 < launched["step_ms"] - recorded["step_ms"] < 4
    cut = answer("explain", "topology=dgx_h100", "topology.ranks=2")
    assert "between lookup and update is priced as one CUDA graph" in cut["notes"][-1]


def test_a_plan_that_fits_nowhere_is_refused_with_what_would_help(capsys):
    assert (
        plan.main(
            ["explain", "tables=sample", "topology.memory_bytes=300000000", "trainer.devices=2"]
        )
        == 1
    )
    said = capsys.readouterr().err.splitlines()[-1]
    assert "does not fit: rank" in said and "large_table" in said and "What helps: " in said


def test_an_exported_plan_is_the_plan_that_was_asked_for_and_knows_what_it_is_for(answer, base):
    assert (
        plan.main(
            ["export", "+plan=mixed", "tables=sample", "trainer.devices=2", "path=made/mixed.yaml"]
        )
        == 0
    )
    made = read_plan(base / "made/mixed.yaml")
    found = analyze_plan(made)
    assert found["sharding_types"] == {"row_wise": 1, "column_wise": 1, "table_wise": 1}
    assert found["memory_distribution"] == [308_480_000, 307_200_000]
    assert found["communication_patterns"][0][0] == 0 and found["communication_patterns"][0][1] > 0
    asked = ("tables=sample", "trainer.devices=2")
    again = answer("explain", "+plan=file", "plan.path=made/mixed.yaml", *asked)
    assert [r["type"] for r in again["rows"]] == ["row_wise", "column_wise", "table_wise"]


def test_growth_is_reported_for_every_plan_mode_and_number_of_ranks(answer):
    rows = answer("scale", "ranks=[8,16]", "plans=[best,table_wise]", "topology=dgx_h100")["rows"]
    assert len(rows) == 2 * 2 * 2 and {r["ranks"] for r in rows} == {8, 16}
    for r in rows:
        assert r["plan"] == "best" or r["step_ms"] is None or r["step_ms"] > 0
        assert r["step_ms"] is None or r["sent_per_rank"] > 0


def test_a_plan_is_printed_and_written_as_hugectrs_notebook_does(base, capsys):
    wanted = ("as=hugectr", "+plan=dp_and_localized", "trainer.devices=8", "statistics=assumed")
    assert plan.main(["explain", *wanted]) == 0
    said = capsys.readouterr().out
    assert sha256(said.encode()).hexdigest() == (
        "f4d859efc70b1b6626943f41512d6e8b77fcac3815f6da5f2e89c3f3fde14c3e"
    )
    assert plan.main(["export", *wanted, "indent=4", "path=made/plan.json"]) == 0
    written = (base / "made/plan.json").read_bytes()
    assert sha256(written).hexdigest() == (
        "09368829331a8889ef4b8e91a81fee808827b714ff31eddb3ca23ab3dc6c1ccc"
    )
    assert plan.main(["explain", *wanted, "format=json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"plan": json.loads(written)}


def test_calibration_ends_with_a_short_run_priced_with_its_file(base):
    asked = recipe("plan", ["trainer.devices=3", "engine.transport=gloo"])
    found = calibration.short_run(asked, 3, "mine.yaml", base / "logs")
    settings = to_plain(found)
    assert to_plain(read_settings(settings, "train")) == settings and settings["choices"] == {}
    assert found.topology.hardware == str(base / "mine.yaml")
    assert found.engine.transport == "gloo" and found.trainer.devices == 3
    assert found.dataset.batch_size == 3 * calibration.RUN_BATCH
    assert found.dataset.generate.rows > found.dataset.batch_size * found.trainer.max_steps
    assert "ckpt_path" in settings and "out" not in settings


@pytest.mark.full
@pytest.mark.usefixtures("no_process_group")
def test_this_machine_is_calibrated_and_plans_are_priced_with_it(base, answer, monkeypatch):
    """Little is timed, in this process; a rank of its own runs the steps of the overhead."""

    def measured_here(settings, job, *_, **__):
        session.run(settings, job.directory)
        return read_metrics(job.directory)

    def shortly(*given):
        return measure_hardware(
            *given, rounds=1, cases=kernel_costs.CASES[:1], model=MODELS["small"]
        )

    measure_hardware = calibrate.measure_hardware
    monkeypatch.setattr(calibration, "run_on_ranks", measured_here)
    monkeypatch.setattr(calibrate, "measure_hardware", shortly)
    monkeypatch.setattr(calibration, "RUN_STEPS", 8)
    found = answer("calibrate", "trainer.devices=1", "path=mine.yaml")
    hardware = read_hardware(base / "mine.yaml")
    rows = {r["name"]: r for r in found["rows"]}
    # 0 where the machine was busier while kernels were measured than in the run
    assert hardware.step_overhead_us == rows["step overhead"]["us"] >= 0
    assert "steps of recapp.train" in hardware.source
    assert (
        answer("explain", "topology.hardware=mine.yaml")["step_ms"]
        > hardware.step_overhead_us / 1e3
    )


@pytest.mark.parametrize(
    ("arguments", "parts"),
    one_of(
        2,
        [
            (["explain", "+plan=mixd"], ("plan=mixd", "mixed")),
            (["explain", "topology=dgx_h10"], ("topology=dgx_h10", "dgx_h100")),
            (["explain", "statistics=guess"], ("statistics=guess", "assumed")),
            (
                ["explain", "planner.constraints={C1: {ranks: [7]}}"],
                ("constraints.C1.ranks", "rank 7", "0..1"),
            ),
            (
                ["explain", "planner.constraints={C1: {rank: [0]}}"],
                ("constraints.C1.rank", "ranks"),
            ),
            (["explain", "planner.mode=uniqe"], ("planner.mode=uniqe", "unique")),
            (["export", "as=torchrec"], ("as=torchrec", "hugectr")),
            (
                ["export", "as=hugectr", "+plan=column_wise", "tables=sample"],
                ("large_table", "column"),
            ),
            (["export", "indent=4"], ("indent=4", "as=hugectr")),
            (["export", "as=hugectr", "indent=-1"], ("indent=-1",)),
            (["scale", "ranks=8"], ("ranks=8", "list")),
            (
                ["scale", "plans=[best,rowwise]"],
                ("plans=[best, rowwise]: rowwise: did you mean row_wise",),
            ),
            (
                ["scale", "path=rows.json"],
                ("path=rows.json: scale does not read it, only export, calibrate, devices",),
            ),
            (["explan"], ("unknown verb explan", "explain")),
        ],
    ),
)
def test_what_cannot_be_is_refused_in_one_line(arguments, parts, capsys):
    assert plan.main(arguments) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and all(part in line for part in parts), line


def test_an_exported_plan_is_what_training_would_read(base):
    assert plan.main(["export", "+plan=distributed", "trainer.devices=2", "path=p.yaml"]) == 0
    assert resolved("train", ["+plan=file", "plan.path=p.yaml"])["plan"]["path"] == str(
        base / "p.yaml"
    )
