"""The pictures of plans and measurements that notebooks about TorchRec import from their own
`utils`.
"""

from collections.abc import Mapping

from torch import nn

from recapp.optim.rules import rowwise_adagrad
from recapp.planner.problem import PlanningProblem
from recapp.planner.topology import Topology
from recapp.reporting.drawing import Picture
from recapp.reporting.plan_explanation import explained
from recapp.reporting.plan_figures import ranks_picture, tables_picture
from recapp.reporting.speed_figures import latency_picture, memory_picture
from recapp.sharding.sharding_plan import ShardingPlan
from recapp.tables.collections import embedding_lookups, embedding_tables

BATCH_SIZE = 1024  # samples on a rank


class TorchRecVisualizer:
    """Draws pictures; a notebook shows them, and `picture.write(folder, "svg")` saves them.

    Args:
        compute_device: "cpu" or "cuda", for predicted times.
    """

    def __init__(self, compute_device: str = "cpu") -> None:
        self.compute_device = compute_device

    def plot_plan(self, plan: ShardingPlan, module: nn.Module) -> Picture:
        """Draw the tables as rectangles, with the shards in the colours of their ranks.

        Args:
            plan: The plan.
            module: The model.

        Raises:
            PlanError: The plan is for other tables.
        """
        return tables_picture(self._explained(plan, module))

    def plot_ranks(
        self, plan: ShardingPlan, module: nn.Module, batch_size: int = BATCH_SIZE
    ) -> Picture:
        """Draw the bytes of each rank and the time of a training step as the planner predicts it,
        with row-wise Adagrad.

        Args:
            plan: The plan.
            module: The model.
            batch_size: The number of samples on a rank.

        Raises:
            PlanError: The plan is for other tables.
        """
        return ranks_picture(self._explained(plan, module, batch_size))

    def plot_latency(self, results: Mapping[str, Mapping[str, float]]) -> Picture:
        """Draw `batch_time_ms` of each strategy.

        Args:
            results: The measurements by the name of a strategy. The picture uses entries that
                `vars()` of a result of `TorchRecBenchmark` has.

        Raises:
            ConfigError: A strategy lacks the entry.
        """
        return latency_picture(results)

    def plot_memory(self, results: Mapping[str, Mapping[str, float]]) -> Picture:
        """Draw `memory_gb` of each strategy.

        Args:
            results: The measurements by the name of a strategy.

        Raises:
            ConfigError: A strategy lacks the entry.
        """
        return memory_picture(results)

    def _explained(
        self, plan: ShardingPlan, module: nn.Module, batch_size: int = BATCH_SIZE
    ) -> dict[str, object]:
        tables = embedding_tables(module)
        plan.check(tables)
        problem = PlanningProblem(
            tables,
            Topology(plan.world_size, compute_device=self.compute_device),
            batch_size,
            rowwise_adagrad(),
            lookups=embedding_lookups(module),
        )
        return explained(plan, problem, alternatives=False)
