"""The update that is fused into backward: touched rows are changed where their gradients arrive, so
no gradient tensor of a table ever exists.

A step may look up several batches. Their gradients come back one lookup at a time, and each row is
to be updated once per step, with the sum: so what one lookup brings is set aside, summed per row,
until the last lookup of the step has come back.

Where an optimiser clips gradients, the update is deferred: all lookups' gradients are set aside
until its `step`, when their norm is known (`recapp/engine/held_gradients.py`).
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recapp.engine.row_statistics import RowPieces
from recapp.engine.state import EngineState
from recapp.errors import ConfigError
from recapp.kernels.links import Links, Scratch, offset_dtype
from recapp.optim.rules import GRADIENT, Rate, RowRule
from recapp.optim.rules_by_table import group_names
from recapp.sharding.layout import Layout


class RowGradients(NamedTuple):
    """The touched rows of a group's store and where their gradients stand.

    Args:
        row_U: Distinct rows, as the store has located them.
        links: The sparse matrix that sums a flat buffer of gradients to one gradient per row.
        pieces: Which piece of a table each row belongs to, where strips of a row exchange
            statistics; else None.
    """

    row_U: Tensor
    links: Links
    pieces: RowPieces | None = None


def rules_of_groups(layout: Layout, rules: Sequence[RowRule]) -> list[RowRule | None]:
    """Return the rule of each group of a layout, which names it by number; None where there are no
    rules.
    """
    return [rules[group.rule] if rules else None for group in layout.groups]


def _nothing() -> None:
    """Do nothing."""


class FusedUpdate:
    """Updates the touched rows of a collection, once per step.

    Args:
        state: Of the collection.
        rules: Optimisers of the rows, each once; the groups of the layout name them by number.
            Empty where rows are only read.

    `updates` counts the updates so far; a checkpoint keeps it. `before_first_update` is called
    before the first one, `before_update` before each: whoever has something to say or to do puts a
    function there. `param_groups` carry the live learning rate of each rule; the optimiser object
    holds the same dicts, so schedules reach the tables as they reach any parameter. While
    `deferred`, rows are updated in `end_step` alone, and gradients of several backwards add up
    until then.
    """

    def __init__(self, state: EngineState, rules: Sequence[RowRule]) -> None:
        self.state = state
        self.rules = list(rules)
        self.updates = 0
        self._stepper: weakref.ref[object] | None = None
        self.before_first_update: Callable[[], None] = _nothing
        self.before_update: Callable[[], None] = _nothing
        tables = [state.layout.tables_of_rule(number) for number in range(len(rules))]
        names = group_names(list(zip(rules, tables, strict=True)))
        self._param_groups: list[dict[str, Any]] = [
            {"params": [], "lr": rule.lr, "name": name, "tables": of_rule}
            for rule, name, of_rule in zip(rules, names, tables, strict=True)
        ]
        self._in_flight: weakref.WeakSet[object] = weakref.WeakSet()
        self._waiting: list[list[tuple[Tensor, Tensor]]] = []
        self._scratch_G = [Scratch() for _ in state.stores]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the param group of each rule; tables that are parameters have none here.

        Raises:
            ConfigError: The tables are read-only.
        """
        self._check_trained()
        return [
            group
            for rule, group in zip(self.rules, self._param_groups, strict=True)
            if rule != GRADIENT
        ]

    @property
    def deferred(self) -> bool:
        """Return whether updates wait for an optimiser's step."""
        return self._stepper is not None

    def defer(self, optimizer: object) -> None:
        """Have updates wait for `end_step` from now on.

        Args:
            optimizer: Calls `end_step` in its step. Once it is gone nobody does, and gradients that
                come are an error.
        """
        self._stepper = weakref.ref(optimizer)

    @property
    def rule_G(self) -> list[RowRule | None]:
        """Return the rule of each group of the layout; None where rows are only read."""
        return rules_of_groups(self.state.layout, self.rules)

    def expect(self, lookup: object) -> None:
        """Count a lookup in until its gradients come, or until nobody refers to it any more.

        Args:
            lookup: Any object that lives as long as the graph of the lookup; `take` is called with
                the same one.
        """
        self._in_flight.add(lookup)

    def take(
        self, lookup: object, gradients: Tensor, row_gradients_G: Sequence[RowGradients]
    ) -> None:
        """Take the gradients of one lookup; update once the last lookup of this step is back.

        Args:
            lookup: As of `expect`.
            gradients: Flat buffer of all groups' gradients; used before this returns.
            row_gradients_G: Of each group.

        Raises:
            ConfigError: The tables are read-only, or the optimiser that their update waits for is
                gone.
        """
        if self._stepper is not None and self._stepper() is None:
            raise ConfigError(
                "the optimiser that clips gradients of tables, and updates them in its step, is "
                "gone: keep it and call its step, or shard the model anew to train without it"
            )
        self._in_flight.discard(lookup)
        if not (self._in_flight or self._waiting or self.deferred):
            self._update([gradients] * len(row_gradients_G), row_gradients_G)
            return
        self.before_update()
        self._waiting.append(
            [self._set_aside(g, gradients, x) for g, x in enumerate(row_gradients_G)]
        )
        if not self._in_flight:
            self.finish_step()

    def finish_step(self) -> None:
        """Update with gradients that still wait for another lookup of their step, which had no part
        in the loss; nothing where updates are deferred.

        The output of such a lookup may be held for ever, and on some ranks only: so the next
        lookup or reading of the rows ends a step for certain.
        """
        if self._waiting and not self.deferred:
            self.end_step()

    @torch.no_grad()
    def end_step(self) -> None:
        """Update with the gradients that wait, if there are any. Every rank calls it."""
        if waiting := self._waiting:
            self._waiting = []
            merged = [
                self._merged(g, [lookup[g] for lookup in waiting])
                for g in range(len(self.state.stores))
            ]
            self._update([gradients for gradients, _ in merged], [x for _, x in merged])

    def drop(self) -> None:
        """Forget the gradients that wait."""
        self._waiting.clear()

    @torch.no_grad()
    def held(self) -> list[tuple[Tensor, Tensor]]:
        """Return for each group the distinct rows whose gradients wait and these gradients side by
        side, flat, which may be changed in place; nothing where none wait.
        """
        if len(self._waiting) > 1:
            self._waiting = [
                [
                    self._set_aside(g, *self._merged(g, [lookup[g] for lookup in self._waiting]))
                    for g in range(len(self.state.stores))
                ]
            ]
        return self._waiting[0] if self._waiting else []

    def buffers(self) -> Iterator[Tensor]:
        """Yield the memory that stays between updates."""
        for scratch in self._scratch_G:
            yield from scratch.tensors()

    def _check_trained(self) -> None:
        """Raise where the tables have no rule."""
        if not self.rules:
            names = ", ".join(t.name for t in self.state.layout.tables[:3])
            raise ConfigError(
                f"tables {names}...: they are read-only (rule=None) and have neither updates nor a "
                "learning rate: look them up under torch.no_grad(), or shard them with a rule of "
                "recapp/optim/rules.py"
            )

    @torch.no_grad()
    def _update(
        self, gradients_G: Sequence[Tensor], row_gradients_G: Sequence[RowGradients]
    ) -> None:
        """Update every touched row once, with gradients of one flat buffer per group."""
        state = self.state
        self._check_trained()
        if not self.updates:
            self.before_first_update()
        self.before_update()
        self.updates += 1
        rates = [
            rule.rate_of(float(group["lr"]), self.updates)
            for rule, group in zip(self.rules, self._param_groups, strict=True)
        ]
        rate_G = [rates[group.rule] for group in state.layout.groups]
        means_G: Sequence[Tensor | None] = [None] * len(row_gradients_G)
        if state.row_statistics:
            gradients_G, row_gradients_G = self._summed_once(gradients_G, row_gradients_G)
            means_G = self._mean_squares(gradients_G, row_gradients_G, rate_G)
        for store, gradients, (row_U, links, _), mean_KU, rate in zip(
            state.stores, gradients_G, row_gradients_G, means_G, rate_G, strict=True
        ):
            store.update(gradients, links, row_U, mean_KU, rate)
        for store in state.stores:
            store.settle(self.updates)

    def _mean_squares(
        self,
        gradients_G: Sequence[Tensor],
        row_gradients_G: Sequence[RowGradients],
        rate_G: Sequence[Rate],
    ) -> list[Tensor | None]:
        """Return the mean squares that rules ask for of every touched row, over the whole table
        row, [K, U]; None for groups whose rules do not ask.
        """
        state = self.state
        statistics = state.row_statistics
        assert statistics is not None
        pieces_G = [
            x.pieces or statistics.find(g, store.piece_keys(x.row_U))
            for g, (x, store) in enumerate(zip(row_gradients_G, state.stores, strict=True))
        ]
        squares_G = [
            None if pieces is None else store.squares(gradients, x.links, x.row_U, rate)
            for pieces, store, gradients, x, rate in zip(
                pieces_G, state.stores, gradients_G, row_gradients_G, rate_G, strict=True
            )
        ]
        return statistics.mean_squares(pieces_G, squares_G, state.dtype)

    def _summed_once(
        self, gradients_G: Sequence[Tensor], row_gradients_G: Sequence[RowGradients]
    ) -> tuple[list[Tensor], list[RowGradients]]:
        """Sum every touched row's gradient once and for all: it is read twice, for its squares and
        for the update. Gradients of groups whose rules ask for no squares stay as they are.
        """
        state = self.state
        statistics = state.row_statistics
        assert statistics is not None
        summed_G = list(gradients_G)
        read_G = list(row_gradients_G)
        for g, (store, scratch, gradients, x) in enumerate(
            zip(state.stores, self._scratch_G, gradients_G, row_gradients_G, strict=True)
        ):
            if not statistics.means_G[g]:
                continue
            n = x.links.bags
            flat = (
                scratch("summed", n * store.width, state.dtype)
                if gradients.device.type == "cpu"
                else gradients.new_empty(n * store.width)
            )
            state.backend.pool(gradients, 1, store.width, x.links, flat, state.dtype)
            summed_G[g] = flat
            read_G[g] = x._replace(links=_one_by_one(n, store.width, gradients.device))
        return summed_G, read_G

    def _set_aside(self, group: int, gradients: Tensor, x: RowGradients) -> tuple[Tensor, Tensor]:
        """Return the rows of one lookup and their summed gradients side by side, in memory of their
        own. Gradients of tables that are parameters do not wait: they are added up anyhow.
        """
        state = self.state
        if self.rule_G[group] == GRADIENT:
            state.stores[group].update(gradients, x.links, x.row_U, None, 0.0)
            return x.row_U[:0], torch.empty(0, dtype=state.dtype, device=gradients.device)
        width = state.stores[group].width
        summed = torch.empty(x.links.bags * width, dtype=state.dtype, device=gradients.device)
        state.backend.pool(gradients, 1, width, x.links, summed, state.dtype)
        return x.row_U.clone(), summed

    def _merged(
        self, group: int, parts: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, RowGradients]:
        """Bring together what several lookups of one step have set aside: a row's gradients are
        added in the order in which the lookups came back.
        """
        store = self.state.stores[group]
        if len(parts) == 1:
            row_U, summed = parts[0]
            return summed, RowGradients(row_U, _one_by_one(len(row_U), store.width, row_U.device))
        row_N = torch.cat([row_U for row_U, _ in parts])
        gradients = torch.cat([summed for _, summed in parts])
        at_N = (store.width * torch.arange(len(row_N), device=row_N.device)).to(
            offset_dtype(gradients.numel())
        )
        asked = Links(row_N, None, None, at_N, len(row_N))
        grouped = self.state.backend.group_rows(
            store.rows, asked, self._scratch_G[group], store.finds_rows
        )
        return gradients, RowGradients(*grouped)


def _one_by_one(rows: int, width: int, device: torch.device) -> Links:
    """Return the sparse matrix of gradients that stand side by side, one for each row."""
    number = torch.arange(rows + 1, dtype=offset_dtype(rows * width), device=device)
    return Links(number[:rows] * width, number, None, None, rows)
