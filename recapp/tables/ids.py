"""Raw ids become rows here and nowhere else.

A data set gives ids as they stand in the logs: contiguous numbers, 32-bit hashes, any int64, 64-bit
hashes of other text (`recapp/dataset/decode.py`), or MISSING for a sample without an id. The
table's rule turns each id into a row:

| rule  | id                      | outside 0..R-1                             | MISSING |
|-------|-------------------------|--------------------------------------------|---------|
| error | is the row              | an error that names table, feature and id  | row 0   |
| hash  | row 1 + id mod (R - 1)  | cannot happen                              | row 0   |
| clamp | is the row              | the nearest row; counted                   | row 0   |
| drop  | is the row              | leaves the bag, which gets shorter; counted| row 0   |

Under all rules but `hash` ids are counted from the table's `min_key`, by default 0.

A dynamic table has no rule: any id, also MISSING, is a key, and the key's position takes the place
of the row (`recapp/tables/positions.py`).

So a hashed table keeps row 0 for missing ids alone (measured on Criteo: sharing it costs .003 AUC).

The host must know the ids that were outside, and a read from a GPU waits for it. So `begin` returns
rows at once, and a check to call later. Only for tables with the rule `drop` does `begin` itself
wait, because sizes change.

In eager mode the host reads facts about a batch's ids: the number of ids of each feature, the ids
outside of tables, the number of ids that leave their bags. `torch.export` traces a program without
numbers, so there the rules are written without reads:

    error    an assertion in the program for each lookup: it names table and feature, not the id
    clamp    the nearest row; not counted
    drop     the ids that stay are selected, however many they are
    hash     as ever

Rows are those of eager mode.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby

import numpy as np
import torch
from torch import Tensor

from recapp.console import note_once
from recapp.errors import ConfigError, IdError
from recapp.sparse.bags import offsets_of
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor, as_int64
from recapp.sparse.missing_ids import MISSING
from recapp.sparse.transfer import to_device, to_host, true_indices
from recapp.tables.bags_of_samples import check_samples
from recapp.tables.config import LARGEST_ID, EmbeddingConfig, IdRule, PoolingType, TableLookup
from recapp.tables.positions import DYNAMIC, positions_of


@dataclass(slots=True)
class LookupRows:
    """The rows that a batch looks up, lookup by lookup.

    Args:
        rows_L: Integers, lookups-major, samples in order within a lookup.
        lengths_FB: The number of ids of each bag; F counts lookups.
        weights_L: A weight per id, or None.
        per_F: The number of ids of each lookup, on the host.
    """

    rows_L: Tensor
    lengths_FB: Tensor
    weights_L: Tensor | None
    per_F: list[int]

    def of(self, lookups: range) -> "LookupRows":
        """Return the rows of a range of lookups."""
        first = sum(self.per_F[: lookups.start])
        per_F = self.per_F[lookups.start : lookups.stop]
        here = slice(first, first + sum(per_F))
        weights_L = None if self.weights_L is None else self.weights_L[here]
        lengths_FB = self.lengths_FB[lookups.start : lookups.stop]
        return LookupRows(self.rows_L[here], lengths_FB, weights_L, per_F)


class OutsideTable(IdError):
    """The error of an id outside of its table.

    The error keeps the number of the lookup and the id, so that every rank can raise the same
    error.

    Args:
        table: The table.
        feature: The feature that had the id.
        lookup: The index of the lookup in its collection.
        number: The id.
        where: A text after the id, such as the rank that had it.
        output: The name of the lookup, if it is not the feature's.
    """

    def __init__(
        self,
        table: EmbeddingConfig,
        feature: str,
        lookup: int,
        number: int,
        where: str = "",
        output: str = "",
    ) -> None:
        first = table.min_key
        rows = table.num_embeddings
        named = f"lookup {output}: " if output not in ("", feature) else ""
        super().__init__(
            f"table {table.name}: {named}feature {feature} has the id {number}{where}, which is "
            f"outside its {rows} rows ({first}..{first + rows - 1}): give the table more rows, or "
            "set its id_rule to hash, clamp or drop"
        )
        self.feature = feature
        self.lookup = lookup
        self.number = number
        self._arguments = (table, feature, lookup, number, where, output)

    def at(self, place: str) -> "OutsideTable":
        """Return the error with a further text after the id, such as its row."""
        table, feature, lookup, number, where, output = self._arguments
        return OutsideTable(table, feature, lookup, number, f"{where}{place}", output)

    def __reduce__(self) -> tuple[type["OutsideTable"], tuple[object, ...]]:
        return type(self), self._arguments  # rank 0 sends it to the other ranks


class LongBag(IdError):
    """The error of a bag with more ids than its concatenation has vectors.

    Args:
        lookup: The lookup that reads the bag.
        length: The number of ids in the bag.
        where: A text after the length, such as the row of the bag.
    """

    def __init__(self, lookup: TableLookup, length: int, where: str = "") -> None:
        super().__init__(
            f"lookup {lookup.output}: feature {lookup.feature} has a bag of {length} ids{where}, "
            f"and its concatenation takes at most hotness={lookup.hotness}: raise hotness, or set "
            "truncates to leave the last ids out"
        )
        self.feature = lookup.feature
        self.length = length
        self._arguments = (lookup, length, where)

    def at(self, place: str) -> "LongBag":
        """Return the error with a further text after the length, such as its row."""
        lookup, length, where = self._arguments
        return LongBag(lookup, length, f"{where}{place}")

    def __reduce__(self) -> tuple[type["LongBag"], tuple[object, ...]]:
        return type(self), self._arguments


# A function that applies all rules in one pass: (ids_L, edges, sizes_F, rules_F, changed_F) ->
# (rows_L, first).
#
# `rows_L` has -1 for a dropped id; `first` is the index of the first id that is an error, or -1.
# `RULE_NUMBERS` has the numbers of the rules. The function adds the number of changed ids of each
# lookup to `changed_F`.
Kernel = Callable[[Tensor, Sequence[int], Tensor, Tensor, Tensor], tuple[Tensor, int]]

# A function that waits for the device's check of a batch's ids, counts changed ids, and raises
# OutsideTable.
#
# Call it once for each batch.
PendingCheck = Callable[[], object]

RULE_NUMBERS: dict[str, int] = {
    rule: number
    for number, rule in enumerate((IdRule.ERROR, IdRule.HASH, IdRule.CLAMP, IdRule.DROP, DYNAMIC))
}
_LARGE = 2**62  # the size of a dynamic table, whose rows need 64 bits


def rule_of(lookup: TableLookup) -> str:
    """Return the id rule of a lookup's table, or `DYNAMIC`."""
    return lookup.table.id_rule if lookup.table.dynamic is None else DYNAMIC


def check_have_values(features: KeyedJaggedTensor) -> None:
    """Check that the ids of a batch have values, if tables have rows.

    Raises:
        ConfigError: The ids are on the meta device.
    """
    if features.values().device.type == "meta":
        raise ConfigError(
            "ids are on the meta device, where they have no values: give a sharded collection "
            "ids on its own device; for shapes alone use an unsharded collection on the meta "
            "device"
        )


class IdRules:
    """The id rules of a collection's tables, applied to a batch.

    `changed` has the number of ids that clamp and drop have changed, by table. `drops` tells
    whether a table has the rule `drop`, `shortens` whether a sequence of such a table is looked up,
    and `ends_F2` has the first and the last id that the rule keeps, for each lookup.

    Args:
        lookups: The lookups of the collection.
        kernel: A faster implementation for ids on the CPU. The torch operations here define the
            result.
        is_weighted: Whether ids must have sample weights, for all lookups or one by one. False
            ignores sample weights; None takes them if a batch has some. Sequences have none.
    """

    def __init__(
        self,
        lookups: Sequence[TableLookup],
        kernel: Kernel | None = None,
        is_weighted: bool | Sequence[bool | None] | None = None,
    ) -> None:
        self.lookups = tuple(lookups)
        self._weighted_F = (
            [is_weighted] * len(self.lookups)
            if isinstance(is_weighted, bool | None)
            else list(is_weighted)
        )
        self._kernel = kernel
        self._sizes = [
            x.table.num_embeddings if x.table.dynamic is None else _LARGE for x in self.lookups
        ]
        self._size_F = torch.tensor(self._sizes, device="cpu")
        self._first_F = [x.table.min_key for x in self.lookups]
        rules = [RULE_NUMBERS[rule_of(x)] for x in self.lookups]
        self._rule_F = torch.tensor(rules, device="cpu")
        self.changed = {x.table.name: 0 for x in self.lookups}
        dropping_F = [rule_of(x) == IdRule.DROP for x in self.lookups]
        self.drops = any(dropping_F)
        pairs = zip(self.lookups, dropping_F, strict=True)
        self.shortens = any(drops and not x.columns for x, drops in pairs)
        self.ends_F2 = [
            (first, first + size - 1) if drops else (MISSING, -1 - MISSING)
            for first, size, drops in zip(self._first_F, self._sizes, dropping_F, strict=True)
        ]
        self._blocks = [
            (rule, [i for i, _ in block])
            for rule, block in groupby(enumerate(self.lookups), key=lambda p: rule_of(p[1]))
        ]

    def __call__(self, features: KeyedJaggedTensor) -> LookupRows:
        """Return the rows of every lookup.

        Args:
            features: Raw ids of at least the features of the tables, in any order.

        Raises:
            OutsideTable: An id is outside of a table whose rule is `error`.
            ConfigError: The ids are not integers.
        """
        rows, check = self.begin(features)
        check()
        return rows

    def begin(
        self, features: KeyedJaggedTensor, taken_F: Sequence[bool] | None = None
    ) -> tuple[LookupRows, PendingCheck]:
        """Return the rows of every lookup, and a check that must be called before the rows are used
        for good.

        Before the check, an id outside of its table has an arbitrary row.

        Args:
            features: As for `raw`.
            taken_F: As for `raw`.

        Raises:
            OutsideTable: An id is outside of a table whose rule is `error`. It is raised at once if
                this needs no wait, else by the check.
            LongBag: A bag has more ids than its concatenation has vectors.
            ConfigError: As for `raw`.
        """
        ids = self.raw(features, taken_F)
        if self._kernel is None and not torch.compiler.is_exporting():
            ids = self.inside(ids)
        ids_L = as_int64(ids.rows_L)
        ids = replace(ids, rows_L=ids_L)
        edge = [0, *accumulate(ids.per_F)]
        if any(self._first_F):
            ids = replace(ids, rows_L=self._from_min_key(ids_L, ids.lengths_FB.sum(1)))
        if torch.compiler.is_exporting():
            return self._exported(ids), nothing_pending
        if self._kernel is not None:
            return self._in_one_pass(self._kernel, ids, edge, ids_L), nothing_pending
        return self._rule_by_rule(ids, edge, ids_L)

    def raw(self, features: KeyedJaggedTensor, taken_F: Sequence[bool] | None = None) -> LookupRows:
        """Return the raw ids of every lookup, of any integer type, in the place of its rows.

        Args:
            features: Raw ids, as for a call.
            taken_F: Whether each lookup takes part. The others get no ids, and the batch need not
                have their features. None: all take part.

        Raises:
            LongBag: A bag has more ids than its concatenation has vectors.
            ConfigError: The ids are not integers, are not flat, or have no weights and must have
                some; or the batch does not tell which bags the samples take.
        """
        number = [i for i in range(len(self.lookups)) if taken_F is None or taken_F[i]]
        lookups = [self.lookups[i] for i in number]
        check_samples(features, lookups)
        if features.values().dim() != 1:
            shape = list(features.values().shape)
            raise ConfigError(f"ids have the shape {shape}: a lookup needs a flat tensor, [values]")
        features = _select(features, lookups).padded()
        ids_L = features.values()
        if ids_L.is_floating_point() or ids_L.dtype == torch.bool:
            raise ConfigError(
                f"ids are {ids_L.dtype}: a lookup needs integer ids (int32 or int64); weights go "
                "into `weights`"
            )
        per_F = features.length_per_key()
        lengths_FB = (
            features.lengths().view(len(lookups), -1) if per_F else features.lengths().view(0, 0)
        )
        weights_L = self._weights(features, number)
        ids = _at_most_hot(LookupRows(ids_L, lengths_FB, weights_L, per_F), lookups)
        if len(number) < len(self.lookups):
            ids = _with_none_for_others(ids, number, len(self.lookups))
        return ids

    def inside(self, ids: LookupRows) -> LookupRows:
        """Return raw ids without those that leave their bags by the rule `drop`, and count these.
        The host waits for the sizes.
        """
        if not self.drops or ids.rows_L.is_meta:
            return ids
        low, high = zip(*self.ends_F2, strict=True)
        count_F = ids.lengths_FB.sum(1)
        ids_L = as_int64(ids.rows_L)
        low_L, high_L = (per_id(end_F, count_F, ids_L) for end_F in (low, high))
        kept = _drop(ids, ((ids_L >= low_L) & (ids_L <= high_L)) | (ids_L == MISSING))
        for x, before, after in zip(self.lookups, ids.per_F, kept.per_F, strict=True):
            self.changed[x.table.name] += before - after
        return kept

    def _from_min_key(self, ids_L: Tensor, count_F: Tensor) -> Tensor:
        """Return ids counted from the `min_key` of their tables. Ids outside of a table get the
        nearest number outside, so that no difference overflows.
        """
        ends = [
            (-LARGEST_ID, LARGEST_ID) if first == 0 else (first - 1, first + size)
            for first, size in zip(self._first_F, self._sizes, strict=True)
        ]
        low, high = zip(*ends, strict=True)
        first_L, low_L, high_L = (
            per_id(bound_F, count_F, ids_L) for bound_F in (self._first_F, low, high)
        )
        from_0_L = ids_L.maximum(low_L).minimum(high_L) - first_L
        return torch.where(ids_L == MISSING, MISSING, from_0_L)

    def _rule_by_rule(
        self, ids: LookupRows, edge: list[int], raw_L: Tensor
    ) -> tuple[LookupRows, PendingCheck]:
        """Apply the rules by torch operations, one block of lookups with equal rules at a time."""
        ids_L = ids.rows_L
        parts = list[Tensor]()
        outside = list[Tensor]()
        size_F, count_F = to_device(np.array([self._sizes, ids.per_F], np.int64), ids_L.device)
        size_L = torch.repeat_interleave(size_F, count_F, output_size=len(ids_L))
        for rule, block in self._blocks:
            here = slice(edge[block[0]], edge[block[-1] + 1])
            ids_N = ids_L[here]
            size_N = size_L[here]
            missing_N = ids_L[here] == MISSING
            if rule == DYNAMIC:
                parts.append(positions_of(ids_N))
                outside.append(torch.zeros_like(missing_N))
                continue
            if rule is IdRule.HASH:
                parts.append(torch.where(missing_N, 0, 1 + ids_N.remainder(size_N - 1)))
                outside.append(torch.zeros_like(missing_N))
                continue
            row_N = torch.where(missing_N, 0, ids_N)
            parts.append(row_N.clamp(min=0).minimum(size_N - 1))
            outside.append(parts[-1] != row_N)
        rows = replace(ids, rows_L=parts[0] if len(parts) == 1 else torch.cat(parts))
        if ids_L.is_meta or all(rule in (IdRule.HASH, DYNAMIC) for rule, _ in self._blocks):
            return rows, nothing_pending
        outside_L = torch.cat(outside)
        outside_F = offsets_of(outside_L)[offsets_of(count_F)].diff()
        return rows, lambda: self._check_outside(outside_F, outside_L, raw_L, edge)

    def _exported(self, ids: LookupRows) -> LookupRows:
        rows_L, keep_L = exported_rows(ids.rows_L, ids.lengths_FB.sum(1), self.lookups)
        rows = replace(ids, rows_L=rows_L)
        return rows if keep_L is None else _drop(rows, keep_L)

    def error(self, lookup: int, number: int, where: str) -> OutsideTable:
        """Return the error of an id that another rank found; `where` names the rank."""
        record = self.lookups[lookup]
        # recapp's own name `feature@table` adds nothing to feature and table
        named = "" if record.output == f"{record.feature}@{record.table.name}" else record.output
        return OutsideTable(record.table, record.feature, lookup, number, where, named)

    def _in_one_pass(
        self, kernel: Kernel, ids: LookupRows, edge: list[int], raw_L: Tensor
    ) -> LookupRows:
        """Apply the rules by the kernel, on the CPU."""
        changed_F = torch.zeros(len(self.lookups), dtype=torch.int64, device="cpu")
        rows_L, first = kernel(ids.rows_L.contiguous(), edge, self._size_F, self._rule_F, changed_F)
        if not self.count_changed(first, changed_F.tolist(), raw_L, edge):
            return replace(ids, rows_L=rows_L)
        drops_F = self._rule_F == RULE_NUMBERS[IdRule.DROP]
        per_F = torch.tensor(ids.per_F, device="cpu")
        drops_L = torch.repeat_interleave(drops_F, per_F, output_size=len(rows_L))
        return _drop(replace(ids, rows_L=rows_L), (rows_L != -1) | ~drops_L)

    def count_changed(
        self, first: int, changed_F: Sequence[int], ids_L: Tensor, edge: Sequence[int]
    ) -> bool:
        """Count the ids that a kernel has changed, and return whether some leave their bags.

        Args:
            first: The index of the first id that is an error; -1: none is.
            changed_F: The number of changed ids of each lookup.
            ids_L: The raw ids.
            edge: Lookup f has the ids edge[f] .. edge[f + 1].

        Raises:
            OutsideTable: An id is an error.
        """
        if first >= 0:
            raise self.error(bisect_right(edge, first) - 1, int(ids_L[first]), "")
        for x, n in zip(self.lookups, changed_F, strict=True):
            self.changed[x.table.name] += n
        return any(
            n and x.table.id_rule is IdRule.DROP
            for x, n in zip(self.lookups, changed_F, strict=True)
        )

    def _weights(self, features: KeyedJaggedTensor, lookups: Sequence[int]) -> Tensor | None:
        """Return the sample weights; ones for a lookup without sample weights if others have
        some.
        """
        weights_L = features.weights_or_none()
        pooled = [i for i in lookups if self.lookups[i].pooling is not PoolingType.NONE]
        weighted = [self._weighted_F[i] for i in pooled]
        if weights_L is None:
            if True in weighted and len(features.values()):
                raise ConfigError(
                    "is_weighted=True and the ids have no sample weights: give the "
                    "KeyedJaggedTensor weights, or make the collection with is_weighted=False"
                )
            return None
        if False in weighted:
            note_once(
                "is_weighted=False: the sample weights of the ids are ignored; make the "
                "EmbeddingBagCollection with is_weighted=True to multiply by them"
            )
        used = [i in pooled and self._weighted_F[i] is not False for i in lookups]
        if all(used):
            return weights_L
        if not any(used):
            return None
        count_F = features.lengths().view(len(used), -1).sum(1)
        return torch.where(per_id(used, count_F, weights_L) > 0, weights_L, 1.0)

    def _check_outside(
        self, outside_F: Tensor, outside_L: Tensor, ids_L: Tensor, edge: list[int]
    ) -> None:
        """Raise an error for the first id that is one, or count changed ids by table."""
        found_F = to_host(outside_F).tolist()
        for i, x in enumerate(self.lookups):
            if found_F[i] and x.table.id_rule is IdRule.ERROR:
                # Waiting for the GPU is harmless here: the run ends with this error.
                first = edge[i] + int(outside_L[edge[i] : edge[i + 1]].nonzero()[0])
                raise self.error(i, int(ids_L[first]), "")
        self.count_changed(-1, found_F, ids_L, edge)


def _select(features: KeyedJaggedTensor, lookups: Sequence[TableLookup]) -> KeyedJaggedTensor:
    """Return the ids of the features of lookups, in the order of the lookups."""
    keys = [x.feature for x in lookups]
    if keys == list(features.keys()):
        return features.without_slack()
    return features.permute([features.index_of(f) for f in keys])


def _at_most_hot(ids: LookupRows, lookups: Sequence[TableLookup]) -> LookupRows:
    """Return ids without those that exceed the vectors of a concatenation.

    Raises:
        LongBag: A bag is longer, and the lookup does not truncate.
    """
    hot = {i: x.hotness for i, x in enumerate(lookups) if x.hotness is not None}
    if not hot or not ids.lengths_FB.numel():
        return ids
    if torch.compiler.is_exporting():
        keep_L = exported_hot(ids.lengths_FB, ids.rows_L, lookups)
        return ids if keep_L is None else _drop(ids, keep_L)
    longest = to_host(ids.lengths_FB[list(hot)].amax(1)).tolist()
    cut = False
    for (i, hotness), length in zip(hot.items(), longest, strict=True):
        if length > hotness and not lookups[i].truncates:
            raise LongBag(lookups[i], length)
        cut |= length > hotness
    if not cut:
        return ids
    return _drop(ids, _of_first_ids(ids.lengths_FB, ids.rows_L, lookups))


def _of_first_ids(lengths_FB: Tensor, ids_L: Tensor, lookups: Sequence[TableLookup]) -> Tensor:
    """Return a mask of the ids that concatenations have vectors for: the first of each bag."""
    most_F = [x.hotness or _ALL for x in lookups]
    lengths_N = lengths_FB.flatten().long()
    begin_L = per_id(lengths_N.cumsum(0) - lengths_N, lengths_N, ids_L)
    nth_L = torch.arange(ids_L.shape[0], device=ids_L.device) - begin_L
    return nth_L < per_id(most_F, lengths_FB.sum(1), ids_L)


def _with_none_for_others(ids: LookupRows, number: Sequence[int], lookups: int) -> LookupRows:
    """Return the ids of the numbered lookups as ids of all lookups; the others have none."""
    lengths_FB = ids.lengths_FB.new_zeros(lookups, ids.lengths_FB.shape[1])
    lengths_FB[list(number)] = ids.lengths_FB
    per_F = [0] * lookups
    for i, n in zip(number, ids.per_F, strict=True):
        per_F[i] = n
    return replace(ids, lengths_FB=lengths_FB, per_F=per_F)


def nothing_pending() -> None:
    """Do nothing: the check of ids that are checked already."""


def _drop(ids: LookupRows, keep_L: Tensor) -> LookupRows:
    """Return the ids that stay, in shorter bags."""
    kept_K = true_indices(keep_L)
    lengths = offsets_of(keep_L)[offsets_of(ids.lengths_FB.flatten())].diff()
    lengths_FB = lengths.view_as(ids.lengths_FB)
    return LookupRows(
        ids.rows_L[kept_K],
        lengths_FB,
        None if ids.weights_L is None else ids.weights_L[kept_K],
        to_host(lengths_FB.sum(1)).tolist(),
    )


def exported_rows(
    ids_L: Tensor, count_F: Tensor, lookups: Sequence[TableLookup]
) -> tuple[Tensor, Tensor | None]:
    """Return the rows of ids, and a mask of the ids that stay in their bags; None if all stay.

    Args:
        ids_L: Ids, counted from 0 for every table, lookups-major.
        count_F: The number of ids of each lookup.
        lookups: The lookups, of tables that are not dynamic.
    """
    rules = [x.table.id_rule for x in lookups]
    size_L = per_id([x.table.num_embeddings for x in lookups], count_F, ids_L)
    missing_L = ids_L == MISSING
    row_L = torch.where(missing_L, 0, ids_L)
    rows_L = row_L.clamp(min=0).minimum(size_L - 1)
    outside_L = rows_L != row_L
    if IdRule.HASH in rules:
        hashed_L = _of_rule(IdRule.HASH, rules, count_F, ids_L)
        others_L = (size_L - 1).clamp(min=1)  # for a table of one row, which is not hashed
        hash_L = torch.where(missing_L, 0, 1 + ids_L.remainder(others_L))
        rows_L = torch.where(hashed_L, hash_L, rows_L)
    if IdRule.ERROR in rules:
        _assert_inside(outside_L, count_F, lookups)
    if IdRule.DROP not in rules:
        return rows_L, None
    return rows_L, ~(outside_L & _of_rule(IdRule.DROP, rules, count_F, ids_L))


def exported_hot(
    lengths_FB: Tensor, ids_L: Tensor, lookups: Sequence[TableLookup]
) -> Tensor | None:
    """Return a mask of the ids that stay when concatenations limit the length of bags; None for
    all.

    Args:
        lengths_FB: The number of ids of each bag.
        ids_L: The ids.
        lookups: The lookups. A lookup that does not truncate gets an assertion in the program.
    """
    cut = False
    for i, x in enumerate(lookups):
        if x.hotness is None:
            continue
        cut |= x.truncates
        if not x.truncates:
            torch._assert_async(
                (lengths_FB[i] <= x.hotness).all(),
                f"lookup {x.output}: feature {x.feature} has a bag of more than {x.hotness} ids, a "
                f"concatenation of hotness={x.hotness} takes {x.hotness}",
            )
    return _of_first_ids(lengths_FB, ids_L, lookups) if cut else None


def per_id(numbers_N: Sequence[int] | Tensor, count_N: Tensor, ids_L: Tensor) -> Tensor:
    """Return a number for each id from a number for each lookup or bag.

    Args:
        numbers_N: The numbers.
        count_N: The number of ids for each number.
        ids_L: The ids.
    """
    if not isinstance(numbers_N, Tensor):
        numbers_N = to_device(numbers_N, ids_L.device)
    return torch.repeat_interleave(numbers_N, count_N, output_size=ids_L.shape[0])


_ALL = torch.iinfo(torch.int64).max


def _of_rule(rule: IdRule, rules: Sequence[str], count_F: Tensor, ids_L: Tensor) -> Tensor:
    """Return for each id whether its table has a rule."""
    return per_id([int(r == rule) for r in rules], count_F, ids_L) > 0


def _assert_inside(outside_L: Tensor, count_F: Tensor, lookups: Sequence[TableLookup]) -> None:
    """Assert in the program that no id is outside of a table whose rule is `error`."""
    before_L1 = torch.nn.functional.pad(outside_L.cumsum(0), (1, 0))
    edge_F1 = torch.nn.functional.pad(count_F.cumsum(0), (1, 0))
    outside_F = before_L1[edge_F1].diff()
    for i, x in enumerate(lookups):
        if x.table.id_rule is not IdRule.ERROR:
            continue
        first = x.table.min_key
        rows = x.table.num_embeddings
        torch._assert_async(
            outside_F[i] == 0,
            f"table {x.table.name}: feature {x.feature} has an id outside its {rows} rows "
            f"({first}..{first + rows - 1}): give the table more rows, or set its id_rule to hash, "
            "clamp or drop before it is exported",
        )
