"""Which way messages go: what is asked for, or the best there is, chosen by all ranks alike, with a
line that says why.
"""

import errno
import os
import sys
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch

from recapp import console
from recapp.errors import ConfigError, LaunchError
from recapp.processes.process_memory import Pool
from recapp.transport import join_ranks
from recapp.transport.communicator import Comm
from recapp.transport.join_ranks import (
    HostInfo,
    describe,
    make_comm,
    obstacle_to_sharing,
)
from recapp.transport.shared_memory import file_bytes


@contextmanager
def changed(owner, name, value):
    """As pytest's monkeypatch, on a rank."""
    kept = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, kept)


def other_host(comm):
    return changed(join_ranks, "host_id", lambda: f"host {comm.rank // 2}")


def little_room(comm):
    return changed(
        join_ranks, "memory_pools", lambda device: [Pool("machine", 3 * file_bytes(comm.world))]
    )


def no_numba(comm):
    return patch.dict(sys.modules, {"recapp.transport.ring": None} if comm.rank == 1 else {})


def no_space(comm):
    def posix_fallocate(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return changed(os, "posix_fallocate", posix_fallocate if comm.rank == 1 else os.posix_fallocate)


def no_processes(comm):
    def pidfd_open(*_):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    return changed(os, "pidfd_open", pidfd_open if comm.rank == 1 else os.pidfd_open)


def no_memfd(comm):
    def memfd_create(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    return changed(os, "memfd_create", memfd_create if comm.rank == 1 else os.memfd_create)


def chosen(comm, obstacle, transport):
    """Transport, reason, what was printed, what was raised."""
    said = []
    with obstacle(comm), changed(console, "note", said.append):
        open_before = len(os.listdir("/proc/self/fd"))
        try:
            made = make_comm(comm.group, transport=transport)
        except LaunchError as error:
            return None, str(error), said, len(os.listdir("/proc/self/fd")) - open_before
    assert type(made) is Comm
    comm.barrier()
    return made.transport, made.fallback, said, len(os.listdir("/proc/self/fd")) - open_before


@pytest.mark.parametrize(
    ("obstacle", "world", "reason"),
    [
        (other_host, 4, "the ranks are on 2 hosts"),
        (
            little_room,
            4,
            (
                f"a rank needs {file_bytes(4):,} bytes for shared memory, and has only "
                f"{3 * file_bytes(4) // 4:,} bytes free in all"
            ),
        ),
        (
            no_numba,
            2,
            (
                "rank 1: numba cannot be used: import of recapp.transport.ring halted; None in "
                "sys.modules"
            ),
        ),
        (no_space, 2, "rank 1: No space left on device"),
        (no_processes, 2, "rank 1: Operation not permitted"),
        (no_memfd, 2, "rank 1: Function not implemented"),
    ],
)
def test_where_shared_memory_cannot_be_had_gloo_is_taken_and_rank_0_says_why(
    ranks, obstacle, world, reason
):
    for rank, (transport, fallback, said, left_open) in enumerate(
        ranks.run(chosen, world, obstacle, "auto")
    ):
        assert (transport, fallback, left_open) == ("gloo", reason, 0)
        assert said == (
            [f"no shared memory between the ranks ({reason}): their messages go through gloo"]
            if rank == 0
            else []
        )


@pytest.mark.parametrize("obstacle", [other_host, no_space])
def test_where_it_is_asked_for_and_cannot_be_had_all_ranks_refuse_in_one_line(ranks, obstacle):
    answers = ranks.run(chosen, 4, obstacle, "shared_memory")
    assert (
        len({line for _, line, _, _ in answers}) == 1
        and [said for _, _, said, _ in answers] == [[]] * 4
    )
    line = answers[0][1]
    assert (
        line.startswith("engine.transport=shared_memory: ")
        and line.endswith("; use auto or gloo")
        and "\n" not in line
    )


def without_choice(comm):
    said = []
    with changed(console, "note", said.append):
        asked = make_comm(comm.group, transport="gloo")
        on_gpu = make_comm(comm.group, torch.device("cuda"))
        with pytest.raises(
            LaunchError,
            match=(
                r"engine\.transport=shared_memory: rank 0: the device "
                r"is cuda; use auto or gloo"
            ),
        ):
            make_comm(comm.group, torch.device("cuda"), "shared_memory")
    assert type(asked) is type(on_gpu) is Comm and not asked.fallback and not on_gpu.fallback
    return said


def test_asked_for_or_on_a_gpu_the_process_group_needs_no_word(ranks):
    assert ranks.run(without_choice, 2) == [[], []]


def test_one_process_has_nobody_to_share_with():
    for transport in ("auto", "gloo", "shared_memory"):
        assert type(made := make_comm(transport=transport)) is Comm and made.transport == "none"


def test_an_unknown_transport_is_refused_with_the_close_match():
    with pytest.raises(
        ConfigError, match=r"engine\.transport=shared_memroy: did you mean shared_memory\?"
    ):
        make_comm(transport="shared_memroy")
    with pytest.raises(ConfigError, match=r"engine\.transport=glo: did you mean gloo\?"):
        make_comm(transport="glo")


def test_containers_that_hide_their_processes_share_no_memory():
    there = HostInfo("host", "1", "", [])
    assert obstacle_to_sharing([there, there]) == ""
    assert (
        obstacle_to_sharing([there, there._replace(processes="2")])
        == "the ranks are in different containers, which do not see each other's processes"
    )
    assert (
        obstacle_to_sharing([there, there._replace(obstacle="it needs Linux")])
        == "rank 1: it needs Linux"
    )


def test_memory_is_counted_for_all_ranks_that_take_it_from_one_pool():
    enough = 4 * file_bytes(2)
    here = HostInfo("host", "1", "", [Pool("machine", enough)])
    assert obstacle_to_sharing([here, here]) == ""
    less = here._replace(pools=[Pool("machine", enough - 2)])
    assert obstacle_to_sharing([here, less]).startswith(
        f"a rank needs {file_bytes(2):,} bytes for shared memory, and has only "
        f"{enough // 2 - 1:,} bytes free"
    )


def test_the_reason_is_told_with_the_transport():
    comm = Comm()
    comm.transport = "gloo"
    assert describe(comm) == "transport gloo"
    comm.fallback = "the ranks are on 2 hosts"
    assert describe(comm) == "transport gloo (no shared memory: the ranks are on 2 hosts)"
