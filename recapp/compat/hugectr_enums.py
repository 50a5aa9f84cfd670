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


class Layer_t(NamedEnum):
    """HugeCTR's types of layers; `recapp/compat/hugectr_layers.py` lists those that recapp has."""

    Add = "Add"
    BatchNorm = "BatchNorm"
    BinaryCrossEntropyLoss = "BinaryCrossEntropyLoss"
    Cast = "Cast"
    Concat = "Concat"
    CrossEntropyLoss = "CrossEntropyLoss"
    Dropout = "Dropout"
    ELU = "ELU"
    ElementwiseMultiply = "ElementwiseMultiply"
    FmOrder2 = "FmOrder2"
    FusedInnerProduct = "FusedInnerProduct"
    FusedReshapeConcat = "FusedReshapeConcat"
    FusedReshapeConcatGeneral = "FusedReshapeConcatGeneral"
    GRU = "GRU"
    Gather = "Gather"
    InnerProduct = "InnerProduct"
    Interaction = "Interaction"
    LayerNorm = "LayerNorm"
    MLP = "MLP"
    MatrixMultiply = "MatrixMultiply"
    MultiCross = "MultiCross"
    MultiCrossEntropyLoss = "MultiCrossEntropyLoss"
    MultiHeadAttention = "MultiHeadAttention"
    PReLU_Dice = "PReLU_Dice"
    ReLU = "ReLU"
    ReduceMean = "ReduceMean"
    ReduceSum = "ReduceSum"
    Reshape = "Reshape"
    Scale = "Scale"
    SequenceMask = "SequenceMask"
    Sigmoid = "Sigmoid"
    Slice = "Slice"
    Softmax = "Softmax"
    Sub = "Sub"
    WeightMultiply = "WeightMultiply"


class Initializer_t(NamedEnum):
    """HugeCTR's initialisers of a layer."""

    Default = "Default"
    Uniform = "Uniform"
    XavierNorm = "XavierNorm"
    XavierUniform = "XavierUniform"
    Zero = "Zero"


class MetricsType(NamedEnum):
    """HugeCTR's metrics of an evaluation."""

    AUC = "AUC"
    AverageLoss = "AverageLoss"
    HitRate = "HitRate"
    NDCG = "NDCG"
    SMAPE = "SMAPE"


class DataReaderType_t(NamedEnum):
    """HugeCTR's formats of data; recapp reads Parquet."""

    Norm = "Norm"
    Raw = "Raw"
    Parquet = "Parquet"
    RawAsync = "RawAsync"


class Check_t(NamedEnum):
    """The checks that HugeCTR makes of the Norm format; Parquet has no sums to check."""

    Non = "Non"
    Sum = "Sum"


class LrPolicy_t(NamedEnum):
    """HugeCTR's learning-rate policy; there is only one."""

    fixed = "fixed"


class AllReduceAlgo(NamedEnum):
    """HugeCTR's all-reduce algorithms; in recapp torch chooses."""

    NCCL = "NCCL"
    OneShot = "OneShot"


class DeviceLayout(NamedEnum):
    """HugeCTR's numberings of the GPUs of several hosts; in recapp the launcher numbers them."""

    LocalFirst = "LocalFirst"
    NodeFirst = "NodeFirst"
