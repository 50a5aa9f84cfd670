"""HugeCTR's training programs, trained: a small one of our own on a pool of ranks, and the one that
HugeCTR's notebook prints, in the full tier.
"""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hugectr_data import write_nvtabular
from jobs import environment, metrics_of, ranks_of, validation

from recapp import hugectr
from recapp.compat.hugectr import program as hugectr_program
from recapp.stored.store import is_checkpoint

L = hugectr.Layer_t
KIND = hugectr.Optimizer_t
SIZES = [300, 7, 120]
LINE = re.compile(
    r"^\[HCTR\]\[\d\d:\d\d:\d\d\.\d{3}\]\[INFO\]\[RK0\]\[main\]: Iter: (\d+) Time\((\d+) iters\): "
    r"\d+\.\d{6}s Loss: (\d\.\d{6}) lr:(\d\.\d{6})$",
    re.MULTILINE,
)
MIXED = [
    [
        {
            "local_embedding_list": [[0], [2]][gpu],
            "global_embedding_list": [[0], [2]],
            "table_placement_strategy": "mp",
        },
        {
            "local_embedding_list": [1],
            "global_embedding_list": [[1], [1]],
            "table_placement_strategy": "dp",
        },
    ]
    for gpu in range(2)
]
DISTRIBUTED = [
    [
        {
            "local_embedding_list": [0, 1, 2],
            "global_embedding_list": [[0, 1, 2]] * 2,
            "table_placement_strategy": "mp",
            "sharding_id": gpu,
            "num_sharding": 2,
        }
    ]
    for gpu in range(2)
]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """However many GPUs this machine has, programs list two."""
    monkeypatch.setattr("recapp.compat.hugectr.program_settings.gpu_count", lambda: 0)


def program(plan=None, opt=None, sizes=SIZES, gpus=(0, 1), tables=(), **solved):
    """A small DLRM that trains on `data`, compiled; `tables` has more of each of them."""
    solver = hugectr.CreateSolver(
        **{
            "batchsize": 32,
            "batchsize_eval": 64,
            "max_eval_batches": 2,
            "lr": 0.5,
            "warmup_steps": 10,
            "vvgpu": [list(gpus)],
            "i64_input_key": True,
            "use_embedding_collection": True,
            "metrics_spec": {hugectr.MetricsType.AverageLoss: 0.0, hugectr.MetricsType.AUC: 1.0},
        }
        | solved
    )
    reader = hugectr.DataReaderParams(
        data_reader_type=hugectr.DataReaderType_t.Parquet,
        source="data/train/_file_list.txt",
        eval_source="data/val/_file_list.txt",
        check_type=hugectr.Check_t.Non,
        slot_size_array=SIZES,
    )
    model = hugectr.Model(solver, reader, opt or hugectr.CreateOptimizer(optimizer_type=KIND.SGD))
    names = [f"data{k}" for k in range(3)]
    params = [hugectr.DataReaderSparseParam(name, 1, False, 1) for name in names]
    model.add(hugectr.Input(1, "label", 4, "dense", params))
    planner = hugectr.EmbeddingPlanner()
    for k, size in enumerate(sizes):
        more = tables[k] if tables else {}
        table = hugectr.EmbeddingTableConfig(
            id_space=k, max_vocabulary_size=size, ev_size=8, **more
        )
        planner.embedding_lookup(table, names[k], f"emb{k}", "sum")
    model.add(planner.create_embedding_collection(plan))
    for layer in (
        hugectr.DenseLayer(L.Concat, ["emb0", "emb1", "emb2"], ["vectors"]),
        hugectr.DenseLayer(L.InnerProduct, ["dense"], ["fc1"], num_output=8),
        hugectr.DenseLayer(L.ReLU, ["fc1"], ["relu1"]),
        hugectr.DenseLayer(L.Interaction, ["relu1", "vectors"], ["dots"]),
        hugectr.DenseLayer(L.Reshape, ["vectors"], ["wide"], leading_dim=24),
        hugectr.DenseLayer(L.MultiCross, ["wide"], ["crossed"], num_layers=1, projection_dim=4),
        hugectr.DenseLayer(L.Concat, ["dots", "crossed"], ["both"]),
        hugectr.DenseLayer(L.InnerProduct, ["both"], ["fc2"], num_output=1),
        hugectr.DenseLayer(L.BinaryCrossEntropyLoss, ["fc2", "label"], ["loss"]),
    ):
        model.add(layer)
    model.compile()
    return model


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with data."""
    monkeypatch.chdir(tmp_path)
    write_nvtabular("data/train", SIZES, rows=640, dense=4)
    write_nvtabular("data/val", SIZES, rows=256, dense=4, seed=2)
    return tmp_path


@pytest.fixture
def in_pool(jobs, monkeypatch):
    """Programs that train on the pool of ranks; the directories of their runs."""
    runs = []

    def run(command, gpus):
        folder = Path(command[command.index("--config-dir") + 1])
        overrides = [said.replace("'", "") for said in command[5:]]
        overrides = [said for said in overrides if not said.startswith("hydra.")]
        world = int(os.environ.get("TEST_RANKS", "2"))
        jobs.train(folder.parent, *overrides, "engine.backend=torch", world=world, folders=[folder])
        runs.append(folder.parent)
        return 0

    monkeypatch.setattr(hugectr_program, "_run", run)
    return runs


def losses(directory):
    """The losses of a run, as its curves have them."""
    with (directory / "csv/metrics.csv").open() as file:
        return [row["train_loss"] for row in csv.DictReader(file) if row["train_loss"]]


def written(name, plan):
    Path(name).write_text(json.dumps(plan))
    return name


def test_a_program_trains_alike_under_both_plans_and_prints_hugectrs_lines(here, in_pool):
    for name, plan in (("mixed", MIXED), ("distributed", DISTRIBUTED)):
        program(written(f"{name}.json", plan)).fit(
            max_iter=30, display=5, eval_interval=10, snapshot=10, snapshot_prefix=f"{name}/dlrm"
        )
    one, other = in_pool
    assert [one, other] == [here / "mixed", here / "distributed"]
    assert losses(one) == losses(other) and len(losses(one)) == 6
    assert validation(metrics_of(one)) == validation(metrics_of(other))
    assert metrics_of(one)["plan"] == "hugectr"
    out = (one / "rank0.out").read_text()
    lines = LINE.findall(out)
    assert [(iteration, count) for iteration, count, _, _ in lines] == [
        (str(5 * k), "5") for k in range(1, 7)
    ]
    assert [rate for *_, rate in lines[:2]] == ["0.300000", "0.500000"]  # those of 6 and 11
    assert lines == LINE.findall((other / "rank0.out").read_text())
    loss = metrics_of(one)["val_log_loss"]
    assert f"[main]: Evaluation, AverageLoss: {loss:.6f}\n" in out
    assert "[main]: Evaluation, AUC: 0." in out and "[main]: Eval Time for 2 iters: " in out
    assert "[main]: Finish 30 iterations with batchsize: 32 in " in out
    assert not LINE.search((one / "rank1.out").read_text())


@pytest.mark.full
def test_snapshots_are_checkpoints_that_are_measured_without_the_program(here, in_pool, jobs):
    program(max_eval_batches=4).fit(
        max_iter=20, display=0, eval_interval=10, snapshot=10, snapshot_prefix="dlrm"
    )
    (run,) = in_pool
    found = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert {"dlrm_10.ckpt", "dlrm_20.ckpt", "last.ckpt"} <= set(found)
    snapshot = run / "checkpoints/dlrm_20.ckpt"
    assert is_checkpoint(snapshot)
    measured = jobs.evaluate(here / "eval", f"ckpt_path={snapshot}")
    assert validation(measured) == pytest.approx(validation(metrics_of(run)))
    assert "Iter:" not in (run / "rank0.out").read_text()
    assert metrics_of(run)["checkpoint"].endswith("last.ckpt")
    assert metrics_of(run)["checkpoint_step"] == 20


@pytest.mark.full
def test_a_snapshot_is_gone_on_from_without_the_program(here, in_pool, jobs):
    for prefix, last in (("whole", 20), ("half", 10)):
        program().fit(
            max_iter=last, display=5, eval_interval=10, snapshot=10, snapshot_prefix=f"{prefix}/x"
        )
    snapshot = here / "half/checkpoints/x_10.ckpt"
    went_on = jobs.train(here / "more", f"ckpt_path={snapshot}", "trainer.max_steps=20")
    assert validation(went_on) == validation(metrics_of(here / "whole"))


@pytest.mark.full
def test_tables_may_grow_and_have_optimisers_of_their_own(here, in_pool):
    adam = hugectr.CreateOptimizer(optimizer_type=KIND.Adam)
    tables = [{}, {"opt_params": adam}, {"min_key": 0, "max_key": 120}]
    program(sizes=[-1, 7, 120], tables=tables, opt=adam, lr=0.01, repeat_dataset=False).fit(
        num_epochs=1, display=5, eval_interval=0, snapshot=0
    )
    (run,) = in_pool
    out = (run / "rank0.out").read_text()
    assert [line[0] for line in LINE.findall(out)] == ["5", "10", "15", "20"]
    assert "Evaluation" not in out
    rules = re.search(r"Lookups and rules.*?\n\n", out, re.DOTALL)
    assert rules and "adam" in rules[0]


def test_one_rank_trains_as_two(here, in_pool, monkeypatch):
    program().fit(max_iter=10, display=5, eval_interval=10, snapshot=0)
    monkeypatch.setenv("TEST_RANKS", "1")
    program(gpus=(0,)).fit(max_iter=10, display=5, eval_interval=10, snapshot=0)
    two, one = (validation(metrics_of(run)) for run in in_pool)
    assert two == pytest.approx(one, rel=1e-5)


def test_a_goal_that_is_reached_ends_training(here, in_pool):
    goal = {hugectr.MetricsType.AverageLoss: 0.5}
    program(metrics_spec=goal).fit(max_iter=50, display=5, eval_interval=10, snapshot=0)
    (run,) = in_pool
    assert metrics_of(run)["steps"] == 10


def test_a_model_is_fitted_once(here, in_pool):
    model = program()
    model.fit(max_iter=1, display=1, eval_interval=1)
    with pytest.raises(hugectr_program.ConfigError, match="was trained already"):
        model.fit(max_iter=1)


# ---- the program as a script


SCRIPT = """
import sys
sys.path[:0] = {paths!r}
from test_hugectr_training import program
program(batchsize=16).fit(max_iter=100000, display=5, eval_interval=0, snapshot=0)
print("the end")
"""


def script(here, text):
    """A program in a process of its own, its output in `out.txt` and `err.txt`."""
    (here / "train.py").write_text(text)
    with open(here / "out.txt", "w") as out, open(here / "err.txt", "w") as err:
        return subprocess.Popen(
            [sys.executable, "train.py"], cwd=here, env=environment(), stdout=out, stderr=err
        )


def trains(run, here):
    """Wait until ranks train; return their processes."""
    for _ in range(1200):
        if "Iter: 5 " in (here / "out.txt").read_text():
            (command,) = children_of(run.pid)
            return ranks_of(command)
        assert run.poll() is None, (here / "err.txt").read_text()
        time.sleep(0.1)
    raise AssertionError("it does not train")


def children_of(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def gone(pids):
    """Whether processes end within some seconds."""
    for _ in range(100):
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return True
        time.sleep(0.1)
    return False


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_program_and_ranks_with_a_checkpoint(here, number):
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    run = script(here, SCRIPT.format(paths=paths))
    ranks = trains(run, here)
    run.send_signal(number)
    assert run.wait(60) == 128 + number
    assert gone(ranks.values())
    assert list(here.glob("outputs/*/*/checkpoints/last.ckpt"))
    assert "Traceback" not in (here / "err.txt").read_text()
    assert "the end" not in (here / "out.txt").read_text()


@pytest.mark.full
def test_a_killed_rank_ends_the_program_with_one_line(here):
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    run = script(here, SCRIPT.format(paths=paths))
    ranks = trains(run, here)
    os.kill(ranks[1], signal.SIGKILL)
    assert run.wait(60) == 1
    assert gone(ranks.values())
    errors = [
        line for line in (here / "err.txt").read_text().splitlines() if line.startswith("error: ")
    ]
    assert len(errors) == 1 and "rank 1" in errors[0]


@pytest.mark.full
def test_a_killed_program_leaves_no_ranks_behind(here):
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    run = script(here, SCRIPT.format(paths=paths))
    ranks = trains(run, here)
    run.kill()
    run.wait()
    assert gone(ranks.values())


# ---- HugeCTR's own program


CUT = (
    ("import hugectr", "import recapp.hugectr as hugectr"),
    ("65536", "64"),
    ("[[0,1,2,3,4,5,6,7]]", "[[0,1]]"),
    ("max_iter = 1000, display = 100", "max_iter = 20, display = 20"),
)


@pytest.mark.full
def test_hugectrs_own_program_trains_alike_under_both_of_its_plans(tmp_path, foreign_programs):
    text = (foreign_programs / "dlrm_train.txt").read_text()
    generators = (foreign_programs / "generate_plans.txt").read_text()
    for said, ours in CUT:
        assert said in text
        text = text.replace(said, ours)
    (tmp_path / "dlrm_train.py").write_text(text)
    sizes = json.loads(re.search(r"table_size_array = (\[.*?\])", text)[1])
    data = tmp_path / "deepfm_data_nvt"
    write_nvtabular(data / "train", sizes, rows=4_000, files=8)
    write_nvtabular(data / "val", sizes, rows=500, files=2, seed=2)
    made = {}
    exec(generators, made)
    found = []
    for name in ("generate_plan", "generate_distributed_plan"):
        made[name](sizes, 2, str(tmp_path / f"{name}.json"))
        run = subprocess.run(
            [sys.executable, "dlrm_train.py", f"{name}.json"],
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
        )
        assert run.returncode == 0, run.stderr
        directory = max(tmp_path.glob("outputs/*/*"), key=lambda path: path.stat().st_mtime)
        found.append((run.stdout, losses(directory), metrics_of(directory)))
    (out, loss, metrics), (other_out, other_loss, other_metrics) = found
    assert loss == other_loss and len(loss) == 1
    assert validation(metrics) == validation(other_metrics)
    assert LINE.findall(out) == LINE.findall(other_out)
    assert LINE.findall(out)[0][0] == "20" and LINE.findall(out)[0][3] == "0.035000"
    for shape in ("(None, 26, 128)", "(None, 480)", "(None, 1024)", "(None, 512)"):
        assert shape in out
    tops = re.findall(r'top_names = \["(\w+)"\]', text)
    assert len(tops) == 18
    for top in tops:
        assert re.search(rf"\b{top} +\(None", out), top
