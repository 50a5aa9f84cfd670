"""The worker of a benchmark, which every rank runs: it joins the other ranks, runs the measurement
of one verb, and writes records and pictures.

    JOB/resolved.yaml -> run -> JOB/rows.json, JOB/metrics.json, JOB/*.png
"""

import json
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

MEASUREMENTS = {
    "kernels": "recapp.benchmarks.kernels",
    "quantised": "recapp.benchmarks.quantised_lookup",
    "memory": "recapp.benchmarks.kernels",
    "step": "recapp.benchmarks.embedding_step",
    "train": "recapp.benchmarks.whole_step",
    "strategies": "recapp.benchmarks.embedding_step",
    "data": "recapp.benchmarks.data",
    "dynamic": "recapp.benchmarks.dynamic_tables",
    "serve": "recapp.benchmarks.serving_load",
    "calibrate": "recapp.benchmarks.calibrate",
}
"""The module of each verb; every rank calls its `run(session)`."""


def run(plain: dict[str, Any], job_dir: Path, measure: Callable[[Any], None] | None = None) -> None:
    """Run the measurement of the settings. Rank 0 writes the records to `metrics.json` as `rows`.

    Args:
        plain: The plain values of `BenchSettings`.
        job_dir: The directory of the records and pictures.
        measure: The function that measures in a `Session`; None takes the measurement of the verb.
    """
    warnings.filterwarnings("ignore", ".*[Ss]parse invariant checks.*")
    from recapp.benchmarks.bench_settings import BenchSettings
    from recapp.benchmarks.ranks import join
    from recapp.benchmarks.session import Session
    from recapp.processes.process_memory import keep_freed_memory
    from recapp.settings.records import record
    from recapp.transport.communicator import leave_process_group

    settings = record(BenchSettings, plain)
    if settings.keep_freed_memory:
        keep_freed_memory()  # as the worker of training does
    comm = join()
    session = Session(settings, comm, Path(settings.folder), job_dir)
    (measure or import_module(MEASUREMENTS[settings.verb]).run)(session)
    comm.barrier()
    if comm.rank == 0:
        from recapp.benchmarks.figures import draw

        pictures = draw(settings.verb, session.rows, job_dir)
        (job_dir / "metrics.json").write_text(
            json.dumps({"rows": session.rows, **session.more, "pictures": pictures}, indent=1)
            + "\n"
        )
    leave_process_group()
