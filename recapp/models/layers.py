"""The parts that recapp's models share: dropout, normalisation, a stack of linear layers, the dot
product of every pair of vectors, the vectors of a sample's fields, and checks of settings.

Layers know neither ranks nor tables. Start values come from torch's global generator, so ranks with
the same seed get the same values.

Fields are the input of models that know fields and not columns (`FieldVectors`):

    numbers="vectors"    v1 * x1, v2 * x2, ..., pooled vectors    a field for each number and lookup
    numbers="concat"     x1, x2, ... | pooled vectors             the numbers as columns

With `vectors`, each number has a learnt vector, which the number scales (DeepFM, arXiv 1703.04247,
and AutoInt, arXiv 1810.11921, treat numbers in this way). With `concat`, numbers stay columns (the
cross networks DCN, arXiv 1708.05123).

The constructors of the models check their settings: rank 0 constructs a model on the meta device
before the ranks meet, so a wrong setting ends a command early.

Shapes: B batch, I dense features, F fields, D columns of a field's vector, K columns of all inputs.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from recapp.errors import ConfigError, suggest
from recapp.models.linear_stack import (
    Linear,
    are_several,
    may_run_layers,
    on_gpu,
    run_layers,
    whole_columns,
)
from recapp.sparse.jagged_tensor import KeyedTensor
from recapp.sparse.keyed_jagged_tensor import Batch
from recapp.tables.collections import BagCollection

STEPS = 2**16  # the number of shares: a mask compares 16 random bits with a threshold


class Layer(nn.Module):
    """A module that returns a tensor."""

    __call__: Callable[..., Tensor]


class FastDropout(Layer):
    """Sets a share of entries to 0 in training, and scales the others to keep the mean. Its masks
    are drawn four entries at a time.

    `torch.nn.Dropout` draws a number of the generator for each entry. On a core, for 4096 x 624
    entries, that takes 25 ms, forward alone; a 64-bit number for every four entries takes 8 ms. The
    share is rounded to 1 / 65536, and kept entries are scaled by the rounded share.

    Args:
        share: The share, at least 0 and less than 1. The attribute has torch's name, `p`.
    """

    def __init__(self, share: float) -> None:
        super().__init__()
        self.p = share
        self.dropped = min(round(share * STEPS), STEPS - 1)

    def forward(self, entries: Tensor) -> Tensor:
        """Return the entries, some of them 0 in training."""
        if not self.training or not self.dropped:
            return entries
        return _Dropped.apply(entries, self.dropped)  # type: ignore[no-any-return, no-untyped-call]


class FieldDropout(nn.Module):
    """Sets a share of the vectors of a sample to 0 in training, and scales the others to keep the
    mean, as Gal and Ghahramani drop whole word vectors (arXiv 1512.05287) and DropoutNet whole
    inputs of a recommender (Volkovs et al., NIPS 2017): a model then cannot lean on the vector of
    one id, and learns to do without those that it has not seen.

    Args:
        share: The share, at least 0 and less than 1.
        dims: The columns of each vector.

    Raises:
        ConfigError: The share is not allowed.

    The buffer `field_K` has the field of each column.
    """

    field_K: Tensor

    def __init__(self, share: float, dims: Sequence[int]) -> None:
        super().__init__()
        check_settings(field_dropout=share)
        self.dims = list(dims)
        self.mask = FastDropout(share)
        # numpy, because torch could not count the columns on the meta device
        field_K = torch.tensor(np.repeat(np.arange(len(self.dims)), self.dims))
        self.register_buffer("field_K", field_K, persistent=False)

    def forward(self, vectors_BK: Tensor) -> Tensor:
        """Return the vectors side by side, some of them 0 in training."""
        if not self.training or not self.mask.dropped:
            return vectors_BK
        mask_BF = self.mask(vectors_BK.new_ones(len(vectors_BK), len(self.dims)))
        if len(set(self.dims)) == 1:
            parts_BFD = vectors_BK.view(len(vectors_BK), len(self.dims), -1)
            return (parts_BFD * mask_BF.unsqueeze(2)).flatten(1)
        return vectors_BK * mask_BF.index_select(1, self.field_K)


class _Dropped(torch.autograd.Function):
    """Multiplies entries by 0 or by a constant above 1."""

    @staticmethod
    def forward(ctx: Any, entries: Tensor, dropped: int) -> Tensor:
        count = entries.numel()
        bits = torch.empty((count + 3) // 4, dtype=torch.int64, device=entries.device)
        bits.random_(-(2**63), None)
        bits_of_entries = bits.view(torch.int16)[:count].view(entries.shape)
        ctx.dropped = dropped
        ctx.save_for_backward(bits_of_entries)
        return _with_dropout(entries, bits_of_entries, dropped)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (bits_of_entries,) = ctx.saved_tensors
        return _with_dropout(grad, bits_of_entries, ctx.dropped), None


def _with_dropout(entries: Tensor, bits_of_entries: Tensor, dropped: int) -> Tensor:
    """Return entries times 0 or times a constant, by 16 bits of each."""
    least = dropped - STEPS // 2
    factor = STEPS / (STEPS - dropped)
    factors = (bits_of_entries >= least).to(entries.dtype) * factor
    return entries * factors


class BatchNorm(nn.BatchNorm1d):
    """`nn.BatchNorm1d`, [B, C] or [B, C, columns], which normalises a single value of each channel
    by the running mean and variance, and leaves these as they are.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalised channels."""
        if not self.training or input.numel() != input.shape[1]:
            return super().forward(input)
        return functional.batch_norm(
            input, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
        )


ADDED = 1e-8  # to a variance, as published


MOMENTUM = 0.1  # of the running statistics, as in torch's batch normalisation


class Dice(nn.Module):
    """Dice, the activation of DIN (arXiv 1706.06978, section 5.3): [N, U] -> [N, U].

        f(s) = p s + (1 - p) a s,  p = sigmoid((s - mean) / sqrt(variance + 1e-8))

    It is a PReLU with a learnt slope a whose bend is smooth, and lies at the mean of the data
    instead of at 0. Training takes mean and variance of each column from the rows of the batch, and
    keeps running ones for evaluation. Slopes start at 0, as in the authors' code.

    A batch without rows leaves the running statistics as they are; a single row has the variance 0.

    Args:
        columns: The columns of the input, U.
    """

    mean_U: Tensor
    variance_U: Tensor
    # The buffers that ranks average (`recapp/trainer/step_of_ranks.py`).
    running_statistics = ("mean_U", "variance_U")

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.slope_U = nn.Parameter(torch.zeros(columns))
        self.register_buffer("mean_U", torch.zeros(columns))
        self.register_buffer("variance_U", torch.ones(columns))

    def forward(self, input_NU: Tensor) -> Tensor:
        """Return the activated columns, [N, U]."""
        share_NU = torch.sigmoid(self._normal(input_NU))
        return input_NU * torch.addcmul(self.slope_U, share_NU, 1 - self.slope_U)

    def _normal(self, input_NU: Tensor) -> Tensor:
        """Return the columns minus their means, divided by their deviations."""
        if not self.training or not input_NU.shape[0]:
            return (input_NU - self.mean_U) * (self.variance_U + ADDED).rsqrt()
        # autocast computes in 16 bits, which is too few for a variance
        wide_NU = input_NU.to(self.mean_U.dtype)
        # torch's batch norm computes x * scale + shift, which loses digits where a mean is large
        # beside the deviation; a constant taken off before changes neither result nor gradient
        with torch.no_grad():
            centre_U = wide_NU.mean(0)
        normal_NU: Tensor
        # without running statistics, as torch's batch norm would keep the unbiased variance
        normal_NU, rest_U, scale_U = torch.native_batch_norm(
            wide_NU - centre_U, None, None, None, None, True, 0.0, ADDED
        )
        with torch.no_grad():
            variance_U = (scale_U**-2 - ADDED).clamp_(min=0)
            self.mean_U.lerp_(centre_U + rest_U, MOMENTUM)
            self.variance_U.lerp_(variance_U, MOMENTUM)
        return normal_NU


def draw_normal(weight: Tensor, deviation: float) -> None:
    """Draw the start values of a weight: normal with mean 0 and a deviation."""
    if not weight.is_meta:  # it has no values, and to draw them torch would import its compiler
        nn.init.normal_(weight, 0.0, deviation)


def xavier(weight: Tensor, inputs: int, outputs: int) -> None:
    """Draw the start values of a weight: normal with deviation sqrt(2 / (inputs + outputs))."""
    draw_normal(weight, (2 / (inputs + outputs)) ** 0.5)


def learnt_vectors(count: int, dim: int) -> nn.Parameter:
    """Return vectors to learn, [count, dim], that start with deviation .01."""
    vectors = nn.Parameter(torch.empty(count, dim))
    draw_normal(vectors, 0.01)
    return vectors


def xavier_linear(inputs: int, outputs: int, bias: bool = True) -> Linear:
    """Return a linear layer with Xavier-normal weights and a bias of zero."""
    layer = Linear(inputs, outputs, bias)
    xavier(layer.weight, inputs, outputs)
    if bias and not layer.bias.is_meta:
        nn.init.zeros_(layer.bias)
    return layer


def published_linear(in_features: int, out_features: int, bias: bool = True) -> Linear:
    """Return a linear layer with the start values of the published DLRM.

    Weights are Xavier normal, biases normal with standard deviation sqrt(1 / out)
    (facebookresearch/dlrm, `dlrm_s_pytorch.py: create_mlp`).
    """
    layer = xavier_linear(in_features, out_features, bias)
    if bias:
        draw_normal(layer.bias, (1 / out_features) ** 0.5)
    return layer


# The activations of an `MLP` by name; each is made for a number of columns.
ACTIVATIONS: dict[str, Callable[[int], nn.Module]] = {
    # ReLU works in place, because its backward needs only the result.
    "relu": lambda columns: nn.ReLU(inplace=True),
    "leaky_relu": lambda columns: nn.LeakyReLU(inplace=True),
    "prelu": lambda columns: nn.PReLU(),
    "dice": Dice,
    "sigmoid": lambda columns: nn.Sigmoid(),
    "tanh": lambda columns: nn.Tanh(),
    "gelu": lambda columns: nn.GELU(),
    "none": lambda columns: nn.Identity(),
}


class MLP(nn.Sequential):
    """Linear layers with an activation behind each, or behind each but the last.

        x_BK - Linear - [BatchNorm] - activation - [Dropout] - Linear - ... - y_BK

    The input is [B, in_features], the output [B, layers[-1]].

    Args:
        in_features: The columns of the input.
        layers: The output columns of each linear layer, first to last.
        last_relu: Whether an activation follows the last layer, too.
        setting: The name of `layers` in the configuration, for messages.
        activation: The name of the activation, one of `ACTIVATIONS`.
        batch_norm: Whether batch normalisation stands before each activation.
        dropout: The share of outputs that training sets to 0 behind each activation.
        make_linear: Makes a linear layer from the numbers of its columns.

    Raises:
        ConfigError: A width is no whole number of at least 1, the activation does not exist,
            `dropout` is no share, or `batch_norm` no truth value.
    """

    __call__: Callable[..., Tensor]

    def __init__(
        self,
        in_features: int,
        layers: Sequence[int],
        last_relu: bool = True,
        setting: str = "layers",
        activation: str = "relu",
        batch_norm: bool = False,
        dropout: float = 0.0,
        make_linear: Callable[[int, int], nn.Linear] = xavier_linear,
    ) -> None:
        check_tower(setting, layers, activation, dropout, batch_norm)
        widths = [in_features, *layers]
        modules: list[nn.Module] = []
        for place, (width_in, width_out) in enumerate(pairwise(widths), 1):
            modules.append(make_linear(width_in, width_out))
            if place == len(layers) and not last_relu:
                break
            if batch_norm:
                modules.append(BatchNorm(width_out))
            modules.append(ACTIVATIONS[activation](width_out))
            if dropout:
                modules.append(FastDropout(dropout))
        super().__init__(*modules)

    def forward(self, input: Tensor) -> Tensor:
        """Return the output of the last layer, [B, layers[-1]]."""
        if self.training and may_run_layers(input):
            return run_layers(self, input)
        return super().forward(input)  # type: ignore[no-any-return, no-untyped-call]


def logit_mlp(
    in_features: int,
    layers: Sequence[int],
    *,
    activation: str = "relu",
    batch_norm: bool = False,
    dropout: float = 0.0,
) -> MLP:
    """Return an `MLP` with the hidden layers of the setting `model.layers`, which the logit
    follows: [B, in_features] -> [B, 1].

    Raises:
        ConfigError: A setting is not allowed.
    """
    return MLP(
        in_features,
        [*check_widths("model.layers", layers), 1],
        last_relu=False,
        setting="model.layers",
        activation=activation,
        batch_norm=batch_norm,
        dropout=dropout,
    )


class DotInteraction(Layer):
    """The dot product of every pair of F vectors: [B, F, D] -> [B, F (F - 1) / 2].

    The pairs are the lower triangle without the diagonal, row by row, as published (arXiv
    1906.00091):

              f1   f2   f3
        f1    .    .    .
        f2    f12  .    .         ->   f12, f13, f23
        f3    f13  f23  .

    Args:
        vectors: The number of vectors, F.
        keeps_first: Whether the first vector stands before the products, [B, D + P]. On a GPU
            zeros may follow, which a `Linear` of D + P columns takes.

    Attributes:
        pairs: The number of pairs, P.
        pair_P: The place of each pair in the flat [F, F] matrix of all products.
        entry_FF: The pair of each entry of this matrix, flat; the entries of the diagonal have the
            number P, one after the last pair.
    """

    pair_P: Tensor
    entry_FF: Tensor

    def __init__(self, vectors: int, keeps_first: bool = False) -> None:
        super().__init__()
        self.vectors = vectors
        self.keeps_first = keeps_first
        # numpy, because torch would import its compiler for indices on the meta device
        row_P, col_P = np.tril_indices(vectors, -1)
        self.pairs = len(row_P)
        entry_FF = np.full((vectors, vectors), self.pairs)
        entry_FF[row_P, col_P] = entry_FF[col_P, row_P] = np.arange(self.pairs)
        pair_P = torch.tensor(row_P * vectors + col_P)
        self.register_buffer("pair_P", pair_P, persistent=False)
        self.register_buffer("entry_FF", torch.tensor(entry_FF.flatten()), persistent=False)

    def forward(self, vectors_BFD: Tensor) -> Tensor:
        """Return the dot products of all pairs, [B, F (F - 1) / 2].

        Raises:
            ConfigError: The vectors have another shape, which the error names.
        """
        if vectors_BFD.dim() != 3 or vectors_BFD.shape[1] != self.vectors:
            raise ConfigError(
                f"the interaction got vectors of shape {list(vectors_BFD.shape)}: it takes "
                f"[samples, {self.vectors}, columns]"
            )
        return _PairDots.apply(  # type: ignore[no-any-return, no-untyped-call]
            vectors_BFD, self.pair_P, self.entry_FF, self.keeps_first
        )


def _dense_kernels(vectors_BFD: Tensor) -> Any:
    """Return the kernels for pairs of vectors on a GPU; None where torch's functions run, which
    torch's compiler makes kernels of.
    """
    if not on_gpu(vectors_BFD) or torch.compiler.is_compiling() or not _has_triton():
        return None
    from recapp.kernels import triton_dense

    return triton_dense if triton_dense.takes(vectors_BFD) else None


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


class _PairDots(torch.autograd.Function):
    """Computes the dot products of pairs, and their gradients by a single matrix product.

    Backward expands the gradients of the pairs into a symmetric matrix, which needs one product
    instead of a scatter and two products. At B = 1024, F = 27, D = 16 on one core, forward and
    backward take 1.3 ms. With autograd's backward, bmm and `gather` take 2.5 ms, and indexing by
    the rows and columns of the triangle takes 4.4 ms. On a GPU each of them is one kernel.
    """

    @staticmethod
    def forward(
        ctx: Any, vectors_BFD: Tensor, pair_P: Tensor, entry_FF: Tensor, keeps_first: bool
    ) -> Tensor:
        ctx.save_for_backward(vectors_BFD, entry_FF)
        ctx.dim = vectors_BFD.shape[2] if keeps_first else 0
        if (kernels := _dense_kernels(vectors_BFD)) is not None:
            columns = whole_columns(ctx.dim + len(pair_P)) if keeps_first else len(pair_P)
            out_BK: Tensor = kernels.pair_dots(vectors_BFD, columns, keeps_first)
            return out_BK
        dots_BP = torch.bmm(vectors_BFD, vectors_BFD.mT).flatten(1).index_select(1, pair_P)
        return torch.cat([vectors_BFD[:, 0], dots_BP], 1) if keeps_first else dots_BP

    @staticmethod
    def backward(ctx: Any, grad_BK: Tensor) -> tuple[Tensor, None, None, None]:
        vectors_BFD, entry_FF = ctx.saved_tensors
        kernels = _dense_kernels(vectors_BFD)
        if kernels is not None and not (torch.is_grad_enabled() or are_several(grad_BK)):
            return kernels.pair_dots_backward(vectors_BFD, grad_BK, ctx.dim > 0), None, None, None
        count = vectors_BFD.shape[1]
        grad_BK = grad_BK.to(vectors_BFD.dtype)
        grad_BP = grad_BK.narrow(1, ctx.dim, count * (count - 1) // 2)
        padded_BP1 = torch.cat([grad_BP, grad_BP.new_zeros(len(grad_BP), 1)], 1)
        factor_BFF = padded_BP1.index_select(1, entry_FF).view(-1, count, count)
        grad_BFD = torch.bmm(factor_BFF, vectors_BFD)
        if ctx.dim:
            grad_BFD[:, 0] += grad_BK[:, : ctx.dim]
        return grad_BFD, None, None, None


# ---- the vectors of fields

Numbers = Literal["vectors", "concat"]


class FieldVectors(Layer):
    """The inputs of a model: a vector for each field, or all inputs as columns.

    Args:
        embedding_bag_collection: The tables. Each vector of a concatenation is a field.
        dense_in_features: The number of dense features I.
        numbers: Whether numbers become fields (`vectors`) or stay columns (`concat`).
        model: The name of the model, for messages.
        dropout: The share of the vectors of a sample that training sets to 0, each as a whole;
            numbers and their vectors stay.

    Attributes:
        count: The number of fields F; numbers count under `vectors` only.
        dim: The columns D of a field's vector; 0 if the dims differ.
        columns: The columns K of `flat`.

    Raises:
        ConfigError: `vectors` is asked for, and the lookups have different dims or there is none;
            or the share is not allowed.
    """

    def __init__(
        self,
        embedding_bag_collection: BagCollection,
        dense_in_features: int,
        numbers: Numbers = "vectors",
        model: str = "the model",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.embedding_bag_collection = embedding_bag_collection
        self.dense_in_features = dense_in_features
        lookups = embedding_bag_collection.lookups
        dims = [x.dim for x in lookups for _ in range(x.columns // x.dim)]
        check_settings(numbers=numbers)
        if numbers == "vectors":
            check_same_dim(model, dims)
        self.dim = dims[0] if len(set(dims)) == 1 else 0
        self.count = len(dims)
        self.columns = sum(dims) + dense_in_features
        self.dropout = FieldDropout(dropout, dims) if dropout else None
        self.number_vectors_ID: nn.Parameter | None = None
        if numbers == "vectors" and dense_in_features:
            self.count += dense_in_features
            self.columns = self.count * self.dim
            self.number_vectors_ID = learnt_vectors(dense_in_features, self.dim)

    def forward(self, batch: Batch) -> Tensor:
        """Return the vectors of all fields, [B, F, D]: numbers first, then the lookups.

        Raises:
            ConfigError: The batch has another number of dense features.
        """
        return self.flat(batch).view(-1, self.count, self.dim)

    def flat(self, batch: Batch) -> Tensor:
        """Return all inputs as columns, [B, K]: numbers first, then the lookups.

        Raises:
            ConfigError: The batch has another number of dense features.
        """
        dense_BI = numbers_of(batch, self.dense_in_features)
        pooled: KeyedTensor = self.embedding_bag_collection(batch.sparse)
        # Tables may have another dtype than the model, whose numbers have its own.
        vectors_BK = pooled.values().to(dense_BI.dtype)
        if self.dropout is not None:
            vectors_BK = self.dropout(vectors_BK)
        if not self.dense_in_features:
            return vectors_BK
        if self.number_vectors_ID is None:
            return torch.cat([dense_BI, vectors_BK], 1)
        scaled_BID = dense_BI.unsqueeze(2) * self.number_vectors_ID
        return torch.cat([scaled_BID.flatten(1), vectors_BK], 1)


def numbers_of(batch: Batch, dense_in_features: int) -> Tensor:
    """Return the numbers of a batch, [B, I].

    Args:
        batch: The samples.
        dense_in_features: The number of dense features I for which the model was made.

    Raises:
        ConfigError: The batch has another number of dense features.
    """
    dense_BI = batch.dense_BI
    if dense_BI.dim() != 2 or dense_BI.shape[1] != dense_in_features:
        raise ConfigError(
            f"the model was made for {dense_in_features} dense features and got a batch of shape "
            f"{list(dense_BI.shape)}: dataset.dense must be the one it was made with"
        )
    return dense_BI


# ---- checks of settings


def check_widths(setting: str, widths: Sequence[int]) -> list[int]:
    """Check the widths of a stack of layers, and return them as a list.

    Args:
        setting: The setting's full name, for the message.
        widths: The output columns of each layer, first to last.

    Raises:
        ConfigError: There is no layer, or a width is no whole number of at least 1.
    """
    if not isinstance(widths, list | tuple) or not widths:
        raise ConfigError(f"{setting}={widths}: must be a list of at least one width, e.g. [64,16]")
    for width in widths:
        if isinstance(width, bool) or not isinstance(width, int) or width < 1:
            raise ConfigError(
                f"{setting}={list(widths)}: {width} is no width; each must be a whole number of at "
                "least 1"
            )
    return list(widths)


def check_tower(
    setting: str,
    widths: Sequence[int],
    activation: str = "relu",
    dropout: float = 0.0,
    batch_norm: bool = False,
) -> None:
    """Check the settings of a stack of layers.

    Args:
        setting: The full name of the setting of the widths, for the message.
        widths: The output columns of each layer, first to last.
        activation: The name of the activation behind each layer.
        dropout: The share of outputs that training sets to 0.
        batch_norm: Whether batch normalisation stands before each activation.

    Raises:
        ConfigError: There is no layer, a width is not allowed, the activation does not exist,
            `dropout` is no share of at least 0 and less than 1, or `batch_norm` no truth value.
    """
    check_widths(setting, widths)
    if activation not in ACTIVATIONS:
        known = suggest(str(activation), ACTIVATIONS)
        raise ConfigError(f"model.activation={activation}: {known}")
    check_number("model.dropout", dropout, "share")
    check_truth("model.batch_norm", batch_norm)


# The kinds of numbers: what holds for one, and the same in words.
NUMBERS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "count": (lambda value: isinstance(value, int) and value >= 1, "a whole number of at least 1"),
    "share": (lambda value: 0 <= value < 1, "at least 0 and less than 1, such as 0.1"),
    "factor": (lambda value: 0 < value < 1e30, "a number above 0, such as 1"),
    "amount": (lambda value: value >= 0, "a number of at least 0"),
}


def check_number(setting: str, value: Any, kind: str) -> None:
    """Check that a setting is a number of a kind.

    Args:
        setting: The setting's full name, for the message.
        value: Its value.
        kind: A kind of `NUMBERS`.

    Raises:
        ConfigError: The value is no such number.
    """
    fits, allowed = NUMBERS[kind]
    if isinstance(value, bool) or not isinstance(value, int | float) or not fits(value):
        raise ConfigError(f"{setting}={value}: must be {allowed}")


def check_same_dim(model: str, dims: Sequence[int]) -> None:
    """Check that all vectors of an interaction have one dim.

    Args:
        model: The name of the model, for the message.
        dims: The dim of each vector.

    Raises:
        ConfigError: The dims differ, or there is no vector.
    """
    if not dims:
        raise ConfigError(
            f"{model} has no vectors: it needs a sparse column whose ids are pooled; name one in "
            "dataset.sparse"
        )
    if len(set(dims)) > 1:
        different = ", ".join(map(str, sorted(set(dims))))
        raise ConfigError(
            f"tables.dim: the interaction of {model} takes vectors of one dim, and these have "
            f"{different}: leave out dataset.table_dims and tables.dim_rule, or list tables of one "
            "embedding_dim"
        )


def check_divides(setting: str, parts: int, width_of: str, width: int) -> None:
    """Check that a number of parts, such as attention heads, divides a width.

    Args:
        setting: The setting with the number of parts.
        parts: The number of parts.
        width_of: The name of the width.
        width: The width.

    Raises:
        ConfigError: The number does not divide the width, or is below 1.
    """
    if isinstance(parts, bool) or not isinstance(parts, int) or parts < 1 or width % parts:
        fits = [n for n in range(1, width + 1) if width % n == 0]
        raise ConfigError(
            f"{setting}={parts}: must divide {width_of}={width}: {', '.join(map(str, fits))} do"
        )


def check_choice(setting: str, value: Any, choices: Sequence[str]) -> None:
    """Check that a setting is one of some words.

    Raises:
        ConfigError: The value is not one of the words.
    """
    if value not in choices:
        raise ConfigError(f"{setting}={value}: {suggest(str(value), choices)}")


def check_hidden(setting: str, layers: Sequence[int]) -> None:
    """Check the widths of hidden layers, which may be none.

    Raises:
        ConfigError: A width is not allowed.
    """
    if not isinstance(layers, list | tuple) or layers:
        check_widths(setting, layers)


def check_truth(setting: str, value: Any) -> None:
    """Check that a setting is true or false.

    Raises:
        ConfigError: The value is neither.
    """
    if not isinstance(value, bool):
        raise ConfigError(f"{setting}={value}: must be true or false")


def check_logit_layers(setting: str, layers: Sequence[int]) -> None:
    """Check the widths of layers whose last is the logit.

    Raises:
        ConfigError: A width is not allowed, or the last is not 1.
    """
    if check_widths(setting, layers)[-1] != 1:
        raise ConfigError(
            f"{setting}={list(layers)}: the last layer is the logit and must be 1, e.g. [256,128,1]"
        )


# The check of each setting that means the same in all models that have it, by its name.
CHECKS: Mapping[str, Callable[[str, Any], object]] = {
    "cross": partial(check_choice, choices=("full", "low_rank", "mixture")),
    "structure": partial(check_choice, choices=("parallel", "stacked")),
    "bridge": partial(
        check_choice,
        choices=(
            "hadamard_product",
            "pointwise_addition",
            "concatenation",
            "attention_pooling",
        ),
    ),
    "numbers": partial(check_choice, choices=("vectors", "concat")),
    "form": partial(check_choice, choices=("serial", "parallel")),
    "residual": partial(check_choice, choices=("sum", "concat")),
    "top_layers": check_logit_layers,
    "ratio": partial(check_number, kind="factor"),
    "temperature": partial(check_number, kind="factor"),
    "sparsity": partial(check_number, kind="amount"),
    **dict.fromkeys(
        (
            "cross_layers",
            "exponential_layers",
            "linear_layers",
            "quadratic_layers",
            "transformer_layers",
            "rank",
            "experts",
            "rows",
            "heads",
            "width",
            "blocks",
            "expansion",
            "stack",
            "factorised",
            "compressed",
            "max_length",
            "position_dim",
            "feed_forward",
        ),
        partial(check_number, kind="count"),
    ),
    **dict.fromkeys(
        (
            "dropout",
            "first_dropout",
            "second_dropout",
            "exponential_dropout",
            "linear_dropout",
            "field_dropout",
        ),
        partial(check_number, kind="share"),
    ),
    **dict.fromkeys(("batch_norm", "layer_norm", "normalise"), check_truth),
}


def check_settings(**settings: Any) -> None:
    """Check settings of a model by `CHECKS`.

    Args:
        settings: The settings by name.

    Raises:
        ConfigError: A value is not allowed; the message names the setting.
    """
    for name, value in settings.items():
        CHECKS[name](f"model.{name}", value)
