"""`calibrate`: what lookup, update, messages and the dense part cost on this machine, as a hardware
file for the planner.

    kernels (`kernel_costs`) + links (`link_costs`)   -> PATH, and a record of each number that was
        + dense part + plain copy                        found
    a short run of recapp.train, priced with PATH     -> what its dense phase takes beside that:
                                                         a step's overhead

Everything is timed in rounds (medians of turns, the lower quartile of rounds), on all ranks at
once, because ranks share memory and cores. It takes about a minute; where kernels must be compiled
first, one or two more.
"""

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from recapp.benchmarks.fit import typical
from recapp.benchmarks.kernel_costs import (
    CASES,
    WIDTHS,
    Case,
    Sample,
    fit_kernels,
    measure_kernels,
    synchroniser,
    turns,
)
from recapp.benchmarks.link_costs import SIZES, Found, Kind, measure_link, measure_overlap, worlds
from recapp.benchmarks.models import DENSE, NamedModel
from recapp.benchmarks.session import Session
from recapp.console import progress
from recapp.errors import ConfigError, suggest
from recapp.kernels.backend import BACKENDS, SETTING
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
from recapp.planner.problem import dense_of
from recapp.planner.topology import hosts_in_blocks
from recapp.processes.process_memory import free_memory_bytes, host_id, memory_pools
from recapp.sparse.batch import Batch
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.sparse.keyed_tensor import KeyedTensor
from recapp.tables.config import EmbeddingBagConfig
from recapp.tables.lookups import lookups_of
from recapp.transport.choose_transport import check_transport
from recapp.transport.communicator import Comm

PATH = "hardware.yaml"  # where nothing is said
ROUNDS = 5
DENSE_TURNS = 4  # steps of the dense part in a round
COPIED_BYTES = 1 << 26  # several times the caches of a core
# the DLRM of conf/model/dlrm.yaml
DENSE_MODEL = NamedModel("default", 2048, 16, (256, 64), (256, 128, 1))
# a batch of the dense part, and one of so many times fewer samples: what a step takes at all falls
# out
FEWER = 4
KINDS: tuple[Kind, Kind] = ("all_to_all", "all_reduce")


def settings_for(config: Mapping[str, Any], path: str | None = None) -> dict[str, Any]:
    """What the ranks are told, checked before any is started.

    Args:
        config: settings with `trainer` (devices, accelerator), `topology` (transport, backend),
            `launch` and `format`.
        path: of the hardware file; None: `hardware.yaml` here.

    Returns:
        What `recapp.app.command.run_on_ranks` gives to the ranks of
        `recapp.benchmarks.bench_worker`; its rows are then in `metrics.json`.

    Raises:
        ConfigError: the file cannot be there, or the transport or backend is none.
    """
    place = Path(path or PATH).expanduser().absolute()
    if (
        place.is_dir()
        or not place.parent.is_dir()
        or not os.access(place if place.exists() else place.parent, os.W_OK)
    ):
        why = "is a directory" if place.is_dir() else "cannot be written"
        raise ConfigError(
            f"path={path or PATH}: {why}: name a file in a directory that is there, such as "
            f"path={PATH}"
        )
    engine = config["engine"]
    check_transport(engine["transport"])
    if engine["backend"] not in BACKENDS:
        raise ConfigError(
            f"{SETTING}={engine['backend']}: unknown; {suggest(str(engine['backend']), BACKENDS)}"
        )
    return {
        "verb": "calibrate",
        "path": str(place),
        "transport": engine["transport"],
        "backend": engine["backend"],
        "keep_freed_memory": engine["keep_freed_memory"],
        "rounds": ROUNDS,
        "folder": "",
        **{key: config[key] for key in ("trainer", "launch", "format")},
    }


def run(session: Session) -> None:
    """Measure this machine and write its hardware file; a record for each line of the table."""
    settings = session.settings
    device = _device(session.settings["trainer"]["accelerator"])
    make_backend(settings["backend"], device)
    hardware, rows = calibrate(
        session.comm, device, settings["transport"], settings["backend"], rounds=settings["rounds"]
    )
    for row in rows:
        session.add(row)
    if session.comm.rank == 0:
        write_hardware(hardware, settings["path"])


def _device(accelerator: str) -> torch.device:
    if accelerator == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    return device


def calibrate(
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
    """Measure the machine that these ranks run on. Every rank calls it and gets the same.

    Args:
        comm: the ranks, through a process group of the CPU.
        device: where rows and messages live.
        transport: of messages.
        backend: local kernels.
        rounds: of everything.
        cases: steps of the engine that are timed.
        sizes: of messages.
        model: whose dense part is timed.

    Returns:
        The hardware, and a record for each line of the table.
    """
    local = comm.world // hosts_in_blocks(comm.all_gather(host_id()))
    asked = worlds(local, comm.world)
    total = turns(cases, rounds) + 2 * rounds * len(asked) + 3
    with progress("calibrating, turns", total if comm.rank == 0 else 0) as told:
        advance = told if comm.rank == 0 else lambda _: None
        copy = _slowest(comm, _copy_seconds(comm, device, rounds))
        advance(1)
        samples = measure_kernels(
            comm, device, backend, cases=cases, rounds=rounds, advance=advance
        )
        batches = (model.batch_size // FEWER, model.batch_size)
        few, many = (
            _slowest(comm, _dense_seconds(comm, model, batch, device, rounds)) for batch in batches
        )
        advance(1)
        links: dict[Kind, list[Found]] = {kind: [] for kind in KINDS}
        for kind in KINDS:
            for world in asked:
                found = measure_link(
                    kind,
                    comm,
                    device,
                    world,
                    transport,
                    sizes=sizes,
                    rounds=rounds,
                    advance=advance,
                )
                links[kind].append(comm.broadcast(found))
        alone = comm.world == 1
        overlap = (
            default_hardware(device.type).overlap
            if alone
            else comm.broadcast(measure_overlap(comm, device, transport, rounds))
        )
        advance(1)
    kernels, errors = fit_kernels(samples)
    flops_per_s = _flops_per_s(model, few, many, kernels["combine"].gb_per_s)
    measured = {
        "copy_gb_per_s": 2e-9 * COPIED_BYTES / copy,
        "flops_per_s": flops_per_s,
        "overlap": overlap,
    }
    hardware = _hardware(comm, device, local, transport, backend, kernels, links, measured)
    return comm.broadcast(hardware), _rows(samples, kernels, errors, links, measured)


def _slowest(comm: Comm, seconds: float) -> float:
    return float(max(comm.all_gather(seconds)))


def _timed(comm: Comm, work: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Seconds of a round, all ranks beginning together."""
    wait = synchroniser(device)
    times = []
    for _ in range(1 + rounds):
        wait()
        comm.barrier()
        began = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - began)
    return typical(times[1:])


def _copy_seconds(comm: Comm, device: torch.device, rounds: int) -> float:
    source = torch.zeros(COPIED_BYTES // 4, device=device)
    target = torch.zeros(COPIED_BYTES // 4, device=device)
    return _timed(comm, lambda: target.copy_(source), device, rounds)


class _Pooled(nn.Module):
    """In place of tables: pooled vectors that want a gradient, as those of tables do."""

    def __init__(
        self, tables: Sequence[EmbeddingBagConfig], batch_size: int, device: torch.device
    ) -> None:
        super().__init__()
        self.tables = list(tables)
        self.lookups = lookups_of(tables)
        width = sum(t.embedding_dim for t in tables)
        self.register_buffer(
            "vectors_BK",
            torch.rand(batch_size, width, device=device).requires_grad_(),
            persistent=False,
        )

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The tables whose vectors these would be."""
        return self.tables

    def leave_room(self, columns: int) -> None:
        """It makes no vectors that anything could stand before."""

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """The same vectors whatever is asked."""
        vectors: Any = self.vectors_BK
        return KeyedTensor([x.output for x in self.lookups], [x.dim for x in self.lookups], vectors)


def _dlrm(model: NamedModel, batch_size: int, device: torch.device) -> DLRM:
    tables = model.workload().tables()
    return DLRM(_Pooled(tables, batch_size, device), DENSE, model.bottom_layers, model.top).to(
        device
    )


def _dense_seconds(
    comm: Comm, model: NamedModel, batch_size: int, device: torch.device, rounds: int
) -> float:
    """A training step of a DLRM without its tables."""
    dlrm = _dlrm(model, batch_size, device)
    optimizer = torch.optim.Adam(dlrm.parameters(), lr=1e-3, fused=True)
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
    """Operations of the samples that one batch has more than the other, as plans count them, by the
    seconds that it takes longer.

    Less those that plans count for moving the pooled vectors.
    """
    dense = dense_of(_dlrm(model, 1, torch.device("cpu")))
    more = model.batch_size - model.batch_size // FEWER
    moving = VECTOR_PASSES * dense.vector_bytes * more / (gb_per_s * 1e9)
    return dense.flops * more / max(many - few - moving, many / FEWER)


def with_overhead(
    path: Path, measured: Mapping[str, Any], predicted: Mapping[str, Any]
) -> dict[str, Any]:
    """Write into a hardware file what a run's dense phase took beside what was predicted of it with
    that file.

    Args:
        path: of the file.
        measured: `performance.json` of the run.
        predicted: its `predicted.json`.

    Returns:
        The record for the table.
    """
    hardware = read_hardware(path)
    seen = sum(rank["dense"] for rank in measured["phases_ms"]) / len(measured["phases_ms"])
    said = sum(rank["dense_ms"] for rank in predicted["ranks"]) / len(predicted["ranks"])
    us = float(f"{max(0.0, (seen - said) * 1e3 + hardware.step_overhead_us):.4g}")
    source = hardware.source.removesuffix(_assumed_overhead(hardware.compute_device))
    source += (
        f"; a step's overhead is what {measured['steps']} steps of recapp.train on "
        f"{measured['batch_per_rank']} samples a rank "
        "took beside"
    )
    write_hardware(replace(hardware, step_overhead_us=us, source=source), path)
    return _row("step overhead", us, None, None)


def _assumed_overhead(device: str) -> str:
    return f"; a step's overhead is assumed as of {default_hardware(device).name}"


# ---- what it comes to


def _hardware(
    comm: Comm,
    device: torch.device,
    local: int,
    transport: str,
    backend: str,
    kernels: Mapping[str, Work],
    links: Mapping[Kind, Sequence[Found]],
    measured: Mapping[str, float],
) -> Hardware:
    assumed = default_hardware(device.type)
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    free = [n for n in free_memory_bytes(comm.all_gather(memory_pools(device))) if n is not None]
    places = {kind: _by_place(links[kind], local, getattr(assumed, kind)) for kind in KINDS}
    lacking = [
        place
        for place, there in (("within a host", local > 1), ("between hosts", comm.world > local))
        if not there
    ]
    source = (
        f"measured on {date.today()} by python -m recapp.plan calibrate: {comm.world} ranks of "
        f"{torch.get_num_threads()} "
        f"thread{'s' if torch.get_num_threads() > 1 else ''} on {machine}, {os.cpu_count()} "
        f"cores, transport {transport}, kernels "
        f"{make_backend(backend, device).name}; a plain copy moves "
        f"{measured['copy_gb_per_s']:.1f} GB/s"
    )
    if lacking:
        source += (
            f"; messages {' and '.join(lacking)} were not measured but are assumed as of "
            f"{assumed.name}"
        )
    source += _assumed_overhead(device.type)
    return Hardware(
        f"{comm.world} ranks on {machine}",
        source,
        device.type,
        local,
        min(free, default=None),
        {name: _rounded_work(work) for name, work in kernels.items()},
        places["all_to_all"],
        places["all_reduce"],
        float(f"{measured['flops_per_s']:.4g}"),
        round(measured["overlap"], 3),
        assumed.step_overhead_us,
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )


def _by_place(found: Sequence[Found], local: int, assumed: Mapping[str, Link]) -> dict[str, Link]:
    """Within a host by ranks, between hosts by hosts; assumed where nothing was measured."""
    parts = {
        "host": [(f.ranks, f) for f in found if f.ranks <= local],
        "network": [(f.ranks // local, f) for f in found if f.ranks > local],
    }
    return {
        place: Link(
            {n: float(f"{f.latency_us:.4g}") for n, f in part},
            {n: float(f"{f.gb_per_s:.4g}") for n, f in part},
        )
        if part
        else assumed[place]
        for place, part in parts.items()
    }


def _rounded_work(work: Work) -> Work:
    return Work(
        *(
            float(f"{number:.4g}")
            for number in (work.call_us, work.item_ns, work.gb_per_s, work.step_us)
        )
    )


def _rows(
    samples: Mapping[str, Sequence[Sample]],
    kernels: Mapping[str, Work],
    errors: Mapping[str, float],
    links: Mapping[Kind, Sequence[Found]],
    measured: Mapping[str, float],
) -> list[dict[str, Any]]:
    """The table: what was fitted, then lookup and update by width as they were measured."""
    rows = [
        _row(
            name,
            kernels[name].step_us + kernels[name].call_us,
            1e9 / kernels[name].item_ns if kernels[name].item_ns else None,
            kernels[name].gb_per_s if kernels[name].gb_per_s < 1e5 else None,
            error=errors[name],
        )
        for name in KERNELS
    ]
    for kernel in ("combine", "update"):
        for width in WIDTHS:
            alike = [s for s in samples[kernel] if s.widths == (width,)]
            if alike:
                most = max(alike, key=lambda s: s.bytes)
                us = most.seconds * 1e6
                rows.append(
                    _row(
                        f"{kernel}, width {width}",
                        us,
                        most.items / most.seconds,
                        most.bytes / us / 1e3,
                    )
                )
    rows += [
        _row(f"{kind}, {f.ranks} ranks", f.latency_us, None, f.gb_per_s, error=f.error)
        for kind in KINDS
        for f in links[kind]
    ]
    rows.append(_row("copy", None, None, measured["copy_gb_per_s"]))
    return [
        *rows,
        _row("dense part", None, None, None, gflop_per_s=measured["flops_per_s"] / 1e9),
        _row("overlap", None, None, None, share=measured["overlap"]),
    ]


def _row(
    name: str,
    us: float | None,
    items: float | None,
    gb: float | None,
    *,
    error: float | None = None,
    gflop_per_s: float | None = None,
    share: float | None = None,
) -> dict[str, Any]:
    return {
        "name": name,
        "us": us,
        "items_per_second": items,
        "gb_per_s": gb,
        "gflop_per_s": gflop_per_s,
        "share": share,
        "error": error,
    }
