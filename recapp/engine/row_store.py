"""The rows of one group on this rank, with their optimiser state, behind one small interface.

A dynamic table, a quantised table or a table on another tier replaces this class and nothing else:
the engine asks a store to pool rows and to update them, a checkpoint asks it for its rectangles.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from recapp.kernels.links import Links
from recapp.optim.rules import RowRule
from recapp.sharding.layout import Block, Layout
from recapp.tables.initial import fill_initial

if TYPE_CHECKING:
    from recapp.kernels.backend import Backend


class RowStore(nn.Module):
    """Weights [R, width] of a group's pieces on a rank and the state of its rule.

    Args:
        layout: of all tables.
        group: number of the group.
        rank: this one.
        rule: the optimiser's.
        dtype: what is computed in; weights may be stored narrower.
        device: where the rows live.
        backend: the kernels.
    """

    weights: Tensor

    def __init__(
        self,
        layout: Layout,
        group: int,
        rank: int,
        rule: RowRule,
        dtype: torch.dtype,
        device: torch.device,
        backend: "Backend",
    ) -> None:
        super().__init__()
        self.backend = backend
        self.layout = layout
        self.rank = rank
        self.rule = rule
        self.dtype = dtype
        self.width = layout.groups[group].width
        self.pieces = layout.pieces_of(rank, group)
        rows = layout.groups[group].rows_W[rank]
        self.register_buffer(
            "weights",
            torch.empty(rows, self.width, dtype=layout.groups[group].dtype, device=device),
            persistent=False,
        )
        for name, kind in rule.state:
            held = torch.zeros(
                rows, self.width if kind == "element" else 1, dtype=dtype, device=device
            )
            self.register_buffer(name, held, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "RowStore":
        """Rows stay as the plan made them: `model.half()` or Lightning's `bf16-true` is meant for
        the dense part.
        """
        return self

    @property
    def state(self) -> list[Tensor]:
        """The rule's state tensors, in its order."""
        return [getattr(self, name) for name, _ in self.rule.state]

    def reset(self, seed: int) -> None:
        """Write the start values of every piece; state becomes zero."""
        for p in self.pieces:
            strip = self.layout.strips[p.strip]
            fill_initial(
                self.weights[p.base : p.base + len(p.rows)],
                self.layout.tables[strip.table],
                seed,
                p.rows,
                strip.cols,
            )
        for held in self.state:
            held.zero_()

    @property
    def flat(self) -> Tensor:
        """All rows behind each other."""
        return self.weights.view(-1)

    @property
    def rows(self) -> int:
        """R, rows held here."""
        return len(self.weights)

    def update(
        self, gradients: Tensor, learn: Links, row_U: Tensor, mean_U: Tensor | None, lr: float
    ) -> None:
        """Sum the touched rows' gradients along `learn` and apply the rule, once each; `mean_U`
        where a row here is a strip.
        """
        self.backend.update(
            gradients, learn, row_U, mean_U, self.weights, self.state, self.dtype, lr, self.rule
        )

    def blocks(self) -> Iterator[Block]:
        """The rectangles held here, as views: what a checkpoint reads and writes."""
        for p in self.pieces:
            strip = self.layout.strips[p.strip]
            table = self.layout.tables[strip.table]
            shape = (table.num_embeddings, table.embedding_dim)
            here = slice(p.base, p.base + len(p.rows))
            replicated = self.layout.groups[strip.group].mode == "replicated"
            owner = not replicated or self.rank == 0
            yield Block(table.name, "weight", shape, p.rows, strip.cols, self.weights[here], owner)
            for (name, kind), held in zip(self.rule.state, self.state, strict=True):
                if kind == "element":
                    yield Block(table.name, name, shape, p.rows, strip.cols, held[here], owner)
                else:
                    yield Block(
                        table.name,
                        name,
                        (shape[0], 1),
                        p.rows,
                        range(1),
                        held[here],
                        owner and strip.cols.start == 0,
                    )

    def extra_repr(self) -> str:
        """Rows, width and rule."""
        return (
            f"{len(self.weights):,} rows x {self.width}, "
            f"{str(self.weights.dtype).removeprefix('torch.')}, {self.rule.name}"
        )
