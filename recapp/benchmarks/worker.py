"""What every rank of a benchmark runs: join the others, measure one verb, leave records and pictures.

    JOB/resolved.yaml -> run -> JOB/rows.json, JOB/metrics.json, JOB/*.png
"""

import json
import os
import shutil
import tempfile
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

from recapp.distributed.rank_process import rank_main


def run(settings: dict[str, Any], job_dir: Path) -> None:
    """Measure what the settings ask for; rank 0 leaves `metrics.json` with the records as `rows`.

    Args:
        settings: of `recapp.bench`, checked; `verb` says which measurement.
        job_dir: where the run writes.
    """
    os.environ.setdefault("MKL_DYNAMIC", "FALSE")
    warnings.filterwarnings("ignore", ".*[Ss]parse invariant checks.*")
    from recapp.benchmarks.ranks import join
    from recapp.benchmarks.session import Session
    from recapp.distributed.comm import leave_process_group

    comm = join()
    folder = Path(comm.broadcast(tempfile.mkdtemp(prefix="recapp_bench_") if comm.rank == 0 else None))
    try:
        session = Session(settings, comm, folder, job_dir)
        import_module(f"recapp.benchmarks.{settings['verb']}").run(session)
        comm.barrier()
    finally:
        if comm.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    if comm.rank == 0:
        from recapp.benchmarks.figures import draw

        pictures = draw(settings["verb"], session.rows, job_dir)
        (job_dir / "metrics.json").write_text(json.dumps({"rows": session.rows, "pictures": pictures}, indent=1) + "\n")
    leave_process_group()


if __name__ == "__main__":
    rank_main(run)
