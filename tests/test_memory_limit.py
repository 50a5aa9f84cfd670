"""What sharding is for: under a limit on each process that is below the model's tables, one rank
and replicas are refused, shards train.
"""

import json
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


ONE_AFTER_THE_OTHER = """
import json, sys
from recapp.train import main
print([main(settings) for settings in json.loads(sys.argv[1])])
"""


def limited(*words, cwd):
    """A program of Python of which no process, ranks included, gets more than LIMIT."""

    def limit():
        resource.setrlimit(resource.RLIMIT_DATA, (LIMIT, LIMIT))

    ran = subprocess.run(
        [sys.executable, *words],
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


def training(plan, *arguments):
    """The settings of a training."""
    return [
        f"+plan={plan}",
        "trainer.max_steps=10",
        "dataset=sample",
        "dataset.path=clicks",
        "dataset.generate.rows=3000",
        f"dataset.table_rows={ROWS}".replace(" ", ""),
        "dataset.batch_size=256",
        "dataset.val_batch_size=256",
        *arguments,
    ]


def ended_well(base, run, name, *arguments):
    """The metrics of a command under the limit."""
    ran = limited("-m", f"recapp.{name}", *arguments, f"hydra.run.dir={run}", cwd=base)
    assert ran.code == 0, ran.err
    return metrics_of(base / run)


def test_the_limit_is_below_the_tables():
    assert LIMIT < TABLES


def test_one_rank_and_replicas_are_refused_beforehand_with_the_bytes_they_lack(base):
    refused = {"row_wise": 1, "mixed": 1, "data_parallel": 2}
    jobs = [
        training(plan, f"trainer.devices={ranks}", f"hydra.run.dir=refused/{plan}")
        for plan, ranks in refused.items()
    ]
    ran = limited("-c", ONE_AFTER_THE_OTHER, json.dumps(jobs), cwd=base)
    assert (ran.code, ran.out.splitlines()[-1]) == (0, "[1, 1, 1]") and "Traceback" not in ran.err
    errors = [line for line in ran.err.splitlines() if line.startswith("error: ")]
    for plan, line in zip(refused, errors, strict=True):
        lacks = rf"error: plan {plan} does not fit: rank \d lacks ([\d,]+) bytes"
        missing = int(re.match(lacks, line)[1].replace(",", ""))
        assert TABLES - LIMIT < missing < TABLES
        assert "largest there: large_table (1.5 GB)" in line
    assert not list(base.glob("refused/**/*.ckpt")) and not list(
        base.glob("refused/*/metrics.json")
    )


def test_shards_of_the_same_tables_train_save_are_evaluated_and_go_on_under_that_limit(base):
    """Also under plans that are not those of the checkpoint."""
    trained = ended_well(base, "mixed", "train", *training("mixed", "trainer.devices=2"))
    assert trained["steps"] == 10 and sum(trained["bytes_by_rank"]) > TABLES
    stored = f"ckpt_path={trained['checkpoint']}"
    assert validation(ended_well(base, "evaluated", "eval", stored)) == validation(trained)
    others = ("+plan=row_wise", "plan.mode=unique", "trainer.max_steps=12")
    further = ended_well(base, "on", "train", stored, *others)
    assert further["steps"] == 12
    stored = f"ckpt_path={further['checkpoint']}"
    measured = ended_well(base, "measured", "eval", stored, "+plan=column_wise")
    assert validation(measured) == validation(further)
