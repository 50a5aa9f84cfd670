"""Raw ids become rows here and nowhere else.

A data set hands over ids as it found them: contiguous numbers, 32-bit hashes, any int64, or MISSING for a sample without an id. The
table's rule makes a row of each:

| rule  | id                      | outside 0..R-1                             | MISSING |
|-------|-------------------------|--------------------------------------------|---------|
| error | is the row              | an error that names table, feature and id  | row 0   |
| hash  | row 1 + id mod (R - 1)  | cannot happen                              | row 0   |
| clamp | is the row              | the nearest row; counted                   | row 0   |
| drop  | is the row              | leaves the bag, which gets shorter; counted| row 0   |

So a hashed table keeps row 0 for missing ids alone (measured on Criteo: sharing it costs .003 AUC).
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby

import torch
from torch import Tensor

from recapp.errors import ConfigError, IdError
from recapp.sparse.batch import MISSING
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.tables.config import EmbeddingBagConfig, IdRule


@dataclass(slots=True)
class Rows:
    """The rows a batch looks up, (table, feature) pair by pair.

    Args:
        rows_L: integers, pairs-major, samples in order within a pair.
        lengths_FB: ids per bag; F counts (table, feature) pairs.
        weights_L: a weight per id, or None.
        per_F: ids per pair, on the host.
    """

    rows_L: Tensor
    lengths_FB: Tensor
    weights_L: Tensor | None
    per_F: list[int]


class OutsideTable(IdError):
    """An id outside its table: which (table, feature) pair and which id, so that every rank can be told."""

    def __init__(self, table: EmbeddingBagConfig, feature: str, pair: int, number: int, where: str = "") -> None:
        super().__init__(
            f"table {table.name}: feature {feature} has the id {number}{where}, which is outside its {table.num_embeddings} rows "
            f"(0..{table.num_embeddings - 1}): give the table more rows, or set its id_rule to hash, clamp or drop")
        self.pair, self.number = pair, number


Kernel = Callable[[Tensor, Sequence[int], Tensor, Tensor, Tensor], tuple[Tensor, int]]
"""All rules in one pass: (ids_L, edges, sizes_F, rules_F, changed_F) to rows, -1 where an id is dropped, and the place of the first id
that is an error, or -1. Rules are numbered as in `RULE_NUMBERS`; `changed_F` is added to."""

RULE_NUMBERS = {rule: number for number, rule in enumerate((IdRule.ERROR, IdRule.HASH, IdRule.CLAMP, IdRule.DROP))}


class IdRules:
    """Applies the rules of a collection's tables to a batch. Counts what clamp and drop changed, by table, in `changed`.

    Args:
        tables: of the collection.
        kernel: a faster way for ids on the CPU; the torch operations here define the result.
    """

    def __init__(self, tables: Sequence[EmbeddingBagConfig], kernel: Kernel | None = None) -> None:
        self.pairs = [(t, f) for t in tables for f in t.feature_names]
        self._kernel = kernel
        self._size_F = torch.tensor([t.num_embeddings for t, _ in self.pairs])
        self._rule_F = torch.tensor([RULE_NUMBERS[t.id_rule] for t, _ in self.pairs])
        self.changed = {t.name: 0 for t in tables}
        self._runs = [(rule, [i for i, _ in run]) for rule, run in groupby(enumerate(self.pairs), key=lambda p: p[1][0].id_rule)]

    def __call__(self, features: KeyedJaggedTensor) -> Rows:
        """Rows of every (table, feature) pair.

        Args:
            features: raw ids; needs every feature of the tables, may hold more, in any order.

        Raises:
            OutsideTable: rule `error` and an id outside its table.
            ConfigError: ids that are not integers.
        """
        features = self._select(features)
        ids_L, weights_L = features.values(), features.weights_or_none()
        if ids_L.is_floating_point() or ids_L.dtype == torch.bool:
            raise ConfigError(f"ids are {ids_L.dtype}: a lookup needs integer ids (int32 or int64); weights go into `weights`")
        ids_L, per_F = ids_L.long(), features.length_per_key()
        lengths_FB = features.lengths().view(len(self.pairs), -1) if per_F else features.lengths().view(0, 0)
        edge = [0, *accumulate(per_F)]
        if self._kernel is not None:
            return self._in_one_pass(self._kernel, Rows(ids_L, lengths_FB, weights_L, per_F), edge)
        parts: list[Tensor] = []
        kept: list[Tensor | None] = []
        for rule, run in self._runs:
            ids_N = ids_L[edge[run[0]]:edge[run[-1] + 1]]
            size_N = _per_id(torch.tensor([self.pairs[i][0].num_embeddings for i in run]), per_F[run[0]:run[-1] + 1], ids_N)
            missing_N = ids_N == MISSING
            if rule is IdRule.HASH:
                parts.append(torch.where(missing_N, 0, 1 + ids_N.remainder(size_N - 1)))
                kept.append(None)
                continue
            row_N = torch.where(missing_N, 0, ids_N)
            outside_N = (row_N < 0) | (row_N >= size_N)
            keep_N = None
            if bool(outside_N.any()):
                keep_N = self._outside(rule, run, per_F, ids_N, outside_N)
                row_N = row_N.clamp(min=0).minimum(size_N - 1) if keep_N is None else row_N
            parts.append(row_N)
            kept.append(keep_N)
        rows_L = parts[0] if len(parts) == 1 else torch.cat(parts)
        if any(k is not None for k in kept):
            return _drop(rows_L, lengths_FB, weights_L, torch.cat(
                [torch.ones_like(p, dtype=torch.bool) if k is None else k for p, k in zip(parts, kept, strict=True)]))
        return Rows(rows_L, lengths_FB, weights_L, per_F)

    def error(self, pair: int, number: int, where: str) -> OutsideTable:
        """The error of a pair's id that was found elsewhere; `where` says on which rank."""
        table, feature = self.pairs[pair]
        return OutsideTable(table, feature, pair, number, where)

    def _in_one_pass(self, kernel: Kernel, ids: Rows, edge: list[int]) -> Rows:
        changed_F = torch.zeros(len(self.pairs), dtype=torch.int64)
        rows_L, first = kernel(ids.rows_L.contiguous(), edge, self._size_F, self._rule_F, changed_F)
        if first >= 0:
            raise self.error(bisect_right(edge, first) - 1, int(ids.rows_L[first]), "")
        dropped = False
        for (table, _), n in zip(self.pairs, changed_F.tolist(), strict=True):
            self.changed[table.name] += n
            dropped |= n > 0 and table.id_rule is IdRule.DROP
        return _drop(rows_L, ids.lengths_FB, ids.weights_L, rows_L >= 0) if dropped else replace(ids, rows_L=rows_L)

    def _select(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        wanted, keys = [f for _, f in self.pairs], list(features.keys())
        if wanted == keys:
            return features
        return features.permute([features.index_of(f) for f in wanted])

    def _outside(self, rule: IdRule, run: list[int], per_F: list[int], ids_N: Tensor, outside_N: Tensor) -> Tensor | None:
        """Raise, or count; returns which ids stay where the rule drops some."""
        pair_N = _per_id(torch.tensor(run), per_F[run[0]:run[-1] + 1], ids_N)
        if rule is IdRule.ERROR:
            first = int(outside_N.nonzero()[0])
            raise self.error(int(pair_N[first]), int(ids_N[first]), "")
        counts = torch.bincount(pair_N[outside_N], minlength=len(self.pairs)).tolist()
        for (table, _), n in zip(self.pairs, counts, strict=True):
            self.changed[table.name] += n
        return ~outside_N if rule is IdRule.DROP else None


def _per_id(value_F: Tensor, per_F: list[int], ids_N: Tensor) -> Tensor:
    """A value per pair becomes a value per id."""
    return torch.repeat_interleave(value_F.to(ids_N.device), torch.tensor(per_F, device=ids_N.device), output_size=len(ids_N))


def _drop(rows_L: Tensor, lengths_FB: Tensor, weights_L: Tensor | None, keep_L: Tensor) -> Rows:
    bag_L = torch.repeat_interleave(torch.arange(lengths_FB.numel(), device=rows_L.device), lengths_FB.flatten(), output_size=len(rows_L))
    lengths = torch.bincount(bag_L[keep_L], minlength=lengths_FB.numel()).view_as(lengths_FB)
    return Rows(rows_L[keep_L], lengths, None if weights_L is None else weights_L[keep_L], lengths.sum(1).tolist())
