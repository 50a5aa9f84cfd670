"""A worker of which rank 1 is killed while rank 0 waits for what it should send."""

import os
import signal
from pathlib import Path
from typing import Any


def run(config: dict[str, Any], directory: Path) -> None:
    import torch
    import torch.distributed as dist

    from recapp.transport.join_ranks import make_comm

    dist.init_process_group("gloo")
    comm = make_comm(transport="shared_memory")
    # elastic ends rank 0 as soon as it misses rank 1: it is to notice by itself
    signal.signal(signal.SIGTERM, lambda *_: None)
    comm.barrier()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        comm.swap(torch.zeros(8), [(0, 0), (0, 4)], [(0, 0), (4, 8)])()
    except Exception as error:
        (directory / "said0").write_text(f"{type(error).__name__}: {error}")
        raise
