"""What every rank of a benchmark runs: join the others, measure one verb, leave records and
pictures.

    JOB/resolved.yaml -> run -> JOB/rows.json, JOB/metrics.json, JOB/*.png
"""

import json
import os
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

from recapp.processes.rank_process import rank_main

MEASUREMENTS = {
    "kernels": "recapp.benchmarks.kernels",
    "memory": "recapp.benchmarks.backward_memory",
    "step": "recapp.benchmarks.embedding_step",
    "train": "recapp.benchmarks.whole_step",
    "strategies": "recapp.benchmarks.strategies",
    "data": "recapp.benchmarks.data",
    "calibrate": "recapp.benchmarks.calibrate",
}
"""The module that measures a verb; its `run(session)` is called on every rank."""


def run(settings: dict[str, Any], job_dir: Path) -> None:
    """Measure what the settings ask for; rank 0 leaves `metrics.json` with the records as `rows`.

    Args:
        settings: of `recapp.bench`, checked; `verb` says which measurement, `folder` where its
            files may lie.
        job_dir: where the run writes.
    """
    os.environ.setdefault("MKL_DYNAMIC", "FALSE")
    warnings.filterwarnings("ignore", ".*[Ss]parse invariant checks.*")
    from recapp.benchmarks.ranks import join
    from recapp.benchmarks.session import Session
    from recapp.processes.process_memory import keep_freed_memory
    from recapp.transport.communicator import leave_process_group

    if settings["keep_freed_memory"]:
        keep_freed_memory()  # as the product's own worker does
    comm = join()
    session = Session(settings, comm, Path(settings["folder"]), job_dir)
    import_module(MEASUREMENTS[settings["verb"]]).run(session)
    comm.barrier()
    if comm.rank == 0:
        from recapp.benchmarks.figures import draw

        pictures = draw(settings["verb"], session.rows, job_dir)
        (job_dir / "metrics.json").write_text(
            json.dumps({"rows": session.rows, "pictures": pictures}, indent=1) + "\n"
        )
    leave_process_group()


if __name__ == "__main__":
    rank_main(run)
