"""`train`: compare a whole training step of a DLRM on several ranks with its own matrix products
and with TorchRec's DLRM.

The step is forward, loss, backward (which updates tables, while DDP reduces dense gradients) and
Adam for the dense part, on batches in memory. The floor is work that no framework can avoid: the
matrix products of the MLPs, forward and backward, and the two batched products of the interaction,
into allocated memory, on all ranks at once. The floor has no bias, ReLU, loss, optimiser,
all-reduce or tables. With `compile=true`, a model with its dense part under torch.compile takes
part too, through the first transport. Models of `conf/model` are measured by `dense_part.py`.

B samples of a rank's batch, F vectors of the interaction, D their width, I inputs and O outputs of
a layer.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor, nn

from recapp.benchmarks.dense_part import measure_dense_part
from recapp.benchmarks.session import Session
from recapp.benchmarks.timing import Measured, Steps, beside, compared, in_turn, spread
from recapp.benchmarks.workloads import DENSE, MODELS, NamedModel, Workload
from recapp.engine.sharded_collection import sharded_tables
from recapp.models.published_dlrm import DLRM
from recapp.optim.optimizer import hybrid
from recapp.parallel import compile_dense, wrap_dense
from recapp.sharding.sharding_plan import ShardingPlan
from recapp.sparse.batch import Batch
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.tables.config import EmbeddingConfig
from recapp.transport.communicator import Comm


class TrainingStep:
    """The training step of recapp: a DLRM under DDP with sharded tables.

    Args:
        session: The ranks, which meet at a barrier before each step, and the backend.
        model: The shape of the DLRM.
        tables: Its tables.
        plan: The plan of the tables.
        comm: The ranks, through the measured transport.
        compiled: Whether the dense part runs under torch.compile.
    """

    def __init__(
        self,
        session: Session,
        model: NamedModel,
        tables: Sequence[EmbeddingConfig],
        plan: ShardingPlan,
        comm: Comm,
        compiled: bool = False,
    ) -> None:
        torch.manual_seed(0)
        collection = session.shard(tables, plan, comm)
        dlrm = DLRM(collection, DENSE, model.bottom_layers, model.top)
        if compiled:
            compile_dense(dlrm)
        self.model = wrap_dense(
            dlrm, comm, static_graph=True, gradient_as_bucket_view=True, broadcast_buffers=False
        )
        dense = [p for p in dlrm.parameters() if p.requires_grad and p.numel()]
        self.optimizer = hybrid(torch.optim.Adam(dense, lr=1e-3, fused=True), sharded_tables(dlrm))
        self.barrier = session.comm

    def in_memory(self, batches: Sequence[Batch]) -> Steps:
        """Return a contender that trains on batches in memory.

        Args:
            batches: The batches of this rank, which steps take in turn.
        """
        return Steps({"step": in_turn(self.step, batches)}, self.barrier.barrier)

    def step(self, batch: Batch) -> None:
        """Train on one batch."""
        self.optimizer.zero_grad()
        logits_B = self.model(batch)
        loss: Any = nn.functional.binary_cross_entropy_with_logits(logits_B, batch.labels_B)
        loss.backward()
        self.optimizer.step()


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


def batches_of(model: NamedModel, features: list[KeyedJaggedTensor]) -> list[Batch]:
    """Return batches with the given ids, and with random dense inputs and labels.

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
    comms = session.open_transports()
    recipes = session.settings.recipes
    for name in recipes:
        measure_dense_part(session, name)
    whole = [name for name in session.settings.model if name not in recipes]
    for name, plan_name in product(whole, session.settings.plans):
        workload = MODELS[name].workload()
        features = session.batches(workload)
        plan = session.plan(plan_name, workload.tables(), features)
        _measure(session, MODELS[name], workload, plan, batches_of(MODELS[name], features), comms)


def _measure(
    session: Session,
    model: NamedModel,
    workload: Workload,
    plan: ShardingPlan,
    batches: list[Batch],
    comms: dict[str, Comm],
) -> None:
    tables = workload.tables()
    own = {
        transport: TrainingStep(session, model, tables, plan, comm).in_memory(batches)
        for transport, comm in comms.items()
    }
    if session.settings.compile:
        transport, comm = next(iter(comms.items()))
        step = TrainingStep(session, model, tables, plan, comm, compiled=True)
        own[f"{transport}, compiled"] = step.in_memory(batches)
    spec = {"dense": DENSE, "bottom": model.bottom_layers, "top": model.top}
    specs = session.specs("train", workload, plan, model=spec)
    gemm = matrix_products(model, session.comm)
    with session.rivals("torchrec", specs) as others:
        measured = session.measure(f"{model.name}, {plan.name}", {**own, "gemm": gemm, **others})
    for name in own:
        session.add(_record(model, plan.name, name, measured))


def _record(
    model: NamedModel, plan: str, name: str, measured: dict[str, Measured]
) -> dict[str, Any]:
    own = measured[name]
    gemm = measured["gemm"]
    transport, _, compiled = name.partition(", ")
    return {
        "model": " ".join(filter(None, (model.name, compiled))),
        "plan": plan,
        "transport": transport,
        "threads": torch.get_num_threads(),
        **compared(own, {"gemm_floor": gemm, **beside("torchrec", measured)}),
        **spread(gemm, prefix="gemm_"),
        "gemm_gflop_per_s": dense_flops(model) / gemm.median() / 1e6,
        "dense_flops": dense_flops(model),
        "samples_per_second": model.batch_size / own.median() * 1e3,  # of one rank
    }
