"""The DLRMs whose training step is measured, by name."""

from dataclasses import dataclass

from recapp.benchmarks.workloads import CRITEO_ROWS, Workload

DENSE = 13  # numbers of a Criteo sample


@dataclass(frozen=True)
class NamedModel:
    """A DLRM over Criteo's one-hot tables.

    Args:
        name: as on the command line.
        batch_size: samples of a rank.
        dim: of tables and interaction.
        bottom: layers of the bottom MLP before the last, whose width is `dim`.
        top: layers of the top MLP.
    """

    name: str
    batch_size: int
    dim: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]

    @property
    def bottom_layers(self) -> list[int]:
        """All of the bottom MLP."""
        return [*self.bottom, self.dim]

    def workload(self) -> Workload:
        """Its tables and ids."""
        count = len(CRITEO_ROWS)
        return Workload(self.name, self.batch_size, CRITEO_ROWS, (self.dim,) * count, (1,) * count)


HUGECTR_TOP = (1024, 1024, 512, 256, 1)
MODELS = {
    m.name: m
    for m in (
        # of HugeCTR's notebook, as the next
        NamedModel("hugectr_d128", 8192, 128, (512, 256), HUGECTR_TOP),
        NamedModel("hugectr_d64", 4096, 64, (512, 256), HUGECTR_TOP),
        NamedModel("small", 1024, 16, (512, 256, 64), (512, 256, 1)),
    )
}
