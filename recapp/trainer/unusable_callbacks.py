"""Lightning's callbacks that cannot be used where tables train, by class."""

from recapp.errors import ConfigError

_AVERAGES = (
    "it averages parameters, and tables are none: trainer.average.kind=ema (or swa) averages "
    "both, and so does AverageWeights in Python"
)
NOT_OF_TABLES = {  # Lightning's callbacks that cannot be used, and the reason
    "StochasticWeightAveraging": _AVERAGES,
    "WeightAveraging": _AVERAGES,
    "EMAWeightAveraging": _AVERAGES,
    "GradientAccumulationScheduler": (
        "a step takes as many batches in the whole run, trainer.accumulate_grad_batches=k"
    ),
    "ModelPruning": "it prunes parameters, and tables are none",
    "BatchSizeFinder": (
        "dataset.batch_size is part of the order of the data; sweep it: -m "
        "dataset.batch_size=512,1024"
    ),
    "LearningRateFinder": (
        "it knows one learning rate and there are two; sweep them: -m optimizer.dense.lr=0.001,0.01"
    ),
}


def refuse_class(kind: object, setting: str) -> None:
    """Refuse Lightning's callbacks that cannot be used here, and classes derived from them.

    Arguments and errors are those of `refuse_callback`, but for the class itself.
    """
    for base in getattr(kind, "__mro__", ()):
        if base.__module__.startswith("lightning."):
            refuse_callback(base.__name__, setting)


def refuse_callback(kind: str, setting: str) -> None:
    """Refuse a Lightning callback that cannot be used here (`NOT_OF_TABLES`).

    Args:
        kind: The name of the callback's class, or of a base class.
        setting: The dotted name of the callback's settings.

    Raises:
        ConfigError: The callback cannot be used; the error gives the reason.
    """
    if kind in NOT_OF_TABLES:
        raise ConfigError(f"{setting} ({kind}): cannot be used: {NOT_OF_TABLES[kind]}")
