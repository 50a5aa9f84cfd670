"""A trained model as a prediction needs it, of whatever kind `ckpt_path` names.

    ckpt_path -> trained_model -> settings, judged, with the command line's        the command
                               -> module, strategy, what to restore                each rank

This is the only place where the kind is decided. The command asks for the settings and leaves what
ranks run on (torch's modules, Lightning) to them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from recapp.app.check_checkpoint import check_fits_checkpoint
from recapp.app.check_data import match_checkpoint, match_trained
from recapp.processes.rank_environment import rank_info
from recapp.stored.artefact_manifest import ArtefactManifest
from recapp.stored.checkpoint_manifest import CheckpointManifest
from recapp.stored.stored_model import read_stored

if TYPE_CHECKING:
    from recapp.app.rank_model import RankModel

SCORED = (
    ("planner", "mode", "unique"),
    ("trainer", "precision", "32-true"),
    ("engine", "payload", "full"),
)
"""Settings of training that a prediction takes from its command line alone."""
Settings = Mapping[str, Any]
Compose = Callable[[Settings], dict[str, Any]]
"""Puts a command line over stored settings; ranks have none, and do without Hydra."""


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

    def on_ranks(self, settings: Settings) -> "RankModel":
        """Return the module and strategy that predict with it; every rank calls it."""


def trained_model(path: str | Path) -> TrainedModel:
    """Return the trained model of a path, of which nothing but its manifest is read yet.

    Raises:
        CheckpointError: There is no model, or it is damaged or of a later version.
        ArtefactError: As of a checkpoint, of an artefact.
    """
    found = read_stored(path)
    if isinstance(found, ArtefactManifest):
        return _Artefact(Path(path), found)
    return _Checkpoint(Path(path), found)


@dataclass(frozen=True)
class _Checkpoint:
    """A checkpoint, whose tables the engine shards by a plan as those of training."""

    path: Path
    manifest: CheckpointManifest

    @property
    def identity(self) -> dict[str, Any]:
        """Return its identity, in which versions of a checkpoint differ."""
        return {"checkpoint": f"{self.manifest.identity:08x}"}

    def settings(self, compose: Compose, overrides: Sequence[str]) -> dict[str, Any]:
        """Return its settings, under which scores do not depend on ranks (`_as_scored`)."""
        found = match_checkpoint(compose(self.manifest.config), self.manifest)
        check_fits_checkpoint({**found, "ckpt_path": str(self.path)}, overrides)
        return _as_scored(found, overrides)

    def on_ranks(self, settings: Settings) -> "RankModel":
        """Return an empty model, and the strategy that fills its shards from the checkpoint."""
        from recapp.app.build_strategy import build_strategy
        from recapp.app.build_training import build_module
        from recapp.app.rank_model import RankModel

        strategy = build_strategy(settings, training=False)
        strategy.modes = {}  # those of training are of its number of ranks
        return RankModel(build_module(settings), strategy, str(self.path))


@dataclass(frozen=True)
class _Artefact:
    """An artefact, of whose files each rank takes its part."""

    path: Path
    artefact: ArtefactManifest

    @property
    def identity(self) -> dict[str, Any]:
        """Return its identity, in which versions of an artefact differ."""
        return {"artefact": f"{self.artefact.identity:08x}"}

    def settings(self, compose: Compose, overrides: Sequence[str]) -> dict[str, Any]:
        """Return the settings that it was exported with, under which scores do not depend on ranks
        (`_as_scored`).
        """
        artefact = self.artefact
        composed = compose(artefact.config)
        found = match_trained(composed, artefact.folder, artefact.info, artefact.numbered_rows)
        return _as_scored(found, overrides)

    def on_ranks(self, settings: Settings) -> "RankModel":
        """Return a model with its dense part, and the strategy whose ranks map or copy rows."""
        from recapp.app.artefact_model import model_to_shard, raw_rows_of
        from recapp.app.build_strategy import build_strategy
        from recapp.app.build_training import build_module
        from recapp.app.rank_model import CheckExample, RankModel
        from recapp.inference.mapped_rows import mapped_tables
        from recapp.stored.artefact_files import read_example
        from recapp.stored.stored_model import open_artefact

        artefact = open_artefact(self.path)
        here = rank_info()
        if here is None or here.rank == 0:
            artefact.verify()
        make_store = mapped_tables(artefact).make_store
        strategy = build_strategy(settings, training=False, make_store=make_store)
        plain = dict(settings)
        module = build_module(settings, lambda: model_to_shard(artefact, plain))
        batch = raw_rows_of(plain).batch(read_example(artefact))
        return RankModel(module, strategy, None, (CheckExample(artefact.manifest, batch),))


def _as_scored(found: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return settings under which every way to score makes the same bits, unless the command line
    says else.

    Sums that owners make of bags have other last bits on other numbers of ranks; so have vectors
    that are rounded on their way, and only a trainer computes in narrower floats.
    """
    said = {override.lstrip("+").partition("=")[0] for override in overrides}
    plan = found.get("plan")
    for group, name, value in SCORED:
        if not said & {group, f"{group}.{name}"}:
            found = {**found, group: {**found[group], name: value}}
    if isinstance(plan, Mapping) and "mode" in plan and not said & {"plan", "plan.mode"}:
        found = {**found, "plan": {**plan, "mode": "unique"}}
    return found
