"""A stored model for whoever scores with it, of whichever kind a path names.

    path -> scoring_settings -> settings, judged, with the command line's           the command
         -> model_on_ranks   -> module, strategy, what Lightning restores           each rank

The rows of a checkpoint are read into tables as those of training, under any plan; the rows of an
artefact are mapped. `recapp/app/load_model.py` does without Lightning.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recapp.app.check_checkpoint import check_fits_checkpoint
from recapp.app.check_data import match_checkpoint
from recapp.stored.checkpoint_manifest import CheckpointManifest
from recapp.stored.directories import is_artefact
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


def scoring_settings(
    path: str | Path, compose: Compose, overrides: Sequence[str]
) -> dict[str, Any]:
    """Return the settings that a model was stored with, as a command line changes them, under which
    scores do not depend on ranks (`_as_scored`).

    Args:
        path: The model; nothing but its manifest is read.
        compose: Puts the command line over stored settings.
        overrides: The command line.

    Raises:
        CheckpointError: There is no model, or it is damaged, or of other tables than the settings.
        ArtefactError: As of a checkpoint, of an artefact.
    """
    manifest = read_stored(path)
    found = match_checkpoint(compose(manifest.config), manifest)
    if isinstance(manifest, CheckpointManifest):
        check_fits_checkpoint({**found, "ckpt_path": str(path)}, overrides)
    return _as_scored(found, overrides)


def _as_scored(found: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return settings under which every way to score makes the same bits, unless the command line
    sets another value.

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


def model_on_ranks(settings: Settings) -> "RankModel":
    """Return the module and strategy that predict with the model `ckpt_path`. Every rank calls it.

    Raises:
        CheckpointError: There is no model, or it is damaged.
        ArtefactError: As of a checkpoint, of an artefact.
    """
    from recapp.app.build_strategy import build_strategy
    from recapp.app.build_training import build_module
    from recapp.app.rank_model import CheckExample, RankModel

    path = settings["ckpt_path"]
    if not is_artefact(path):
        strategy = build_strategy(settings, training=False)
        strategy.modes = {}  # those of training are of its number of ranks
        return RankModel(build_module(settings), strategy, path)
    from recapp.app.artefact_model import model_to_shard, raw_rows_of
    from recapp.inference.mapped_rows import mapped_tables
    from recapp.processes.rank_environment import rank_info
    from recapp.stored.stored_model import open_artefact

    artefact = open_artefact(path)
    here = rank_info()
    if here is None or here.rank == 0:
        artefact.verify()
    make_store = mapped_tables(artefact).make_store
    strategy = build_strategy(settings, training=False, make_store=make_store)
    plain = dict(settings)
    module = build_module(settings, lambda: model_to_shard(artefact, plain))
    raw_rows = raw_rows_of(plain)
    example = raw_rows.batch(artefact.example(raw_rows))
    return RankModel(module, strategy, None, (CheckExample(artefact.manifest, example),))
