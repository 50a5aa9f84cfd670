"""The settings of Lightning's Trainer, loggers and callbacks: the groups `trainer`, `logger` and
`callbacks`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from recapp.errors import ConfigError
from recapp.settings.records import fields_of, not_a_setting
from recapp.settings.values import Natural, Positive, Share, Within, read, shown

Precision = Annotated[
    Literal["32-true", "64-true", "bf16-mixed", "bf16-true", "16-true", "32", "64", "bf16", 32, 64],
    "; 16-mixed is refused: tables are updated in backward, where the scaled loss would reach "
    "them; use bf16-mixed",
]


@dataclass(frozen=True, kw_only=True)
class AverageSettings:
    """The settings `trainer.average`: an average of the weights, which is validated and stored.

    Args:
        kind: `none`; `ema`, an exponential moving average; `swa`, the mean of all updates.
        decay: The share of the average that stays at an update, of `ema`.
        every: The steps between two updates; None updates at the end of each epoch.
        start: The first steps, or epochs if `every` is None, after which there is no update.

    Raises:
        ConfigError: A setting has a value that is not allowed.
    """

    kind: Literal["none", "ema", "swa"] = "none"
    decay: Annotated[float, Within(above=0, below=1)] = 0.9
    every: Positive | None = 10
    start: Natural = 0

    def __post_init__(self) -> None:
        for name, (annotation, _) in fields_of(AverageSettings).items():
            read(getattr(self, name), annotation, f"trainer.average.{name}")

    def check_effect(self) -> None:
        """Check that each setting has an effect. Only a training calls this: the settings of a
        stored model may have such values.

        Raises:
            ConfigError: A setting that the kind of the average does not read has another value than
                its default.
        """
        reads = {"none": ("kind",), "swa": ("kind", "every", "start")}
        for name, (_, default) in fields_of(AverageSettings).items():
            value = getattr(self, name)
            if value != default and name not in reads.get(self.kind, (name,)):
                fix = "ema or swa" if self.kind == "none" else "ema"
                raise ConfigError(
                    f"trainer.average.{name}={shown(value)}: has no effect with "
                    f"trainer.average.kind={self.kind}: leave it out, or set kind to {fix}"
                )


@dataclass(frozen=True, kw_only=True)
class TrainerSettings:
    """The group `trainer`: settings of Lightning's Trainer. A plus adds an argument that is not
    listed.

    `others` names the constructor that takes the added arguments, `refused` maps arguments that
    cannot be added to the reasons, and `more` holds the added arguments.

    Raises:
        ConfigError: Two settings contradict each other.
    """

    others: ClassVar[str] = "lightning.pytorch.Trainer"
    refused: ClassVar[dict[str, str]] = {
        "strategy": "recapp's own shards the tables; +plan=... says how, topology=... on what",
        "logger": "choose loggers by logger=..., or add one by +logger.NAME._target_=...",
        "callbacks": (
            "choose callbacks by callbacks=..., or add one by +callbacks.NAME._target_=..."
        ),
        "enable_checkpointing": "the last checkpoint is always kept; callbacks=none keeps no other",
        "enable_model_summary": "layers, plan and ranks are always printed before the first step",
        "num_sanity_val_steps": "there is no validation before the first step; "
        "trainer.val_check_interval=1 trainer.max_steps=1 tries one",
        "num_nodes": "torchrun or srun say how many hosts there are",
        "default_root_dir": "hydra.run.dir=DIR says where a run writes",
        "use_distributed_sampler": "every rank reads its own lanes of the data (dataset.lanes)",
        "inference_mode": "validation needs no gradients as it is",
    }

    devices: Positive | Literal["auto"] = "auto"
    accelerator: Literal["auto", "cpu", "gpu", "cuda"] = "auto"
    precision: Precision = "32-true"
    max_epochs: Positive | Literal[-1] | None = None
    max_steps: Positive | Literal[-1] | None = None
    val_check_interval: Positive | Share | None = None
    check_val_every_n_epoch: Positive = 1
    limit_train_batches: Positive | Share | None = None
    limit_val_batches: Natural | Annotated[float, Within(0, 1)] | None = None
    gradient_clip_val: Annotated[float, Within(0)] | None = None
    gradient_clip_algorithm: Literal["norm", "value"] = "norm"
    accumulate_grad_batches: Positive = 1
    average: AverageSettings = field(default_factory=AverageSettings)
    log_every_n_steps: Positive = 20
    enable_progress_bar: bool = True
    more: Mapping[str, Any] = not_a_setting()

    def __post_init__(self) -> None:
        if type(self.val_check_interval) is int and self.check_val_every_n_epoch != 1:
            raise ConfigError(
                f"trainer.check_val_every_n_epoch={self.check_val_every_n_epoch}: validations "
                f"are every trainer.val_check_interval={self.val_check_interval} steps, counted "
                "across epochs; set one of the two"
            )
        batches = self.accumulate_grad_batches
        every = self.val_check_interval
        within = every is not None and every % (1 if isinstance(every, float) else batches)
        if batches > 1 and within:
            raise ConfigError(
                f"trainer.val_check_interval={every}: counts batches, and a step takes "
                f"trainer.accumulate_grad_batches={batches} of them: set a multiple of {batches}, "
                "or null for a validation at every epoch's end"
            )

    @property
    def length(self) -> tuple[int, int]:
        """Return the number of epochs and the number of steps after which training ends, -1 for no
        limit; one epoch if neither limit is set.
        """
        epochs = self.max_epochs
        if epochs is None:
            epochs = 1 if self.max_steps in (None, -1) else -1
        return epochs, -1 if self.max_steps is None else self.max_steps


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
    """Refuse Lightning's callbacks that cannot be used here (`NOT_OF_TABLES`), and classes derived
    from them.

    Args:
        kind: The callback's class.
        setting: The dotted name of the callback's settings.

    Raises:
        ConfigError: The callback cannot be used; the error gives the reason.
    """
    for base in getattr(kind, "__mro__", ()):
        name = base.__name__
        if base.__module__.startswith("lightning.") and name in NOT_OF_TABLES:
            raise ConfigError(f"{setting} ({name}): cannot be used: {NOT_OF_TABLES[name]}")
