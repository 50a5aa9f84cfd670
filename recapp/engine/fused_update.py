"""The update that is fused into backward. Owners update touched rows when the gradients arrive, so
no gradient tensor of a table ever exists.

A step may look up several batches. Gradients come back one lookup at a time, but a step updates
each row once, with the sum. So the gradients of each lookup are summed per row and held until those
of the last lookup of the step arrive.

An optimiser that clips gradients defers the update to its step, when their norm is known:

    backward                owners sum each touched row's gradient, and keep it
    optimizer.step()        the norm of all gradients: one number from each rank to each other
                            rows' gradients are scaled; the update

The norm counts each row once: the strips of a row add up, and of replicas only the rows of rank 0
count. An unadmitted key of a dynamic table gets no row and does not count. The held memory is the
touched rows in the compute type, and 8 bytes per row.
"""

import math
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recapp.engine.row_statistics import RowPieces, RowStatistics
from recapp.engine.row_store import FloatRows, MissedSteps
from recapp.engine.state import EngineState
from recapp.errors import ConfigError
from recapp.kernels.links import Links, Scratch, offset_dtype, one_by_one
from recapp.optim.named_rules import group_names
from recapp.optim.optimizer import joined
from recapp.optim.rules import FROZEN, GRADIENT, WITHOUT_RATE, Rate, RowRule
from recapp.sharding.layout import Layout
from recapp.transport.communicator import Comm


class RowGradients(NamedTuple):
    """The touched rows of a group's store, and the links to their gradients.

    Args:
        row_U: The distinct touched rows, located in the store.
        links: The sparse matrix that sums the gradients of a flat buffer to one gradient per row.
        pieces: The piece of a table to which each row belongs, where the strips of a row exchange
            statistics; else None.
    """

    row_U: Tensor
    links: Links
    pieces: RowPieces | None = None

    def exact(self) -> "RowGradients":
        """Return the same rows and links without room for more. The host waits for their number if
        only the device knows it.
        """
        links = self.links.exact()
        return self._replace(row_U=self.row_U[: links.bags], links=links)


def rules_of_groups(layout: Layout, rules: Sequence[RowRule]) -> list[RowRule | None]:
    """Return the row rule of each group, whose number the layout holds; None where there are no
    rules.
    """
    return [rules[group.rule] if rules else None for group in layout.groups]


class FusedUpdate:
    """Update the touched rows of a collection, once per step. For an optimiser that defers the
    updates, this object is the gradients that wait (`recapp/optim/optimizer.py`).

    Args:
        state: The engine state of the collection.
        rules: The distinct row rules. The groups of the layout hold their numbers. Empty for
            read-only rows.

    `rule_G` has the rule of each group of the layout; None for read-only rows. `updates` counts the
    updates so far; a checkpoint stores it. `changes` differs after each time that rows may have
    been written. Two functions are hooks for other code: `before_first_update` is called before the
    first update, `before_update` before each. `param_groups` hold the live learning rate of each
    rule. The optimiser object holds the same dicts, so schedules reach the tables as they reach any
    parameter. While `deferred`, only `end_step` updates rows, and the gradients of several
    backwards add up until then. While it `ignores` gradients, those that arrive are dropped. Where
    `device_rates` is set, an update reads its rates there, by rule.
    """

    def __init__(self, state: EngineState, rules: Sequence[RowRule]) -> None:
        self.state = state
        self.rules = list(rules)
        self.rule_G = rules_of_groups(state.layout, rules)
        self.updates = 0
        self.changes = 0
        self.ignores = False
        self.device_rates: Sequence[Any] | None = None
        self._stepper: weakref.ref[object] | None = None
        self.before_first_update: Callable[[], None] = lambda: None
        self.before_update: Callable[[], None] = lambda: None
        tables = [state.layout.tables_of_rule(number) for number in range(len(rules))]
        names = group_names(list(zip(rules, tables, strict=True)))
        self._param_groups: list[dict[str, Any]] = [
            {"params": [], "lr": rule.lr, "name": name, "tables": of_rule}
            for rule, name, of_rule in zip(rules, names, tables, strict=True)
        ]
        self._begun = [0] * len(rules)
        self._in_flight: weakref.WeakSet[object] = weakref.WeakSet()
        self._waiting: list[list[tuple[Tensor, Tensor]]] = []
        device = state.comm.device
        self._scratch_G = [Scratch(device) for _ in state.stores]
        self._missed = {n: MissedSteps(r, device) for n, r in enumerate(rules) if r.all_rows}
        for group, store in zip(state.layout.groups, state.stores, strict=True):
            if rules and isinstance(store, FloatRows):
                store.missed = self._missed.get(group.rule)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the param group of each rule. Tables that are parameters, and frozen ones, have
        none here.

        Raises:
            ConfigError: The tables are read-only.
        """
        self._check_trained()
        return [
            group
            for rule, group in zip(self.rules, self._param_groups, strict=True)
            if rule not in WITHOUT_RATE
        ]

    def begin_anew(self, tables: Collection[str], updates: int) -> None:
        """Count the updates of some tables, on which corrections of moments depend, from a number
        of updates on. Tables of one rule begin together (`tables_that_restart`).

        Args:
            tables: The names of the tables that begin anew.
            updates: The number of updates of the collection when they began.
        """
        for number in range(len(self.rules)):
            if set(self.state.layout.tables_of_rule(number)) <= set(tables):
                self._begun[number] = updates

    @property
    def begun(self) -> dict[str, int]:
        """The number of updates from which the updates of each table count, by table. Those that
        count from the beginning are left out.
        """
        numbers = enumerate(self._begun)
        of_rule = ((begun, self.state.layout.tables_of_rule(n)) for n, begun in numbers if begun)
        return {table: begun for begun, tables in of_rule for table in tables}

    def count_from(self, begun: Mapping[str, int]) -> None:
        """Count the updates of each table from those of a checkpoint on.

        Args:
            begun: What `begun` was, with the tables whose state begins anew. Where tables of one
                rule differ, the latest number counts.
        """
        self._begun = [
            max((begun.get(t, 0) for t in self.state.layout.tables_of_rule(n)), default=0)
            for n in range(len(self.rules))
        ]

    @property
    def deferred(self) -> bool:
        """Return whether updates wait for the step of an optimiser."""
        return self._stepper is not None

    def defer(self, optimizer: object) -> None:
        """Defer updates to `end_step` from now on.

        Args:
            optimizer: The optimiser that calls `end_step` in its step. It must live as long as the
                tables train: gradients that arrive after it was deleted are an error.

        Raises:
            ConfigError: Some tables are parameters, whose gradients are complete when backward
                ends.
        """
        if GRADIENT in self.rules:
            tables = self.state.layout.tables_of_rule(self.rules.index(GRADIENT))
            raise ConfigError(
                f"tables {', '.join(tables)} are parameters (compute kernel dense): recapp "
                "cannot clip them together with tables that a row rule updates: leave "
                "compute_kernel of these tables out, or clip only the dense part"
            )
        self._stepper = weakref.ref(optimizer)

    def expect(self, lookup: object) -> None:
        """Expect the gradients of a lookup until they arrive or until no reference to the lookup is
        left.

        Args:
            lookup: An object that lives as long as the autograd graph of the lookup. `take` gets
                the same object.
        """
        self._in_flight.add(lookup)

    @property
    def expected(self) -> list[Any]:
        """The lookups whose gradients have not arrived."""
        return [*self._in_flight]

    def take(
        self, lookup: object, gradients: Tensor, row_gradients_G: Sequence[RowGradients]
    ) -> None:
        """Take the gradients of one lookup. Update the rows after the last lookup of the step.

        Args:
            lookup: The object that `expect` got.
            gradients: The flat buffer of all groups' gradients. It is not read after the return.
            row_gradients_G: The row gradients of each group.

        Raises:
            ConfigError: The tables are read-only, or the optimiser that deferred their update was
                deleted.
        """
        if self._stepper is not None and self._stepper() is None:
            raise ConfigError(
                "the optimiser that clips gradients of tables, and updates them in its step, "
                "was deleted: keep it and call its step, or shard the model anew to train "
                "without clipping"
            )
        self._in_flight.discard(lookup)
        if self.ignores:
            return
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
        """Update with gradients that still wait for another lookup of their step: that lookup had
        no part in the loss. Do nothing where updates are deferred.

        Some ranks may keep the output of such a lookup for ever. So the next lookup, or the next
        read of the rows, always ends the step.
        """
        if self._waiting and not self.deferred:
            self._end_step()

    def complete(self) -> None:
        """Finish the step, and bring all rows up to date: rules of all rows change rows that no id
        touches. Rows may then be read and written whole.
        """
        self.finish_step()
        self.changes += 1
        for store in self.state.stores:
            store.catch_up()
        for missed in self._missed.values():
            missed.begin_at(missed.now)

    def begin_at(self, updates: int) -> None:
        """Take the rows as they are for those after a number of updates."""
        self.complete()
        self.updates = updates
        for missed in self._missed.values():
            missed.begin_at(updates)
        for store in self.state.stores:
            store.begin_at(updates)

    @torch.no_grad()
    def _end_step(self) -> None:
        """Update with the held gradients, if there are any. Every rank calls it."""
        if waiting := self._waiting:
            self._waiting = []
            merged = [
                self._merged(g, [lookup[g] for lookup in waiting])
                for g in range(len(self.state.stores))
            ]
            self._update([gradients for gradients, _ in merged], [x for _, x in merged])

    def end_step(self) -> None:
        """Update the rows with the held gradients. Do nothing where updates are not deferred."""
        if self.deferred:
            self.state.observer.begins()
            self._end_step()
            self.state.observer.ends("update")

    def drop(self) -> None:
        """Drop the held gradients. Do nothing where updates are not deferred."""
        if self.deferred:
            self._waiting.clear()

    def power_sum(self, order: float, dense: float) -> float:
        """Return the sum of |g|^order over all elements of the held gradients, in fp64, or the
        maximum of |g|.

        Args:
            order: The exponent, or infinity for the maximum.
            dense: The same sum or maximum over the other gradients. Only the value of rank 0
                counts.
        """
        comm = self.state.comm
        parts = [0.0 if comm.rank else dense, *(_power(x, order) for x in self._counted())]
        return joined(_from_ranks(comm, joined(parts, order)), order)

    def scale(self, factor: float) -> None:
        """Multiply the held gradients by a factor."""
        for _, gradients in self._rows_and_gradients():
            gradients.mul_(factor)

    def clamp(self, most: float) -> None:
        """Clamp the elements of the held gradients to [-most, most]."""
        for _, gradients in self._rows_and_gradients():
            gradients.clamp_(-most, most)

    def _counted(self) -> Iterator[Tensor]:
        """Yield the gradients that this rank counts in a norm."""
        state = self.state
        for group, store, (row_U, gradients) in zip(
            state.layout.groups, state.stores, self._rows_and_gradients(), strict=False
        ):
            if group.mode == "replicated" and state.comm.rank:
                continue
            trained_U = store.trained(row_U)
            if trained_U is None:
                yield gradients
            else:
                yield gradients.view(-1, store.width)[trained_U]

    @torch.no_grad()
    def _rows_and_gradients(self) -> list[tuple[Tensor, Tensor]]:
        """Return for each group the distinct rows with held gradients, and these gradients one
        after the other in a flat tensor that the caller may change in place. Return nothing where
        no gradients are held.
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
        """Yield the buffers that are kept between updates."""
        for scratch in self._scratch_G:
            yield from scratch.tensors()

    def _check_trained(self) -> None:
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
        """Update every touched row once, from one flat buffer of gradients per group."""
        state = self.state
        self._check_trained()
        if not self.updates:
            self.before_first_update()
        self.before_update()
        rates = self.next_rates()
        device_rates = self.device_rates
        if device_rates is None:
            device_rates = state.backend.on_device(rates, self.rules, state.comm.device)
        rate_G = [device_rates[group.rule] for group in state.layout.groups]
        means_G: Sequence[Tensor | None] = [None] * len(row_gradients_G)
        if statistics := state.row_statistics:
            gradients_G, row_gradients_G, means_G = self._of_whole_rows(
                statistics, gradients_G, row_gradients_G, rate_G
            )
        for store, gradients, x, mean_KU, rate, rule in zip(
            state.stores, gradients_G, row_gradients_G, means_G, rate_G, self.rule_G, strict=True
        ):
            if rule != FROZEN:
                row_U, links, _ = x.exact() if store.needs_exact else x
                store.update(gradients, links, row_U, mean_KU, rate)
        for number, missed in self._missed.items():
            missed.add(rates[number])
        self.count(self.device_rates[0].stopped if self.device_rates else None)

    def next_rates(self) -> list[Rate]:
        """Return the rates of the next update, by rule."""
        return [
            rule.rate_of(float(group["lr"]), self.updates + 1 - begun)
            for rule, group, begun in zip(self.rules, self._param_groups, self._begun, strict=True)
        ]

    def count(self, stopped: Tensor | None = None) -> None:
        """Count an update: this one, or one that a recorded step has made. It ends the step, unless
        the step is recorded now.

        Args:
            stopped: An integer on the device: where it is set, the update was left out.
        """
        self.updates += 1
        self.changes += 1
        for store in () if self.state.records else self.state.stores:
            store.settle(self.updates, stopped)

    def _of_whole_rows(
        self,
        statistics: RowStatistics,
        gradients_G: Sequence[Tensor],
        row_gradients_G: Sequence[RowGradients],
        rate_G: Sequence[Rate],
    ) -> tuple[list[Tensor], list[RowGradients], list[Tensor | None]]:
        """Sum the gradient of every touched row once, because two passes read the sum: the squares
        and the update. Leave groups whose rules need no squares as they are.

        Returns:
            The gradients and the touched rows of each group, and the mean squares over whole rows
            of the tables, [K, U].
        """
        state = self.state
        summed_G = list(gradients_G)
        read_G = list(row_gradients_G)
        pieces_G: list[RowPieces | None] = [None] * len(read_G)
        squares_G: list[Tensor | None] = [None] * len(read_G)
        for g, (store, scratch, x) in enumerate(
            zip(state.stores, self._scratch_G, row_gradients_G, strict=True)
        ):
            if not (statistics.means_G[g] and isinstance(store, FloatRows)):
                continue
            links = one_by_one(x.links.bags, store.width, state.comm.device)
            flat = scratch("summed", links.bags * store.width, state.dtype)
            state.backend.pool(gradients_G[g], 1, store.width, x.links, flat, state.dtype)
            summed_G[g] = flat
            read_G[g] = x._replace(links=links)
            pieces_G[g] = x.pieces or statistics.find(g, store.piece_keys(x.row_U))
            squares_G[g] = store.squares(flat, links, x.row_U, rate_G[g])
        return summed_G, read_G, statistics.mean_squares(pieces_G, squares_G, state.dtype)

    def _set_aside(self, group: int, gradients: Tensor, x: RowGradients) -> tuple[Tensor, Tensor]:
        """Copy the rows of one lookup, and sum their gradients into a new flat tensor. Gradients of
        tables that are parameters do not wait: their rule only adds them up. Those of frozen tables
        are dropped.
        """
        state = self.state
        x = x.exact()
        if self.rule_G[group] in WITHOUT_RATE:
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
        """Merge the held gradients of several lookups of one step. The gradients of a row are added
        in the order in which the lookups came back.
        """
        store = self.state.stores[group]
        if len(parts) == 1:
            row_U, summed = parts[0]
            return summed, RowGradients(row_U, one_by_one(len(row_U), store.width, row_U.device))
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


def _power(values: Tensor, order: float) -> float:
    """Return the sum of |value|^order, or the maximum of |value| where the order is infinity."""
    if not values.numel():
        return 0.0
    norm = float(torch.linalg.vector_norm(values, order, dtype=torch.float64))
    return norm if math.isinf(order) else norm**order


def _from_ranks(comm: Comm, value: float) -> list[float]:
    """Return the number of every rank, in rank order."""
    buffer = torch.full((comm.world,), value, dtype=torch.float64, device=comm.device)
    sends = [(comm.rank, comm.rank + 1)] * comm.world
    comm.swap(buffer, sends, [(rank, rank + 1) for rank in range(comm.world)])()
    values: list[float] = buffer.tolist()
    return values
