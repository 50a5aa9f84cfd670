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

from recapp.distributed.rank_process import rank_main


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
    from recapp.distributed.comm import leave_process_group
    from recapp.distributed.resources import keep_freed_memory

    if settings["launch"]["keep_freed_memory"]:
        keep_freed_memory()  # as the product's own worker does
    comm = join()
    session = Session(settings, comm, Path(settings["folder"]), job_dir)
    import_module(f"recapp.benchmarks.{settings['verb']}").run(session)
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
