"""What a prediction reads and writes, as its settings say; checks before ranks are started.

settings -> ScoringSettings, and what distinguishes the model
settings -> nothing, or the error that a rank would have raised
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recapp.processes.rank_environment import started_externally

Settings = Mapping[str, Any]


def scoring_of(settings: Settings) -> Any:
    """Return the rows that are to be scored, a `ScoringSettings`.

    Raises:
        ConfigError: The settings do not fit together.
    """
    from recapp.dataset.prediction_input import ScoringSettings

    return ScoringSettings(
        input=settings["input"],
        columns=tuple(settings["columns"]),
        rows_per_batch=settings["rows_per_batch"],
        rows_per_part=settings["rows_per_part"],
    )


def model_of(settings: Settings) -> dict[str, Any]:
    """Return what distinguishes the scores of a model from those of others: the checkpoint, and
    the settings of arithmetic.
    """
    from recapp.stored.stored_model import read_stored

    return {
        **read_stored(settings["ckpt_path"]).version_entry,
        "precision": settings["trainer"].get("precision"),
        "payload": settings["engine"]["payload"],
    }


def check_prediction(settings: Settings) -> None:
    """Check, before ranks are started, what each of them would refuse some seconds later.

    That is: files that do not exist, a first file that is no Parquet file or lacks a column, an
    output that cannot be written or exists, parts of other scores. Files are not looked at where
    the ranks were started from outside: they may lie on the ranks' hosts only.

    Raises:
        ConfigError, DataError: The error that a rank would raise.
    """
    scoring = scoring_of(settings)
    if started_externally():
        return
    from recapp.dataset.data_file import stamp_of
    from recapp.dataset.files import file_names
    from recapp.dataset.prediction_input import SETTING, open_named
    from recapp.dataset.schema import schema_from
    from recapp.dataset.score_parts import ScoreParts, check_output, identity_of

    output = Path(settings["output"])
    overwrite = settings["overwrite"]
    names = file_names(scoring.input, setting=SETTING)
    check_output(output, names, overwrite=overwrite)
    schema = schema_from(settings)
    transform = settings["dataset"]["dense_transform"]
    open_named(names[:1], scoring, schema, transform)
    files = [(name, stamp_of(name)) for name in names]
    identity = identity_of(model_of(settings), files, scoring, schema, transform)
    ScoreParts(output, identity, overwrite=overwrite).check()
