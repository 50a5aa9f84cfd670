"""The process of a rival: a Python with TorchRec and FBGEMM, and without recapp, builds a module
from a spec and times steps on command.

The first line on standard input is the spec. The first line of output is `{"ready": true}`, or
`{"refused": "why"}`. Each further line of input, such as `{"steps": 12, "threads": 1}`, asks for
steps, and the answer holds the milliseconds of each: `{"step": [...]}`. The process ends with its
standard input, or with its parent.

The `kind` of a spec names the module. The optimiser is row-wise Adagrad, fused into backward where
TorchRec can do that:
    kernels   FBGEMM's SplitTableBatchedEmbeddingBags on the CPU, one process
    quantised FBGEMM's IntNBitTableBatchedEmbeddingBags on the CPU, forward only, one process
    step      TorchRec's sharded EmbeddingBagCollection under a plan, several processes; its
              EmbeddingCollection where bags are not summed
    train     TorchRec's DLRM around such a collection, DDP and Adam for its dense part
    inference TorchRec's DLRM after `quantize_embeddings`, forward only, one process; `batches` of a
              request names one of its lists of batches

Data-parallel tables of TorchRec have dense gradients, which DDP reduces. TorchRec's own
RowWiseAdagrad updates these tables.
"""

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

if __name__ == "__main__":
    sys.path.pop(0)  # the folder of this file: its modules are not top-level modules

import numpy
import torch
import torch.distributed as dist

PR_SET_PDEATHSIG = 1
Step = Callable[[int], dict[str, float]]
"""A function that runs the step of a number, and returns its milliseconds by part."""


def main() -> None:
    """Build the module of the spec in the first line, then time steps for each further line."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keeps output of libraries out of the answers
    spec = json.loads(sys.stdin.readline())
    try:
        step: Any = BUILD[spec["kind"]](spec)
        answer(answers, {"ready": True})
    except Refusal as refusal:
        answer(answers, {"refused": " ".join(str(refusal).split())})
        return
    number = 0
    for line in sys.stdin:
        request = json.loads(line)
        torch.set_num_threads(request["threads"])
        if request["batches"] is not None:
            step.take(request["batches"])
        times: dict[str, list[float]] = {}
        for _ in range(request["steps"]):
            for part, ms in step(number).items():
                times.setdefault(part, []).append(ms)
            number += 1
        answer(answers, times)


class Refusal(Exception):
    """TorchRec cannot build the module of the spec."""


def answer(to: Any, document: dict[str, Any]) -> None:
    """Write a document as one line of JSON.

    Args:
        to: The text file of the answers.
        document: The answer.
    """
    to.write(json.dumps(document) + "\n")
    to.flush()


def load_ids(spec: dict[str, Any]) -> Any:
    """Return the ids of this rank's batches, int64 [N, L], and the length of each bag, [F * B].

    The rank of recapp has written the ids. N batches, L ids of a batch, F features, B samples.
    """
    ids_NL = torch.from_numpy(numpy.load(spec["ids"]))
    lengths_FB = torch.repeat_interleave(
        torch.tensor(spec["bags"], dtype=torch.int32), spec["batch_size"]
    )
    return ids_NL, lengths_FB


def timed(
    parts: dict[str, Callable[[int], object]], before: Callable[[], object] = lambda: None
) -> Step:
    """Return a step that runs parts one after the other, and times each part and their sum, as
    `recapp/benchmarks/timing.py` does.

    Args:
        parts: The function of each part by its name, which gets the number of the step. A part
            named `step` has no time of its own, because `step` is the sum.
        before: A function that is called before each step, untimed, such as a barrier.
    """

    def step(number: int) -> dict[str, float]:
        before()
        times = {}
        begin = last = time.perf_counter()
        for name, work in parts.items():
            work(number)
            now = time.perf_counter()
            times[name] = (now - last) * 1e3
            last = now
        return times | {"step": (last - begin) * 1e3}

    return step


def build_kernels(spec: dict[str, Any]) -> Step:
    """Return a step of FBGEMM alone: forward, and backward with its fused update."""
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        OptimType,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    torch.set_num_threads(spec["threads"])
    module = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for _, rows, dim in spec["tables"]],
        optimizer=OptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=spec["learning_rate"],
        eps=spec["eps"],
    )
    module.init_embedding_weights_uniform(-0.01, 0.01)
    ids_NL, lengths_FB = load_ids(spec)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths_FB.long().cumsum(0)])
    gradient = torch.randn(spec["batch_size"], sum(dim for _, _, dim in spec["tables"]))

    pooled: list[Any] = []

    def forward(number: int) -> None:
        pooled.append(module(ids_NL[number % len(ids_NL)], offsets))

    return timed({"forward": forward, "backward": lambda number: pooled.pop().backward(gradient)})


def build_quantised(spec: dict[str, Any]) -> Step:
    """Return a lookup of FBGEMM in tables of 8 or 4 bits: fp32 vectors, ids not checked."""
    from fbgemm_gpu.split_embedding_configs import SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
        BoundsCheckMode,
        EmbeddingLocation,
    )
    from fbgemm_gpu.split_table_batched_embeddings_ops_inference import (
        IntNBitTableBatchedEmbeddingBagsCodegen,
    )

    torch.set_num_threads(spec["threads"])
    kind = SparseType.INT8 if spec["bits"] == 8 else SparseType.INT4
    module = IntNBitTableBatchedEmbeddingBagsCodegen(
        [(name, rows, dim, kind, EmbeddingLocation.HOST) for name, rows, dim in spec["tables"]],
        device="cpu",
        bounds_check_mode=BoundsCheckMode.NONE,
        output_dtype=SparseType.FP32,
    )
    module.fill_random_weights()
    ids_NL, lengths_FB = load_ids(spec)
    ids_NL = ids_NL.int()
    zero = torch.zeros(1, dtype=torch.int32)
    offsets = torch.cat([zero, lengths_FB.cumsum(0).int()])

    return timed({"step": lambda number: module(ids_NL[number % len(ids_NL)], offsets)})


def join_ranks(spec: dict[str, Any]) -> None:
    """Join a gloo process group, whose ranks meet through a file."""
    torch.set_num_threads(spec["threads"])
    os.environ.update(LOCAL_RANK=str(spec["rank"]), LOCAL_WORLD_SIZE=str(spec["world"]))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", init_method="file://" + spec["store"], rank=spec["rank"], world_size=spec["world"]
    )


def shard(spec: dict[str, Any], module: Any, collection: Any, path: str) -> Any:
    """Return a module as TorchRec's DistributedModelParallel under the plan of the spec.

    Args:
        spec: The spec, with `sharding`, `world`, `learning_rate` and `eps`.
        module: The whole module.
        collection: Its unsharded collection.
        path: The dotted name of the collection in the module.

    Raises:
        Refusal: TorchRec's sharder does not list a sharding type of the plan for the CPU.
    """
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.sharding_plan import (
        column_wise,
        construct_module_sharding_plan,
        data_parallel,
        row_wise,
        table_wise,
    )
    from torchrec.distributed.types import ShardingPlan

    kind = EmbeddingBagCollectionSharder if spec["pooled"] else EmbeddingCollectionSharder
    sharder: Any = kind(
        fused_params={
            "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            "learning_rate": spec["learning_rate"],
            "eps": spec["eps"],
        }
    )
    fused = "fused"  # other compute kernels give tables dense gradients and no optimiser
    made = {
        "table_wise": lambda ranks: table_wise(rank=ranks[0], compute_kernel=fused),
        "column_wise": lambda ranks: column_wise(ranks=ranks, compute_kernel=fused),
        "row_wise": lambda ranks: row_wise(compute_kernel=fused),
        "data_parallel": lambda ranks: data_parallel(),
    }
    asked_for = {kind for kind, _ in spec["sharding"].values()}
    refused = sorted(asked_for - set(sharder.sharding_types("cpu")) | asked_for - set(made))
    if refused:
        raise Refusal(f"no {', '.join(refused)} on the CPU")
    tables = {table: made[kind](ranks) for table, (kind, ranks) in spec["sharding"].items()}
    plan = construct_module_sharding_plan(
        collection,
        tables,
        sharder=sharder,
        local_size=spec["world"],
        world_size=spec["world"],
        device_type="cpu",
    )
    return DistributedModelParallel(
        module, device=torch.device("cpu"), plan=ShardingPlan({path: plan}), sharders=[sharder]
    )


def features(spec: dict[str, Any]) -> list[Any]:
    """Return the batches as TorchRec's KeyedJaggedTensors."""
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    ids_NL, lengths_FB = load_ids(spec)
    names = [name for name, _, _ in spec["tables"]]
    return [KeyedJaggedTensor(names, ids_L, lengths=lengths_FB) for ids_L in ids_NL]


def collection_of(spec: dict[str, Any]) -> Any:
    """Return the unsharded collection of the spec, on the meta device: of bags, or of sequences."""
    from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

    config, collection = (
        (EmbeddingBagConfig, EmbeddingBagCollection)
        if spec["pooled"]
        else (EmbeddingConfig, EmbeddingCollection)
    )
    return collection(
        device=torch.device("meta"),
        tables=[
            config(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[name])
            for name, rows, dim in spec["tables"]
        ],
    )


def vectors(spec: dict[str, Any], found: Any) -> list[Any]:
    """Return the vectors of all bags, or of each sequence, from the output of a collection."""
    return [found.values()] if spec["pooled"] else [found[f].values() for f, _, _ in spec["tables"]]


def of_replicated(model: Any, spec: dict[str, Any]) -> list[Any]:
    """Return a list with the optimiser of the data-parallel tables, the only tables with dense
    gradients; an empty list where there are none.
    """
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

    names = tuple(
        f"{'embedding_bags' if spec['pooled'] else 'embeddings'}.{table}.weight"
        for table, (kind, _) in spec["sharding"].items()
        if kind == "data_parallel"
    )
    weights = [p for name, p in model.named_parameters() if name.endswith(names)]
    if not weights:
        return []
    return [RowWiseAdagrad(weights, lr=spec["learning_rate"], eps=spec["eps"])]


def dlrm_of(collection: Any, shape: dict[str, Any]) -> Any:
    """Return TorchRec's DLRM around a collection.

    Args:
        collection: The unsharded collection.
        shape: The number of dense inputs, and the widths of the layers `bottom` and `top`.
    """
    from torchrec.models.dlrm import DLRM

    cpu = torch.device("cpu")
    return DLRM(collection, shape["dense"], shape["bottom"], shape["top"], dense_device=cpu)


def build_step(spec: dict[str, Any]) -> Step:
    """Return TorchRec's embedding step: exchange, lookup, backward, update."""
    join_ranks(spec)
    collection = collection_of(spec)
    model = shard(spec, collection, collection, "")
    optimizers = of_replicated(model, spec)
    batches = features(spec)
    with torch.no_grad():
        first = vectors(spec, model(batches[0]).wait())
    gradients = [torch.randn(v.shape) for v in first]

    def train(number: int) -> None:
        found = vectors(spec, model(batches[number % len(batches)]).wait())
        torch.autograd.backward(found, gradients)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return timed({"step": train}, dist.barrier)


def build_train(spec: dict[str, Any]) -> Step:
    """Return a whole training step of TorchRec's DLRM."""
    join_ranks(spec)
    torch.manual_seed(0)
    collection = collection_of(spec)
    model = shard(
        spec, dlrm_of(collection, spec["model"]), collection, "sparse_arch.embedding_bag_collection"
    )
    dense = [p for name, p in model.named_parameters() if ".embedding_bags." not in name]
    optimizers = [torch.optim.Adam(dense, lr=1e-3, fused=True), *of_replicated(model, spec)]
    batches = features(spec)
    numbers = torch.rand(spec["batch_size"], spec["model"]["dense"])
    labels = torch.randint(2, (spec["batch_size"],)).float()

    def train(number: int) -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()
        logits = model(numbers, batches[number % len(batches)]).squeeze(1)
        loss: Any = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()

    return timed({"step": train}, dist.barrier)


class Scores:
    """A step of TorchRec's DLRM whose tables are quantised: a batch becomes scores.

    Args:
        spec: The spec, with `model`, `quantize`, and `batches`, the file of each list of batches.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        from torchrec.inference.modules import quantize_embeddings
        from torchrec.modules.embedding_configs import EmbeddingBagConfig
        from torchrec.modules.embedding_modules import EmbeddingBagCollection

        torch.set_num_threads(spec["threads"])
        collection = EmbeddingBagCollection(
            device=torch.device("cpu"),
            tables=[
                EmbeddingBagConfig(
                    name=name, num_embeddings=rows, embedding_dim=dim, feature_names=read
                )
                for name, rows, dim, read in spec["tables"]
            ],
        )
        dlrm = dlrm_of(collection, spec["model"]).eval()
        dtypes = {
            "none": torch.float32,
            "fp16": torch.float16,
            "int8": torch.qint8,
            "int4": torch.quint4x2,
        }
        self.model = quantize_embeddings(dlrm, dtypes[spec["quantize"]], inplace=True)
        self.files = spec["batches"]
        self.features = spec["features"]
        self.batches: list[Any] = []

    def take(self, name: str) -> None:
        """Load the list of batches with a name for the next steps.

        Args:
            name: A key of the spec's `batches`.
        """
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        found = numpy.load(self.files[name])
        ids = torch.split(torch.from_numpy(found["ids"]), found["ids_of_batch"].tolist())
        lengths = torch.from_numpy(found["lengths"])
        numbers = torch.from_numpy(found["dense"])
        self.batches = [
            (dense, KeyedJaggedTensor(self.features, own, lengths=of_bags))
            for dense, own, of_bags in zip(numbers, ids, lengths, strict=True)
        ]

    def __call__(self, number: int) -> dict[str, float]:
        """Score a batch, and return the milliseconds.

        Args:
            number: The number of the batch.
        """
        dense, features = self.batches[number % len(self.batches)]
        # a new tensor each time, because it caches sums of lengths, which a request does not have
        features = type(features)(self.features, features.values(), lengths=features.lengths())
        with torch.inference_mode():
            begin = time.perf_counter()
            torch.sigmoid(self.model(dense, features))
            return {"step": (time.perf_counter() - begin) * 1e3}


BUILD: dict[str, Callable[[dict[str, Any]], Step]] = {
    "kernels": build_kernels,
    "quantised": build_quantised,
    "step": build_step,
    "train": build_train,
    "inference": Scores,
}

if __name__ == "__main__":
    main()
