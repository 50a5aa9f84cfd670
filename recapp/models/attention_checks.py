"""Checks of the settings of models with attention, gates, mixers and sequences.

A command makes them before it starts ranks, and the constructors of the models make them, too. This
file does not import torch. Each function has the names of the model's settings as arguments.
"""

from collections.abc import Mapping, Sequence

from recapp.errors import ConfigError, suggest
from recapp.models.widths import (
    NUMBERS,
    check_choice,
    check_count,
    check_divides,
    check_factor,
    check_hidden,
    check_share,
    check_tower,
    check_widths,
)
from recapp.tables.config import TableLookup


def check_autoint(
    attention_layers: int, width: int, heads: int, deep_layers: Sequence[int], dropout: float
) -> None:
    """Check the settings of AutoInt, `recapp.models.autoint.AutoInt`.

    Raises:
        ConfigError: The heads do not divide the width, or another setting is not allowed.
    """
    check_count("model.attention_layers", attention_layers)
    check_count("model.width", width)
    check_divides("model.heads", heads, "model.width", width)
    check_hidden("model.deep_layers", deep_layers)
    check_share("model.dropout", dropout)


def check_masknet(
    form: str, block_layers: Sequence[int], ratio: float, layers: Sequence[int], dropout: float
) -> None:
    """Check the settings of MaskNet, `recapp.models.masknet.MaskNet`.

    Raises:
        ConfigError: A setting is not allowed.
    """
    check_choice("model.form", form, ("serial", "parallel"))
    check_widths("model.block_layers", block_layers)
    check_factor("model.ratio", ratio)
    check_hidden("model.layers", layers)
    check_share("model.dropout", dropout)


def check_finalmlp(
    first_layers: Sequence[int],
    second_layers: Sequence[int],
    heads: int,
    gate_layers: Sequence[int],
    first_dropout: float,
    second_dropout: float,
) -> None:
    """Check the settings of FinalMLP, `recapp.models.finalmlp.FinalMLP`.

    Raises:
        ConfigError: The heads do not divide the last width of an MLP, or another setting is not
            allowed.
    """
    check_share("model.first_dropout", first_dropout)
    check_share("model.second_dropout", second_dropout)
    for setting, layers in (("first_layers", first_layers), ("second_layers", second_layers)):
        check_tower(f"model.{setting}", layers)
        check_divides("model.heads", heads, f"model.{setting}[{len(layers) - 1}]", layers[-1])
    check_hidden("model.gate_layers", gate_layers)


def check_finalnet(
    first_layers: Sequence[int],
    second_layers: Sequence[int],
    residual: str,
    activation: str,
    first_dropout: float,
    second_dropout: float,
) -> None:
    """Check the settings of FinalNet, `recapp.models.finalnet.FinalNet`.

    Raises:
        ConfigError: A width is odd under `residual=concat`, or another setting is not allowed.
    """
    check_choice("model.residual", residual, ("sum", "concat"))
    check_share("model.first_dropout", first_dropout)
    check_share("model.second_dropout", second_dropout)
    check_tower("model.first_layers", first_layers, activation)
    check_hidden("model.second_layers", second_layers)
    for setting, layers in (("first_layers", first_layers), ("second_layers", second_layers)):
        odd = [width for width in layers if width % 2]
        if odd and residual == "concat":
            raise ConfigError(
                f"model.{setting}={list(layers)}: {odd[0]} is odd, and model.residual=concat makes "
                "the two halves of a layer's columns: use even widths, or model.residual=sum"
            )


def check_wukong(
    bottom_layers: Sequence[int],
    stack: int,
    factorised: int,
    compressed: int,
    rank: int,
    block_layers: Sequence[int],
    layers: Sequence[int],
    dropout: float,
) -> None:
    """Check the settings of Wukong, `recapp.models.wukong.Wukong`.

    Raises:
        ConfigError: A setting is not allowed.
    """
    counts = {"stack": stack, "factorised": factorised, "compressed": compressed, "rank": rank}
    for setting, count in counts.items():
        check_count(f"model.{setting}", count)
    check_hidden("model.bottom_layers", bottom_layers)
    check_hidden("model.block_layers", block_layers)
    check_hidden("model.layers", layers)
    check_share("model.dropout", dropout)


def check_rankmixer(
    tokens: int,
    width: int,
    blocks: int,
    expansion: int,
    experts: int,
    sparsity: float,
    numbers: str,
) -> None:
    """Check the settings of RankMixer, `recapp.models.rankmixer.RankMixer`.

    Raises:
        ConfigError: The tokens do not divide the width, or another setting is not allowed.
    """
    counts = {"width": width, "blocks": blocks, "expansion": expansion, "experts": experts}
    for setting, count in counts.items():
        check_count(f"model.{setting}", count)
    check_divides("model.tokens", tokens, "model.width", width)
    if isinstance(sparsity, bool) or not isinstance(sparsity, int | float) or sparsity < 0:
        raise ConfigError(f"model.sparsity={sparsity}: must be a number of at least 0")
    check_choice("model.numbers", numbers, NUMBERS)


def check_din(
    attention_layers: Sequence[int], layers: Sequence[int], activation: str, dropout: float
) -> None:
    """Check the settings of DIN, `recapp.models.din.DIN`.

    Raises:
        ConfigError: A setting is not allowed.
    """
    check_tower("model.attention_layers", attention_layers, activation)
    check_tower("model.layers", layers, activation, dropout)


def check_bst(
    max_length: int,
    position_dim: int | None,
    transformer_layers: int,
    feed_forward: int | None,
    layers: Sequence[int],
    dropout: float,
) -> None:
    """Check the settings of BST, `recapp.models.bst.BST`. Its heads must divide the columns of a
    step, which the constructor checks.

    Raises:
        ConfigError: A setting is not allowed.
    """
    check_count("model.max_length", max_length)
    check_count("model.transformer_layers", transformer_layers)
    for setting, count in {"position_dim": position_dim, "feed_forward": feed_forward}.items():
        if count is not None:
            check_count(f"model.{setting}", count)
    check_tower("model.layers", layers, dropout=dropout)


def check_step(item: int, position: int, heads: int) -> None:
    """Check that the heads of a BST divide the columns of a step.

    Args:
        item: The columns of an item.
        position: The columns of a position.
        heads: The number of heads.

    Raises:
        ConfigError: The number of heads does not divide the columns of a step, or is below 1.
    """
    step = f"the {item} columns of an item + model.position_dim={position}, together "
    check_divides("model.heads", heads, step.strip(), item + position)


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
        said = f"model.history={{{name}: {column}}}"
        if name not in dims:
            raise ConfigError(f"{said}: {name} is no sequence; {suggest(name, list(dims))}")
        if column not in columns:
            found = suggest(column, list(columns))
            raise ConfigError(f"{said}: {column} is no column that pools its ids; {found}")
        if dims[name] != columns[column]:
            raise ConfigError(
                f"{said}: their vectors have {dims[name]} and {columns[column]} columns: let them "
                f"share a table, tables.shared={{{name}: {column}}}, or give their tables one dim"
            )
    return dict(history)


def _reader_of(sequence: TableLookup, target: Sequence[TableLookup]) -> str:
    """Return the only column that reads the table of a sequence."""
    same = [x.output for x in target if x.table.name == sequence.table.name]
    if len(same) == 1:
        return same[0]
    name = sequence.output
    found = f"{' and '.join(same)} read" if same else "no column that pools its ids reads"
    raise ConfigError(
        f"model.history=null: {found} the table of the sequence {name}: name the column with "
        f"which it is compared, model.history={{{name}: COLUMN}}, and let both read one table, "
        f"tables.shared={{{name}: COLUMN}}"
    )
