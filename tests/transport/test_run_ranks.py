"""Ranks by one call: `recapp.run_ranks`."""

import gc
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from ranks import auto_means
from tiers import one_of

import recapp
from recapp import run_ranks
from recapp.errors import ConfigError, LaunchError, PlanError

pytestmark = pytest.mark.usefixtures("no_process_group")


class Found:
    """A result of a class of this file."""

    def __init__(self, rank):
        self.rank = rank


class Refused(Exception):
    def __init__(self, table, reason):
        super().__init__(f"{table}: {reason}")


def alive(pid):
    """Whether a process is there."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_rank_calls_the_function_and_all_results_come_back_in_order(ranks):
    factor = torch.arange(3.0)  # the function is a closure, as one of a notebook may be

    def work(plus):
        total = torch.ones(1)
        dist.all_reduce(total)
        return dist.get_rank(), dist.get_world_size(), total.item(), factor * dist.get_rank() + plus

    results = run_ranks(work, 1, ranks=ranks)
    assert [result[:3] for result in results] == [(rank, ranks, ranks) for rank in range(ranks)]
    assert all(torch.equal(r[3], factor * rank + 1) for rank, r in enumerate(results))


def test_ranks_do_not_collect_garbage_of_the_caller(tmp_path):
    class Threaded:
        """An object such as a process group, whose end waits for threads that forks do not have."""

        def __init__(self):
            self.itself = self

        def __del__(self):
            (tmp_path / str(os.getpid())).touch()

    Threaded()
    run_ranks(gc.collect, ranks=1)
    assert {path.name for path in tmp_path.iterdir()} <= {str(os.getpid())}
    gc.collect()
    assert len([*tmp_path.iterdir()]) == 1, "the caller goes on to collect garbage"


@pytest.mark.full
def test_a_result_may_be_of_a_class_of_the_program_and_large():
    first, second = run_ranks(lambda: (Found(dist.get_rank()), torch.ones(2_000_000)))
    assert (first[0].rank, second[0].rank) == (0, 1)
    assert first[1].sum() == second[1].sum() == 2_000_000


def test_what_a_rank_changes_stays_there_and_nothing_of_it_is_left_here():
    changed = []
    before = dict(os.environ)

    def work():
        changed.append(1)
        os.environ["CHANGED"] = "1"
        return os.getpid(), len(changed), os.environ["RANK"], torch.get_num_threads()

    results = run_ranks(work)
    assert [result[1:] for result in results] == [(1, "0", 1), (1, "1", 1)]
    assert not changed and os.environ == before and not dist.is_initialized()
    assert not any(alive(pid) for pid, *_ in results)


@pytest.mark.full
def test_what_ranks_print_is_printed_where_this_process_prints(capfd):
    print("before")

    def work():
        if dist.get_rank():
            dist.barrier()
        print(f"line of rank {dist.get_rank()}", flush=True)
        os.write(2, b"from below\n")  # as a library of C prints
        if not dist.get_rank():
            dist.barrier()
        print("no end", end="")

    run_ranks(work)
    out, err = capfd.readouterr()
    assert out.startswith("before\nline of rank 0\n") and out.count("before") == 1, out
    assert out.count("line of rank 1\n") == 1 and out.count("no end") == 2, out
    assert err == "from below\n" * 2


def test_a_model_is_sharded_and_trained_in_ranks_after_this_process_has_computed():
    torch.ones(512, 512) @ torch.ones(512, 512)  # on the threads that a fork has not
    table = recapp.EmbeddingBagConfig(
        name="t", num_embeddings=20, embedding_dim=4, feature_names=["f"]
    )
    bags = recapp.EmbeddingBagCollection(tables=[table])
    batch = recapp.KeyedJaggedTensor(["f"], [1, 7, 7], lengths=[2, 1])

    def work():
        sharded = recapp.DistributedModelParallel(bags)
        pooled = sharded(batch).values()
        pooled.sum().backward()
        return pooled.detach(), recapp.gathered_state_dict(sharded)

    with auto_means("torch"):  # others would be compiled first
        (first, whole), (second, _) = run_ranks(work)
    assert torch.equal(first, bags(batch).values()) and torch.equal(first, second)
    (moved,) = whole.values()
    weight = bags.embedding_bags["t"].weight
    assert (moved != weight).any(1).nonzero().flatten().tolist() == [1, 7]


def test_an_exception_of_a_rank_is_raised_with_its_rank_and_traceback_and_ends_the_others(tmp_path):
    def fail_in_a_function_of_this_name():
        raise ValueError("no such row")

    def work():
        (tmp_path / str(dist.get_rank())).write_text(str(os.getpid()))
        dist.barrier()
        if dist.get_rank() == 1:
            fail_in_a_function_of_this_name()
        time.sleep(60)

    begin = time.monotonic()
    with pytest.raises(LaunchError) as caught:
        run_ranks(work)
    assert time.monotonic() - begin < 30
    assert str(caught.value) == "rank 1 of 2 raised ValueError: no such row"
    assert isinstance(caught.value.__cause__, ValueError)
    (note,) = caught.value.__notes__
    assert "in rank 1 of 2:" in note and "fail_in_a_function_of_this_name" in note
    assert not any(alive(int((tmp_path / str(rank)).read_text())) for rank in range(2))


@pytest.mark.full
def test_recapps_own_errors_keep_their_class():
    def work():
        raise PlanError("plan x: no such table")

    with pytest.raises(PlanError) as caught:
        run_ranks(work, ranks=1)
    assert str(caught.value) == "rank 0 of 1: plan x: no such table"


def test_the_rank_is_named_that_failed_and_not_one_that_waited_for_it():
    def work():
        dist.barrier()
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    with pytest.raises(LaunchError, match=r"^rank 1 of 2 was ended by SIGKILL; the system does"):
        run_ranks(work)


@pytest.mark.parametrize(
    ("function", "says"),
    one_of(
        3,
        [
            (lambda: os._exit(3), "exited with code 3"),
            (
                lambda: os.kill(os.getpid(), signal.SIGTERM),
                "was ended by SIGTERM; GNU's OpenMP does",
            ),
            (lambda: sys.exit(4), "raised SystemExit: 4"),
            (lambda: (each for each in []), "returned a generator, which cannot be sent back"),
            (lambda: (_ for _ in ()).throw(Refused("t", "full")), "raised Refused: t: full"),
        ],
    ),
)
def test_a_rank_without_a_result_is_one_line(function, says):
    with pytest.raises(LaunchError) as caught:
        run_ranks(function, ranks=1)
    assert str(caught.value).startswith(f"rank 0 of 1 {says}") and "\n" not in str(caught.value)


@pytest.mark.full
def test_a_rank_may_close_or_replace_what_it_prints_on():
    def work():
        if dist.get_rank():
            sys.stdout = None
        else:
            sys.stdout.close()
        return 7

    assert run_ranks(work) == [7, 7]


def test_ranks_that_take_longer_than_the_timeout_are_ended():
    with pytest.raises(LaunchError, match=r"^timeout=0.5: rank 0 of 2 and rank 1 of 2 took longer"):
        run_ranks(time.sleep, 60, timeout=0.5)


@pytest.mark.parametrize(
    ("arguments", "says"),
    one_of(
        3,
        [
            ({"ranks": 0}, "ranks=0: must be a whole number of at least 1"),
            ({"ranks": "2"}, "ranks='2': must be a whole number"),
            ({"timeout": 0}, "timeout=0: must be a number of seconds above 0, or None"),
            ({"timeout": "1"}, "timeout='1': must be a number of seconds above 0"),
            ({"timeout": float("nan")}, "timeout=nan: must be a number of seconds above 0"),
        ],
    ),
)
def test_a_wrong_argument_is_one_line(arguments, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        run_ranks(print, **arguments)


@pytest.mark.full
def test_a_rank_starts_no_ranks():
    with pytest.raises(LaunchError, match=r"^rank [01] of 2: run_ranks: this process is a rank"):
        run_ranks(lambda: run_ranks(print))


def test_a_process_that_has_used_a_gpu_starts_no_ranks(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(LaunchError, match=r"^run_ranks: this process has used a GPU"):
        run_ranks(print)


INTERRUPTED = """
import os, sys, time
from recapp import run_ranks

def work():
    print(os.getpid(), flush=True)
    time.sleep(60)

try:
    run_ranks(work)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_ctrl_c_ends_all_ranks_and_only_this_process_hears_of_it():
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", INTERRUPTED],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    pids = [int(process.stdout.readline()) for _ in range(2)]
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does it: to all of the group
    out, err = process.communicate(timeout=60)
    assert (out, err, process.returncode) == ("interrupted\n", "", 0)
    assert not any(alive(pid) for pid in pids)
