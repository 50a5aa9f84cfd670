"""`calibrate`: measure the costs of lookup, update, messages and dense part on this machine, and
write them as a hardware file for the planner.

    kernels (`kernel_costs`) + messages               -> PATH, and a row for each number
        + dense part + plain copy
    a short run of recapp.train, predicted with PATH  -> measured minus predicted dense phase: the
                                                         overhead of a step

All costs are timed in rounds (medians of turns, the lower quartile of rounds), on all ranks at
once, because ranks share memory and cores. A calibration takes about a minute, and one or two more
where kernels must be compiled first.
"""

import math
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recapp.benchmarks.kernel_costs import (
    CASES,
    Case,
    fit,
    fit_kernels,
    measure_kernels,
    synchroniser,
    typical,
)
from recapp.benchmarks.session import Session
from recapp.benchmarks.timing import Steps
from recapp.benchmarks.workloads import DENSE, NamedModel
from recapp.console import note
from recapp.kernels.backend import backend as make_backend
from recapp.models.published_dlrm import DLRM
from recapp.planner.cost import VECTOR_PASSES
from recapp.planner.hardware import (
    KERNELS,
    Hardware,
    Link,
    Work,
    default_hardware,
    read_hardware,
    write_hardware,
)
from recapp.planner.problem import dense_of, hosts_in_blocks
from recapp.processes.process_memory import free_memory_bytes, host_id, memory_pools
from recapp.processes.rank_environment import device_of, rank_info
from recapp.reporting.run_record import Performance, PlanReport
from recapp.sparse.jagged_tensor import KeyedTensor
from recapp.sparse.keyed_jagged_tensor import Batch, KeyedJaggedTensor
from recapp.tables.collections import EmbeddingBagCollection
from recapp.transport.communicator import Comm
from recapp.transport.join_ranks import make_comm
from recapp.transport.step_messages import AverageOverRanks

# ---- messages
# seconds = latency + bytes / rate, with the bytes that one rank sends in an all-to-all, or that the
# ranks sum in an all-reduce. Ranks 0, 1, ... of the first hosts take part; the others wait.
# Messages between hosts can be measured only where the ranks are on several hosts.

# the bytes that one rank sends to another in an all-to-all, and the bytes that an all-reduce sums
SIZES = (1 << 6, 1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
TURN_SECONDS = 0.02  # for one size in one round
MOST_REPEATS = 50
OVERLAP_BYTES = 1 << 21  # the dense gradients of a click model: half a million numbers

Kind = Literal["all_to_all", "all_reduce"]


@dataclass(frozen=True)
class LinkCost:
    """The cost of one kind of message among a number of ranks.

    Args:
        ranks: The number of ranks that take part.
        latency_us: The microseconds of an empty message.
        gb_per_s: The rate, which adds the time of the bytes.
        error: The median relative error of the fit of latency and rate.
    """

    ranks: int
    latency_us: float
    gb_per_s: float
    error: float


def first_ranks(world: int, transport: str, device: torch.device) -> Comm | None:
    """Return a Comm of the first ranks, or None on the other ranks. Every rank calls this function.

    Args:
        world: The number of ranks in the Comm.
        transport: The name of the transport; `auto` chooses one.
        device: The device of the messages, which decides the backend of the process group.

    Raises:
        LaunchError: The transport is given by name, and does not work here.
    """
    group = dist.new_group(list(range(world)), backend="nccl" if device.type == "cuda" else "gloo")
    return make_comm(group, device, transport) if dist.get_rank() < world else None


def reducer(comm: Comm) -> Callable[[torch.Tensor], Callable[[], object]]:
    """Return a function that starts an all-reduce of a tensor, as training reduces dense gradients.

    The returned function itself returns a function that waits for the result.
    """
    average = AverageOverRanks(comm) if comm.device.type == "cpu" else None

    def start(tensor: torch.Tensor) -> Callable[[], object]:
        if average is not None:
            average.start(tensor)
            return average.finish
        work: dist.Work = dist.all_reduce(tensor, group=comm.group, async_op=True)
        return work.wait

    return start


def measured_world_sizes(local: int, world: int) -> list[int]:
    """Return the world sizes at which messages are measured.

    These are 2, 4, ... and all ranks of one host; then all ranks of two, four, ... and all hosts.

    Args:
        local: The ranks of a host.
        world: All ranks.
    """

    def up_to(most: int) -> list[int]:
        return [min(2**i, most) for i in range(1, most.bit_length() + 1)]

    return sorted(
        {n for n in (*up_to(local), *(local * hosts for hosts in up_to(world // local))) if n > 1}
    )


def measure_link(
    kind: Kind,
    comm: Comm,
    device: torch.device,
    world: int,
    transport: str,
    *,
    sizes: Sequence[int] = SIZES,
    rounds: int = 5,
) -> LinkCost | None:
    """Return latency and rate of messages among the first ranks, or None on the other ranks.

    Every rank calls this function.

    Args:
        kind: The kind of message.
        comm: All ranks.
        device: The device of the messages.
        world: The number of ranks that take part.
        transport: The value of `engine.transport`.
        sizes: The sizes of messages in bytes.
        rounds: The number of rounds; each size has one turn in each round.
    """
    ranks = first_ranks(world, transport, device)
    cost = None
    if ranks is not None:
        turns = [_message(kind, ranks, size) for size in sizes]
        once = [max(ranks.all_gather(_time(ranks, turn, 2))) for turn in turns]
        repeats = [min(MOST_REPEATS, max(2, math.ceil(TURN_SECONDS / s))) for s in once]
        times: list[list[float]] = [[] for _ in sizes]
        for _ in range(rounds):
            for i, turn in enumerate(turns):
                times[i].append(max(ranks.all_gather(_time(ranks, turn, repeats[i]))))
        sent = [size * (world - 1) if kind == "all_to_all" else size for size in sizes]
        (latency, byte), error = fit([[1, n] for n in sent], [typical(t) for t in times])
        cost = LinkCost(world, latency * 1e6, 1e-9 / max(byte, 1e-15), error)
    comm.barrier()
    return cost


def _message(kind: Kind, ranks: Comm, size: int) -> Callable[[], object]:
    n = max(1, size // 4)
    if kind == "all_reduce":
        tensor = torch.zeros(n, device=ranks.device)
        reduce = reducer(ranks)
        return lambda: reduce(tensor)()
    buffer = torch.zeros(2 * ranks.world * n, device=ranks.device)
    send_W, recv_W = (
        [(offset + r * n, offset + (r + 1) * n) for r in range(ranks.world)]
        for offset in (0, ranks.world * n)
    )
    return lambda: ranks.swap(buffer, send_W, recv_W)()


def _time(ranks: Comm, turn: Callable[[], object], repeats: int) -> float:
    """Call `turn` several times in a row, and return the mean seconds of a call on this rank."""
    synchronise = synchroniser(ranks.device)
    ranks.barrier()
    turn()
    synchronise()
    began = time.perf_counter()
    for _ in range(repeats):
        turn()
    synchronise()
    return (time.perf_counter() - began) / repeats


def measure_overlap(comm: Comm, device: torch.device, transport: str, rounds: int = 5) -> float:
    """Return the share of an all-reduce that overlaps with a rank's computation, 0 to 1.

    The share is 0 where the core of a rank does both one after the other. Every rank calls this
    function.

    Args:
        comm: All ranks.
        device: The device of the gradients and of the computation.
        transport: The value of `engine.transport`.
        rounds: The number of rounds; computing, summing and both together have one turn in each
            round.
    """
    ranks = first_ranks(comm.world, transport, device)
    assert ranks is not None
    reduce = reducer(ranks)
    tensor = torch.zeros(OVERLAP_BYTES // 4, device=device)
    square = torch.randn(256, 256, device=device)
    alone = max(ranks.all_gather(_time(ranks, lambda: reduce(tensor)(), 3)))
    product = _time(ranks, lambda: square @ square, 10)
    products = max(ranks.all_gather(max(1, round(alone / product))))

    def compute() -> None:
        for _ in range(products):
            square @ square

    def both() -> None:
        wait = reduce(tensor)
        compute()
        wait()

    parts: dict[str, list[float]] = {"computing": [], "summing": [], "together": []}
    for _ in range(rounds):
        for part, turn in zip(parts, (compute, lambda: reduce(tensor)(), both), strict=True):
            parts[part].append(max(ranks.all_gather(_time(ranks, turn, 3))))
    computing, summing, together = map(typical, parts.values())
    return min(1.0, max(0.0, (computing + summing - together) / min(computing, summing)))


# ---- the machine

ROUNDS = 5
DENSE_TURNS = 4  # steps of the dense part in a round
COPIED_BYTES = 1 << 26  # several times the caches of a core
# the DLRM of conf/model/dlrm.yaml
DENSE_MODEL = NamedModel("default", 2048, 16, (256, 64), (256, 128, 1))
# The dense part is timed with a batch and with a fourth of its samples. Costs of a step that do not
# depend on the batch are in both times, so they cancel in the difference.
FEWER = 4
KINDS: tuple[Kind, Kind] = ("all_to_all", "all_reduce")


def calibrate(session: Session) -> None:
    """Measure this machine, write its hardware file, and add the rows of the table.

    Args:
        session: The session; its settings are those of `recapp.plan`.
    """
    recipe = session.settings
    on_cpu = recipe.trainer.accelerator == "cpu" or not torch.cuda.is_available()
    device = device_of("cpu" if on_cpu else "cuda", rank_info())
    hardware, rows = measure_hardware(
        session.comm, device, recipe.engine.transport, recipe.engine.backend
    )
    for row in rows:
        session.add(row)
    if session.comm.rank == 0:
        write_hardware(hardware, recipe.path)


def measure_hardware(
    comm: Comm,
    device: torch.device,
    transport: str = "auto",
    backend: str = "auto",
    *,
    rounds: int = ROUNDS,
    cases: Sequence[Case] = CASES,
    sizes: Sequence[int] = SIZES,
    model: NamedModel = DENSE_MODEL,
) -> tuple[Hardware, list[dict[str, Any]]]:
    """Measure the machine of these ranks. Every rank calls this function and gets the same result.

    Args:
        comm: The ranks, through a process group of the CPU.
        device: The device of rows and messages.
        transport: The transport of messages.
        backend: The backend of local kernels.
        rounds: The rounds of every measurement.
        cases: The timed steps of the engine.
        sizes: The sizes of messages in bytes.
        model: The model with the timed dense part.

    Returns:
        The hardware, and a row for each line of the table.
    """
    local = comm.world // hosts_in_blocks(comm.all_gather(host_id()))
    if comm.rank == 0:
        note("calibrating (a minute, more where kernels must be compiled first) ...")
    source = torch.zeros(COPIED_BYTES // 4, device=device)
    target = torch.zeros(COPIED_BYTES // 4, device=device)
    copy = _timed(comm, lambda: target.copy_(source), device, rounds)
    samples = measure_kernels(comm, device, backend, cases=cases, rounds=rounds)
    batches = (model.batch_size // FEWER, model.batch_size)
    few, many = (_dense_seconds(comm, model, batch, device, rounds) for batch in batches)
    links = {
        kind: [
            comm.broadcast(
                measure_link(kind, comm, device, world, transport, sizes=sizes, rounds=rounds)
            )
            for world in measured_world_sizes(local, comm.world)
        ]
        for kind in KINDS
    }
    overlap = (
        default_hardware(device.type).overlap
        if comm.world == 1
        else comm.broadcast(measure_overlap(comm, device, transport, rounds))
    )
    kernels, errors = fit_kernels(samples)
    measured = {
        "copy_gb_per_s": 2e-9 * COPIED_BYTES / copy,
        "flops_per_s": _flops_per_s(model, few, many, kernels["combine"].gb_per_s),
        "overlap": overlap,
    }
    hardware = _hardware(comm, device, local, transport, backend, kernels, links, measured)
    return comm.broadcast(hardware), _rows(kernels, errors, links, measured)


def _timed(comm: Comm, work: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Return the typical seconds of a function that all ranks call together, on the slowest."""
    wait = synchroniser(device)
    wait()
    parts = {"work": lambda _: work(), "wait": lambda _: wait()}
    ms = Steps(parts, before=comm.barrier).run(1 + rounds)["step"]
    return float(max(comm.all_gather(typical(ms[1:]) / 1e3)))


def _dlrm(model: NamedModel, batch_size: int, device: torch.device) -> DLRM:
    """Return a DLRM whose tables return constant vectors, which take a gradient as usual."""
    bags = EmbeddingBagCollection(model.workload().tables(), device=torch.device("meta"))
    dims = [x.dim for x in bags.lookups]
    vectors_BK = torch.rand(batch_size, sum(dims), device=device, requires_grad=True)
    pooled = KeyedTensor([x.output for x in bags.lookups], dims, vectors_BK)
    bags.__dict__["forward"] = lambda features: pooled
    with device:
        return DLRM(bags, DENSE, model.bottom_layers, model.top)


def _dense_seconds(
    comm: Comm, model: NamedModel, batch_size: int, device: torch.device, rounds: int
) -> float:
    """Return the typical seconds of a training step of a DLRM without its tables."""
    dlrm = _dlrm(model, batch_size, device)
    dense = [p for p in dlrm.parameters() if not p.is_meta]
    optimizer = torch.optim.Adam(dense, lr=1e-3, fused=True)
    dense_BI = torch.rand(batch_size, DENSE, device=device)
    labels_B = torch.randint(2, (batch_size,), device=device).float()
    nothing = torch.zeros(0, dtype=torch.int64)
    sparse = KeyedJaggedTensor([], nothing, lengths=nothing, stride=batch_size)
    batch = Batch(dense_BI, sparse, labels_B)

    def step() -> None:
        optimizer.zero_grad()
        logits_B: Tensor = dlrm(batch)
        loss: Any = nn.functional.binary_cross_entropy_with_logits(logits_B, labels_B)
        loss.backward()
        optimizer.step()

    return _timed(comm, step, device, DENSE_TURNS * rounds)


def _flops_per_s(model: NamedModel, few: float, many: float, gb_per_s: float) -> float:
    """Return the rate of the dense part: the difference of two batches in operations, as the
    planner counts them, over that in seconds, without the planner's time for moving pooled vectors.

    Args:
        model: The model of both batches.
        few: The seconds of the smaller batch.
        many: The seconds of the larger batch.
        gb_per_s: The rate of moving pooled vectors.
    """
    dense = dense_of(_dlrm(model, 1, torch.device("cpu")))
    more = model.batch_size - model.batch_size // FEWER
    moving = VECTOR_PASSES * dense.vector_bytes * more / (gb_per_s * 1e9)
    return dense.flops * more / max(many - few - moving, many / FEWER)


def with_overhead(path: Path, measured: Performance, predicted: PlanReport) -> dict[str, Any]:
    """Write the overhead of a step into a hardware file: the measured dense phase of a run minus
    the dense phase that the file predicts.

    Args:
        path: The path of the hardware file.
        measured: The content of the run's `performance.json`.
        predicted: The content of the run's `predicted.json`.

    Returns:
        The row for the table.
    """
    hardware = read_hardware(path)
    measured_ms = measured.mean_phases()["dense"]
    predicted_ms = predicted.mean_ms("dense")
    us = float(f"{max(0.0, (measured_ms - predicted_ms) * 1e3 + hardware.step_overhead_us):.4g}")
    source = hardware.source.removesuffix(_assumed_overhead(hardware.compute_device))
    source += (
        f"; a step's overhead is what {measured.steps} steps of recapp.train on "
        f"{measured.batch_per_rank} samples a rank took beside"
    )
    write_hardware(replace(hardware, step_overhead_us=us, source=source), path)
    return _row("step overhead", us=us)


def _assumed_overhead(device: str) -> str:
    return f"; a step's overhead is assumed as of {default_hardware(device).name}"


# ---- the hardware file and the table


def _hardware(
    comm: Comm,
    device: torch.device,
    local: int,
    transport: str,
    backend: str,
    kernels: Mapping[str, Work],
    links: Mapping[Kind, Sequence[LinkCost]],
    measured: Mapping[str, float],
) -> Hardware:
    assumed = default_hardware(device.type)
    machine = platform.machine()
    if device.type == "cuda":
        machine = torch.cuda.get_device_name(device)
    elif (info := Path("/proc/cpuinfo")).is_file():
        lines = [x for x in info.read_text().splitlines() if x.startswith("model name")]
        machine = lines[0].partition(":")[2].strip() if lines else machine
    free = [n for n in free_memory_bytes(comm.all_gather(memory_pools(device))) if n is not None]
    of_kind = {kind: _links(links[kind], local, getattr(assumed, kind)) for kind in KINDS}
    unmeasured = [
        reach
        for reach, has_ranks in (
            ("within a host", local > 1),
            ("between hosts", comm.world > local),
        )
        if not has_ranks
    ]
    threads = torch.get_num_threads()
    source = (
        f"measured on {date.today()} by python -m recapp.plan calibrate: {comm.world} ranks of "
        f"{threads} thread{'s' if threads > 1 else ''} on {machine}, {os.cpu_count()} cores, "
        f"transport {transport}, kernels {make_backend(backend, device).name}; a plain copy moves "
        f"{measured['copy_gb_per_s']:.1f} GB/s"
    )
    if unmeasured:
        source += (
            f"; messages {' and '.join(unmeasured)} were not measured but are assumed as of "
            f"{assumed.name}"
        )
    source += _assumed_overhead(device.type)
    return Hardware(
        f"{comm.world} ranks on {machine}",
        source,
        "cuda" if device.type == "cuda" else "cpu",
        local,
        min(free, default=None),
        {name: Work(*(float(f"{x:.4g}") for x in astuple(work))) for name, work in kernels.items()},
        of_kind["all_to_all"],
        of_kind["all_reduce"],
        float(f"{measured['flops_per_s']:.4g}"),
        round(measured["overlap"], 3),
        assumed.step_overhead_us,
        assumed.graph_us,
        assumed.dense_us,
        assumed.cut_us,
    )


def _links(costs: Sequence[LinkCost], local: int, assumed: Mapping[str, Link]) -> dict[str, Link]:
    """Return the links `host`, by the number of ranks, and `network`, by the number of hosts.

    Args:
        costs: The measured costs of one kind of message.
        local: The ranks of a host.
        assumed: The links for a part that was not measured.
    """
    parts = {
        "host": [(cost.ranks, cost) for cost in costs if cost.ranks <= local],
        "network": [(cost.ranks // local, cost) for cost in costs if cost.ranks > local],
    }
    return {
        link: Link(
            {n: float(f"{cost.latency_us:.4g}") for n, cost in part},
            {n: float(f"{cost.gb_per_s:.4g}") for n, cost in part},
        )
        if part
        else assumed[link]
        for link, part in parts.items()
    }


def _rows(
    kernels: Mapping[str, Work],
    errors: Mapping[str, float],
    links: Mapping[Kind, Sequence[LinkCost]],
    measured: Mapping[str, float],
) -> list[dict[str, Any]]:
    """Return the rows of the table: fitted kernels, messages, dense part."""
    rows = [
        _row(
            name,
            us=kernels[name].step_us + kernels[name].call_us,
            items_per_second=1e9 / kernels[name].item_ns if kernels[name].item_ns else None,
            gb_per_s=kernels[name].gb_per_s if kernels[name].gb_per_s < 1e5 else None,
            error=errors[name],
        )
        for name in KERNELS
    ]
    rows += [
        _row(
            f"{kind}, {cost.ranks} ranks",
            us=cost.latency_us,
            gb_per_s=cost.gb_per_s,
            error=cost.error,
        )
        for kind in KINDS
        for cost in links[kind]
    ]
    return [
        *rows,
        _row("copy", gb_per_s=measured["copy_gb_per_s"]),
        _row("dense part", gflop_per_s=measured["flops_per_s"] / 1e9),
        _row("overlap", share=measured["overlap"]),
    ]


def _row(name: str, **numbers: float | None) -> dict[str, Any]:
    """Return a row of the table; numbers that it does not have are None."""
    keys = ("us", "items_per_second", "gb_per_s", "gflop_per_s", "share", "error")
    return {"name": name, **dict.fromkeys(keys), **numbers}
