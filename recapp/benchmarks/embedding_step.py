"""`step`: the embedding step on several ranks (exchange, lookup, backward, row-wise Adagrad), under
plans and transports.

All plans and transports of recapp are timed in the same rounds first, so that they compare with
each other (`best_plan_ratio`: the fastest plan's time over this plan's). Then recapp and TorchRec
are timed under the same plan, one plan after the other.

Bags are summed, looked up as sequences, or concatenated. TorchRec has no concatenation: its
`EmbeddingCollection` gives the same vectors, one after the other.
"""

from typing import Any

import torch
from torch import Tensor

from recapp.benchmarks.forward import StepOnRanks
from recapp.benchmarks.session import Session, rule
from recapp.benchmarks.timing import Measured, beside, compared, in_turn, ratio
from recapp.benchmarks.workloads import WORKLOADS, Workload
from recapp.engine.shard_model import shard_model
from recapp.engine.sharded_collection import ShardedCollection
from recapp.engine.state import EngineObserver
from recapp.reporting.phases import PhaseClock
from recapp.sharding.sharding_plan import ShardingPlan
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.sparse.keyed_tensor import KeyedTensor
from recapp.tables.config import PoolingType
from recapp.tables.embedding import EmbeddingCollection
from recapp.tables.embedding_bag import EmbeddingBagCollection
from recapp.transport.communicator import Comm

PHASE_STEPS = 20

Key = tuple[str, str]
"""The names of a plan and of a transport."""


class EmbeddingStep(StepOnRanks):
    """The embedding step of recapp, as a contender: requests, lookup, backward, update.

    Args:
        collection: The sharded tables.
        batches: The batches of this rank, which steps take in turn.
        comm: The ranks, which meet at a barrier before each step.
    """

    def __init__(
        self,
        collection: ShardedCollection,
        batches: list[KeyedJaggedTensor],
        comm: Comm,
    ) -> None:
        super().__init__(in_turn(self._train, batches), comm, collection.shared.comm)
        self.collection = collection
        self.batches = batches
        with torch.no_grad():
            self.gradients = [torch.randn(v.shape) for v in self._vectors(batches[0])]

    def _train(self, batch: KeyedJaggedTensor) -> None:
        """Look up a batch and run its backward, which updates the tables."""
        torch.autograd.backward(self._vectors(batch), self.gradients)

    def _vectors(self, batch: KeyedJaggedTensor) -> list[Tensor]:
        """Return the vectors of all bags, or the vectors of each sequence."""
        found = self.collection(batch)
        if isinstance(found, KeyedTensor):
            return [found.values()]
        return [sequence.values() for sequence in found.values()]

    def phases(self) -> dict[str, float]:
        """Run some steps, and return the mean milliseconds of each part on this rank.

        `rest` begins at the end of the last part that the collection marks.
        """
        clock = PhaseClock()
        state = self.collection.shared.state
        own_observer = state.observer
        state.observer = EngineObserver(ends=clock)
        for _ in range(PHASE_STEPS):
            self.comm.barrier()
            clock.start()
            self.step()
            clock.end("rest")
        state.observer = own_observer
        return clock.means()


def shard_workload(
    workload: Workload, plan: ShardingPlan, comm: Comm, backend: str
) -> ShardedCollection:
    """Return the sharded collection for a workload. Every rank calls this function."""
    tables = workload.tables()
    meta = torch.device("meta")
    collection = (
        EmbeddingCollection(tables, meta)
        if workload.pooling is PoolingType.NONE
        else EmbeddingBagCollection(tables, device=meta, lookups=workload.lookups())
    )
    sharded = shard_model(collection, plan, comm, rule(), backend)
    assert isinstance(sharded, ShardedCollection)
    return sharded


def run(session: Session) -> None:
    """Measure every workload under every plan through every transport."""
    comms = session.open_transports()
    for name in session.settings.workload:
        _measure(session, WORKLOADS[name], comms)


def _measure(session: Session, workload: Workload, comms: dict[str, Comm]) -> None:
    batches = session.batches(workload)
    plans = {
        name: session.plan(name, workload.tables(), batches, workload.lookups())
        for name in session.settings.plans
    }
    backend = session.settings.backend
    steps = {
        (name, transport): EmbeddingStep(
            shard_workload(workload, plan, comm, backend), batches, session.comm
        )
        for name, plan in plans.items()
        for transport, comm in comms.items()
    }
    all_plans: dict[Key, Measured] = {}
    if len(steps) > 1:
        by_label = session.measure(
            f"{workload.name}, all plans", {"/".join(key): step for key, step in steps.items()}
        )
        all_plans = {key: by_label["/".join(key)] for key in steps}
    for name, plan in plans.items():
        own = {transport: steps[name, transport] for transport in comms}
        measured = {transport: all_plans[name, transport] for transport in comms if all_plans}
        specs = session.specs("step", workload, plan)
        with session.rivals("torchrec", specs) as others:
            if others or not all_plans:  # both under one plan, in the same rounds
                measured = session.measure(f"{workload.name}, {name}", {**own, **others})
        for transport, step in own.items():
            session.add(
                {
                    "workload": workload.name,
                    "plan": name,
                    "transport": transport,
                    **compared(measured[transport], beside("torchrec", measured)),
                    **_against_plans((name, transport), all_plans),
                    "pooled_tables": sum(s.mode == "pooled" for s in plan.tables.values()),
                    "bytes_exchanged": step.bytes_exchanged(),
                    **_phases(step),
                }
            )


def _against_plans(key: Key, all_plans: dict[Key, Measured]) -> dict[str, Any]:
    """Return the ratio of the fastest plan's time to this plan's, through the same transport."""
    comparable = [m for (_, transport), m in all_plans.items() if transport == key[1]]
    if len(comparable) < 2:
        return ratio("best_plan", None, Measured())
    return ratio("best_plan", min(comparable, key=lambda m: m.median()), all_plans[key])


def _phases(step: EmbeddingStep) -> dict[str, float]:
    """Return the parts of a step as `phase_<name>_ms`, means of all ranks, and their sum as
    `phases_ms`.
    """
    of_ranks = step.comm.all_gather(step.phases())
    phases = {
        f"phase_{name}_ms": sum(ms[name] for ms in of_ranks) / len(of_ranks) for name in of_ranks[0]
    }
    return phases | {"phases_ms": sum(phases.values())}
