"""Commands: what they make of a command line, right or wrong, and what they leave behind."""

import json
import os
import shlex
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest
import standin_conf
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser

import recapp
from recapp import __main__ as console_command
from recapp.cli import command, compose
from recapp.cli.compose import unreadable
from recapp.errors import ConfigError, DataError
from recapp.processes import rank_process
from recapp.processes.rank_process import leave
from recapp.run import recipe as commands
from recapp.settings import option_files
from recapp.settings.records import to_plain

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def base(tmp_path, monkeypatch):
    """An empty working directory, a configuration that the test knows, and nobody who has started
    us as a rank.
    """
    (tmp_path / "conf").mkdir()
    conf = standin_conf.write(tmp_path / "conf")
    monkeypatch.setattr(option_files, "conf_dir", lambda: conf)
    for name, kind in standin_conf.COMMANDS.items():
        monkeypatch.setitem(commands.COMMANDS, name, kind)
    standin_conf.install(monkeypatch.setattr)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "SLURM_NTASKS", "RECAPP_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "here"


class Calls(list):
    """A task that remembers what it was called with, and fails where it should."""

    def __call__(self, recipe, job):
        config = to_plain(recipe)
        self.append((config, job))
        if isinstance(config.get("seed"), str):
            raise DataError(f"seed={config['seed']}: no number\nat all")
        if config.get("seed") == 13:
            raise KeyError("a fault")
        return 0.5


def run(*argv, name="train", **options):
    calls = Calls()
    return command.run(name, calls, argv=argv, **options), calls


def files_in(folder: Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())


@pytest.mark.parametrize("name", ["hydra.run.dir", "hydra.sweep.dir"])
def test_a_run_in_a_bucket_is_refused_before_hydra_makes_directories(base, name, capsys):
    assert run(f"{name}=s3://bucket/run")[0] == 1
    said = capsys.readouterr().err
    assert said.startswith(f"error: {name}=s3://bucket/run: curves, metrics and settings of a run")
    assert "checkpoints=URI writes" in said and files_in(base) == [] and not [*base.iterdir()]


# ---- what a job gets


def test_a_job_gets_plain_settings_its_directory_and_what_the_command_line_said(base):
    code, [(config, job)] = run("+plan=mixed", "seed=2", "hydra.run.dir=out")
    assert code == 0
    assert config["plan"] == {"name": "mixed", "tables": {}} and type(config["trainer"]) is dict
    assert config["seed"] == 2 and config["choices"] == job.choices
    assert job.directory == base / "out" and job.directory.is_dir()
    assert job.overrides == ("+plan=mixed", "seed=2") and job.number is None and job.sweep is None
    assert job.choices == {
        "plan": "mixed",
        "dataset": "generated",
        "model": "dlrm",
        "trainer": "default",
        "launch": "local",
    }


def test_without_a_directory_given_a_job_gets_a_dated_one(base):
    _, [(_, job)] = run()
    assert job.directory.relative_to(base).parts[0] == "outputs"
    assert not set("=,[] ") & set(str(job.directory.relative_to(base)))


@pytest.mark.full
@pytest.mark.parametrize(("flags", "parent"), [([], "outputs"), (["-m", "seed=1,2"], "multirun")])
def test_commands_that_start_in_the_same_second_have_a_directory_each(
    base, monkeypatch, flags, parent
):
    class Stopped(datetime):
        @classmethod
        def now(cls):
            return cls(2026, 1, 31, 18, 5, 11)

    monkeypatch.setattr("hydra.core.utils.datetime", Stopped)
    (base / parent / "2026-01-31/18-05-11").mkdir(parents=True)
    for number in (2, 3):
        code, calls = run(*flags)
        assert code == 0
        assert {job.sweep or job.directory for _, job in calls} == {
            base / parent / f"2026-01-31/18-05-11_{number}"
        }
    code, [(_, job)] = run(f"hydra.run.dir={parent}/2026-01-31/18-05-11")
    assert job.directory.name == "18-05-11"  # said, so it is that


def test_a_place_where_no_directory_can_be_made_is_named(base, capsys):
    (base / "outputs").write_text("a file")
    assert run() == (1, [])
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.full
def test_jobs_of_a_sweep_have_numbers_and_directories_without_odd_signs(base):
    code, calls = run("seed=1,2", "-m", "model=dlrm,deep")  # -m anywhere
    assert code == 0
    assert [job.number for _, job in calls] == [0, 1, 2, 3]
    assert [job.directory.name for _, job in calls] == ["0", "1", "2", "3"]
    assert calls[3][1].overrides == ("seed=2", "model=deep") and calls[3][0]["model"]["depth"] == 2
    assert {job.sweep for _, job in calls} == {calls[0][1].directory.parent}
    assert not set("=,[] ") & set("".join(files_in(base)))


def test_a_command_that_only_prints_leaves_nothing(base):
    code, calls = run("subject=x", name="show", writes=False)
    assert code == 0 and len(calls) == 1
    assert files_in(base) == []


def test_a_verb_is_taken_off_the_front_and_must_be_known(capsys):
    verbs = ("generate", "inspect")
    code, [(_, job)] = run("inspect", "subject=x", name="show", writes=False, verbs=verbs)
    assert code == 0 and job.verb == "inspect" and job.overrides == ("subject=x",)
    assert run("inspct", "subject=x", name="show", verbs=verbs) == (1, [])
    assert "unknown verb inspct: did you mean inspect?" in capsys.readouterr().err
    assert run("subject=x", name="show", verbs=verbs) == (1, [])
    assert "a verb is missing" in capsys.readouterr().err


def test_help_and_cfg_answer_without_running_anything(base, capsys):
    assert run("--help") == (0, [])
    shown = capsys.readouterr().out
    assert shown.startswith("python -m recapp.train")
    assert "plan: mixed, row_wise" in shown and "RECAPP_TRACEBACK=1" in shown
    assert run("+plan=mixed", "--cfg", "job") == (0, [])
    assert "name: mixed" in capsys.readouterr().out
    assert files_in(base) == []


# ---- what is wrong with a command line, in one line


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (
            "trainer.max_step=3",
            "unknown setting trainer.max_step: did you mean trainer.max_steps or "
            "trainer.max_epochs?",
        ),
        ("devices=3", "unknown setting devices: did you mean trainer.devices?"),
        ("sede=3", "unknown setting sede: did you mean seed?"),
        ("hydra.run.dri=x", "unknown setting hydra.run.dri: did you mean hydra.run.dir?"),
        ("+plan=mixd", "plan=mixd: there is no such option; did you mean mixed?"),
        ("model=dlmr", "model=dlmr: there is no such option; did you mean dlrm?"),
        ("model=xyz", "model=xyz: there is no such option; known: deep, dlrm"),
        ("+plann=mixed", "unknown setting plann: did you mean plan"),
        ("plan=mixed", "so it needs a plus: +plan=mixed"),
        ("plan.tables.C1=row_wise", "so it needs a plus: +plan.tables.C1=..."),
        ("+model=deep", "a group that has a default is chosen without a plus: model=..."),
        ("+seed=3", "seed is set already: write it without the plus"),
        ("seed=1,2", "seed=1,2: put -m in front"),
        ("seed=range(3)", "seed=range(3): put -m in front"),
        ("foo", "cannot read 'foo': settings are key=value"),
        ("ckpt_path=/a=b", "a value with = needs quotes: \"ckpt_path='/a=b'\""),
        ("dataset.path=/a,b", "or quotes around a text with commas: \"key='a,b'\""),
        ("--hlep", "unrecognized arguments: --hlep; --help lists the settings"),
        ("--cfg", "argument --cfg/-c: expected one argument"),
        ("dataset=null", "dataset=null: choose one of generated, other"),
        ("dataset.path=${nope}", "dataset.path: Interpolation key 'nope' not found"),
        ("format=xml", "format=xml: known: json, text"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_code_1(argv, said, capsys):
    assert run(*argv.split(" ")) == (1, [])
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("error: ") and said in line


@pytest.mark.parametrize(
    ("text", "signs"),
    [
        ("/l/dt=2026-01-01", "="),
        ("/l/a#b,c", "# ,"),
        ("/l/it's", "'"),
        ("/l/(new)", "( )"),
        ("/l/{x}", "{ }"),
        ("/l/x[1]&~", "[ ] & ~"),
        ("/l/Größe", "ö ß"),
        ("/l/商店", "商 店"),
        (r"/l/a\\'b#", "' #"),
        ('/l/$a"!`', '" ! `'),
    ],
)
def test_the_sign_that_needs_quotes_is_named_and_the_quoted_form_works(text, signs):
    said = unreadable(f"dataset.path={text}")
    assert f": a value with {signs} needs quotes: " in said
    (setting,) = shlex.split(said.partition(" needs quotes: ")[2])
    assert OverridesParser.create().parse_override(setting).value() == text


def test_an_open_bracket_and_a_key_with_other_signs_are_named():
    assert "a list is [a,b] and a mapping {a: b}; as one text" in unreadable("dataset.dense=[a,b")
    assert "a key has letters, digits, _ and dots" in unreadable("dataset.päth=x")


def test_a_wrong_option_in_a_sweep_is_found_before_the_first_job(capsys):
    assert run("-m", "+plan=mixed,row_wize") == (1, [])
    assert (
        capsys.readouterr().err
        == "error: plan=row_wize: there is no such option; did you mean row_wise?\n"
    )


def test_a_setting_that_must_be_given_is_named(capsys):
    assert run(name="show", writes=False) == (1, [])
    assert capsys.readouterr().err == "error: subject must be given: subject=...\n"


# ---- failing jobs


def test_an_error_for_people_is_one_line_and_stays_in_the_job_directory(base, capsys):
    assert run("seed=x", "hydra.run.dir=out")[0] == 1
    assert capsys.readouterr().err == "error: seed=x: no number at all\n"
    assert json.loads((base / "out/error.json").read_text()) == {
        "error": "seed=x: no number at all"
    }


def test_the_next_run_in_a_directory_forgets_the_error_of_the_last(base):
    run("seed=x", "hydra.run.dir=out")
    run("seed=2", "hydra.run.dir=out")
    assert not (base / "out/error.json").exists()


@pytest.mark.full
def test_an_error_is_not_left_beside_the_results_of_a_run_that_it_is_not_of(base):
    def train(recipe, job):
        if recipe.seed == 2:
            (job.directory / "resolved.yaml").write_text("seed: 2")
            raise DataError("it had begun")
        if recipe.seed != 1:
            raise DataError("it has not begun")
        (job.directory / "resolved.yaml").write_text("seed: 1")

    def left(seed, *place):
        command.run("train", train, argv=[f"seed={seed}", *(place or ["hydra.run.dir=out"])])
        errors = sorted(base.rglob("error.json"))
        return [json.loads(error.read_text())["error"] for error in errors]

    assert left(3) == ["it has not begun"]
    assert left(1) == left(3) == []
    assert left(2) == left(3) == ["it had begun"]
    assert left(1) == []
    sweep = ["-m", "hydra.sweep.dir=."]
    assert left(1, *sweep) == []
    assert left(3, *sweep) == ["it has not begun"]  # its directory is this sweep's now


def test_a_traceback_comes_if_asked_for_and_always_with_a_fault_of_ours(capsys, monkeypatch):
    run("seed=x")
    assert "Traceback" not in capsys.readouterr().err
    run("seed=13")
    shown = capsys.readouterr().err
    assert "Traceback" in shown and shown.endswith("error: KeyError: 'a fault'\n")
    monkeypatch.setenv("RECAPP_TRACEBACK", "1")
    for argv in ("seed=x", "sede=3"):
        run(argv)
        shown = capsys.readouterr().err
        assert "Traceback" in shown and shown.splitlines()[-1].startswith("error: ")


def test_a_failing_job_does_not_stop_the_sweep(capsys):
    seen = []
    code, calls = run("-m", "seed=1,x,13,2", after=seen.append)
    assert code == 1
    assert [config["seed"] for config, _ in calls] == [1, "x", 13, 2]
    assert [job.number for job in seen] == [0, 1, 2, 3]
    shown = capsys.readouterr().err
    assert (
        shown.index("job 1: seed=x")
        < shown.index("error: seed=x: no number")
        < shown.index("job 2: seed=13")
    )
    assert "Error executing job" not in shown


def test_ctrl_c_ends_a_sweep_at_once_and_without_a_traceback(capsys):
    def interrupted(config, job):
        raise KeyboardInterrupt

    assert command.run("train", interrupted, argv=["-m", "seed=1,2"]) == 130
    assert capsys.readouterr().err.splitlines()[-2:] == ["job 0: seed=1", "interrupted"]


def test_what_follows_a_job_follows_an_interrupted_one_too(base):
    def interrupted(config, job):
        raise KeyboardInterrupt

    seen = []
    command.run(
        "train", interrupted, after=seen.append, argv=["-m", "seed=1,2", "hydra.sweep.dir=sweep"]
    )
    assert [job.number for job in seen] == [0]
    assert json.loads((base / "sweep/0/error.json").read_text()) == {
        "error": "interrupted",
        "status": "stopped",
    }


# ---- ranks that are there already


def test_ranks_started_outside_share_a_directory_and_only_rank_0_writes_hydras_files(
    base, monkeypatch
):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RECAPP_RUN_ID", "night run")
    directories = []
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        code, [(_, job)] = run("seed=3")
        assert code == 0
        directories.append(job.directory)
        assert files_in(base) == (
            []
            if rank == "1"
            else [
                f"outputs/night run/.hydra/{name}.yaml" for name in ("config", "hydra", "overrides")
            ]
        )
    assert directories == [base / "outputs/night run"] * 2


@pytest.mark.full
def test_ranks_started_by_hand_are_asked_for_a_directory(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert run() == (1, [])
    assert capsys.readouterr().err.startswith(
        "error (rank 1): ranks started by hand need one common directory"
    )
    assert run("hydra.run.dir=out")[0] == 0


def test_a_sweep_inside_of_ranks_is_refused_in_one_line(monkeypatch, capsys):
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert run("-m", "seed=1,2") == (1, [])
    assert capsys.readouterr().err.startswith("error: -m starts the ranks of its jobs itself")


# ---- a checkpoint's settings


@pytest.fixture
def stored():
    """The settings of a run that chose and changed much."""
    _, [(config, _)] = run(
        "model=deep",
        "+plan=mixed",
        "+plan.tables.C1=row_wise",
        "model.depth=5",
        "seed=4",
        "format=json",
    )
    return config


def test_without_overrides_the_checkpoints_settings_stay_as_they_are(stored):
    assert compose.compose_over(stored, "train", []) == stored | {"format": "text"}


def test_one_setting_on_the_command_line_replaces_that_setting(stored):
    got = compose.compose_over(
        stored, "train", ["trainer.max_epochs=2", "model.depth=6", "+plan.tables.C2=table_wise"]
    )
    assert got["trainer"] == stored["trainer"] | {"max_epochs": 2}
    assert got["model"] == stored["model"] | {"depth": 6}
    assert got["plan"] == {"name": "mixed", "tables": {"C1": "row_wise", "C2": "table_wise"}}
    assert got["seed"] == 4


def test_a_group_on_the_command_line_replaces_the_whole_group_and_what_it_refers_to_is_stored(
    stored,
):
    got = compose.compose_over(stored, "train", ["model=deep", "+plan=row_wise"])
    assert got["model"] == {"ranks": ["fine", "fine"], "depth": 2, "seed_of_model": 4}
    assert got["plan"] == {"name": "row_wise", "tables": {}}
    assert got["choices"] == stored["choices"] | {"plan": "row_wise"}
    assert got["trainer"] == stored["trainer"]


def test_a_default_said_on_the_command_line_replaces_too(stored):
    assert compose.compose_over(stored, "train", ["seed=1"])["seed"] == 1


def test_an_experiment_replaces_what_it_lists(stored):
    stored["model"] = {"ranks": []}
    got = compose.compose_over(stored, "train", ["experiment=wide", "trainer.max_steps=9"])
    assert got["seed"] == 7 and got["model"]["depth"] == 2
    assert got["trainer"] == stored["trainer"] | {"max_steps": 9}
    assert got["plan"] == stored["plan"]


def test_what_another_command_has_and_the_checkpoint_has_not_is_added(stored):
    got = compose.compose_over(stored, "show", ["subject=me"])
    assert got["subject"] == "me" and got["model"] == stored["model"] and got["seed"] == 4


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model.dephth=3", "unknown setting model.dephth: did you mean model.depth?"),
        ("model.dim=3", "unknown setting model.dim"),  # the default model has it, this one has not
        ("model=dlmr", "did you mean dlrm?"),
        ("+seed=3", "seed is set already"),
    ],
)
def test_a_wrong_override_of_a_checkpoint_is_one_line(stored, override, said):
    with pytest.raises(ConfigError, match=said.replace("?", r"\?")) as raised:
        compose.compose_over(stored, "train", [override])
    assert len(str(raised.value).splitlines()) == 1


@pytest.fixture
def keep(base, monkeypatch):
    """`keep(settings)`: last.ckpt is a checkpoint of these settings."""

    def kept(settings):
        (base / "last.ckpt").mkdir()
        (base / "last.ckpt/manifest.json").write_text(json.dumps({"config": settings}))
        monkeypatch.setattr(
            command,
            "stored_recipe",
            lambda _, *said: compose.recipe_over(settings, *said),
        )

    return kept


def test_settings_of_a_checkpoints_group_can_be_said_though_the_default_group_lacks_them(
    keep, stored
):
    keep(stored)
    code, [(_, job)] = run("ckpt_path=last.ckpt", "model.depth=6")
    assert code == 0 and job.overrides == ("ckpt_path=last.ckpt", "model.depth=6")
    got = compose.compose_over(stored, "train", job.overrides)
    assert got["model"]["depth"] == 6 and got["plan"] == stored["plan"]
    assert run("model.depth=6") == (1, [])


def test_a_command_composes_its_settings_once(keep, stored, monkeypatch):
    composed = []
    load = ConfigLoaderImpl.load_configuration

    def counted(*given, **more):
        composed.append(given)
        return load(*given, **more)

    keep(stored)
    monkeypatch.setattr(ConfigLoaderImpl, "load_configuration", counted)
    for argv in (["seed=2"], ["ckpt_path=last.ckpt", "model.depth=6", "+plan=row_wise"]):
        composed.clear()
        assert run(*argv)[0] == 0 and len(composed) == 1


def test_paths_become_absolute_globs_and_lists_included(base, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    config = {
        "ckpt_path": "a/b.ckpt",
        "seed": 1,
        "dataset": {"path": ["x", "y/*.parquet"], "val_path": "~/v", "test_path": None},
    }
    got = compose.with_absolute_paths(config)
    assert got["ckpt_path"] == f"{base}/a/b.ckpt"
    assert got["dataset"] == {
        "path": [f"{base}/x", f"{base}/y/*.parquet"],
        "val_path": "/home/me/v",
        "test_path": None,
    }
    assert config["ckpt_path"] == "a/b.ckpt" and compose.with_absolute_paths(got) == got


# ---- where the configuration is, and that it is answered without torch


def test_the_configuration_is_found_beside_the_package_or_inside_it(tmp_path, monkeypatch):
    monkeypatch.undo()
    assert option_files.conf_dir() == REPOSITORY / "conf"
    (tmp_path / "recapp/conf").mkdir(parents=True)
    monkeypatch.setattr(option_files, "__file__", str(tmp_path / "recapp/settings/option_files.py"))
    assert option_files.conf_dir() == tmp_path / "recapp/conf"


def test_help_and_misspelt_settings_load_neither_torch_nor_lightning(tmp_path):
    code = (
        "import sys; from recapp import train; code = train.main(['trainer.max_stepz=1', "
        "'+plan=mixed'])\n"
        "print(code, [name for name in ('torch', 'lightning', 'pyarrow', 'rich') if name in "
        "sys.modules])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout == "1 []\n"
    assert ran.stderr.startswith(
        "error: unknown setting trainer.max_stepz: did you mean trainer.max_steps"
    )


# ---- nobody reads what is printed


@pytest.mark.parametrize(
    ("shell", "printed"), [("| head -1", "table_wise: the whole table on one rank\n"), (">&-", "")]
)
def test_a_reader_that_has_seen_enough_is_no_error(base, shell, printed):
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    ran = subprocess.run(
        f"{shlex.quote(sys.executable)} -u -m recapp.plan types {shell}",
        shell=True,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert (ran.stdout, ran.stderr) == (printed, "")


def failing(module, error):
    """A function of a module elsewhere that raises an error."""
    room = {"__name__": module, "error": error}
    exec("def fail(*arguments): raise error", room)
    return room["fail"]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            AssertionError(),
            "AssertionError: raised without a text in optuna.rdb, line 1: optuna 2 ",
        ),
        (ValueError("no such\nfile"), "failed: ValueError: no such file; RECAPP_TRACEBACK=1 shows"),
    ],
)
def test_an_error_of_a_sweeper_is_one_line(monkeypatch, capsys, error, said):
    monkeypatch.setattr(command.hydra, "main", failing("optuna.rdb", error))
    assert run("-m", "seed=1,2")[0] == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: optuna, which hydra/sweeper or hydra/launcher runs, failed: ")
    assert said in line


class Unread:
    """Standard output whose reader has ended."""

    def write(self, text):
        raise BrokenPipeError

    flush = write


@pytest.mark.parametrize(
    "main",
    [
        lambda: console_command.main(["--help"]),
        lambda: command.run("train", Calls(), argv=["--help"]),
        lambda: leave(lambda: print("a table of all jobs")),
    ],
)
def test_printing_ends_without_a_word_when_nobody_reads(monkeypatch, capsys, main):
    monkeypatch.setattr(sys, "stdout", Unread())
    for module in (command, console_command, rank_process):
        monkeypatch.setattr(module, "stop_printing", lambda: None)
    monkeypatch.setattr(rank_process, "end_process", lambda code: code)
    assert main() in (1, None) and capsys.readouterr().err == ""


@pytest.mark.parametrize("verbs", [(), ("types",)])
def test_the_version_is_recapps_own(capsys, verbs):
    assert run("--version", verbs=verbs)[0] == console_command.main(["--version"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == lines[1] and lines[0].startswith(f"recapp {recapp.__version__}, torch 2.")


# ---- one run in a directory


@pytest.mark.parametrize(
    ("argv", "lock_directory"),
    [
        (["hydra.run.dir=out"], "out"),
        (["-m", "seed=1,2", "hydra.sweep.dir=out"], "out"),
        pytest.param(["-m", "seed=1,2", "hydra.sweep.dir=out"], "out/0", marks=pytest.mark.full),
    ],
)
def test_a_second_run_in_a_directory_is_refused_and_touches_nothing_there(
    base, capsys, argv, lock_directory
):
    run(*argv)
    hold = (
        "import sys, pathlib, recapp.processes.rank_environment as lock\nwith "
        "lock.locked(pathlib.Path(sys.argv[1])): print(flush=True); input()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", hold, str(base / lock_directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
    )
    assert other.stdout.readline() == b"\n"
    before = {
        name: (base / name).stat().st_mtime_ns
        for name in files_in(base)
        if "out/0" in name or lock_directory == "out"
    }
    capsys.readouterr()
    code, calls = run(*argv, "seed=7" if "-m" not in argv else "model=deep")
    assert code == 1 and len(calls) == (lock_directory == "out/0")
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert len(said) == 1 and f"{lock_directory} is in use: process {other.pid} on " in said[0]
    assert (
        "choose another hydra.sweep.dir" in said[0] or lock_directory != "out" or "-m" not in argv
    )
    if lock_directory == "out":
        assert {name: (base / name).stat().st_mtime_ns for name in before} == before
    assert not (base / lock_directory / "error.json").exists()
    other.communicate(b"\n")
    assert run(*argv)[0] == 0 and not list(base.rglob(".lock"))


# ---- folders of one's own


@pytest.fixture
def folder(tmp_path):
    """A folder with a model and an experiment that recapp does not have."""
    for name, text in {
        "model/own.yaml": "# A model of one's own.\ndepth: 9    # of its tower\n",
        "experiment/mine.yaml": "# @package _global_\nseed: 11\n",
    }.items():
        (tmp_path / "own" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "own" / name).write_text(text)
    return tmp_path / "own"


def test_a_folder_of_ones_own_may_have_an_equals_sign_in_its_name(folder):
    folder.rename(folder.parent / "its=own")
    code, [(config, _)] = run("--config-dir", "../its=own", "model=own")
    assert code == 0 and config["model"]["depth"] == 9


@pytest.mark.parametrize(
    "said", [["--config-dir", "../own"], ["--config-dir=../own"], ["-cd", "../own"]]
)
def test_options_of_ones_own_folder_are_chosen_and_helped_with(folder, said, capsys):
    code, [(config, job)] = run(*said, "model=own", "experiment=mine")
    assert (
        code == 0
        and config["model"]["depth"] == 9
        and config["seed"] == 11
        and [path.resolve() for path in job.folders] == [folder]
    )
    assert run("model=own") == (1, []) and run("experiment=mine") == (1, [])
    capsys.readouterr()
    assert run(*said, "--help", "model=own") == (0, [])
    out = capsys.readouterr().out
    assert "own" in out.splitlines()[1] and "A model of one's own." in out and "of its tower" in out
    assert run(*said, "--help") == (0, [])
    assert "experiment: mine" in capsys.readouterr().out


def test_a_checkpoint_of_a_model_of_ones_own_takes_its_settings_and_experiments(keep, folder):
    _, [(stored, _)] = run("--config-dir", "../own", "model=own")
    keep(stored)
    code, [(_, job)] = run(
        "--config-dir", "../own", "ckpt_path=last.ckpt", "model.depth=6", "experiment=mine"
    )
    assert code == 0
    got = compose.compose_over(stored, "train", job.overrides, job.folders)
    assert got["model"]["depth"] == 6 and got["seed"] == 11
