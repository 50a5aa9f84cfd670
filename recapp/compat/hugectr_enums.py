"""The enumerations that HugeCTR's programs use. A member that does not exist raises an error of one
line with close matches.
"""

from enum import Enum, EnumMeta, StrEnum
from typing import Any

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
    "HugeCTR's types of layers; `recapp/compat/hugectr_layers.py` lists those that recapp has.",
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
