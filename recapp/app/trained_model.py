"""Load a stored model, a checkpoint or an artefact, to predict with Lightning.

    path -> scoring_recipe   -> recipe, trusted, changed by the command line        the command
         -> model_on_ranks   -> module, strategy, checkpoint to restore             each rank

A checkpoint's rows are read into tables, under any plan, as training does. An artefact's rows are
mapped. `recapp/app/load_model.py` loads a model without Lightning.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recapp.app.check_checkpoint import check_fits_checkpoint
from recapp.app.match_trained import match_stored
from recapp.recipe.commands import Predict
from recapp.stored.directories import is_artefact
from recapp.stored.stored_model import read_stored

if TYPE_CHECKING:
    from recapp.app.rank_model import RankModel

Compose = Callable[[Mapping[str, Any]], Predict]
"""Changes stored settings by a command line. Ranks have no command line and do not import Hydra."""


def scoring_recipe(path: str | Path, compose: Compose, overrides: Sequence[str]) -> Predict:
    """Return the recipe of a stored model, changed by a command line. Scores do not depend on the
    number of ranks (`_as_scored`).

    Args:
        path: The model. Only its manifest is read.
        compose: Changes stored settings by the command line.
        overrides: The command line.

    Raises:
        CheckpointError: The model does not exist, is damaged, or has other tables than the
            settings.
        ArtefactError: The same for an artefact.
    """
    manifest = read_stored(path)
    found = match_stored(compose(manifest.config), manifest)
    check_fits_checkpoint(found, overrides)
    return _as_scored(found, overrides)


def _as_scored(found: Predict, overrides: Sequence[str]) -> Predict:
    """Return a recipe with which every way to score gives the same bits, unless the command line
    changes it.

    Three settings of training change the last bits of scores, so only the command line sets them:
    owners' sums of bags depend on the number of ranks, payloads of 16 bits round vectors, and only
    a trainer computes in narrower floats.
    """
    said = {override.lstrip("+").partition("=")[0] for override in overrides}
    if not said & {"planner", "planner.mode"}:
        found = replace(found, planner=replace(found.planner, mode="unique"))
    if not said & {"trainer", "trainer.precision"}:
        found = replace(found, trainer=replace(found.trainer, precision="32-true"))
    if not said & {"engine", "engine.payload"}:
        found = replace(found, engine=replace(found.engine, payload="full"))
    plan = found.plan
    if plan is not None and plan.mode is not None and not said & {"plan", "plan.mode"}:
        found = replace(found, plan=replace(plan, mode="unique"))
    return found


def model_on_ranks(recipe: Predict) -> "RankModel":
    """Return the module and strategy that predict with the model `ckpt_path`. Every rank calls it.

    Raises:
        CheckpointError: The model does not exist, or is damaged.
        ArtefactError: The same for an artefact.
    """
    from recapp.app.rank_model import CheckExample, RankModel
    from recapp.recipe.model import build_model
    from recapp.recipe.strategy_of_run import build_strategy
    from recapp.recipe.training import build_module

    path = recipe.ckpt_path
    assert path is not None
    if not is_artefact(path):
        strategy = build_strategy(recipe, training=False)
        strategy.modes = {}  # the modes of training belong to its number of ranks
        return RankModel(build_module(recipe, partial(build_model, recipe)), strategy, path)
    from recapp.app.artefact_model import model_to_shard, raw_rows_of
    from recapp.inference.mapped_rows import mapped_tables
    from recapp.processes.rank_environment import rank_info
    from recapp.stored.stored_model import open_artefact

    artefact = open_artefact(path)
    here = rank_info()
    if here is None or here.rank == 0:
        artefact.verify()
    make_store = mapped_tables(artefact).make_store
    strategy = build_strategy(recipe, training=False, make_store=make_store)
    module = build_module(recipe, lambda: model_to_shard(artefact, recipe))
    raw_rows = raw_rows_of(recipe)
    example = raw_rows.batch(artefact.example(raw_rows))
    return RankModel(module, strategy, None, (CheckExample(artefact.manifest, example),))
