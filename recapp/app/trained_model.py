"""A trained model as a prediction needs it, of whatever kind `ckpt_path` names.

    ckpt_path -> trained_model -> settings, judged, with the command line's        the command
                               -> module, strategy, what to restore                each rank

This is the only place where the kind is decided.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from recapp.app.check_data import match_checkpoint
from recapp.checkpoints.directory import read_manifest
from recapp.checkpoints.manifest import Manifest
from recapp.trainer.module import ClickModule
from recapp.trainer.strategy import EmbeddingShardingStrategy

Settings = Mapping[str, Any]
Compose = Callable[[Settings], dict[str, Any]]
"""Puts a command line over stored settings; ranks have none, and do without Hydra."""


@dataclass(frozen=True)
class RankModel:
    """A model on its way to the ranks, as Lightning takes it.

    Args:
        module: The module; its tables are sharded when prediction starts.
        strategy: What shards them.
        ckpt_path: What Lightning restores into them; None where nothing is left to restore.
    """

    module: ClickModule
    strategy: EmbeddingShardingStrategy
    ckpt_path: str | None


class TrainedModel(Protocol):
    """What a prediction asks of a model that was stored."""

    @property
    def identity(self) -> dict[str, Any]:
        """Return plain values in which it differs from others, and from versions of itself."""

    def settings(self, compose: Compose, overrides: Sequence[str]) -> dict[str, Any]:
        """Return the settings that it was trained with, as a command line changes them.

        Args:
            compose: Puts the command line over them.
            overrides: The command line.
        """

    def on_ranks(self, settings: Settings) -> RankModel:
        """Return the module and strategy that predict with it; every rank calls it."""


def trained_model(path: str | Path) -> TrainedModel:
    """Return the trained model of a path, of which nothing but its manifest is read yet.

    Raises:
        CheckpointError: There is no model, or it is damaged or of a later version.
    """
    return _Checkpoint(Path(path), read_manifest(path))


@dataclass(frozen=True)
class _Checkpoint:
    """A checkpoint, whose tables the engine shards by a plan as those of training."""

    path: Path
    manifest: Manifest

    @property
    def identity(self) -> dict[str, Any]:
        """Return its identity, in which versions of a checkpoint differ."""
        return {"checkpoint": f"{self.manifest.identity:08x}"}

    def settings(self, compose: Compose, overrides: Sequence[str]) -> dict[str, Any]:
        """Return its settings; tables ask for distinct rows, unless the command line says else.

        Sums that owners make of bags have other last bits on other numbers of ranks.
        """
        found = match_checkpoint(compose(self.manifest.config), self.manifest)
        said = {override.lstrip("+").partition("=")[0] for override in overrides}
        plan = found.get("plan")
        if "planner.mode" not in said:
            found = {**found, "planner": {**found["planner"], "mode": "unique"}}
        if isinstance(plan, Mapping) and "mode" in plan and not said & {"plan", "plan.mode"}:
            found = {**found, "plan": {**plan, "mode": "unique"}}
        return found

    def on_ranks(self, settings: Settings) -> RankModel:
        """Return an empty model, and the strategy that fills its shards from the checkpoint."""
        from recapp.app import build
        from recapp.app.build_strategy import build_strategy

        strategy = build_strategy(settings, training=False)
        strategy.modes = {}  # those of training are of its number of ranks
        return RankModel(build.build_module(settings), strategy, str(self.path))
