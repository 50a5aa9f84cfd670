"""Whatever a user gets wrong is one line that says what and what to do, exit code 1, and nothing
that was there is touched.

Each mistake is made as a job on the pool of ranks, and every third one (full tier) as the command,
too, where the one line must be all of standard error.
"""

import os
import shutil
import socket
from dataclasses import dataclass

import jobs as product
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from jobs import command, refusal
from tiers import one_of

from recapp import eval as evaluation
from recapp import train
from recapp.dataset.data_settings import Generate
from recapp.dataset.synthetic import write_clicks
from recapp.errors import PlanError, suggest
from recapp.sharding.sharding_plan import Shard, ShardingPlan, TableSharding
from recapp.stored.stored_model import read_manifest
from recapp.tables.config import EmbeddingBagConfig

SIZES = (
    400,
    90,
    60,
    50,
    40,
    4,
    30,
    20,
    9,
    300,
    70,
    60,
    11,
    20,
    30,
    10,
    4,
    9,
    5,
    200,
    150,
    90,
    60,
    30,
    7,
    5,
)
ROWS = f"dataset.table_rows=[{','.join(map(str, SIZES))}]"
SETTINGS = (
    "dataset=custom",
    "dataset.naming=criteo",
    "dataset.id_rule=error",
    ROWS,
    "dataset.batch_size=64",
    "dataset.val_batch_size=64",
    "trainer.max_steps=20",
)


@dataclass
class Mistake:
    """What is wrong, the error it must be, and what its line must say. `{logs}` in settings is the
    data set.
    """

    error: str
    says: tuple[str, ...]
    settings: tuple[str, ...] = ()
    spoil: object = None
    ranks: int = 1


def column(name, row, value):
    """Spoils one value of the third file."""

    def spoil(logs):
        file = sorted(logs.glob("*.parquet"))[2]
        table = pq.read_table(file)
        column = table.schema.get_field_index(name)
        values = table.column(name).to_pylist()
        values[row] = value
        kind = pa.float64() if isinstance(value, float) else table.schema.field(name).type
        pq.write_table(table.set_column(column, name, pa.array(values, kind)), file)

    return spoil


def third_file(change):
    """Spoils the third file as a whole."""

    def spoil(logs):
        file = sorted(logs.glob("*.parquet"))[2]
        change(file)

    return spoil


def without_c7(file):
    pq.write_table(pq.read_table(file).drop_columns(["C7"]), file)


MISTAKES = {
    "a directory that is not there": Mistake(
        "DataError",
        ("dataset.path={logs}/gone", "no such file or directory"),
        ("dataset.path={logs}/gone",),
    ),
    "an empty directory": Mistake(
        "DataError",
        ("dataset.path={logs}", "the directory is empty"),
        spoil=lambda logs: [file.unlink() for file in logs.iterdir()],
    ),
    "a truncated file": Mistake(
        "DataError",
        ("part-00002.parquet", "not a whole Parquet file"),
        spoil=third_file(lambda f: f.write_bytes(f.read_bytes()[:3000])),
    ),
    "a file that is not Parquet": Mistake(
        "DataError",
        ("part-00002.parquet", "is not a whole Parquet file"),
        spoil=third_file(lambda file: file.write_text("label,I1\n0,1\n")),
    ),
    "a column that is missing": Mistake(
        "DataError",
        ("part-00002.parquet", "no column for C7", "cat_6", "_c20", "did you mean C17"),
        spoil=third_file(without_c7),
    ),
    "a label that is neither 0 nor 1": Mistake(
        "DataError",
        ("part-00002.parquet", "column label, row 50 holds 2", "must be 0 or 1"),
        spoil=column("label", 50, 2),
    ),
    "a number that is not finite": Mistake(
        "DataError",
        ("part-00002.parquet", "column I4, row 31 holds inf", "not finite"),
        spoil=column("I4", 31, float("inf")),
    ),
    "an id outside its table": Mistake(
        "IdError",
        (
            "table C9",
            "feature C9",
            "the id 4711",
            "in row 7 of ",
            "part-00002.parquet (",
            "9 rows",
            "id_rule to hash, clamp or drop",
        ),
        spoil=column("C9", 7, 4711),
        ranks=2,
    ),
    "data of other settings in the way": Mistake(
        "DataError",
        ("{logs}", "other settings", "rows=1400 instead of 900", "another directory"),
        ("dataset=generated", "dataset.generate.rows=900", "dataset.path={logs}", ROWS),
    ),
    "a table that is unknown": Mistake(
        "PlanError",
        ("plan.tables.C33", "no such table; did you mean C3"),
        ("+plan=mixed", "+plan.tables.C33=row_wise"),
    ),
    "a sharding type that is unknown": Mistake(
        "PlanError",
        ("plan.tables.C3=rowwise", "did you mean row_wise"),
        ("+plan=mixed", "+plan.tables.C3=rowwise"),
    ),
    "a mode that is unknown": Mistake(
        "ConfigError",
        ("plan.mode=poled", "did you mean pooled?"),
        ("+plan=mixed", "plan.mode=poled"),
    ),
    "a rule that knows no such condition": Mistake(
        "ConfigError",
        ("plan.rules[0].rows_abov: did you mean", "rows_above"),
        ("+plan=mixed", "plan.rules=[{type: row_wise, rows_abov: 3}]"),
    ),
    "strips of no columns": Mistake(
        "ConfigError",
        ("plan.column_width=0", "at least 1"),
        ("+plan=column_wise", "plan.column_width=0"),
    ),
    "a feature that the data has not": Mistake(
        "ConfigError",
        ("tables.large_table", "feature large_table", "dataset=sample"),
        ("tables=sample",),
    ),
    "more hosts than the ranks fill": Mistake(
        "ConfigError",
        ("topology.hosts=3", "2 ranks", "one of [1, 2]"),
        ("+plan=grid_shard", "topology.hosts=3"),
        ranks=2,
    ),
    "a plan that does not fit": Mistake(
        "PlanError",
        ("plan data_parallel does not fit: rank 0 lacks", " bytes", "C1 (", "+plan=row_wise"),
        ("+plan=data_parallel", "topology.memory_bytes=100000", "topology.reserve_bytes=0"),
    ),
    "a batch that no lanes share": Mistake(
        "ConfigError",
        ("dataset.batch_size=100", "dataset.lanes=16", "set 96"),
        ("dataset.batch_size=100",),
    ),
    "more ranks than lanes": Mistake(
        "ConfigError", ("dataset.lanes=1", "2 ranks"), ("dataset.lanes=1",), ranks=2
    ),
    "a validation batch that no lanes share": Mistake(
        "ConfigError",
        ("dataset.val_batch_size=70", "dataset.lanes=16", "set 64"),
        ("dataset.val_batch_size=70",),
    ),
    "a value that the constructor refuses": Mistake(
        "ConfigError",
        ("optimizer.dense (torch.optim.Adam)", "Invalid learning rate: -1"),
        ("optimizer.dense.lr=-1",),
    ),
    "a value that Lightning refuses": Mistake(
        "ConfigError", ("trainer: ", "is not a valid duration", "bad"), ("+trainer.max_time=bad",)
    ),
    "a metric to watch that is not measured": Mistake(
        "ConfigError",
        ("callbacks.checkpoint.monitor=val_auk", "did you mean val_auc?"),
        ("callbacks.checkpoint.monitor=val_auk",),
    ),
    "an argument that nobody takes": Mistake(
        "ConfigError", ("optimizer.dense", "betta"), ("+optimizer.dense.betta=1",)
    ),
    "a constructor that is not there": Mistake(
        "ConfigError",
        ("model._target_=recapp.models.published_dlrm.DRLM", "no such constructor"),
        ("model._target_=recapp.models.published_dlrm.DRLM",),
    ),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Good logs, in base/logs."""
    base = tmp_path_factory.mktemp("bad")
    write_clicks(base / "logs", Generate(rows=1400, seed=3), SIZES)
    return base


@pytest.fixture
def made(base, tmp_path):
    """`made(mistake)`: the mistake's settings on a spoilt copy of the logs, and what its line must
    say.
    """

    def make(mistake):
        logs = tmp_path / "logs"
        shutil.copytree(base / "logs", logs)
        if mistake.spoil:
            mistake.spoil(logs)
        settings = [
            text.replace("{logs}", str(logs))
            for text in (f"dataset.path={logs}", *SETTINGS, *mistake.settings)
        ]
        # the mistake's own come last
        named = {text.lstrip("+").partition("=")[0]: text for text in settings}
        return list(named.values()), [text.replace("{logs}", str(logs)) for text in mistake.says]

    return make


def contents(directory):
    """Every file below, with its bytes."""
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


EARLIER = (
    "metrics.json",
    "resolved.yaml",
    "csv/metrics.csv",
    "checkpoints/best.ckpt/manifest.json",
)


def leave_an_earlier_run(directory):
    """What a good run leaves; answers every file with its bytes."""
    for name in EARLIER:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(f"{name} of an earlier run")
    return contents(directory)


@pytest.mark.parametrize(
    "name",
    one_of(3, MISTAKES),
)
def test_a_mistake_is_refused_in_one_line(jobs, made, tmp_path, name):
    settings, says = made(MISTAKES[name])
    leave_an_earlier_run(tmp_path / "run")
    before = contents(tmp_path)
    kind, line = refusal(jobs.train, tmp_path / "run", *settings, world=MISTAKES[name].ranks)
    assert kind == MISTAKES[name].error
    assert [text for text in says if text not in line] == [], line
    assert {
        path: text
        for path, text in contents(tmp_path).items()
        if path.suffix not in (".out", ".err")
    } == before


@pytest.mark.full
@pytest.mark.parametrize("name", list(MISTAKES)[1::3])
def test_the_command_says_it_in_that_one_line(made, tmp_path, name):
    settings, says = made(MISTAKES[name])
    leave_an_earlier_run(tmp_path / "run")
    before = contents(tmp_path)
    line = command("train", *settings, "hydra.run.dir=run", cwd=tmp_path).error()
    assert [text for text in says if text not in line] == [], line
    after = contents(tmp_path)
    assert {path: after[path] for path in before} == before
    new = {path.parts[len(tmp_path.parts) + 1] for path in after.keys() - before.keys()}
    assert new <= {".hydra", "ranks"}


@pytest.mark.full
def test_through_the_command_a_ranks_error_is_one_line_and_code_1(made, tmp_path):
    settings, says = made(MISTAKES["a number that is not finite"])
    line = command("train", "+plan=mixed", *settings, "hydra.run.dir=run", cwd=tmp_path).error()
    assert [text for text in says if text not in line] == [], line


@pytest.mark.full
def test_the_traceback_is_shown_where_it_is_wanted(made, tmp_path):
    settings, _ = made(MISTAKES["a number that is not finite"])
    done = command(
        "train", "+plan=mixed", *settings, "hydra.run.dir=run", cwd=tmp_path, RECAPP_TRACEBACK="1"
    )
    *_, line = done.err.splitlines()
    assert (
        done.code == 1
        and "column I4, row 31" in line
        and "Traceback" in done.err
        and "recapp/dataset/" in done.err
    )


@pytest.mark.full
def test_a_rank_that_dies_shows_its_own_traceback_and_ends_the_others(base, tmp_path):
    (tmp_path / "bomb.py").write_text(
        "from lightning.pytorch import Callback\n\n\nclass Bomb(Callback):\n    def "
        "on_train_batch_end(self, trainer, *others):\n"
        "        if trainer.global_rank == 1 and trainer.global_step == 3:\n            raise "
        "ZeroDivisionError('the fuse was short')\n"
    )
    done = command(
        "train",
        f"dataset.path={base / 'logs'}",
        *SETTINGS,
        "+callbacks.bomb._target_=bomb.Bomb",
        "hydra.run.dir=run",
        cwd=tmp_path,
        PYTHONPATH=f"{os.getcwd()}{os.pathsep}{tmp_path}",
    )
    *_, line = done.err.splitlines()
    assert done.code == 1 and line.startswith(f"error: rank 1 on {os.uname().nodename} (process ")
    assert line.endswith("failed: ZeroDivisionError: the fuse was short")
    assert (
        done.err.count("Traceback") == 1
        and "bomb.py" in done.err
        and not (tmp_path / "run/metrics.json").exists()
    )


# ---- what is refused before any rank is started


@pytest.fixture
def say(tmp_path, monkeypatch, capfd):
    """`say(*arguments)`: the one line of `python -m recapp.train` in this process; a failed start
    leaves what was there, and no more.
    """
    monkeypatch.chdir(tmp_path)
    before = leave_an_earlier_run(tmp_path / "run")

    def run(*arguments, main=train.main):
        assert main(["hydra.run.dir=run", *arguments]) == 1
        err = capfd.readouterr().err
        assert len(err.splitlines()) == 1 and err.startswith("error: "), err
        left = {
            path: text
            for path, text in contents(tmp_path / "run").items()
            if ".hydra" not in path.parts
        }
        assert left == before and not (tmp_path / "data").exists()
        return err

    return run


def test_a_setting_that_a_file_of_ones_own_leaves_out_needs_a_plus(say, tmp_path):
    (tmp_path / "own/tables").mkdir(parents=True)
    (tmp_path / "own/tables/listed.yaml").write_text("source: list\ntables: []\n")
    own = ("--config-dir", "own", "tables=listed")
    assert "tables.frozen: the chosen options do not set it, so it needs a plus: " in say(
        *own, "tables.frozen=[C1]"
    )
    assert "unknown setting tables.frozn: did you mean tables.frozen?" in say(
        *own, "tables.frozn=[C1]"
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    one_of(
        2,
        [
            (["+plan=mixd"], "plan=mixd: there is no such option; did you mean mixed?"),
            (["plan=mixed"], "+plan"),
            (
                ["trainer.max_stepz=3"],
                "unknown setting trainer.max_stepz: did you mean trainer.max_steps",
            ),
            (
                ["trainer.devices=two"],
                "trainer.devices=two: must be a whole number of at least 1, or auto",
            ),
            (["dataset=criteo_kagle"], "did you mean criteo_kaggle?"),
            (["dataset=criteo_kaggle"], "dataset.path must be given"),
            (["ckpt_path=nowhere.ckpt"], "there is no checkpoint"),
            (
                ["+plan=mixed", "plan.tables.C3=row_wise"],
                "nothing is set there by default, so it needs a plus: +plan.tables.C3=...",
            ),
            (["dataset.path="], "dataset.path is empty"),
            (
                ["hydra.run.dir=/proc/none"],
                "/proc/none: cannot be written (No such file or directory): choose another "
                "hydra.run.dir",
            ),
            (
                ["trainer.max_steps=many"],
                "trainer.max_steps=many: must be a whole number of at least 1",
            ),
            (
                ["trainer.max_epochs=0"],
                "trainer.max_epochs=0: must be a whole number of at least 1",
            ),
            (["dataset.batch_size=1.5"], "dataset.batch_size=1.5: must be a whole number"),
            (["trainer.accelerator=gpuu"], "trainer.accelerator=gpuu: did you mean gpu"),
            (["engine.transport=shm"], "engine.transport=shm: known: auto, gloo, shared_memory"),
        ],
    ),
)
def test_the_command_line_is_refused_before_any_rank_is_started(
    say, tmp_path, monkeypatch, arguments, says
):
    monkeypatch.setattr("recapp.cli.job.launch", lambda *_, **__: 0)
    assert says.replace("{here}", str(tmp_path)) in say(*arguments)


def test_far_more_ranks_than_cores_deserve_a_word(base, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("recapp.cli.job.launch", lambda *_, **__: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    for ranks, notes in ((8, 0), (9, 1)):
        train.main(
            [
                f"dataset.path={base / 'logs'}",
                "dataset=custom",
                "dataset.sparse=[C1]",
                f"trainer.devices={ranks}",
            ]
        )
        assert (
            capfd.readouterr().err.count(
                f"trainer.devices={ranks}: {ranks} ranks share the 2 cores"
            )
            == notes
        )


def test_a_port_that_is_taken_is_named_by_ranks_that_others_started(
    jobs, base, tmp_path, monkeypatch
):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        monkeypatch.setattr(product, "free_port", lambda: port)
        kind, line = refusal(
            jobs.train, tmp_path / "run", f"dataset.path={base / 'logs'}", *SETTINGS, world=1
        )
    assert (
        kind == "LaunchError"
        and f"could not meet at 127.0.0.1:{port} (MASTER_ADDR, MASTER_PORT)" in line
        and "in use" in line
    )


def test_an_incomplete_checkpoint_is_refused_with_what_is_missing(jobs, base, tmp_path, say):
    jobs.train(
        tmp_path / "whole",
        f"dataset.path={base / 'logs'}",
        *SETTINGS,
        "trainer.max_steps=1",
        world=1,
    )
    path = (tmp_path / "whole/checkpoints/last.ckpt").resolve()
    stored = path / "rank-00000.safetensors"
    stored.write_bytes(stored.read_bytes()[:-1])
    assert f"checkpoint {path} is incomplete: rank-00000.safetensors has" in say(
        f"ckpt_path={path}", "trainer.max_steps=2"
    )
    kind, line = refusal(jobs.evaluate, tmp_path / "eval", f"ckpt_path={path}", world=1)
    assert kind == "CheckpointError" and "is incomplete" in line
    (path / "manifest.json").unlink()
    assert "no checkpoint, or an incomplete one: it has no manifest.json" in say(
        f"ckpt_path={path}"
    )


@pytest.mark.parametrize("job", ["evaluate", pytest.param("train", marks=pytest.mark.full)])
def test_a_damaged_checkpoint_is_refused_with_file_and_table(jobs, base, tmp_path, job):
    jobs.train(
        tmp_path / "whole",
        f"dataset.path={base / 'logs'}",
        *SETTINGS,
        "trainer.max_steps=1",
        world=1,
    )
    path = (tmp_path / "whole/checkpoints/last.ckpt").resolve()
    block = next(b for b in read_manifest(path).blocks if (b.table, b.tensor) == ("C10", "weight"))
    raw = bytearray((path / block.file).read_bytes())
    raw[(block.begin + block.end) // 2] ^= 255
    (path / block.file).write_bytes(raw)
    more = ["trainer.max_steps=2"] if job == "train" else []
    kind, line = refusal(getattr(jobs, job), tmp_path / "next", f"ckpt_path={path}", *more, world=2)
    assert (
        kind == "CheckpointError"
        and f"{path}/rank-00000.safetensors is damaged: table C10, weight" in line
    )


def test_evaluation_needs_a_checkpoint_and_is_shown_one_that_lies_below(jobs, base, tmp_path, say):
    assert "ckpt_path must be given: ckpt_path=DIR" in say(main=evaluation.main)
    jobs.train(
        tmp_path / "whole",
        f"dataset.path={base / 'logs'}",
        *SETTINGS,
        "trainer.max_steps=1",
        world=1,
    )
    for folder in ("whole", "whole/checkpoints"):
        assert f"that of this run is {tmp_path}/whole/checkpoints/last.ckpt" in say(
            f"ckpt_path={tmp_path}/{folder}", main=evaluation.main
        )
    last = f"ckpt_path={tmp_path}/whole/checkpoints/last.ckpt"
    for none in ("dataset.val_share=0", "trainer.limit_val_batches=0"):
        assert say(last, none, main=evaluation.main).startswith(f"error: {none}: no row validates:")


def test_names_are_listed_as_people_count():
    assert suggest("user", ["C10", "C2", "C1", "I3"]) == "known: C1, C2, C10, I3"


# ---- plans that no setting can write


TABLE = EmbeddingBagConfig(name="t", num_embeddings=10, embedding_dim=8, feature_names=["f"])


@pytest.mark.parametrize(
    ("shards", "says"),
    [
        ([(0, 0, 10, 0, 4)], "reaches outside|tile|held 0 times"),
        ([(0, 0, 6, 0, 8), (1, 5, 10, 0, 8)], "held 2 times"),
        ([(0, 0, 5, 0, 8), (1, 6, 10, 0, 8)], "held 0 times"),
        ([(0, 0, 10, 0, 8), (2, 0, 0, 0, 8)], None),
        ([(0, 0, 5, 0, 8), (2, 5, 10, 0, 8)], "rank 2, but there are 2 ranks .*trainer.devices=3"),
        ([(0, 0, 12, 0, 8)], "reaches outside its 10 rows x 8 columns"),
    ],
)
def test_a_plan_must_tile_every_table_with_the_ranks_there_are(shards, says):
    sharding = TableSharding(
        tuple(Shard(rank, range(a, b), range(c, d)) for rank, a, b, c, d in shards)
    )
    plan = ShardingPlan({"t": sharding}, 2)
    if says is None:
        return plan.check([TABLE])
    with pytest.raises(PlanError, match=says) as raised:
        plan.check([TABLE])
    assert "table t" in str(raised.value) and len(str(raised.value).splitlines()) == 1


def test_a_plan_names_the_models_tables_and_no_others():
    plan = ShardingPlan({"user": TableSharding((Shard(0, range(10), range(8)),))}, 1)
    with pytest.raises(
        PlanError, match=r"table user, which the model does not have; did you mean users\?"
    ):
        plan.check(
            [
                EmbeddingBagConfig(
                    name="users", num_embeddings=10, embedding_dim=8, feature_names=["f"]
                )
            ]
        )
    with pytest.raises(PlanError, match="no entry for table t"):
        ShardingPlan({}, 1).check([TABLE])
