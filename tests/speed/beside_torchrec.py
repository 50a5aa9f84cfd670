"""`train` and `step` beside TorchRec: a whole training step of a DLRM on several ranks, compared
with its own matrix products and with TorchRec's DLRM, and the embedding step alone.

The floor of `train` is work that no framework can avoid: the matrix products of the MLPs, forward
and backward, and the two batched products of the interaction, into allocated memory, on all ranks
at once. The floor has no bias, ReLU, loss, optimiser, all-reduce or tables.

On one GPU (`--device cuda`) four more have turns: FBGEMM's fused tables without TorchRec
(`fbgemm`), recapp's steps as CUDA graphs (`graph`), these around the dense part that the others
have (`given`), and forward and backward alone as graphs (`calls`, `graph=True` of a model). Each
row of results then tells what a step gives the GPU to do.

TorchRec has no concatenation of bags: its `EmbeddingCollection` gives the same vectors, one after
the other.

B samples of a rank's batch, F vectors of the interaction, D their width, I inputs and O outputs of
a layer.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import pairwise, product
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from recapp.benchmarks.steps import (
    EmbeddingStep,
    TrainingStep,
    batches_of,
    clock_of,
    shard_workload,
)
from recapp.benchmarks.timing import Measured, Steps, compared, spread
from recapp.benchmarks.workloads import DENSE, MODELS, WORKLOADS, NamedModel, Workload
from recapp.graphs.module_graph import ModuleGraph
from recapp.graphs.step_graph import StepGraph
from recapp.sharding.sharding_plan import ShardingPlan
from recapp.sparse.keyed_jagged_tensor import Batch
from recapp.transport.communicator import Comm

from .lab import TERABYTE_MODELS, Lab
from .rivals import beside
from .torchrec_worker import GivenDense


def matrix_products(model: NamedModel, barrier: Comm) -> Steps:
    """Return a contender that runs only the matrix products of a DLRM's dense part, forward and
    backward.

    Args:
        model: The shape of the DLRM.
        barrier: The ranks, which meet at a barrier before each step.
    """
    B = model.batch_size
    F = len(model.workload().rows_F) + 1
    D = model.dim
    bottom = list(pairwise([DENSE, *model.bottom_layers]))
    top = list(pairwise([D + F * (F - 1) // 2, *model.top]))
    layers = [_layer(B, *shape) for shape in bottom + top]
    layers[0].pop()  # the dense inputs need no gradient
    vectors_BFD = torch.randn(B, F, D)
    dots_BFF = torch.randn(B, F, F)
    products: list[Callable[[], Tensor]] = [
        *(layer[0] for layer in layers),
        partial(torch.bmm, vectors_BFD, vectors_BFD.mT, out=dots_BFF),
        partial(torch.bmm, dots_BFF, vectors_BFD, out=torch.empty(B, F, D)),
        *(multiply for layer in layers for multiply in layer[1:]),
    ]

    def step(_: int) -> None:
        for multiply in products:
            multiply()

    return Steps({"step": step}, barrier.barrier)


def _layer(batch_size: int, inputs: int, outputs: int) -> list[Callable[[], Tensor]]:
    """Return the products of a linear layer: x W^T forward; g^T x and g W backward."""
    x_BI = torch.randn(batch_size, inputs)
    w_OI = torch.randn(outputs, inputs)
    y_BO = torch.randn(batch_size, outputs)
    return [
        partial(torch.mm, x_BI, w_OI.T, out=y_BO),
        partial(torch.mm, y_BO.T, x_BI, out=torch.empty(outputs, inputs)),
        partial(torch.mm, y_BO, w_OI, out=torch.empty(batch_size, inputs)),
    ]


def dense_flops(model: NamedModel) -> int:
    """Return the multiplications and additions of `matrix_products` in a step of one rank."""
    B = model.batch_size
    F = len(model.workload().rows_F) + 1
    D = model.dim
    bottom = [DENSE, *model.bottom_layers]
    top = [D + F * (F - 1) // 2, *model.top]
    products = (
        3 * sum(i * o for layers in (bottom, top) for i, o in pairwise(layers))
        - bottom[0] * bottom[1]
    )
    return 2 * B * (products + 2 * F * F * D)


def measure_training(session: Lab) -> None:
    """Measure every model under every plan."""
    comm = session.ranks()
    for name, plan_name in product(session.settings.model, session.settings.plan):
        model = {**MODELS, **TERABYTE_MODELS}[name]
        workload = model.workload()
        features = session.batches(workload)
        plan = session.plan(plan_name, workload.tables(), features)
        batches = batches_of(model, features)
        shape = {"dense": DENSE, "bottom": model.bottom_layers, "top": model.top}
        ours = {"recapp": TrainingStep(session, model, workload.tables(), plan, comm)}
        if session.device.type == "cuda" and comm.world == 1:
            ours["graph"] = graphed(session, model, workload, plan)
            ours["calls"] = graphed_calls(session, model, workload, plan)
            with patch("recapp.benchmarks.steps.DLRM", GivenDLRM):
                ours["given"] = graphed(session, model, workload, plan)
        with session.device:
            gemm = matrix_products(model, session.comm)
        gemm.clock = clock_of(session.device)
        contenders = {"gemm": gemm}
        for key, training in ours.items():
            contenders[key] = training.in_memory(batches)
            contenders[key].inside = session.autocast
        specs = session.specs("train", workload, plan, model=shape)
        with (
            session.rivals("torchrec", specs) as others,
            _fbgemm(session, "by_hand", workload, shape) as fbgemm,
        ):
            contenders |= {**others, **fbgemm}
            measured = session.measure(f"{name}, {plan_name}", contenders)
            gpu = session.on_gpu(contenders)
        session.add(_row(model, plan_name, comm.transport, measured) | gpu)


def graphed(
    session: Lab, model: NamedModel, workload: Workload, plan: ShardingPlan
) -> TrainingStep:
    """Return recapp's training whose steps are CUDA graphs where that is possible."""
    comm = session.ranks()  # its own, because graphs have one stream
    training: Any = TrainingStep(session, model, workload.tables(), plan, comm)
    training.step = StepGraph(training.model, _loss, training.optimizer)
    return training


def graphed_calls(
    session: Lab, model: NamedModel, workload: Workload, plan: ShardingPlan
) -> TrainingStep:
    """Return recapp's training whose forward and backward are CUDA graphs, the rest launched."""
    comm = session.ranks()  # its own, because graphs have one stream
    training: Any = TrainingStep(session, model, workload.tables(), plan, comm)
    training.model = ModuleGraph(training.model, comm.device)
    return training


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    return torch.nn.functional.binary_cross_entropy_with_logits(model(batch), batch.labels_B)


class GivenDLRM(nn.Module):
    """A DLRM whose dense part is the one that rivals have on a GPU, with the arguments of recapp's
    DLRM.
    """

    def __init__(
        self, collection: Any, dense: int, bottom: Sequence[int], top: Sequence[int]
    ) -> None:
        super().__init__()
        self.collection = collection
        shape = {"dense": dense, "bottom": bottom, "top": top}
        self.given = GivenDense(shape, len(collection.lookups))

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits, [B]."""
        logits: Tensor = self.given(batch.dense_BI, self.collection(batch.sparse).values())
        return logits


def _fbgemm(session: Lab, kind: str, workload: Workload, shape: Any = None) -> Any:
    """Return a context with FBGEMM's fused tables without TorchRec, on one GPU."""
    if session.device.type == "cpu" or session.comm.world > 1:
        return nullcontext({})
    return session.rivals("fbgemm", session.specs(kind, workload, model=shape))


def measure_step(session: Lab) -> None:
    """Measure the embedding step of every workload under every plan."""
    comm = session.ranks()
    for name, plan_name in product(session.settings.workload, session.settings.plan):
        workload = WORKLOADS[name]
        batches = session.batches(workload)
        plan = session.plan(plan_name, workload.tables(), batches, workload.lookups())
        tables = shard_workload(workload, plan, comm, session.settings.backend)
        moved = [batch.to(session.device) for batch in batches]
        step = EmbeddingStep(tables, moved, session.comm)
        with (
            session.rivals("torchrec", session.specs("step", workload, plan)) as others,
            _fbgemm(session, "kernels", workload) as fbgemm,
        ):
            contenders = {"recapp": step, **others, **fbgemm}
            measured = session.measure(f"{name}, {plan_name}", contenders)
            gpu = session.on_gpu(contenders)
        session.add(
            {
                "workload": name,
                "plan": plan_name,
                "transport": comm.transport,
                **compared(measured["recapp"], _rivals(measured)),
                "bytes_exchanged": step.bytes_exchanged(),
                **gpu,
            }
        )


def _rivals(measured: dict[str, Measured]) -> dict[str, Measured | None]:
    """Return the times of others for a comparison; on a GPU those of FBGEMM alone, and of recapp's
    graphs, as well.
    """
    more = [name for name in ("fbgemm", "graph", "calls", "given") if name in measured]
    return {**beside("torchrec", measured), **{name: measured[name] for name in more}}


def _row(
    model: NamedModel, plan: str, transport: str, measured: dict[str, Measured]
) -> dict[str, Any]:
    ours = measured["recapp"]
    gemm = measured["gemm"]
    return {
        "model": model.name,
        "plan": plan,
        "transport": transport,
        "threads": torch.get_num_threads(),
        **compared(ours, {"gemm_floor": gemm, **_rivals(measured)}),
        **spread(gemm, prefix="gemm_"),
        "gemm_gflop_per_s": dense_flops(model) / gemm.median() / 1e6,
        "dense_flops": dense_flops(model),
        "samples_per_second": model.batch_size / ours.median() * 1e3,  # of one rank
    }
