"""Behaviour sequences of models: which sequence belongs to which column of the candidate, and their
vectors, flat or as the latest steps.

Behaviours have a length of their own in each sample: the histories [i1 i2 i3] and [] of two samples
are three vectors and the lengths 3 and 0. Several sequences describe the same behaviours (their
items, their categories): their vectors stand side by side. The first sequence says how many
behaviours there are; where another one is shorter it has zeros.

Nothing here depends on padding, reads a number from the device, or branches on a size, so the
functions can be exported with any batch size and any number of behaviours.

Shapes: B samples, L behaviours of all samples, D columns of a sequence, W columns of all sequences,
K columns of all inputs, T steps.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from recapp.errors import ConfigError, suggest
from recapp.sparse.jagged_tensor import JaggedTensor
from recapp.tables.collections import BagCollection, SequenceCollection
from recapp.tables.config import TableLookup


class Histories:
    """The sequences of a model and the columns of its candidate that they are compared with.

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

    def flat(self, found: Mapping[str, JaggedTensor]) -> tuple[Tensor, Tensor]:
        """Return all behaviours, [L, W], and the number of the sample of each, [L].

        Values beyond the last behaviour get the number B.

        Args:
            found: The vectors of the sequences by name.
        """
        first, *others = (found[name] for name in self.pairs)
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

    def latest(self, found: Mapping[str, JaggedTensor], steps: int) -> tuple[Tensor, Tensor]:
        """Return the last behaviours of each sample, the latest one first, [B, T, W], and whether
        each exists, [B, T]. Those that do not are zero.

        Args:
            found: The vectors of the sequences by name.
            steps: The number of steps, T.
        """
        held = [found[name] for name in self.pairs]
        lengths_B = held[0].lengths()
        step_BT = lengths_B[:, None] - 1 - torch.arange(steps, device=lengths_B.device)
        exists_BT = step_BT >= 0
        parts = [
            _rows(
                jagged,
                jagged.offsets()[:-1, None] + step_BT,
                exists_BT & (step_BT < jagged.lengths()[:, None]),
            )
            for jagged in held
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
