"""Memory comes from pools, and ranks share some of them."""

import resource
import subprocess
import sys

import pytest
import torch

from recapp.processes import process_memory
from recapp.processes.process_memory import Pool, free_memory_bytes, host_id, memory_pools

CPU = torch.device("cpu")
GIB = 1 << 30


def test_a_pool_is_divided_by_the_ranks_that_share_it_and_the_least_share_counts():
    big = Pool("machine 1", 100)
    small = Pool("cgroup 1", 30)
    own = Pool("", 20)
    assert free_memory_bytes([[big], [big]]) == [50, 50]
    assert free_memory_bytes([[big, small], [big]]) == [30, 50]
    assert free_memory_bytes([[big, small, own], [big, small], [Pool("machine 2", 7)], []]) == [
        15,
        15,
        7,
        None,
    ]
    assert free_memory_bytes([[big, big, own]]) == [20]  # a pool seen twice by one rank


def test_two_machines_of_one_name_and_two_networks_of_one_machine_are_hosts_of_their_own(
    monkeypatch, tmp_path
):
    mine = host_id()
    assert mine == host_id()
    boot = tmp_path / "boot_id"
    boot.write_text("another\n")
    monkeypatch.setattr(process_memory, "_BOOT", boot)
    assert host_id() != mine and host_id().startswith("another ")


@pytest.mark.full
def test_a_limit_on_the_process_is_what_is_left_of_it():
    code = (
        "import torch; from recapp.processes.process_memory import *; "
        "before = free_memory_bytes([memory_pools(torch.device('cpu'))])[0]; held = "
        "torch.ones(50_000_000); "
        "print(before, before - free_memory_bytes([memory_pools(torch.device('cpu'))])[0])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, preexec_fn=limit
    )
    before, taken = map(int, ran.stdout.split())
    assert GIB / 2 < before < 2 * GIB
    assert 200_000_000 <= taken < 250_000_000


def limit():
    resource.setrlimit(resource.RLIMIT_DATA, (2 * GIB, 2 * GIB))


@pytest.fixture
def cgroups(monkeypatch, tmp_path):
    """`cgroups(own, {folder: {file: text}})`: the process's cgroups and the files of all."""

    def make(own, folders):
        for folder, files in folders.items():
            (tmp_path / "fs" / folder).mkdir(parents=True, exist_ok=True)
            for name, text in files.items():
                (tmp_path / "fs" / folder / name).write_text(text)
        (tmp_path / "own").write_text(own)
        monkeypatch.setattr(process_memory, "_CGROUPS", tmp_path / "fs")
        monkeypatch.setattr(process_memory, "_OWN_CGROUPS", tmp_path / "own")
        return sorted(
            pool.free_bytes for pool in memory_pools(CPU) if pool.name.startswith("cgroup")
        )

    return make


def second_version(most, current, files=0):
    return {
        "memory.max": f"{most}\n",
        "memory.current": f"{current}\n",
        "memory.stat": f"anon 5\ninactive_file {files}\nactive_file 0\n",
    }


def test_the_limits_of_all_cgroups_around_the_process_count_and_files_in_memory_do_not(cgroups):
    found = cgroups(
        "0::/job_7/step_0/task_1\n",
        {
            ".": {},
            "job_7": second_version(1000, 600, files=100),
            "job_7/step_0": second_version("max", 600),
            "job_7/step_0/task_1": second_version(800, 100),
            "job_8": second_version(1, 1),
        },
    )
    assert found == [500, 700]


def test_a_container_whose_cgroup_has_another_path_outside_sees_its_own_as_the_root(cgroups):
    assert cgroups("0::/docker/abc\n", {".": second_version(1000, 1200)}) == [0]


def test_the_kernels_older_interface_is_read_too(cgroups):
    files = {
        "memory.limit_in_bytes": "1000\n",
        "memory.usage_in_bytes": "600\n",
        "memory.stat": "total_inactive_file 50\ntotal_active_file 50\n",
    }
    own = "9:name=systemd:/a\n4:memory:/job\n0::/\n"
    assert cgroups(
        own, {"memory/job": files, "memory": files | {"memory.limit_in_bytes": "9000"}}
    ) == [500, 8500]


def test_nothing_that_tells_is_no_limit(cgroups, monkeypatch):
    assert cgroups("", {}) == []
    monkeypatch.setattr(process_memory, "_bytes_of", lambda file, field: None)
    assert free_memory_bytes([memory_pools(CPU)]) == [None]


FAULTS = """
import resource, sys, torch
from recapp.processes.process_memory import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(48 << 18)                                     # 48 MiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
# the freed pieces grow together within some steps
print(min([faults() for _ in range(20)][-5:]))
"""


@pytest.mark.full
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
def test_freed_memory_is_faulted_in_again_unless_it_is_kept():
    found = {
        how: int(
            subprocess.run(
                [sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True
            ).stdout
        )
        for how in ("keep", "system")
    }
    assert found["keep"] < 100 < found["system"]
