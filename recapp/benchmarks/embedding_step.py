"""`step`: the embedding step on several ranks (exchange, lookup, backward, row-wise Adagrad), under
plans and transports.

All plans and transports of recapp are timed in the same rounds first, so that they can be compared
with each other (`best_plan_ratio`: the fastest plan's time over this one's). Then plan by plan
recapp and TorchRec under the same plan.
"""

from typing import Any

import torch

from recapp.benchmarks.ranks import open_transports
from recapp.benchmarks.rivals import rivals
from recapp.benchmarks.session import Session
from recapp.benchmarks.setup import make_collection, make_plan, pooled_tables, torchrec_sharding
from recapp.benchmarks.timing import Measured, Times, ratio, spread, time_steps
from recapp.benchmarks.workloads import WORKLOADS, Workload
from recapp.engine.observer import EngineObserver
from recapp.engine.sharded_embedding_bag import ShardedEmbeddingBagCollection
from recapp.reporting.phases import PhaseClock
from recapp.sharding.sharding_plan import ShardingPlan
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.transport.communicator import Comm

PHASE_STEPS = 20

Key = tuple[str, str]
"""Plan and transport."""


class EmbeddingStep:
    """recapp: requests, lookup, backward, update.

    Args:
        collection: sharded.
        batches: of this rank, in turn.
        comm: whose barrier stands before each step.
    """

    def __init__(
        self,
        collection: ShardedEmbeddingBagCollection,
        batches: list[KeyedJaggedTensor],
        comm: Comm,
    ) -> None:
        self.collection = collection
        self.batches = batches
        self.comm = comm
        self.number = 0
        self.gradient_BK = torch.randn(batches[0].stride(), collection.width)

    def run(self, steps: int) -> Times:
        """Whole steps."""
        return time_steps([("step", self.step)], steps, self.comm.barrier)

    def step(self) -> None:
        """One of them."""
        self.collection(self.batches[self.number % len(self.batches)]).values().backward(
            self.gradient_BK
        )
        self.number += 1

    def bytes_exchanged(self) -> int:
        """What all ranks send in one step."""
        before = self.collection.comm.bytes_sent
        self.step()
        return int(sum(self.comm.all_gather(self.collection.comm.bytes_sent - before)))

    def phases(self) -> dict[str, float]:
        """Where a step's milliseconds go on this rank; `rest` comes after the last phase."""
        clock = PhaseClock()
        state = self.collection.state
        quiet = state.observer
        state.observer = EngineObserver(ends=clock)
        for _ in range(PHASE_STEPS):
            self.comm.barrier()
            clock.start()
            self.step()
            clock.end("rest")
        state.observer = quiet
        return clock.means()


def run(session: Session) -> None:
    """Measure every workload under every plan through every transport."""
    torch.set_num_threads(session.settings["threads"][0])
    comms = open_transports(session.settings["transport"])
    for name in session.settings["workload"]:
        _measure(session, WORKLOADS[name], comms)


def _measure(session: Session, workload: Workload, comms: dict[str, Comm]) -> None:
    settings = session.settings
    tables = workload.tables()
    batches = session.batches(workload)
    plans = {
        name: make_plan(name, plain, tables, session.comm, batches)
        for name, plain in settings["plans"].items()
    }
    own = {
        (name, transport): EmbeddingStep(
            make_collection(tables, plan, comm, settings["backend"]), batches, session.comm
        )
        for name, plan in plans.items()
        for transport, comm in comms.items()
    }
    alike = {}
    if len(own) > 1:
        together = session.measure(
            f"{workload.name}, all plans", {"/".join(key): step for key, step in own.items()}
        )
        alike = {key: together["/".join(key)] for key in own}
    for name, plan in plans.items():
        steps = {transport: own[name, transport] for transport in comms}
        measured = _against_torchrec(
            session,
            workload,
            plan,
            steps,
            {transport: alike[name, transport] for transport in comms if alike},
        )
        for transport, step in steps.items():
            record = _record(workload, name, transport, measured) | _against_plans(
                (name, transport), alike
            )
            session.add(
                record
                | {"pooled_tables": pooled_tables(plan), "bytes_exchanged": step.bytes_exchanged()}
                | _phases(step)
            )


def _against_torchrec(
    session: Session,
    workload: Workload,
    plan: ShardingPlan,
    steps: dict[str, EmbeddingStep],
    alike: dict[str, Measured],
) -> dict[str, Measured]:
    """recapp and TorchRec in the same rounds; what was measured with the other plans where TorchRec
    is not there or refuses.
    """
    specs = session.specs("step", workload, sharding=torchrec_sharding(plan))
    with rivals(
        "torchrec", session.settings["torchrec_python"], specs, session.folder, session.comm
    ) as others:
        return (
            session.measure(f"{workload.name}, {plan.name}", {**steps, **others})
            if others or not alike
            else alike
        )


def _record(
    workload: Workload, plan: str, transport: str, measured: dict[str, Measured]
) -> dict[str, Any]:
    own = measured[transport]
    return {
        "workload": workload.name,
        "plan": plan,
        "transport": transport,
        **spread(own),
        **ratio("torchrec", measured.get("torchrec"), own),
        **ratio("torchrec_tuned", measured.get("torchrec_tuned"), own),
        "rounds": len(own.rounds["step"]),
    }


def _against_plans(key: Key, alike: dict[Key, Measured]) -> dict[str, Any]:
    """How near a plan comes to the best one through its transport."""
    rivals_of = [m for (_, transport), m in alike.items() if transport == key[1]]
    if len(rivals_of) < 2:
        return ratio("best_plan", None, Measured())
    return ratio("best_plan", min(rivals_of, key=lambda m: m.median()), alike[key])


def _phases(step: EmbeddingStep) -> dict[str, float]:
    """The phases of a step as `phase_<name>_ms`, the mean of all ranks; `phases_ms` is their
    sum.
    """
    told = step.comm.all_gather(step.phases())
    phases = {f"phase_{name}_ms": sum(t[name] for t in told) / len(told) for name in told[0]}
    return phases | {"phases_ms": sum(phases.values())}
