"""Models with attention, and their parts: AutoInt attends over the fields of a sample, BST over the
steps of a behaviour sequence, and DIN weights behaviours for a candidate item. `Histories` says
which sequence belongs to which column of the candidate.

Shapes: B samples, F fields, D columns of a field, W columns of a layer's output, H heads, E columns
of a head (W / H), T steps of a sequence, L behaviours of all samples, K columns of a pair.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from recapp.errors import ConfigError, suggest
from recapp.models.layers import (
    MLP,
    FastDropout,
    FieldVectors,
    check_divides,
    check_hidden,
    check_number,
    check_settings,
    check_widths,
    draw_normal,
    logit_mlp,
    xavier_linear,
)
from recapp.sparse.jagged_tensor import JaggedTensor
from recapp.sparse.keyed_jagged_tensor import Batch
from recapp.tables.collections import BagCollection, SequenceCollection
from recapp.tables.config import TableLookup


def _heads(vectors_BFW: Tensor, heads: int) -> Tensor:
    """Return the columns of each head, [B, H, F, E]."""
    samples, fields, width = vectors_BFW.shape
    return vectors_BFW.view(samples, fields, heads, width // heads).transpose(1, 2)


class FieldAttention(nn.Module):
    """The interacting layer of AutoInt (arXiv 1810.11921, equations 5 to 8).

    Each field attends to all fields, in H heads whose scores are plain inner products, without a
    factor. The result is ReLU(heads side by side + W_res x): [B, F, D] -> [B, F, W].

    Args:
        dim: The columns of a field, D.
        width: The columns of an output field over all heads, W.
        heads: The number of heads, a divisor of the width.

    Raises:
        ConfigError: The heads do not divide the width.
    """

    def __init__(self, dim: int, width: int, heads: int) -> None:
        super().__init__()
        check_divides("model.heads", heads, "model.width", width)
        self.heads = heads
        self.query = xavier_linear(dim, width, bias=False)
        self.key = xavier_linear(dim, width, bias=False)
        self.value = xavier_linear(dim, width, bias=False)
        self.residual = xavier_linear(dim, width, bias=False)

    def forward(self, fields_BFD: Tensor) -> Tensor:
        """Return the fields after attention, [B, F, W]."""
        parts = (layer(fields_BFD) for layer in (self.query, self.key, self.value))
        query, key, value = (_heads(part_BFW, self.heads) for part_BFW in parts)
        mixed_BHFE = functional.scaled_dot_product_attention(query, key, value, scale=1.0)
        mixed_BFW = mixed_BHFE.transpose(1, 2).flatten(2)
        return torch.relu(mixed_BFW + self.residual(fields_BFD))


class TransformerLayer(nn.Module):
    """A layer of the encoder over behaviours in BST (arXiv 1905.06874, equations 2 to 7).

    S = LN(x + dropout(heads side by side W^H)); output = LN(S + dropout(FFN(S))), where the FFN has
    one hidden layer with a leaky ReLU. Scores are divided by the root of a head's columns.

    Args:
        width: The columns of a step, W.
        heads: The number of heads, a divisor of the width.
        feed_forward: The columns of the hidden layer.
        dropout: The share of the columns that dropout sets to zero.

    Raises:
        ConfigError: The heads do not divide the width.
    """

    def __init__(self, width: int, heads: int, feed_forward: int, dropout: float) -> None:
        super().__init__()
        check_divides("model.heads", heads, "width", width)
        self.heads = heads
        self.query = xavier_linear(width, width, bias=False)
        self.key = xavier_linear(width, width, bias=False)
        self.value = xavier_linear(width, width, bias=False)
        self.output = xavier_linear(width, width, bias=False)
        self.first_norm = nn.LayerNorm(width)
        self.hidden = xavier_linear(width, feed_forward)
        self.back = xavier_linear(feed_forward, width)
        self.second_norm = nn.LayerNorm(width)
        self.dropout = FastDropout(dropout)

    def forward(self, steps_BTW: Tensor, there_BT: Tensor) -> Tensor:
        """Return the steps after the layer, [B, T, W].

        Args:
            steps_BTW: The steps, padding included.
            there_BT: Whether a step exists; no step attends to padding. A sample has at least one.
        """
        parts = (layer(steps_BTW) for layer in (self.query, self.key, self.value))
        query, key, value = (_heads(part_BTW, self.heads) for part_BTW in parts)
        mixed_BHTE = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=there_BT[:, None, None, :]
        )
        attended_BTW = self.output(mixed_BHTE.transpose(1, 2).flatten(2))
        first_BTW = self.first_norm(steps_BTW + self.dropout(attended_BTW))
        hidden_BTF = functional.leaky_relu(self.hidden(first_BTW))
        second_BTW: Tensor = self.second_norm(first_BTW + self.dropout(self.back(hidden_BTF)))
        return second_BTW


class TargetAttention(nn.Module):
    """The local activation unit of DIN (arXiv 1706.06978, section 4.3, figure 2).

    A small MLP scores each pair of the candidate item a and a behaviour v from [a, v, a - v, a * v]
    (the authors' code has the difference, too: github.com/zhougr1993/DeepInterestNetwork). A score
    is a weight as it is: no softmax, so that a sum over many matching behaviours is large.

    Args:
        dim: The columns of the candidate and of a behaviour, D.
        layers: The widths of the hidden layers.
        activation: The activation of the hidden layers.
        setting: The name of `layers` in the configuration, for messages.

    Raises:
        ConfigError: A width or the activation is not allowed.
    """

    def __init__(
        self, dim: int, layers: Sequence[int], activation: str, setting: str = "layers"
    ) -> None:
        super().__init__()
        self.unit = MLP(
            4 * dim, [*layers, 1], last_relu=False, setting=setting, activation=activation
        )

    def forward(self, target_LD: Tensor, behaviour_LD: Tensor) -> Tensor:
        """Return the weight of each behaviour, [L].

        Args:
            target_LD: The candidate of the sample of each behaviour.
            behaviour_LD: The behaviours.
        """
        pair_LK = torch.cat(
            [target_LD, behaviour_LD, target_LD - behaviour_LD, target_LD * behaviour_LD], 1
        )
        return self.unit(pair_LK).squeeze(1)


class AutoInt(nn.Module):
    """Click logits from attention over fields.

    "AutoInt: Automatic Feature Interaction Learning via Self-Attentive Neural Networks",
    arXiv 1810.11921.

        numbers, lookups -- fields -- attention over fields -- ... -- flat -- linear -- logits_B
                                 \\-------------- deep layers (AutoInt+) ------- linear --/

    Each number is a field of its own, x_i v_i with a learnt vector v_i, as each lookup is. A layer
    lets each field attend to all fields, in several heads, and keeps the field by a residual. After
    the last layer a linear map of all fields gives the logit. AutoInt+ adds the logit of an MLP of
    the fields before attention.

    Shapes: B batch, F fields, D columns of a field, W columns of an output field.

    Args:
        embedding_bag_collection: The tables, all of one dim.
        dense_in_features: The number of dense features.
        attention_layers: The number of layers of attention.
        width: The columns of an output field of a layer, over all heads.
        heads: The number of heads, a divisor of the width.
        deep_layers: The widths of the MLP of AutoInt+; without any there is no MLP.
        dropout: The share of the columns of the MLP that dropout sets to zero.
        batch_norm: Whether the MLP normalises its hidden layers over the batch.
        field_dropout: The share of whole vectors that training sets to 0 (`FieldVectors`).

    Raises:
        ConfigError: The heads do not divide the width, or another setting is not allowed.
    """

    def __init__(
        self,
        embedding_bag_collection: BagCollection,
        dense_in_features: int,
        attention_layers: int = 3,
        width: int = 64,
        heads: int = 2,
        deep_layers: Sequence[int] = (),
        dropout: float = 0.0,
        batch_norm: bool = False,
        field_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_number("model.attention_layers", attention_layers, "count")
        check_settings(width=width, dropout=dropout)
        check_hidden("model.deep_layers", deep_layers)
        self.fields = FieldVectors(
            embedding_bag_collection, dense_in_features, model="AutoInt", dropout=field_dropout
        )
        dims = [self.fields.dim, *[width] * attention_layers]
        self.layers = nn.ModuleList(FieldAttention(dim, width, heads) for dim in dims[:-1])
        self.score = xavier_linear(self.fields.count * width, 1)
        self.deep = None
        if deep_layers:
            self.deep = MLP(
                self.fields.columns,
                [*deep_layers, 1],
                last_relu=False,
                setting="model.deep_layers",
                batch_norm=batch_norm,
                dropout=dropout,
            )
        # each layer's linear maps run once for each field, and it multiplies queries with keys, and
        # weights with values
        count = self.fields.count
        weights = sum(p.numel() for p in self.layers.parameters())
        products = 2 * count**2 * width * attention_layers
        self.flops_per_sample = 6.0 * ((count - 1) * weights + products)

    def forward(self, batch: Batch) -> Tensor:
        """Compute logits, [B]."""
        fields_BFD = self.fields(batch)
        mixed_BFW = fields_BFD
        for layer in self.layers:
            mixed_BFW = layer(mixed_BFW)
        logits_B1 = self.score(mixed_BFW.flatten(1))
        if self.deep is not None:
            logits_B1 = logits_B1 + self.deep(fields_BFD.flatten(1))
        return logits_B1.squeeze(1)


class Histories:
    """The sequences of a model and the columns of its candidate that they are compared with.

    They return the vectors of behaviours flat, or as the latest steps.

    Behaviours have a length of their own in each sample: the histories [i1 i2 i3] and [] of two
    samples are three vectors and the lengths 3 and 0. Several sequences describe the same
    behaviours (their items, their categories): their vectors stand side by side. The first sequence
    says how many behaviours there are; where another one is shorter it has zeros.

    Nothing here depends on padding, reads a number from the device, or branches on a size, so the
    functions can be exported with any batch size and any number of behaviours.

    Shapes: B samples, L behaviours of all samples, D columns of a sequence, W columns of all
    sequences, K columns of all inputs, T steps.

    Args:
        bags: The collection whose lookups are the candidate.
        sequences: The collection of the sequences.
        history: The column of the candidate for each sequence; None pairs those that read the same
            table.

    Raises:
        ConfigError: A column does not exist, its dim differs from that of its sequence, or no pair
            is evident.
    """

    def __init__(
        self,
        bags: BagCollection,
        sequences: SequenceCollection,
        history: Mapping[str, str] | None,
    ) -> None:
        self.pairs = pair_history(bags.lookups, sequences.lookups, history)
        dims = {x.output: x.dim for x in sequences.lookups}
        self.dim = sum(dims[name] for name in self.pairs)
        starts = {}
        column = -sum(x.columns for x in bags.lookups)
        for lookup in bags.lookups:
            starts[lookup.output] = (column, lookup.columns)
            column += lookup.columns
        self._places = [starts[target] for target in self.pairs.values()]

    def target(self, flat_BK: Tensor) -> Tensor:
        """Return the candidate, [B, W], from a matrix that ends with all pooled vectors."""
        columns = flat_BK.shape[1]
        return torch.cat([flat_BK.narrow(1, columns + at, n) for at, n in self._places], 1)

    def flat(self, sequences: Mapping[str, JaggedTensor]) -> tuple[Tensor, Tensor]:
        """Return all behaviours, [L, W], and the number of the sample of each, [L].

        Values beyond the last behaviour get the number B.

        Args:
            sequences: The vectors of the sequences by name.
        """
        first, *others = (sequences[name] for name in self.pairs)
        offsets = first.offsets()
        behaviour_L = torch.arange(first.values().shape[0], device=offsets.device)
        sample_L = torch.searchsorted(offsets[1:], behaviour_L, right=True)
        last_L = sample_L.clamp(max=first.lengths().shape[0] - 1)
        step_L = behaviour_L - offsets[last_L]
        parts = [first.values()]
        for jagged in others:
            exists_L = step_L < jagged.lengths()[last_L]
            parts.append(_rows(jagged, jagged.offsets()[last_L] + step_L, exists_L))
        return torch.cat(parts, 1), sample_L

    def latest(self, sequences: Mapping[str, JaggedTensor], steps: int) -> tuple[Tensor, Tensor]:
        """Return the last behaviours of each sample, the latest one first, [B, T, W], and whether
        each exists, [B, T]. Those that do not are zero.

        Args:
            sequences: The vectors of the sequences by name.
            steps: The number of steps, T.
        """
        jagged_tensors = [sequences[name] for name in self.pairs]
        lengths_B = jagged_tensors[0].lengths()
        step_BT = lengths_B[:, None] - 1 - torch.arange(steps, device=lengths_B.device)
        exists_BT = step_BT >= 0
        parts = [
            _rows(
                jagged,
                jagged.offsets()[:-1, None] + step_BT,
                exists_BT & (step_BT < jagged.lengths()[:, None]),
            )
            for jagged in jagged_tensors
        ]
        return torch.cat(parts, 2), exists_BT


def _rows(jagged: JaggedTensor, row: Tensor, exists: Tensor) -> Tensor:
    """Return rows of a sequence's vectors, and zeros where a row does not exist.

    An index in brackets would be shorter, but its backward adds in any order on several threads.
    """
    values_LD = jagged.values()
    with_zeros = torch.cat([values_LD, values_LD.new_zeros(1, values_LD.shape[1])])
    row = torch.where(exists, row, values_LD.shape[0])
    return with_zeros.index_select(0, row.flatten()).view(*row.shape, values_LD.shape[1])


def pair_history(
    target: Sequence[TableLookup],
    sequences: Sequence[TableLookup],
    history: Mapping[str, str] | None,
) -> dict[str, str]:
    """Return the column of the candidate that each sequence is compared with.

    Args:
        target: The lookups that pool.
        sequences: The lookups that do not.
        history: The setting `model.history`, the column for each sequence; None pairs columns of
            one table.

    Raises:
        ConfigError: A name does not exist, the vectors of a pair have different dims, or no pair or
            several are possible.
    """
    if history is None:
        history = {x.output: _reader_of(x, target) for x in sequences}
    elif not history:
        raise ConfigError(
            "model.history={}: names no sequence: use null, or {SEQUENCE: COLUMN} for one or more"
        )
    columns = {x.output: x.columns for x in target}
    dims = {x.output: x.dim for x in sequences}
    for name, column in history.items():
        setting = f"model.history={{{name}: {column}}}"
        if name not in dims:
            raise ConfigError(f"{setting}: {name} is no sequence; {suggest(name, list(dims))}")
        if column not in columns:
            hint = suggest(column, list(columns))
            raise ConfigError(f"{setting}: {column} is no column that pools its ids; {hint}")
        if dims[name] != columns[column]:
            raise ConfigError(
                f"{setting}: their vectors have {dims[name]} and {columns[column]} columns: let "
                f"them share a table, tables.shared={{{name}: {column}}}, or give their tables one "
                "dim"
            )
    return dict(history)


def _reader_of(sequence: TableLookup, target: Sequence[TableLookup]) -> str:
    """Return the only column that reads the table of a sequence."""
    same = [x.output for x in target if x.table.name == sequence.table.name]
    if len(same) == 1:
        return same[0]
    name = sequence.output
    readers = f"{' and '.join(same)} read" if same else "no column that pools its ids reads"
    raise ConfigError(
        f"model.history=null: {readers} the table of the sequence {name}: name the column with "
        f"which it is compared, model.history={{{name}: COLUMN}}, and let both read one table, "
        f"tables.shared={{{name}: COLUMN}}"
    )


class DIN(nn.Module):
    """Click logits from the behaviours that matter for the candidate.

    "Deep Interest Network for Click-Through Rate Prediction", arXiv 1706.06978.

        history -- weight of each behaviour for this candidate -- sum --+
                            |                                           |
        candidate ----------+-------------------------------------------+-- MLP -- logits_B
        numbers, other columns -----------------------------------------+

    The weight of a behaviour is the output of a small MLP, the activation unit, which sees the
    behaviour and the candidate. The weights of a user do not add up to 1, so that the sum tells how
    strong an interest is. Hidden layers have Dice, or PReLU.

    Dice takes its statistics from the behaviours that exist: no padding takes part, so the result
    does not depend on any. An empty history gives a sum of zeros.

    The number of behaviours is not known to the planner, which counts the work of the activation
    unit once for each sample.

    Shapes: B batch, L behaviours of all samples, W columns of a behaviour, K columns of all inputs.

    Args:
        embedding_bag_collection: The tables of the candidate and of the other columns.
        embedding_collection: The sequences: `tables.sequences` names their columns, and
            `tables.shared` lets them read the tables of the candidate.
        dense_in_features: The number of dense features.
        history: The column of the candidate for each sequence; None pairs those that read the same
            table.
        attention_layers: The hidden widths of the activation unit.
        softmax: Whether the weights of a sample are made to add up to 1.
        layers: The widths of the MLP; the logit follows.
        activation: The activation of hidden layers: "dice", "prelu" or "relu".
        dropout: The share of the columns of the MLP that dropout sets to zero.
        batch_norm: Whether the MLP normalises its hidden layers over the batch.
        field_dropout: The share of whole vectors that training sets to 0 (`FieldVectors`).

    Raises:
        ConfigError: A setting is not allowed, or a sequence and its column have different dims.
    """

    def __init__(
        self,
        embedding_bag_collection: BagCollection,
        embedding_collection: SequenceCollection,
        dense_in_features: int,
        history: Mapping[str, str] | None = None,
        attention_layers: Sequence[int] = (36,),
        softmax: bool = False,
        layers: Sequence[int] = (200, 80),
        activation: str = "dice",
        dropout: float = 0.0,
        batch_norm: bool = False,
        field_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_widths("model.attention_layers", attention_layers)
        self.fields = FieldVectors(
            embedding_bag_collection, dense_in_features, numbers="concat", dropout=field_dropout
        )
        self.histories = Histories(embedding_bag_collection, embedding_collection, history)
        self.embedding_collection = embedding_collection
        width = self.histories.dim
        self.attention = TargetAttention(
            width, attention_layers, activation, setting="model.attention_layers"
        )
        self.softmax = softmax
        self.top = logit_mlp(
            self.fields.columns + width,
            layers,
            activation=activation,
            batch_norm=batch_norm,
            dropout=dropout,
        )

    def forward(self, batch: Batch) -> Tensor:
        """Compute logits, [B]."""
        flat_BK = self.fields.flat(batch)
        vectors_LW, sample_L = self.histories.flat(self.embedding_collection(batch.sparse))
        behaviour_LW = vectors_LW.to(flat_BK.dtype)  # tables may have another dtype than the model
        samples = flat_BK.shape[0]
        target_BW = self.histories.target(flat_BK)
        target_LW = target_BW.index_select(0, sample_L.clamp(max=samples - 1))
        weight_L = self.attention(target_LW, behaviour_LW)
        if self.softmax:
            weight_L = _softmax(weight_L, sample_L, samples)
        # One row more than samples, for values that no sample has.
        room = behaviour_LW.new_zeros(samples + 1, self.histories.dim)
        interest_BW = room.index_add(0, sample_L, weight_L[:, None] * behaviour_LW)[:samples]
        return self.top(torch.cat([flat_BK, interest_BW], 1)).squeeze(1)


def _softmax(score_L: Tensor, sample_L: Tensor, samples: int) -> Tensor:
    """Return weights that add up to 1 for each sample with behaviours, [L]."""
    largest_B = score_L.new_full((samples + 1,), -torch.inf)
    largest_B = largest_B.scatter_reduce(0, sample_L, score_L.detach(), "amax")
    power_L = (score_L - largest_B[sample_L]).exp()
    total_B = score_L.new_zeros(samples + 1).index_add(0, sample_L, power_L)
    return power_L / total_B.index_select(0, sample_L)


class BST(nn.Module):
    """Click logits from a transformer over the history and the candidate.

    "Behavior Sequence Transformer for E-commerce Recommendation in Alibaba", arXiv 1905.06874.

        history, latest first --+
                                +-- steps -- transformer layers -- flat --+
        candidate --------------+                                         +-- MLP -- logits_B
        numbers, all columns ---------------------------------------------+

    A step is the vector of an item beside a learnt vector of its position, which counts from the
    candidate (position 0) back in time. All steps attend to each other. Behaviours before the
    `max_length` latest ones are left out.

    The paper's position is the time that has passed; a sequence of ids has only its order, which is
    used here. Padding is never attended to, and its outputs are zeros.

    Shapes: B batch, T steps with the candidate, D columns of an item, W columns of a step, K
    columns of all inputs.

    Args:
        embedding_bag_collection: The tables of the candidate and of the other columns.
        embedding_collection: The sequences: `tables.sequences` names their columns, and
            `tables.shared` lets them read the tables of the candidate.
        dense_in_features: The number of dense features.
        history: The column of the candidate for each sequence; None pairs those that read the same
            table.
        max_length: The number of behaviours that the transformer sees, the latest ones.
        position_dim: The columns of a position; None takes those of an item.
        transformer_layers: The number of transformer layers.
        heads: The number of heads, a divisor of the columns of item and position.
        feed_forward: The hidden width of a transformer layer; None takes four times the columns of
            a step.
        layers: The widths of the MLP, with leaky ReLUs; the logit follows.
        dropout: The share of columns that dropout sets to zero, in transformer layers and MLP.
        field_dropout: The share of whole vectors that training sets to 0 (`FieldVectors`).

    Raises:
        ConfigError: The heads do not divide the columns of a step, another setting is not allowed,
            or a sequence and its column have different dims.
    """

    def __init__(
        self,
        embedding_bag_collection: BagCollection,
        embedding_collection: SequenceCollection,
        dense_in_features: int,
        history: Mapping[str, str] | None = None,
        max_length: int = 20,
        position_dim: int | None = None,
        transformer_layers: int = 1,
        heads: int = 8,
        feed_forward: int | None = None,
        layers: Sequence[int] = (1024, 512, 256),
        dropout: float = 0.2,
        field_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_settings(
            max_length=max_length, transformer_layers=transformer_layers, dropout=dropout
        )
        optional = {"position_dim": position_dim, "feed_forward": feed_forward}
        check_settings(**{name: value for name, value in optional.items() if value is not None})
        self.fields = FieldVectors(
            embedding_bag_collection, dense_in_features, numbers="concat", dropout=field_dropout
        )
        self.histories = Histories(embedding_bag_collection, embedding_collection, history)
        self.embedding_collection = embedding_collection
        self.max_length = max_length
        dim = self.histories.dim
        position_dim = position_dim or dim
        width = dim + position_dim
        step = f"the {dim} columns of an item + model.position_dim={position_dim}, together"
        check_divides("model.heads", heads, step, width)
        self.position_TP = nn.Parameter(torch.zeros(max_length + 1, position_dim))
        draw_normal(self.position_TP, position_dim**-0.5)
        self.layers = nn.ModuleList(
            TransformerLayer(width, heads, feed_forward or 4 * width, dropout)
            for _ in range(transformer_layers)
        )
        self.top = logit_mlp(
            self.fields.columns + (max_length + 1) * width,
            layers,
            activation="leaky_relu",
            dropout=dropout,
        )
        # each step passes through the linear maps of all layers, and attends to all steps
        weights = sum(p.numel() for p in self.layers.parameters())
        products = 2 * (max_length + 1) ** 2 * width * transformer_layers
        self.flops_per_sample = 6.0 * (max_length * weights + products)

    def forward(self, batch: Batch) -> Tensor:
        """Compute logits, [B]."""
        flat_BK = self.fields.flat(batch)
        sequences = self.embedding_collection(batch.sparse)
        past_BTD, past_BT = self.histories.latest(sequences, self.max_length)
        target_BD = self.histories.target(flat_BK)
        # Tables may have another dtype than the model.
        items_BTD = torch.cat([target_BD[:, None], past_BTD.to(flat_BK.dtype)], 1)
        there_BT = torch.cat([torch.ones_like(past_BT[:, :1]), past_BT], 1)
        samples, steps, _ = items_BTD.shape
        position_BTP = self.position_TP.to(items_BTD.dtype).expand(samples, steps, -1)
        steps_BTW = torch.cat([items_BTD, position_BTP], 2)
        for layer in self.layers:
            steps_BTW = layer(steps_BTW, there_BT)
        steps_BTW = steps_BTW * there_BT[:, :, None]
        return self.top(torch.cat([flat_BK, steps_BTW.flatten(1)], 1)).squeeze(1)
