"""Check the input and output of a prediction before ranks start.

recipe -> the facts that determine the scores of a model
recipe -> nothing, or the error that a rank would have raised
"""

from pathlib import Path
from typing import Any

from recapp.processes.rank_environment import started_externally
from recapp.recipe.commands import Predict


def model_of(recipe: Predict) -> dict[str, Any]:
    """Return the facts that determine the scores of a model: the checkpoint and the settings of
    arithmetic.
    """
    from recapp.stored.stored_model import read_stored

    assert recipe.ckpt_path is not None
    return {
        **read_stored(recipe.ckpt_path).version_entry,
        "precision": recipe.trainer.precision,
        "payload": recipe.engine.payload,
    }


def check_prediction(recipe: Predict) -> None:
    """Check, before ranks start, for files that every rank would refuse some seconds later.

    These are: files that do not exist, a first file that is no Parquet file or lacks a column, an
    output that exists or cannot be written, parts of other scores. If the ranks were started from
    outside, files are not read: they may exist only on the ranks' hosts.

    Raises:
        ConfigError, DataError: The error that a rank would raise.
    """
    if started_externally():
        return
    from recapp.dataset.data_file import stamp_of
    from recapp.dataset.files import file_names
    from recapp.dataset.prediction_input import SETTING, open_named
    from recapp.dataset.score_parts import ScoreParts, check_output, identity_of

    assert recipe.output is not None and recipe.input is not None
    output = Path(recipe.output)
    names = file_names(recipe.input, setting=SETTING)
    check_output(output, names, overwrite=recipe.overwrite)
    schema = recipe.schema
    transform = recipe.dataset.dense_transform
    open_named(names[:1], recipe, schema, transform)
    files = [(name, stamp_of(name)) for name in names]
    identity = identity_of(model_of(recipe), files, recipe, schema, transform)
    ScoreParts(output, identity, overwrite=recipe.overwrite).check()
