"""What sharding is for: under a limit on each process that is below the model's tables, one rank
and replicas are refused, shards train.
"""

import re
import resource
import shutil
import subprocess
import sys

import pytest
from jobs import Finished, environment, metrics_of, validation

pytestmark = pytest.mark.full

ROWS = [3_000_000, 100_000, 10_000]  # of the sample's tables, 128, 256 and 32 columns
TABLES = 4 * (ROWS[0] * 128 + ROWS[1] * 256 + ROWS[2] * 32)
LIMIT = 1_600_000_000  # of private memory, written or not: the interpreter's and torch's is in it


def limited(name, *arguments, cwd):
    """A command of which no process, ranks included, gets more than LIMIT."""

    def limit():
        resource.setrlimit(resource.RLIMIT_DATA, (LIMIT, LIMIT))

    ran = subprocess.run(
        [sys.executable, "-m", f"recapp.{name}", *arguments],
        cwd=cwd,
        env=environment(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=600,
        preexec_fn=limit,
    )
    return Finished(ran.returncode, ran.stdout, ran.stderr)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Gigabytes, so they do not stay."""
    base = tmp_path_factory.mktemp("limited")
    yield base
    shutil.rmtree(base)


def train(base, plan, *arguments):
    data = [
        "dataset=sample",
        "dataset.path=clicks",
        "dataset.generate.rows=3000",
        f"dataset.table_rows={ROWS}".replace(" ", ""),
        "dataset.batch_size=256",
        "dataset.val_batch_size=256",
    ]
    return limited("train", f"+plan={plan}", "trainer.max_steps=10", *data, *arguments, cwd=base)


def test_the_limit_is_below_the_tables():
    assert LIMIT < TABLES


@pytest.mark.parametrize(("plan", "ranks"), [("row_wise", 1), ("mixed", 1), ("data_parallel", 2)])
def test_one_rank_and_replicas_are_refused_beforehand_with_the_bytes_they_lack(base, plan, ranks):
    ran = train(base, plan, f"trainer.devices={ranks}", "hydra.run.dir=refused")
    assert ran.code == 1
    line = ran.err.splitlines()[-1]
    missing = int(
        re.match(rf"error: plan {plan} does not fit: rank \d lacks ([\d,]+) bytes", line)[
            1
        ].replace(",", "")
    )
    assert TABLES - LIMIT < missing < TABLES
    assert "largest there: large_table (1.5 GB)" in line and "Traceback" not in ran.err
    assert not list(base.glob("refused/**/*.ckpt")) and not (base / "refused/metrics.json").exists()


def test_shards_of_the_same_tables_train_save_go_on_and_are_evaluated_under_that_limit(base):
    ran = train(base, "mixed", "trainer.devices=2", "hydra.run.dir=mixed")
    assert ran.code == 0, ran.err
    trained = metrics_of(base / "mixed")
    assert trained["steps"] == 10 and sum(trained["bytes_by_rank"]) > TABLES
    evaluated_alike(base, trained)
    ran = limited(
        "train",
        f"ckpt_path={trained['checkpoint']}",
        "trainer.max_steps=12",
        "hydra.run.dir=on",
        cwd=base,
    )
    assert ran.code == 0, ran.err
    assert metrics_of(base / "on")["steps"] == 12


def test_a_checkpoint_is_read_under_another_plan_within_that_limit(base):
    ran = train(base, "row_wise", "plan.mode=unique", "trainer.devices=2", "hydra.run.dir=row_wise")
    assert ran.code == 0, ran.err
    evaluated_alike(base, metrics_of(base / "row_wise"), "+plan=column_wise")


def evaluated_alike(base, trained, *arguments):
    ran = limited(
        "eval",
        f"ckpt_path={trained['checkpoint']}",
        *arguments,
        "hydra.run.dir=evaluated",
        cwd=base,
    )
    assert ran.code == 0, ran.err
    assert validation(metrics_of(base / "evaluated")) == validation(trained)
