"""The laboratory: settings, and the session of one rank, with the contenders of other systems.

settings -> FOLDER/settings.yaml -> ranks, `run` -> FOLDER/metrics.json
"""

import json
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from recapp.benchmarks.session import EPS, LEARNING_RATE, Session, make_plan, rule
from recapp.benchmarks.timing import MOST_STEPS
from recapp.benchmarks.workloads import BATCHES, HUGECTR_TOP, NamedModel, Workload
from recapp.cli.command import recipe_under
from recapp.engine.sharded_collection import shard_bags
from recapp.planner.planner_settings import PlanRule, PlanSettings
from recapp.processes.process_memory import keep_freed_memory
from recapp.processes.rank_environment import device_of, rank_info
from recapp.settings.records import record, to_plain
from recapp.tables.config import PoolingType
from recapp.tables.table_settings import listed_tables
from recapp.transport.communicator import Comm, leave_process_group

from .rivals import Absent, Rival, rivals
from .torchrec_worker import profiled

PROFILED_STEPS = 10
WHOLE = PlanSettings(rules=(PlanRule("table_wise"),))  # cuts no table
PLANS = {  # beside those of conf/plan
    # HugeCTR's notebook: small tables on every rank, the others whole, each on one rank
    "hugectr_mixed": [{"type": "data_parallel", "rows_at_most": 6000}, {"type": "table_wise"}],
    # mixed, with what TorchRec has on the CPU instead of row_wise
    "torchrec_mixed": [
        {"type": "column_wise", "rows_above": 100000},
        {"type": "data_parallel", "rows_at_most": 6000},
        {"type": "table_wise"},
    ],
}
MEASUREMENTS = {
    "kernels": "kernels.measure_kernels",
    "memory": "kernels.measure_memory",
    "quantised": "quantised_lookup.run",
    "step": "beside_torchrec.measure_step",
    "train": "beside_torchrec.measure_training",
    "dense": "dense_part.run",
    "dynamic": "dynamic_tables.run",
    "inference": "inference.run",
    "serve": "serving_load.run",
    "start": "start_times.run",
}
"""The function of each verb; every rank calls it with its session."""
# Criteo 1 TB, its long columns modulo 4 million: 13 GB at 128 columns, so that the tables of four
# contenders fit on one GPU
LONG = 4_000_000
TERABYTE_ROWS = (
    *(LONG, 36084, 17217, 7378, 20134, 3, 7112, 1442, 61, LONG, 1333352, 313829, 10),
    *(2208, 11156, 122, 4, 970, 14, LONG, LONG, LONG, 415421, 12420, 101, 36),
)


@dataclass(frozen=True)
class TerabyteModel(NamedModel):
    """A DLRM over tables of Criteo 1 TB's sizes, for GPUs."""

    bag: int = 1

    def workload(self):
        """Return the tables of the model and the shape of its batches."""
        count = len(TERABYTE_ROWS)
        shape = TERABYTE_ROWS, (self.dim,) * count, (self.bag,) * count
        return Workload(self.name, self.batch_size, *shape)


TERABYTE_MODELS = {
    name: TerabyteModel(name, samples, 128, (512, 256), HUGECTR_TOP, bag)
    for name, samples, bag in (
        ("tb_2048", 2048, 1),
        ("tb_8192", 8192, 1),
        ("tb_8192_ten_ids", 8192, 10),
        ("tb_65536", 65536, 1),
    )
}
DEFAULTS = {
    "quantised": {"workload": ["L48k"], "batch_size": [1, 64, 4096], "threads": [1, 2]},
    "kernels": {"threads": [1, 2]},
    "memory": {"batch_size": [32, 4096]},
    "step": {"ranks": 2, "plan": ["table_wise", "row_wise", "hugectr_mixed", "torchrec_mixed"]},
    "train": {"ranks": 2},
    "dense": {"model": ["dlrm"], "batch_size": [512, 4096]},
    "dynamic": {"ranks": 2, "batch_size": [100_000]},
    "inference": {"batch_size": [1, 64, 4096]},
    "serve": {"batch_size": [1, 64]},
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of the laboratory; each verb reads some of them."""

    verb: str
    folder: str = ""
    workload: list[str] = field(default_factory=lambda: ["W1"])
    model: list[str] = field(default_factory=lambda: ["small"])
    plan: list[str] = field(default_factory=lambda: ["table_wise"])
    transport: str = "auto"
    backend: str = "auto"
    ranks: int = 1
    threads: list[int] = field(default_factory=lambda: [1])
    rounds: int = 7
    round_seconds: float = 0.5
    batch_size: list[int] = field(default_factory=lambda: [64])
    ids: list[str] = field(default_factory=lambda: ["uniform"])
    bag: int = 10
    device: str = "cpu"
    bf16: bool = False
    keys: int = 10_000_000
    compile: bool = False
    quantize: list[str] = field(default_factory=lambda: ["none", "int8"])
    artefact: str | None = None
    protocol: list[str] = field(default_factory=lambda: ["rows", "json", "binary"])
    load: list[float] = field(default_factory=lambda: [0.25, 0.5, 0.75, 1.25])
    cache: list[str] = field(default_factory=lambda: ["warm"])
    torchrec_python: str | None = None
    baseline: str | None = None


class Lab(Session):
    """A session of `recapp.bench` whose measurements also have contenders of other systems."""

    def __init__(self, settings, comm, directory):
        device = device_of(settings.device, rank_info())
        super().__init__(settings, comm, directory, device=device)
        self.folder = Path(settings.folder)

    def measure(self, title, contenders, most=MOST_STEPS, threads=None):
        """Time contenders, on a number of threads each."""
        if threads is not None:
            torch.set_num_threads(threads)
            for contender in contenders.values():
                if isinstance(contender, Rival):
                    contender.threads = threads
        return super().measure(title, contenders, most)

    def rivals(self, name, specs):
        """Return a context with the contenders `<name>` and `<name>_tuned` of another Python.

        On a GPU the allocator of the host does not count, and memory is dear: there is one.
        """
        python = self.settings.torchrec_python
        threads = max(self.settings.threads)
        tuned = self.device.type == "cpu"
        return rivals(name, python, specs, self.folder, self.comm, threads, tuned)

    def by_threads(self, title, contenders, specs):
        """Time contenders and FBGEMM on each number of threads of the settings in turn."""
        with self.rivals("fbgemm", specs) as others:
            for threads in self.settings.threads:
                everybody = {**contenders, **others}
                label = f"{title}, threads: {threads}"
                yield threads, self.measure(label, everybody, threads=threads)

    def ranks(self):
        """Set the threads of this rank, and return the ranks through the transport."""
        torch.set_num_threads(self.settings.threads[0])
        return self.transport(self.settings.transport)

    def plan(self, name, tables, batches, lookups=None):
        """Return a plan of `conf/plan` or of `PLANS`."""
        plain = {"rules": PLANS[name]} if name in PLANS else None
        plain = plain or to_plain(recipe_under("plan", [f"+plan={name}"]).plan)
        return make_plan(
            name, record(PlanSettings, plain, "plan"), tables, self.comm, batches, lookups
        )

    def autocast(self):
        """Return a context in which a model computes in bf16, if the settings say so."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.settings.bf16)

    def on_gpu(self, contenders):
        """Return a part of a row of results: what a step of each contender gives a GPU to do."""
        if self.device.type == "cpu":
            return {}
        work = {
            name: each.profiled(PROFILED_STEPS)
            if isinstance(each, Rival)
            else profiled(lambda _, each=each: each.run(1), PROFILED_STEPS)
            for name, each in contenders.items()
            if not isinstance(each, Absent)
        }
        return {"gpu": work}

    def listed_tables(self):
        """Return the tables of `tables=sample`."""
        return listed_tables(recipe_under("plan", ["tables=sample"]).tables).tables

    def whole(self, tables, batches, comm, by=None):
        """Return a sharded collection of bags with uncut tables."""
        plan = make_plan("table_wise", WHOLE, tables, comm, batches)
        return shard_bags(tables, plan, comm, by or rule(), backend=self.settings.backend)

    def batches(self, workload):
        """Return this rank's batches, and write their ids to a file that rivals read."""
        return workload.features_of(self.ids_of(workload))

    def ids_of(self, workload, batches=BATCHES):
        """Return the ids of this rank's batches, and write them to a file that rivals read."""
        ids_NL = workload.draw(self.comm.rank, batches)
        path = self.ids_file(workload, self.comm.rank)
        if not path.exists():
            np.save(path, ids_NL.numpy())
        self.comm.barrier()
        return ids_NL

    def ids_file(self, workload, rank):
        """Return the path of the file with a rank's ids."""
        return self.folder / f"{workload.name}_{rank}.npy"

    def specs(self, kind, workload: Workload, plan=None, **more):
        """Return the specs of a rival's processes, one for each rank (`torchrec_worker.py`)."""
        tables = list(zip(workload.features, workload.rows_F, workload.dim_F, strict=True))
        shardings = {} if plan is None else plan.tables
        return [
            {
                "kind": kind,
                "tables": tables,
                "batch_size": workload.batch_size,
                "bags": workload.bag_F,
                "pooled": workload.pooling is PoolingType.SUM,
                "ids": str(self.ids_file(workload, rank)),
                "device": self.settings.device,
                "bf16": self.settings.bf16,
                "learning_rate": LEARNING_RATE,
                "eps": EPS,
                "sharding": {
                    name: (sharding.sharding_type, [shard.rank for shard in sharding.shards])
                    for name, sharding in shardings.items()
                },
            }
            | more
            for rank in range(self.comm.world)
        ]


def run(plain, directory):
    """Measure on this rank, and write the rows of results on rank 0."""
    settings = Settings(**plain)
    keep_freed_memory()
    here = rank_info()
    if here is not None and here.world > 1:
        dist.init_process_group("gloo" if settings.device == "cpu" else "cpu:gloo,cuda:nccl")
    if settings.device == "cuda":
        torch.set_float32_matmul_precision("high")
    lab = Lab(settings, Comm(), directory)
    module, function = MEASUREMENTS[settings.verb].split(".")
    getattr(import_module(f".{module}", __package__), function)(lab)
    lab.comm.barrier()
    lab.write("metrics.json")
    leave_process_group()


def rows_of(directory):
    """Return the rows of results of a measurement."""
    return json.loads((directory / "metrics.json").read_text())["rows"]
