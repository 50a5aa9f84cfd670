"""A swap through memory that ranks share is gloo's swap: the same bytes in the same places,
whatever their size and however many fly.
"""

import gc
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import yaml
from engine.engine_cases import make_tables, same_bits
from engine.test_same_run import training_run
from parity.cases import train_and_compare

from recapp.errors import LaunchError
from recapp.processes.launch import launch
from recapp.transport import ring, shared_memory
from recapp.transport.join_ranks import make_comm

DTYPES = [
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
]
PAGE = 4096
TESTS = Path(__file__).resolve().parents[1]


def shared(comm, ring_pages=None):
    """The same ranks over shared memory; a ring has so many pages."""
    kept = shared_memory.RING_BYTES
    shared_memory.RING_BYTES = ring_pages * PAGE if ring_pages else kept
    try:
        made = make_comm(comm.group, transport="shared_memory")
    finally:
        shared_memory.RING_BYTES = kept
    assert isinstance(made, shared_memory.SharedMemoryComm) and made.transport == "shared_memory"
    return made


def random_spans(world, rank, rng, most):
    """Spans to send and to receive in one buffer, in random order with gaps between; its length.
    All ranks draw the same numbers.
    """
    numel_WW = [
        [rng.choice([0, 1, rng.randint(1, 9), rng.randint(1, most)]) for _ in range(world)]
        for _ in range(world)
    ]
    wanted = [("send", r, numel_WW[rank][r]) for r in range(world)] + [
        ("recv", r, numel_WW[r][rank]) for r in range(world)
    ]
    own = random.Random(f"{rng.random()} {rank}")
    own.shuffle(wanted)
    spans = {"send": [(0, 0)] * world, "recv": [(0, 0)] * world}
    end = 0
    for way, r, numel in wanted:
        begin = end + own.randint(0, 5)
        end = begin + numel
        spans[way][r] = (begin, end)
    return spans["send"], spans["recv"], end + own.randint(0, 5)


def as_bytes(tensor):
    return tensor.view(torch.uint8).tolist()


def same_as_gloo(comm, dtype, rounds, most, ring_pages):
    fast = shared(comm, ring_pages)
    rng = random.Random(7)
    torch.manual_seed(comm.rank)
    for _ in range(rounds):
        send_W, recv_W, numel = random_spans(comm.world, comm.rank, rng, most)
        kind = torch.uint8 if dtype is torch.bool else dtype
        size = torch.empty(0, dtype=kind).element_size()
        buffer = torch.randint(
            0, 2 if dtype is torch.bool else 256, (numel * size,), dtype=torch.uint8
        ).view(dtype)
        buffers = [buffer.clone(), buffer.clone()]
        # gloo does not know these
        wire = buffers[0].view(torch.uint8) if dtype in (torch.int16, torch.bool) else buffers[0]
        scale = size if dtype is torch.int16 else 1
        comm.swap(
            wire, *[[(a * scale, b * scale) for a, b in spans] for spans in (send_W, recv_W)]
        )()
        fast.swap(buffers[1], send_W, recv_W)()
        assert same_bits(buffers[0], buffers[1])
    assert (fast.calls, fast.bytes_sent) == (comm.calls, comm.bytes_sent) and fast.calls == rounds
    return comm.bytes_sent


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_random_spans_of_every_type_arrive_as_through_gloo(ranks, world, dtype):
    assert min(ranks.run(same_as_gloo, world, dtype, 12, 300, None)) > 0


@pytest.mark.parametrize("world", [2, 4])
def test_messages_much_larger_than_a_ring_pass_both_ways_at_once(ranks, world):
    assert min(ranks.run(same_as_gloo, world, torch.float32, 6, 100_000, 1)) > 30 * PAGE


def test_messages_larger_than_the_rings_of_a_real_run_pass_both_ways_at_once(ranks):
    numel = 3 * shared_memory.RING_BYTES // 8 + 5
    assert ranks.run(exchange_whole, 2, numel) == [8 * numel] * 2


def exchange_whole(comm, numel):
    fast = shared(comm)
    other = 1 - comm.rank
    buffer = torch.cat(
        [torch.arange(numel) * (comm.rank + 1), torch.zeros(numel, dtype=torch.int64)]
    )
    spans = [[(0, 0), (0, 0)], [(0, 0), (0, 0)]]
    spans[0][other] = (0, numel)
    spans[1][other] = (numel, 2 * numel)
    fast.swap(buffer, *spans)()
    assert torch.equal(buffer[numel:], torch.arange(numel) * (other + 1))
    return fast.bytes_sent


def started(fast, k, numel):
    """The k-th swap, not waited for; the buffer, and what must be in it at the end."""

    def values(source, to):
        return [(k * 1000 + source * 10 + to) % 251] * numel

    me = fast.rank
    world = fast.world
    ends = [(r * numel, (r + 1) * numel if r != me else r * numel) for r in range(2 * world)]
    ends[world + me] = ((world + me) * numel,) * 2
    out = [x for r in range(world) for x in (values(me, r) if r != me else [0] * numel)]
    come = [x for r in range(world) for x in (values(r, me) if r != me else [0] * numel)]
    buffer = torch.tensor(out + [0] * len(come), dtype=torch.uint8)
    return (
        fast.swap(buffer, ends[:world], ends[world:]),
        buffer,
        torch.tensor(out + come, dtype=torch.uint8),
    )


def many_in_flight(comm, numel):
    fast = shared(comm, ring_pages=1)
    flying = [started(fast, k, numel + k) for k in range(7)]
    order = random.Random(comm.rank).sample(flying, len(flying))
    for wait, buffer, expected in order:
        wait()
        assert torch.equal(buffer, expected)
        wait()  # once more is no harm
    assert not fast._buffers and len(fast._work_N4) == 0


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("numel", [1, 3 * PAGE])
def test_many_swaps_in_flight_keep_their_order_in_whatever_order_ranks_wait_for_them(
    ranks, world, numel
):
    ranks.run(many_in_flight, world, numel)


def never_waited_for(comm):
    fast = shared(comm, ring_pages=1)
    started(fast, 0, 3 * PAGE)  # its buffer is nobody's by now
    torch.zeros(10 * PAGE, dtype=torch.uint8)
    wait, buffer, expected = started(fast, 1, 3 * PAGE)
    wait()
    assert torch.equal(buffer, expected)


def test_a_swap_that_nobody_waits_for_is_moved_by_the_next(ranks):
    ranks.run(never_waited_for, 2)


def between_collectives(comm):
    fast = shared(comm, ring_pages=1)
    for k in range(4):
        wait, buffer, expected = started(fast, k, 2 * PAGE)
        total = torch.tensor([comm.rank + 1.0])
        dist.all_reduce(total, group=comm.group)
        assert (
            fast.all_gather(comm.rank) == list(range(comm.world))
            and total.item() == comm.world * (comm.world + 1) / 2
        )
        via, gloo_buffer, gloo_expected = started(comm, k, 10)
        wait()
        via()
        fast.barrier()
        assert torch.equal(buffer, expected) and torch.equal(gloo_buffer, gloo_expected)


@pytest.mark.parametrize("world", [2, 4])
def test_swaps_and_collectives_of_the_process_group_do_not_meet(ranks, world):
    ranks.run(between_collectives, world)


# ---- a peer that is late, and one that does not come


class Alarm(Exception):
    pass


def disturbed(comm):
    """Rank 0 waits for rank 1, which comes late; a signal at its fourth rest must be heard while it
    waits.
    """

    def ring_bell(*_):
        raise Alarm

    def rest(seconds):
        rests.append(seconds)
        if len(rests) == 4:
            signal.setitimer(signal.ITIMER_REAL, 1e-3)
        sleep(seconds)

    fast = shared(comm)
    rests = []
    sleep = time.sleep
    if comm.rank == 1:
        comm.barrier()
    wait, buffer, expected = started(fast, 0, 100)
    if comm.rank == 0:
        kept = signal.signal(signal.SIGALRM, ring_bell)
        shared_memory.time.sleep = rest
        try:
            with pytest.raises(Alarm):
                wait()
        finally:
            shared_memory.time.sleep = sleep
            signal.signal(signal.SIGALRM, kept)
        comm.barrier()
    wait()
    assert torch.equal(buffer, expected)
    return len(rests)


def test_a_rank_that_waits_rests_between_looks_and_hears_signals(ranks):
    assert ranks.run(disturbed, 2)[0] >= 4


@pytest.mark.full
def test_a_rank_whose_peer_was_killed_ends_at_once_and_the_launcher_names_the_peer(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("PYTHONPATH", f"{TESTS.parent}{os.pathsep}{TESTS}")
    settings = tmp_path / "resolved.yaml"
    settings.write_text(yaml.safe_dump({}))
    with pytest.raises(LaunchError, match=r"rank 1 on .* was ended by SIGKILL"):
        launch(settings, 2, module="standin_swap")
    assert (
        tmp_path / "said0"
    ).read_text() == "RankError: rank 1 has ended while rank 0 waited for it"


# ---- nothing is left


def what_is_left(comm):
    comm.barrier()  # gloo's sockets are there now
    gc.collect()  # a first compilation leaves frames behind
    before = mapped_and_open()
    fast = shared(comm)
    started(fast, 0, 5)[0]()
    during = mapped_and_open()
    in_child = os.fork()
    if in_child == 0:
        os._exit("memfd:recapp" in Path("/proc/self/maps").read_text())
    seen_by_child = os.waitpid(in_child, 0)[1]
    del fast
    return during[0] - before[0], seen_by_child, mapped_and_open() == before


def mapped_and_open():
    return Path("/proc/self/maps").read_text().count("memfd:recapp"), len(
        os.listdir("/proc/self/fd")
    )


def test_memory_has_no_name_is_not_inherited_and_goes_with_the_comm(ranks):
    names = set(os.listdir("/dev/shm"))
    assert ranks.run(what_is_left, 3) == [(2 + 2 * 2, 0, True)] * 3
    assert not [name for name in set(os.listdir("/dev/shm")) - names if "recapp" in name]


# ---- the engine on top


def over(comm, train, *args):
    return train(shared(comm, ring_pages=1), *args)


@pytest.mark.parametrize(
    ("world", "kind", "rule", "mode"),
    [
        (2, "row_wise", "sgd", "unique"),
        (4, "column_wise", "adagrad", "pooled"),
        *(
            pytest.param(*more, marks=pytest.mark.full)
            for more in (
                (2, "mixed", "adam", "pooled"),
                (4, "random", "rowwise_adagrad", "unique"),
                (4, "data_parallel", "sgd", "unique"),
            )
        ),
    ],
)
def test_sharded_training_equals_one_process_through_shared_memory_too(
    ranks, world, kind, rule, mode
):
    options = {"rule": rule, "mode": mode, "pooling": "mean", "weighted": True, "uneven": True}
    for calls, *_, agreed in ranks.run(over, world, train_and_compare, 3, kind, "auto", options):
        assert calls == 4 + agreed


def differing(comm, kind, rule):
    """Names of what two runs do not have in common."""
    tables = make_tables()
    through_gloo, through_memory = (
        training_run(c, tables, kind, rule, False, True) for c in (comm, shared(comm, ring_pages=1))
    )
    assert through_gloo.keys() == through_memory.keys() and len(through_gloo) > 10
    return [
        name for name in through_gloo if not same_bits(through_gloo[name], through_memory[name])
    ]


@pytest.mark.parametrize(
    ("world", "kind", "rule"),
    [(2, "mixed", "rowwise_adagrad"), pytest.param(4, "random", "adam", marks=pytest.mark.full)],
)
def test_a_run_has_the_same_bits_through_either_transport(ranks, world, kind, rule):
    assert ranks.run(differing, world, kind, rule) == [[]] * world


def test_rings_of_many_ranks_stay_within_their_bounds():
    for world in range(2, 200):
        size = shared_memory.ring_bytes(world)
        assert (
            size % PAGE == 0 and size % ring.LINE == 0 and PAGE <= size <= shared_memory.RING_BYTES
        )
        assert (world - 1) * size <= shared_memory.RINGS_BYTES
