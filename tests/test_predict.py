"""`recapp.predict`: raw rows in, scores out. Jobs run on a pool of ranks, whole commands with
signals in the full tier.
"""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from jobs import Failed, command, environment, metrics_of, ranks_of, refusal, small, start

import recapp
from recapp import predict
from recapp.processes.rank_environment import locked

ROWS = 6000
BATCH = "rows_per_batch=512"


@pytest.fixture(scope="module")
def base(jobs, tmp_path_factory):
    """A trained model in `run`, and its logs without labels, with a name for each row, in two files
    of several row groups; the training data are gone.
    """
    base = tmp_path_factory.mktemp("predict")
    jobs.train(base / "run", *small(base / "logs"), "+plan=mixed", "trainer.max_steps=12")
    whole = pa.concat_tables(pq.read_table(f) for f in sorted((base / "logs").glob("*.parquet")))
    whole = whole.append_column("request", pa.array([f"row {n}" for n in range(ROWS)]))
    (base / "input").mkdir()
    unlabelled = whole.drop(["label"])
    pq.write_table(unlabelled.slice(0, 2500), base / "input/day_2.parquet", row_group_size=700)
    pq.write_table(unlabelled.slice(2500), base / "input/day_10.parquet", row_group_size=1300)
    shutil.rmtree(base / "logs")
    return base


def arguments(base, output, *more):
    return [
        f"ckpt_path={base / 'run/checkpoints/last.ckpt'}",
        f"input={base / 'input'}",
        f"output={output}",
        BATCH,
        *more,
    ]


def predicted(jobs, base, folder, *more, world=2):
    """The scores of a run, and its metrics."""
    output = folder / "scores.parquet"
    settings = arguments(base, output, *more)
    metrics = jobs.run("predict", folder / f"job{world}", settings, world)
    return pq.read_table(output), metrics


def of_load_model(base):
    """The scores of the same rows by the model that a notebook loads."""
    model = recapp.load_model(base / "run/checkpoints/last.ckpt")
    rows = pa.concat_tables(pq.read_table(base / f"input/day_{day}.parquet") for day in ("2", "10"))
    return torch.cat([model.predict(rows.slice(n, 512)) for n in range(0, ROWS, 512)])


def scores(table):
    return torch.tensor(table["score"].to_numpy())


def test_scores_of_two_ranks_are_those_of_load_model_in_the_order_of_the_input(
    jobs, base, tmp_path
):
    table, metrics = predicted(jobs, base, tmp_path, "columns=[request]")
    assert table.column_names == ["request", "score"]
    assert table.schema.field("score").type == pa.float32()
    assert table["request"].to_pylist() == [f"row {n}" for n in range(ROWS)]
    assert torch.equal(scores(table), of_load_model(base))
    assert metrics["rows"] == metrics["rows_scored"] == ROWS and metrics["status"] == "ok"
    assert metrics["mean_score"] == pytest.approx(float(scores(table).double().mean()))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job2", "scores.parquet"]
    said = (tmp_path / "job2/rank0.out").read_text()
    assert "rows" in said and "6,000" in said and "scores.parquet" in said
    read = metrics["rows_read"]["splits"]["input"]
    assert (read["files"], read["rows"], read["positives"]) == (2, ROWS, {})
    assert "2 files, day_2.parquet to day_10.parquet" in said
    assert "rows scored: 6,000 of 6,000" in (tmp_path / "job2/rank0.err").read_text()


@pytest.mark.full
@pytest.mark.parametrize("plan", ["mixed", "data_parallel"])
def test_the_file_is_the_same_to_the_byte_on_any_number_of_ranks_under_any_plan(
    jobs, base, tmp_path, plan
):
    more = (
        (f"+plan={plan}", "columns=[request,C3]") if plan != "mixed" else ("columns=[request,C3]",)
    )
    found = []
    for world in (1, 2, 4):
        (tmp_path / str(world)).mkdir()
        predicted(jobs, base, tmp_path / str(world), *more, world=world)
        found.append((tmp_path / str(world) / "scores.parquet").read_bytes())
    assert found[0] == found[1] == found[2]
    assert torch.equal(scores(pq.read_table(tmp_path / "1/scores.parquet")), of_load_model(base))


@pytest.mark.full
def test_rounding_that_training_allowed_does_not_reach_the_scores(jobs, base, tmp_path):
    """Neither numbers of 16 bits in the dense part nor vectors that are rounded on their way."""
    rounded = ("trainer.precision=bf16-mixed", "engine.payload=bf16")
    logs = small(tmp_path / "logs")
    jobs.train(tmp_path / "run", *logs, *rounded, "+plan=row_wise", "trainer.max_steps=12")
    checkpoint = tmp_path / "run/checkpoints/last.ckpt"
    model = recapp.load_model(checkpoint)
    rows = pq.read_table(base / "input/day_2.parquet")
    wanted = torch.cat([model.predict(rows.slice(n, 512)) for n in range(0, rows.num_rows, 512)])
    for world, more in ((1, ()), (2, ()), (2, rounded)):
        output = tmp_path / f"{world}_{len(more)}.parquet"
        settings = [f"ckpt_path={checkpoint}", f"input={base / 'input/day_2.parquet'}"]
        settings += [f"output={output}", BATCH, *more]
        jobs.run("predict", tmp_path / f"job{output.stem}", settings, world)
        assert torch.equal(scores(pq.read_table(output)), wanted) is not bool(more)


@pytest.mark.full
def test_dynamic_tables_give_the_same_file_on_any_number_of_ranks(jobs, base, tmp_path):
    logs = [*small(tmp_path / "logs"), "trainer.max_steps=12", "tables=dynamic"]
    jobs.train(tmp_path / "run", *logs)
    (tmp_path / "input").symlink_to(base / "input")
    found = []
    for world in (1, 2, 4):
        (tmp_path / str(world)).mkdir()
        predicted(jobs, tmp_path, tmp_path / str(world), world=world)
        found.append((tmp_path / str(world) / "scores.parquet").read_bytes())
    assert found[0] == found[1] == found[2]
    assert torch.equal(
        scores(pq.read_table(tmp_path / "4/scores.parquet")), of_load_model(tmp_path)
    )


@pytest.fixture(scope="module")
def artefact(base):
    options = recapp.Export(
        quantize="int8", quantize_tables={"C3": "int4", "C1": "fp16"}, compile=False
    )
    recapp.export_model(base / "run/checkpoints/last.ckpt", base / "served", options)
    return base / "served"


@pytest.mark.full
@pytest.mark.parametrize("plan", ["row_wise", "column_wise"])
def test_an_artefact_gives_the_same_file_on_any_number_of_ranks(
    jobs, base, artefact, tmp_path, plan
):
    found = []
    for world in (1, 2, 4):
        (tmp_path / str(world)).mkdir()
        more = (f"ckpt_path={artefact}", f"+plan={plan}")
        predicted(jobs, base, tmp_path / str(world), *more, world=world)
        found.append((tmp_path / str(world) / "scores.parquet").read_bytes())
    assert found[0] == found[1] == found[2]
    model = recapp.load_model(artefact)
    rows = pa.concat_tables(pq.read_table(base / f"input/day_{day}.parquet") for day in ("2", "10"))
    alone = torch.cat([model.predict(rows.slice(n, 512)) for n in range(0, ROWS, 512)])
    assert torch.equal(scores(pq.read_table(tmp_path / "1/scores.parquet")), alone)
    assert not torch.equal(alone, of_load_model(base))


@pytest.mark.full
def test_what_eight_ranks_have_trained_is_served_on_one_two_and_four(jobs, base, tmp_path):
    wide = [*small(tmp_path / "logs", rows=2000), "trainer.devices=8", "trainer.max_steps=2"]
    ran = command("train", *wide, "+plan=row_wise", "hydra.run.dir=run", cwd=tmp_path)
    assert ran.code == 0, ran.err
    options = recapp.Export(quantize="int8", compile=False, report_rows=0)
    recapp.export_model(tmp_path / "run/checkpoints/last.ckpt", tmp_path / "served", options)
    found = []
    for world in (1, 2, 4):
        (tmp_path / str(world)).mkdir()
        more = (f"ckpt_path={tmp_path / 'served'}", "+plan=mixed")
        predicted(jobs, base, tmp_path / str(world), *more, world=world)
        found.append((tmp_path / str(world) / "scores.parquet").read_bytes())
    assert found[0] == found[1] == found[2]


@pytest.mark.full
def test_a_damaged_artefact_is_refused_on_all_ranks(jobs, base, artefact, tmp_path):
    broken = shutil.copytree(artefact, tmp_path / "broken")
    (file,) = (broken / "rows").glob("int8_*.bin")
    raw = bytearray(file.read_bytes())
    raw[17] ^= 1
    file.write_bytes(raw)
    with pytest.raises(Failed, match=r"int8_16\.bin is damaged"):
        predicted(jobs, base, tmp_path, f"ckpt_path={broken}", world=2)


@pytest.mark.full
def test_other_batches_change_last_bits_at_most(jobs, base, tmp_path):
    table, _ = predicted(jobs, base, tmp_path, "rows_per_batch=37", world=2)
    assert float((scores(table) - of_load_model(base)).abs().max()) < 1e-6


@pytest.mark.full
def test_a_label_in_the_input_changes_nothing(jobs, base, tmp_path):
    (tmp_path / "input").mkdir()
    for day in ("2", "10"):
        rows = pq.read_table(base / f"input/day_{day}.parquet")
        rows = rows.add_column(0, "label", pa.array([7] * rows.num_rows))
        pq.write_table(rows, tmp_path / f"input/day_{day}.parquet")
    table, _ = predicted(jobs, base, tmp_path, f"input={tmp_path / 'input'}")
    assert torch.equal(scores(table), of_load_model(base))


@pytest.mark.full
def test_an_input_without_rows_gives_a_file_without_rows(jobs, base, tmp_path):
    rows = pq.read_table(base / "input/day_2.parquet")
    pq.write_table(rows.slice(0, 0), tmp_path / "none.parquet")
    table, metrics = predicted(
        jobs, base, tmp_path, f"input={tmp_path / 'none.parquet'}", "columns=[request]"
    )
    assert table.num_rows == 0 and table.column_names == ["request", "score"]
    assert metrics["rows"] == 0 and metrics["mean_score"] is None and metrics["status"] == "ok"


@pytest.mark.full
def test_fewer_rows_than_ranks_are_scored(jobs, base, tmp_path):
    rows = pq.read_table(base / "input/day_2.parquet")
    pq.write_table(rows.slice(0, 3), tmp_path / "few.parquet")
    table, _ = predicted(
        jobs, base, tmp_path, f"input={tmp_path / 'few.parquet'}", "rows_per_batch=1", world=4
    )
    assert torch.allclose(scores(table), of_load_model(base)[:3], atol=1e-6)


# ---- a run that was ended


TIMES = 12


def many_rows(base, folder, times=TIMES):
    """The input many times over: what takes a while to score."""
    folder.mkdir()
    rows = pq.read_table(base / "input/day_2.parquet")
    with pq.ParquetWriter(folder / "many.parquet", rows.schema) as writer:
        for _ in range(times):
            writer.write_table(rows)
    return [
        f"input={folder / 'many.parquet'}",
        "rows_per_batch=64",
        "format=json",
    ]


def ended(base, tmp_path, more, number, whom):
    """A command that gets a signal when it has written scores; its exit code and its errors."""
    run = start("predict", *arguments(base, tmp_path / "scores.parquet", *more), cwd=tmp_path)
    end = time.monotonic() + 120
    part = tmp_path / "scores.parquet.parts/rank-0.arrow"
    while not part.exists() or part.stat().st_size < 4096:
        assert run.poll() is None and time.monotonic() < end, (tmp_path / "err.txt").read_text()
        time.sleep(0.01)
    os.kill(whom(run), number)
    code = run.wait(timeout=60)
    return code, (tmp_path / "err.txt").read_text()


@pytest.fixture(scope="module")
def whole(base):
    """Many rows, and the file of their scores by a run that nobody has ended."""
    folder = base / "whole"
    more = many_rows(base, folder)
    ran = command("predict", *arguments(base, folder / "scores.parquet", *more), cwd=folder)
    assert ran.code == 0, ran.err
    return more, (folder / "scores.parquet").read_bytes()


@pytest.mark.full
@pytest.mark.parametrize(
    ("number", "whom", "code", "words"),
    [
        (signal.SIGINT, "command", 130, ""),
        (signal.SIGKILL, "command", -9, ""),
        (signal.SIGKILL, "rank", 1, "was ended by SIGKILL"),
        (signal.SIGTERM, "rank", 143, ""),
    ],
)
def test_a_command_that_was_killed_leaves_no_output_and_starts_again(
    base, whole, tmp_path, number, whom, code, words
):
    more, wanted = whole

    def victim(run):
        return run.pid if whom == "command" else ranks_of(run.pid)[1]

    found, said = ended(base, tmp_path, [*more, "trainer.devices=2"], number, victim)
    assert found == code and words in said and "Traceback" not in said
    assert not (tmp_path / "scores.parquet").exists()
    time.sleep(1 if code == -9 else 0)  # ranks die with the command, a moment later
    again = arguments(base, tmp_path / "scores.parquet", *more, "trainer.devices=4")
    ran = command("predict", *again, cwd=tmp_path)
    assert ran.code == 0, ran.err
    assert (tmp_path / "scores.parquet").read_bytes() == wanted
    assert not (tmp_path / "scores.parquet.parts").exists()


@pytest.mark.full
def test_an_output_that_another_command_is_writing_is_refused_with_its_process(
    jobs, base, tmp_path
):
    with locked(tmp_path / "scores.parquet.parts"):
        kind, said = refusal(predicted, jobs, base, tmp_path)
    assert kind == "ConfigError" and "choose another output" in said
    assert f"scores.parquet.parts is in use: process {os.getpid()} on" in said


@pytest.mark.full
def test_a_disk_that_fills_is_one_line_and_more_room_is_enough(base, whole, tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = f'mount -t tmpfs -o size=400k tmpfs "{folder}"'
    if (
        shutil.which("unshare") is None
        or subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True).returncode
    ):
        pytest.skip("no file system can be mounted here")
    more, _ = whole
    settings = arguments(base, folder / "scores.parquet", *more, "columns=[request,C1,C2,C3]")
    twice = shlex.join([sys.executable, "-c", TWICE, *settings])
    ran = subprocess.run(
        ["unshare", "-m", "sh", "-c", f"{mount} && {twice} && cp disk/scores.parquet ."],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    (error,) = [line for line in ran.stderr.splitlines() if line.startswith("error")]
    assert "No space left on device" in error and "make room" in error
    assert pq.read_metadata(tmp_path / "scores.parquet").num_rows == TIMES * 2500


TWICE = """
import os, sys
from recapp.predict import main
assert main(sys.argv[1:]) == 1
assert os.system("mount -o remount,size=80m disk") == 0
assert main(sys.argv[1:]) == 0
"""


# ---- bad input


@pytest.fixture
def say(base, jobs, tmp_path, monkeypatch):
    """`say(*arguments)`: the one line of the command or of its rank, which leaves no file."""
    monkeypatch.chdir(tmp_path)

    def run(*more):
        settings = [*arguments(base, tmp_path / "scores.parquet"), *more]
        _, line = refusal(jobs.run, "predict", tmp_path / "job", settings, 1)
        assert not (tmp_path / "scores.parquet").exists()
        assert not (tmp_path / "scores.parquet.parts").exists()
        return line

    return run


def test_what_must_be_given_is_asked_for(base, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    path = f"ckpt_path={base / 'run/checkpoints/last.ckpt'}"
    for given, words in (
        ([], "ckpt_path must be given: ckpt_path=DIR"),
        ([path], "input must be given: input=FILES"),
        ([path, "input=x"], "output must be given: output=FILE.parquet"),
    ):
        assert predict.main(["hydra.run.dir=job", *given]) == 1
        (line,) = capfd.readouterr().err.splitlines()
        assert words in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["ckpt_path=nowhere.ckpt"], "there is no checkpoint"),
        (["input=nowhere/*.parquet"], "no file matches"),
        (["columns=[requst]"], "has no column requst; did you mean request"),
        (["output=scores.csv"], "name a file scores.parquet"),
        (["output=no/scores.parquet"], "there is no directory"),
        (["rows_per_batch=0"], "rows_per_batch=0"),
    ],
)
def test_mistakes_are_one_line(say, arguments, words):
    assert words in say(*arguments)


def test_an_output_that_exists_is_not_replaced_unasked(base, jobs, tmp_path):
    output = tmp_path / "scores.parquet"
    output.write_text("x")
    _, line = refusal(jobs.run, "predict", tmp_path / "job", arguments(base, output), 1)
    assert "exists; choose another name, or set overwrite=true" in line
    assert output.read_text() == "x"


def test_an_input_is_never_the_output(base, jobs, tmp_path):
    copy = tmp_path / "input"
    shutil.copytree(base / "input", copy)
    settings = arguments(base, copy / "day_2.parquet", f"input={copy}", "overwrite=true")
    _, line = refusal(jobs.run, "predict", tmp_path / "job", settings, 1)
    assert "is one of the files that are scored" in line


def test_missing_columns_and_files_that_are_no_parquet_are_named(base, say, tmp_path):
    rows = pq.read_table(base / "input/day_2.parquet")
    pq.write_table(rows.drop(["C7"]), tmp_path / "a.parquet")
    said = say(f"input={tmp_path}/a.parquet")
    assert "a.parquet: no column for C7" in said
    (tmp_path / "b.parquet").write_text("I1,I2\n1,2\n")
    said = say(f"input={tmp_path}/b.parquet")
    assert "b.parquet is not a whole Parquet file" in said
    wrong = rows.drop(["C7"]).append_column("C7", pa.array([{"a": 1}] * rows.num_rows))
    pq.write_table(wrong, tmp_path / "c.parquet")
    said = say(f"input={tmp_path}/c.parquet")
    assert "c.parquet: column C7 (sparse feature C7) has type struct" in said


@pytest.mark.full
def test_a_file_that_lacks_a_column_is_found_on_the_ranks_too(jobs, base, tmp_path):
    copy = tmp_path / "input"
    shutil.copytree(base / "input", copy)
    pq.write_table(pq.read_table(copy / "day_10.parquet").drop(["C7"]), copy / "day_10.parquet")
    kind, said = refusal(predicted, jobs, base, tmp_path, f"input={copy}")
    assert kind == "DataError" and "day_10.parquet: no column for C7" in said


@pytest.mark.full
def test_an_id_outside_of_its_table_under_rule_error_is_named(jobs, tmp_path):
    for name, ids in (("logs", [1, 2, 3, 4]), ("input", [1, 2, 30, 4])):
        table = pa.table({"label": [0, 1, 0, 1] * 32, "item": ids * 32, "user": [1, 2, 1, 1] * 32})
        (tmp_path / name).mkdir()
        pq.write_table(table, tmp_path / name / "a.parquet")
    jobs.train(
        tmp_path / "run",
        "dataset=custom",
        f"dataset.path={tmp_path / 'logs'}",
        "dataset.dense=[]",
        "dataset.sparse=[item,user]",
        "dataset.id_rule=error",
        "dataset.table_rows=[8,8]",
        "dataset.batch_size=16",
        "tables.dim=4",
        "model.bottom_layers=[4]",
        "model.top_layers=[4,1]",
        world=1,
    )
    kind, said = refusal(predicted, jobs, tmp_path, tmp_path, world=2)
    assert kind == "IdError" and "item" in said and "30" in said


# ---- the command


@pytest.mark.full
def test_the_command_prints_one_document_and_writes_metrics(base, tmp_path):
    settings = arguments(base, "scores.parquet", "format=json", "hydra.run.dir=job")
    ran = command("predict", *settings, cwd=tmp_path, fresh=True)
    assert ran.code == 0, ran.err
    (row,) = json.loads(ran.out)["rows"]
    assert row == metrics_of(tmp_path / "job") and row["rows"] == ROWS
    assert row["rows_per_second"] > 0 and row["output"] == str(tmp_path / "scores.parquet")
    assert torch.equal(scores(pq.read_table(tmp_path / "scores.parquet")), of_load_model(base))


@pytest.mark.full
def test_memory_does_not_grow_with_the_input(base, tmp_path):
    peaks = []
    for times in (6, 60):
        folder = tmp_path / str(times)
        folder.mkdir()
        more = [*many_rows(base, folder / "many", times)[:1], "rows_per_batch=4096"]
        ran = subprocess.run(
            [
                sys.executable,
                "-c",
                PEAK,
                *arguments(base, folder / "s.parquet", *more, "columns=[request]"),
            ],
            cwd=folder,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert ran.returncode == 0, ran.stderr
        peaks.append(int(ran.stdout.splitlines()[-1]))
    rows = 54 * 2500
    assert peaks[0] > 0  # the rank was a child of the command, whose peak the kernel tells
    assert peaks[1] - peaks[0] < 30 * 1024 < rows * 40 * 8 / 1024  # KiB; rows decoded take more


PEAK = """
import resource, sys
from recapp.predict import main
assert main([*sys.argv[1:], "trainer.devices=1", "launch.start_method=spawn"]) == 0
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


@pytest.mark.full
def test_real_unlabelled_files_of_39_columns_are_scored_by_name_and_by_position(
    jobs, real_data, tmp_path
):
    logs = real_data / "criteo_kaggle_137k"
    files = sorted((logs / "test").glob("*.parquet"))
    assert len(pq.read_schema(files[0]).names) == 39
    jobs.train(
        tmp_path / "run",
        "dataset=criteo_kaggle",
        f"dataset.path={logs / 'train'}",
        "tables.max_rows=20000",
        "trainer.max_steps=20",
        "trainer.limit_val_batches=1",
    )
    base = tmp_path
    table, metrics = predicted(jobs, base, tmp_path, f"input={logs / 'test'}", "columns=[C1]")
    assert table.num_rows == metrics["rows"] == sum(pq.read_metadata(f).num_rows for f in files)
    rows = pa.concat_tables(pq.read_table(file) for file in files)
    assert table["C1"].to_pylist() == rows["C1"].to_pylist()
    model = recapp.load_model(tmp_path / "run/checkpoints/last.ckpt")
    alone = [model.predict(rows.slice(n, 512)) for n in range(0, rows.num_rows, 512)]
    assert torch.equal(scores(table), torch.cat(alone))
    (tmp_path / "other").mkdir()
    renamed = rows.rename_columns([f"column {n}" for n in range(39)])
    pq.write_table(renamed, tmp_path / "other/renamed.parquet")
    (tmp_path / "again").mkdir()
    shutil.copytree(tmp_path / "run", tmp_path / "again/run", symlinks=True)
    again, _ = predicted(jobs, tmp_path, tmp_path / "again", f"input={tmp_path / 'other'}", world=4)
    assert torch.equal(scores(again), scores(table))
