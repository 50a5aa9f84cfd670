"""`step`: the embedding step on several ranks (exchange, lookup, backward, row-wise Adagrad), under
plans and transports.

All plans and transports of recapp are timed in the same rounds first, so that they can be compared
with each other (`best_plan_ratio`: the fastest plan's time over this one's). Then recapp and
TorchRec are timed under the same plan, one plan after the other.

Bags are summed, or looked up as sequences, or concatenated. TorchRec has no concatenation: its
`EmbeddingCollection` gives the same vectors, one after the other.
"""

from typing import Any

import torch
from torch import Tensor

from recapp.benchmarks.ranks import open_transports
from recapp.benchmarks.rivals import rivals
from recapp.benchmarks.session import Session
from recapp.benchmarks.setup import make_plan, pooled_tables, shard_workload, torchrec_sharding
from recapp.benchmarks.timing import Measured, Times, ratio, spread, time_steps
from recapp.benchmarks.workloads import WORKLOADS, Workload
from recapp.engine.observer import EngineObserver
from recapp.engine.sharded_collection import ShardedCollection
from recapp.reporting.phases import PhaseClock
from recapp.sharding.sharding_plan import ShardingPlan
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.sparse.keyed_tensor import KeyedTensor
from recapp.transport.communicator import Comm

PHASE_STEPS = 20

Key = tuple[str, str]
"""The names of a plan and of a transport."""


class EmbeddingStep:
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
        self.collection = collection
        self.batches = batches
        self.comm = comm
        self.number = 0
        with torch.no_grad():
            self.gradients = [torch.randn(v.shape) for v in self._vectors(batches[0])]

    def run(self, steps: int) -> Times:
        """Time so many steps."""
        return time_steps([("step", self.step)], steps, self.comm.barrier)

    def step(self) -> None:
        """Look up the next batch and take its gradient back, which updates the tables."""
        vectors = self._vectors(self.batches[self.number % len(self.batches)])
        torch.autograd.backward(vectors, self.gradients)
        self.number += 1

    def _vectors(self, batch: KeyedJaggedTensor) -> list[Tensor]:
        """Return the vectors of all bags, or those of each sequence."""
        found = self.collection(batch)
        if isinstance(found, KeyedTensor):
            return [found.values()]
        return [sequence.values() for sequence in found.values()]

    def bytes_exchanged(self) -> int:
        """Run a step and return the bytes that all ranks send in it. Every rank calls it."""
        before = self.collection.shared.comm.bytes_sent
        self.step()
        return int(sum(self.comm.all_gather(self.collection.shared.comm.bytes_sent - before)))

    def phases(self) -> dict[str, float]:
        """Run some steps and return the mean milliseconds of each part on this rank.

        `rest` is what follows the last part that the collection marks.
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
        name: make_plan(name, plan_settings, tables, session.comm, batches, workload.lookups())
        for name, plan_settings in settings["plans"].items()
    }
    own = {
        (name, transport): EmbeddingStep(
            shard_workload(workload, plan, comm, settings["backend"]), batches, session.comm
        )
        for name, plan in plans.items()
        for transport, comm in comms.items()
    }
    all_plans = {}
    if len(own) > 1:
        by_label = session.measure(
            f"{workload.name}, all plans", {"/".join(key): step for key, step in own.items()}
        )
        all_plans = {key: by_label["/".join(key)] for key in own}
    for name, plan in plans.items():
        steps = {transport: own[name, transport] for transport in comms}
        measured = _against_torchrec(
            session,
            workload,
            plan,
            steps,
            {transport: all_plans[name, transport] for transport in comms if all_plans},
        )
        for transport, step in steps.items():
            record = _record(workload, name, transport, measured) | _against_plans(
                (name, transport), all_plans
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
    with_all_plans: dict[str, Measured],
) -> dict[str, Measured]:
    """Time recapp and TorchRec in the same rounds, under one plan.

    Args:
        session: The rank and its settings.
        workload: Tables and batches.
        plan: The plan of both.
        steps: The step of recapp through each transport.
        with_all_plans: What each transport took in the rounds of all plans; returned instead where
            TorchRec is not there or refuses the plan. Empty: recapp is timed alone then.
    """
    specs = session.specs("step", workload, sharding=torchrec_sharding(plan))
    with rivals(
        "torchrec", session.settings["torchrec_python"], specs, session.folder, session.comm
    ) as others:
        return (
            session.measure(f"{workload.name}, {plan.name}", {**steps, **others})
            if others or not with_all_plans
            else with_all_plans
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


def _against_plans(key: Key, all_plans: dict[Key, Measured]) -> dict[str, Any]:
    """Return the ratio of the fastest plan's time to this one's, through the same transport."""
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
