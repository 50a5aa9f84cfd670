"""The measured DLRMs by name: those for the training step, and those for inference."""

from dataclasses import dataclass

from recapp.benchmarks.workloads import Workload
from recapp.dataset.column_shapes import CRITEO_SIZES

DENSE = 13  # numbers of a Criteo sample


@dataclass(frozen=True)
class NamedModel:
    """A DLRM over Criteo's one-hot tables.

    Args:
        name: The name on the command line.
        batch_size: The samples of a rank.
        dim: The columns of the tables, and the width of the interaction's vectors.
        bottom: The widths of the bottom MLP's layers before the last one, whose width is `dim`.
        top: The widths of the top MLP's layers.
    """

    name: str
    batch_size: int
    dim: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]

    @property
    def bottom_layers(self) -> list[int]:
        """The widths of all layers of the bottom MLP."""
        return [*self.bottom, self.dim]

    def workload(self) -> Workload:
        """Return the tables of the model and the shape of its batches, with one id a bag."""
        count = len(CRITEO_SIZES)
        return Workload(self.name, self.batch_size, CRITEO_SIZES, (self.dim,) * count, (1,) * count)


HUGECTR_TOP = (1024, 1024, 512, 256, 1)
MODELS = {
    m.name: m
    for m in (
        # the first two come from HugeCTR's notebook on hybrid embeddings
        NamedModel("hugectr_d128", 8192, 128, (512, 256), HUGECTR_TOP),
        NamedModel("hugectr_d64", 4096, 64, (512, 256), HUGECTR_TOP),
        NamedModel("small", 1024, 16, (512, 256, 64), (512, 256, 1)),
    )
}


@dataclass(frozen=True)
class ServedModel:
    """A DLRM with the layers of `conf/model/dlrm.yaml`, which trains for one step on generated logs
    and then scores.

    Args:
        sizes: The rows of each table.
        dim: The columns of the tables.
        rows: The rows of the logs, from which batches are cut.
    """

    sizes: tuple[int, ...]
    dim: int
    rows: int


SERVED = {
    "small": ServedModel(CRITEO_SIZES, 16, 32_768),
    "large": ServedModel(CRITEO_SIZES, 128, 32_768),
}
"""The models of `inference`: their 26 tables take 78 and 625 MB in fp32."""
