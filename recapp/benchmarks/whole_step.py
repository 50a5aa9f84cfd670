"""`train`: a whole training step of a DLRM on several ranks, against its own matrix products and
against TorchRec's DLRM.

The step is forward, loss, backward (tables are updated inside, dense gradients reduced by DDP) and
Adam for the dense part, on batches that are in memory. The floor is what no framework can avoid:
the matrix products of the MLPs, forward and backward, and the two batched products of the
interaction, into memory that is there already, on all ranks at once. Bias, ReLU, loss, optimiser,
all-reduce and tables do not count in it. With `compile=true` the same model with its dense part
under torch.compile takes part too, through the first transport.

B samples of a rank's batch, F vectors of the interaction, D their width, I inputs and O outputs of
a layer.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from recapp.benchmarks.models import DENSE, MODELS, NamedModel
from recapp.benchmarks.ranks import open_transports
from recapp.benchmarks.rivals import rivals
from recapp.benchmarks.session import Session
from recapp.benchmarks.setup import make_collection, make_plan, torchrec_sharding
from recapp.benchmarks.timing import Contender, Measured, Times, ratio, spread, time_steps
from recapp.benchmarks.workloads import Workload
from recapp.engine.shard_model import compile_dense, sharded_tables, wrap_dense
from recapp.models.published_dlrm import DLRM
from recapp.optim.optimizer import hybrid
from recapp.sharding.sharding_plan import ShardingPlan
from recapp.sparse.batch import Batch
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.tables.config import EmbeddingConfig
from recapp.transport.communicator import Comm


class TrainingStep:
    """The training step of recapp: a DLRM under DDP with sharded tables.

    Args:
        model: The shape of the DLRM.
        tables: Its tables.
        plan: The plan of the tables.
        comm: The ranks, through the transport that is measured.
        barrier: The ranks, which meet at a barrier before each step.
        backend: The backend of local kernels.
        compiled: Whether the dense part runs under torch.compile.
    """

    def __init__(
        self,
        model: NamedModel,
        tables: Sequence[EmbeddingConfig],
        plan: ShardingPlan,
        comm: Comm,
        barrier: Comm,
        backend: str,
        compiled: bool = False,
    ) -> None:
        torch.manual_seed(0)
        dlrm = DLRM(
            make_collection(tables, plan, comm, backend), DENSE, model.bottom_layers, model.top
        )
        if compiled:
            compile_dense(dlrm)
        self.model = wrap_dense(
            dlrm, comm, static_graph=True, gradient_as_bucket_view=True, broadcast_buffers=False
        )
        dense = [p for p in dlrm.parameters() if p.requires_grad and p.numel()]
        self.optimizer = hybrid(torch.optim.Adam(dense, lr=1e-3, fused=True), sharded_tables(dlrm))
        self.barrier = barrier

    def step(self, batch: Batch) -> None:
        """Train on one batch."""
        self.optimizer.zero_grad()
        logits_B = self.model(batch)
        loss: Any = nn.functional.binary_cross_entropy_with_logits(logits_B, batch.labels_B)
        loss.backward()
        self.optimizer.step()


class InMemory:
    """A contender that trains on batches in memory.

    Args:
        training: The step.
        batches: The batches of this rank, which steps take in turn.
    """

    def __init__(self, training: TrainingStep, batches: list[Batch]) -> None:
        self.training = training
        self.batches = batches
        self.number = 0

    def run(self, steps: int) -> Times:
        """Time so many training steps."""
        return time_steps([("step", self._step)], steps, self.training.barrier.barrier)

    def _step(self) -> None:
        self.training.step(self.batches[self.number % len(self.batches)])
        self.number += 1


class MatrixProducts:
    """A contender of the matrix products of a DLRM's dense part, forward and backward, alone.

    Args:
        model: The shape of the DLRM.
        barrier: The ranks, which meet at a barrier before each step.
    """

    def __init__(self, model: NamedModel, barrier: Comm) -> None:
        B = model.batch_size
        F = len(model.workload().rows_F) + 1
        D = model.dim
        pairs = F * (F - 1) // 2
        first = [True, *[False] * len(model.bottom)]  # numbers need no gradient
        self.layers = [
            _Layer(B, i, o, skip)
            for (i, o), skip in zip(pairwise([DENSE, *model.bottom_layers]), first, strict=True)
        ]
        self.layers += [_Layer(B, i, o, False) for i, o in pairwise([D + pairs, *model.top])]
        self.vectors_BFD = torch.randn(B, F, D)
        self.dots_BFF = torch.randn(B, F, F)
        self.grad_BFD = torch.empty(B, F, D)
        self.barrier = barrier

    def run(self, steps: int) -> Times:
        """Time all products of so many steps."""
        return time_steps([("step", self._step)], steps, self.barrier.barrier)

    def _step(self) -> None:
        for layer in self.layers:
            layer.forward()
        torch.bmm(self.vectors_BFD, self.vectors_BFD.mT, out=self.dots_BFF)
        torch.bmm(self.dots_BFF, self.vectors_BFD, out=self.grad_BFD)
        for layer in self.layers:
            layer.backward()


class _Layer:
    """The products of a linear layer: x W^T forward; g^T x and, unless it is the first, g W
    backward.
    """

    def __init__(self, batch_size: int, inputs: int, outputs: int, first: bool) -> None:
        self.x_BI = torch.randn(batch_size, inputs)
        self.w_OI = torch.randn(outputs, inputs)
        self.y_BO = torch.randn(batch_size, outputs)
        self.grad_w_OI = torch.empty(outputs, inputs)
        self.grad_x_BI: Tensor | None = None if first else torch.empty(batch_size, inputs)

    def forward(self) -> None:
        torch.mm(self.x_BI, self.w_OI.T, out=self.y_BO)

    def backward(self) -> None:
        torch.mm(self.y_BO.T, self.x_BI, out=self.grad_w_OI)
        if self.grad_x_BI is not None:
            torch.mm(self.y_BO, self.w_OI, out=self.grad_x_BI)


def dense_flops(model: NamedModel) -> int:
    """Return the multiplications and additions of `MatrixProducts` in a step of one rank."""
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


def batches_of(model: NamedModel, features: list[KeyedJaggedTensor]) -> list[Batch]:
    """Return batches with the given ids and random numbers and labels.

    Args:
        model: The shape of the DLRM.
        features: The ids of each batch.
    """
    torch.manual_seed(1)
    return [
        Batch(
            torch.rand(model.batch_size, DENSE), ids, torch.randint(2, (model.batch_size,)).float()
        )
        for ids in features
    ]


def run(session: Session) -> None:
    """Measure every model under every plan through every transport."""
    torch.set_num_threads(session.settings["threads"][0])
    comms = open_transports(session.settings["transport"])
    for name in session.settings["model"]:
        for plan_name, plan_settings in session.settings["plans"].items():
            workload = MODELS[name].workload()
            features = session.batches(workload)
            plan = make_plan(plan_name, plan_settings, workload.tables(), session.comm, features)
            _measure(
                session, MODELS[name], workload, plan, batches_of(MODELS[name], features), comms
            )


def _measure(
    session: Session,
    model: NamedModel,
    workload: Workload,
    plan: ShardingPlan,
    batches: list[Batch],
    comms: dict[str, Comm],
) -> None:
    settings = session.settings
    own: dict[str, Contender] = {
        transport: InMemory(
            TrainingStep(model, workload.tables(), plan, comm, session.comm, settings["backend"]),
            batches,
        )
        for transport, comm in comms.items()
    }
    spec = {"dense": DENSE, "bottom": model.bottom_layers, "top": model.top}
    if settings["compile"]:
        transport, comm = next(iter(comms.items()))
        step = TrainingStep(
            model, workload.tables(), plan, comm, session.comm, settings["backend"], compiled=True
        )
        own[f"{transport}, compiled"] = InMemory(step, batches)
    specs = session.specs("train", workload, sharding=torchrec_sharding(plan), model=spec)
    threads = settings["threads"][0]
    with rivals(
        "torchrec", settings["torchrec_python"], specs, session.folder, session.comm, threads
    ) as others:
        contenders: dict[str, Contender] = {
            **own,
            "gemm": MatrixProducts(model, session.comm),
            **others,
        }
        measured = session.measure(f"{model.name}, {plan.name}", contenders)
    for name in own:
        session.add(_record(model, plan.name, name, threads, measured))


def _record(
    model: NamedModel, plan: str, name: str, threads: int, measured: dict[str, Measured]
) -> dict[str, Any]:
    own = measured[name]
    gemm = measured["gemm"]
    transport, _, compiled = name.partition(", ")
    return {
        "model": " ".join(filter(None, (model.name, compiled))),
        "plan": plan,
        "transport": transport,
        "threads": threads,
        **spread(own),
        **ratio("gemm_floor", gemm, own),
        **ratio("torchrec", measured.get("torchrec"), own),
        **ratio("torchrec_tuned", measured.get("torchrec_tuned"), own),
        **spread(gemm, prefix="gemm_"),
        "gemm_gflop_per_s": dense_flops(model) / gemm.median() / 1e6,
        "dense_flops": dense_flops(model),
        "samples_per_second": _samples_per_second(model, own),
        "rounds": len(own.rounds["step"]),
    }


def _samples_per_second(model: NamedModel, own: Measured) -> float:
    """Return the samples that one rank trains in a second."""
    return model.batch_size / own.median() * 1e3
