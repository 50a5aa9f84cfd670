"""The running statistics of layers, such as batch norm: means and variances of training batches, by
which an evaluation normalises.

Each rank sees its own rows, so its statistics are its own. The ranks average them after every step.
Otherwise ranks would evaluate by different functions, and a checkpoint would have those of one
rank. The average of the ranks' running means is the running mean of their averages, because both
are linear. DDP's `broadcast_buffers` would take the statistics of rank 0 alone.
"""

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from recapp.engine.sharded_collection import sharded_collections

OF_BATCH_NORM = ("running_mean", "running_var")


def running_statistics(module: nn.Module) -> list[Tensor]:
    """Return the running statistics of the dense part of a model.

    Those are the buffers of torch's batch norms, and the buffers that another layer names in
    `running_statistics`.
    """
    inside = {id(part) for held in sharded_collections(module) for part in held.modules()}
    found = []
    for part in module.modules():
        names = getattr(part, "running_statistics", ())
        names = OF_BATCH_NORM if isinstance(part, _BatchNorm) else names
        buffers = [] if id(part) in inside else [getattr(part, name, None) for name in names]
        found += [buffer for buffer in buffers if isinstance(buffer, Tensor)]
    return found
