"""`python -m tests.gpu_first.ragged`: steps of batches with other numbers of ids each, as CUDA
graphs and launched one by one: the milliseconds of a step, and whether all weights are equal bit
for bit. Batches lie on the device before.
"""

import json
import time

import torch

from recapp.benchmarks.session import rule
from recapp.engine.sharded_collection import shard_bags, sharded_tables
from recapp.graphs.recorded_batch import WARM_UP
from recapp.graphs.step_graph import StepGraph
from recapp.optim.optimizer import hybrid
from recapp.sharding.sharding_plan import ShardingPlan, tile
from recapp.sharding.sharding_types import CandidateRanks
from recapp.sparse.keyed_jagged_tensor import Batch, KeyedJaggedTensor
from recapp.tables.config import EmbeddingBagConfig
from recapp.transport.communicator import Comm

NUMBERS = 13  # dense inputs
MOST = 20  # ids of a bag


class Model(torch.nn.Module):
    """Tables, and layers that are those of torch with and without a GPU.

    Args:
        tables: The sharded tables.
        hidden: The hidden units.
    """

    def __init__(self, tables, hidden):
        super().__init__()
        self.tables = tables
        width = NUMBERS + sum(x.columns for x in tables.lookups)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(width, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 1)
        )

    def forward(self, batch):
        """Return a logit for each sample."""
        vectors_BK = self.tables(batch.sparse).values()
        return self.layers(torch.cat([batch.dense_BI, vectors_BK], 1)).squeeze(1)


def compared(device, capture=None, samples=8192, tables=26, rows=100_000, width=128, steps=40):
    """Train two equal models, and return what differs.

    Args:
        device: The device of the models.
        capture: Records a step; None records a CUDA graph.
        samples: The samples of a batch.
        tables: The tables, with a bag of each sample.
        rows: The rows of each table.
        width: The columns of each table.
        steps: The steps behind those before the first graph.
    """
    batches = [
        batch_of(seed, samples, tables, rows).to(device) for seed in range(WARM_UP + 1 + steps)
    ]
    found = {}
    weights = []
    for mode in ("graphs", "launches"):
        step = steps_of_model(device, capture, tables, rows, width)
        if mode == "launches":
            step.why_not = "they are compared with graphs"
        for batch in batches[: WARM_UP + 1]:
            step(batch)
        _wait(device)
        begin = time.perf_counter()
        for batch in batches[WARM_UP + 1 :]:
            step(batch)
        step.finish()
        _wait(device)
        found[f"{mode}, ms a step"] = round((time.perf_counter() - begin) * 1e3 / steps, 3)
        found[f"{mode}, recorded"] = len(step._graphs)
        weights.append(weights_of(step))
    return found | {"equal": all(map(torch.equal, *weights))}


def batch_of(seed, samples, tables, rows):
    """Return a batch with 0 to `MOST` ids in a bag."""
    drawn = torch.Generator().manual_seed(seed)
    lengths = torch.randint(MOST + 1, (tables * samples,), generator=drawn)
    ids = torch.randint(rows, (int(lengths.sum()),), generator=drawn)
    features = KeyedJaggedTensor([f"f{k}" for k in range(tables)], ids, lengths=lengths)
    labels_B = (torch.rand(samples, generator=drawn) < 0.3).float()
    return Batch(torch.rand(samples, NUMBERS, generator=drawn), features, labels_B)


def steps_of_model(device, capture, tables, rows, width):
    """Return the steps of a model with tables of one rank."""
    torch.manual_seed(0)
    bags = [
        EmbeddingBagConfig(rows, width, f"t{k}", feature_names=[f"f{k}"]) for k in range(tables)
    ]
    places = CandidateRanks([0], [[0]])
    plan = ShardingPlan({t.name: tile(t, "table_wise", places) for t in bags}, 1)
    collection = shard_bags(bags, plan, Comm(None, device), rule(), backend="triton")
    model = Model(collection, 4 * width).to(device)
    adam = torch.optim.Adam(model.layers.parameters(), fused=True)
    return StepGraph(model, _loss, hybrid(adam, sharded_tables(model)), capture)


def weights_of(step):
    """Return all weights, and the state of the rows."""
    rows = [block.data for t in step.tables for store in t.stores for block in store.blocks()]
    return [*(p.data for p in step.model.parameters()), *rows]


def _loss(model, batch):
    return torch.nn.functional.binary_cross_entropy_with_logits(model(batch), batch.labels_B)


def _wait(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main():
    """Print the comparison as JSON."""
    torch.set_float32_matmul_precision("high")
    print(json.dumps(compared(torch.device("cuda"))))


if __name__ == "__main__":
    main()
