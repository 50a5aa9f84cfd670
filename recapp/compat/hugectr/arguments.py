"""The arguments of HugeCTR's programs: the enumerations that they use, and checks at the call that
passes an argument.

    whole("CreateSolver", "batchsize", 1.5, 1)
        -> CreateSolver: batchsize=1.5: must be a whole number of at least 1

A member of an enumeration that does not exist raises an error of one line with close matches. The
checks turn numbers of NumPy into Python's own, because recapp writes settings into YAML.
"""

import math
import os
from enum import Enum, EnumMeta, StrEnum
from numbers import Real
from operator import index
from typing import Any, TypeVar

from recapp.errors import ConfigError, meant, suggest


class UnknownNameError(ConfigError, AttributeError):
    """A name that HugeCTR or recapp does not have; `hasattr` returns False for it."""


class _Suggesting(EnumMeta):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in cls._member_map_:
            return cls._member_map_[name]
        same = [known for known in cls._member_map_ if known.lower() == name.lower()]
        close = meant(same) if same else suggest(name, cls._member_map_)
        raise UnknownNameError(f"{cls.__name__}.{name}: unknown; {close}")


class NamedEnum(Enum, metaclass=_Suggesting):
    """An enumeration that raises `UnknownNameError` for an unknown member."""


class NamedText(StrEnum, metaclass=_Suggesting):
    """An enumeration of words that raises `UnknownNameError` for an unknown member."""


class CommunicationStrategy(NamedText):
    """The ways HugeCTR's later versions exchange vectors; recapp chooses by the ranks instead."""

    Uniform = "uniform"
    Hierarchical = "hierarchical"


class CompressionStrategy(NamedText):
    """The vectors that ranks send for a table: one per bag and owner, or one per distinct row."""

    Reduction = "reduction"
    Unique = "unique"


def _named(kind: str, says: str, members: str) -> Any:
    """Return an enumeration whose members have their names as values.

    Args:
        kind: The name of the enumeration.
        says: Its docstring.
        members: The names of the members.
    """
    enumeration: Any = NamedEnum
    made = enumeration(kind, [(name, name) for name in members.split()], module=__name__)
    made.__doc__ = says
    return made


Layer_t = _named(
    "Layer_t",
    "HugeCTR's types of layers; `recapp/compat/hugectr/layers.py` lists those that recapp has.",
    """
    Add BatchNorm BinaryCrossEntropyLoss Cast Concat CrossEntropyLoss Dropout ELU
    ElementwiseMultiply FmOrder2 FusedInnerProduct FusedReshapeConcat
    FusedReshapeConcatGeneral GRU Gather InnerProduct Interaction LayerNorm MLP
    MatrixMultiply MultiCross MultiCrossEntropyLoss MultiHeadAttention PReLU_Dice ReLU
    ReduceMean ReduceSum Reshape Scale SequenceMask Sigmoid Slice Softmax Sub WeightMultiply
    """,
)
Initializer_t = _named(
    "Initializer_t",
    "HugeCTR's initialisers of a layer.",
    "Default Uniform XavierNorm XavierUniform Zero",
)
MetricsType = _named(
    "MetricsType", "HugeCTR's metrics of an evaluation.", "AUC AverageLoss HitRate NDCG SMAPE"
)
DataReaderType_t = _named(
    "DataReaderType_t",
    "HugeCTR's formats of data; recapp reads Parquet.",
    "Norm Raw Parquet RawAsync",
)
Check_t = _named(
    "Check_t",
    "The checks that HugeCTR makes of the Norm format; Parquet has no sums to check.",
    "Non Sum",
)
LrPolicy_t = _named("LrPolicy_t", "HugeCTR's learning-rate policy; there is only one.", "fixed")
AllReduceAlgo = _named(
    "AllReduceAlgo", "HugeCTR's all-reduce algorithms; in recapp torch chooses.", "NCCL OneShot"
)
DeviceLayout = _named(
    "DeviceLayout",
    "HugeCTR's numberings of the GPUs of several hosts; in recapp the launcher numbers them.",
    "LocalFirst NodeFirst",
)


MOST = 2**63 - 1
Member = TypeVar("Member", bound=Enum)


def whole(owner: str, name: str, value: Any, least: int = 0) -> int:
    """Check and return a whole number.

    Args:
        owner: The class or function that has the argument, for errors.
        name: The name of the argument.
        value: The value of the argument.
        least: The smallest allowed value.

    Raises:
        ConfigError: The value is no whole number, or out of bounds.
    """
    made = index(value) if hasattr(value, "__index__") and not isinstance(value, bool) else None
    if made is None or not least <= made <= MOST:
        raise ConfigError(f"{owner}: {name}={value}: must be a whole number of at least {least}")
    return made


def number(owner: str, name: str, value: Any, least: float = 0.0, below: float = math.inf) -> float:
    """Check and return a finite number.

    Args:
        owner: The class or function that has the argument, for errors.
        name: The name of the argument.
        value: The value of the argument.
        least: The smallest allowed value.
        below: The value must be smaller than this.

    Raises:
        ConfigError: The value is no finite number, or out of bounds.
    """
    right = not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)
    if not right or not least <= value < below:
        bounds = f" of at least {least:g}" if least > -math.inf else ""
        bounds += f" and below {below:g}" if below < math.inf else ""
        raise ConfigError(f"{owner}: {name}={value}: must be a finite number{bounds}")
    return value if type(value) is int else float(value)


def switch(owner: str, name: str, value: Any) -> bool:
    """Check and return True or False; 1 and 0 count as these.

    Raises:
        ConfigError: The value is neither.
    """
    if not isinstance(value, int) or value not in (0, 1):
        raise ConfigError(f"{owner}: {name}={value}: must be True or False")
    return bool(value)


def text(owner: str, name: str, value: Any) -> str:
    """Check and return a text that is not empty; a path is a text, too.

    Raises:
        ConfigError: The value is no such text.
    """
    made = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(made, str) or not made:
        raise ConfigError(f"{owner}: {name}={value!r}: must be a text that is not empty")
    return made


def member(owner: str, name: str, value: Any, kind: type[Member]) -> Member:
    """Check and return a member of an enumeration.

    Raises:
        ConfigError: The value is no member of it.
    """
    if not isinstance(value, kind):
        known = ", ".join(kind.__members__)
        raise ConfigError(f"{owner}: {name}={value}: must be a {kind.__name__}: {known}")
    return value
