"""The process of a rival: a Python with TorchRec and FBGEMM, and without recapp, builds a module
from a spec and times steps on command.

The first line on standard input is the spec. The first line of output is `{"ready": true}`, or
`{"refused": "why"}`. Each further line of input, such as `{"steps": 12, "threads": 1}`, asks for
steps, and the answer holds the milliseconds of each: `{"step": [...]}`. After `{"profiled": 10}` it
holds what one of so many steps gives a GPU to do. The process ends with its standard input, or with
its parent.

Steps of `kernels`, `step`, `train` and `by_hand` run on the device of their spec.

The `kind` of a spec names the module. The optimiser is row-wise Adagrad, fused into backward where
TorchRec can do that:
    kernels   FBGEMM's SplitTableBatchedEmbeddingBags, one process
    by_hand   a DLRM around FBGEMM's SplitTableBatchedEmbeddingBags without TorchRec, one process
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
import itertools
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
KERNELS = 12  # that a profile names
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
        if "profiled" in request:
            answer(answers, profiled(step, request["profiled"]))
            continue
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


def device_of(spec: dict[str, Any]) -> torch.device:
    """Return the device of a spec, as the current one if it is a GPU; there products are those of
    TF32, as in recapp's part of the measurement.
    """
    if spec["device"] == "cpu":
        return torch.device("cpu")
    torch.set_float32_matmul_precision("high")
    torch.cuda.set_device(spec["rank"])
    return torch.device("cuda", spec["rank"])


def profiled(step: Callable[[int], object], steps: int) -> dict[str, Any]:
    """Return what a step gives a GPU to do: milliseconds in which kernels and copies run, launches,
    waits of the host, copies, and the microseconds of the longest kernels by name. Ranges that only
    annotate others are not counted, nor are waits for the whole device, which a measurement adds.

    Args:
        step: The function that runs the step of a number.
        steps: The number of steps.
    """
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA]) as profile:
        for number in range(steps):
            step(number)
        torch.cuda.synchronize()
    found = dict.fromkeys(("gpu_ms", "launches", "waits", "copies"), 0.0)
    us_of: dict[str, float] = {}
    for event in profile.events() or ():
        if event.is_user_annotation:
            continue
        if event.device_type == torch.autograd.DeviceType.CUDA:
            us = event.time_range.elapsed_us()
            found["gpu_ms"] += us / 1e3
            us_of[event.name] = us_of.get(event.name, 0.0) + us
        elif "LaunchKernel" in event.name or "GraphLaunch" in event.name:
            found["launches"] += 1
        elif event.name.startswith(("cudaMemcpy", "cuMemcpy")):
            found["copies"] += 1
        elif event.name in ("cudaStreamSynchronize", "cudaEventSynchronize"):
            found["waits"] += 1
    longest = sorted(us_of, key=lambda name: -us_of[name])[:KERNELS]
    kernels = {name[:60]: round(us_of[name] / steps, 1) for name in longest}
    return {**{name: number / steps for name, number in found.items()}, "kernels": kernels}


def timed(
    parts: dict[str, Callable[[int], object]],
    before: Callable[[], object] = lambda: None,
    device: torch.device | None = None,
) -> Step:
    """Return a step that runs parts one after the other, and times each part and their sum, as
    `recapp/benchmarks/timing.py` does.

    Args:
        parts: The function of each part by its name, which gets the number of the step. A part
            named `step` has no time of its own, because `step` is the sum.
        before: A function that is called before each step, untimed, such as a barrier.
        device: The device of the work, whose end counts; None if calls return at that end.
    """

    def clock() -> float:
        if device is not None and device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def step(number: int) -> dict[str, float]:
        before()
        times = {}
        begin = last = clock()
        for name, work in parts.items():
            work(number)
            now = clock()
            times[name] = (now - last) * 1e3
            last = now
        return times | {"step": (last - begin) * 1e3}

    return step


def build_kernels(spec: dict[str, Any]) -> Step:
    """Return a step of FBGEMM alone: forward, and backward with its fused update."""
    device = device_of(spec)
    lookup = fused_lookup(spec, device)
    width = sum(dim for _, _, dim in spec["tables"])
    gradient = torch.randn(spec["batch_size"], width, device=device)
    pooled: list[Any] = []
    parts = {
        "forward": lambda number: pooled.append(lookup(number)),
        "backward": lambda number: pooled.pop().backward(gradient),
    }
    return timed(parts, device=device)


def fused_lookup(spec: dict[str, Any], device: torch.device) -> Callable[[int], torch.Tensor]:
    """Return a function that looks up the batch of a number in FBGEMM's fused tables."""
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        OptimType,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    torch.set_num_threads(spec["threads"])
    places = EmbeddingLocation.HOST, ComputeDevice.CPU
    if device.type == "cuda":
        places = EmbeddingLocation.DEVICE, ComputeDevice.CUDA
    module = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, *places) for _, rows, dim in spec["tables"]],
        optimizer=OptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=spec["learning_rate"],
        eps=spec["eps"],
        device=device,
    )
    module.init_embedding_weights_uniform(-0.01, 0.01)
    ids_NL, lengths_FB = load_ids(spec)
    ids_NL = ids_NL.to(device)
    zero = torch.zeros(1, dtype=torch.int64)
    offsets = torch.cat([zero, lengths_FB.long().cumsum(0)]).to(device)
    return lambda number: module(ids_NL[number % len(ids_NL)], offsets)


class GivenDense(torch.nn.Module):
    """The dense part of a DLRM as TorchRec computes it: dots of pairs by an index of all dots.

    Args:
        shape: The number of dense inputs, and the widths of the layers `bottom` and `top`.
        tables: The number of tables.
    """

    def __init__(self, shape: dict[str, Any], tables: int) -> None:
        super().__init__()
        dim = shape["bottom"][-1]
        vectors = tables + 1
        self.bottom = layers_of([shape["dense"], *shape["bottom"]])
        self.top = layers_of([dim + vectors * (vectors - 1) // 2, *shape["top"]])[:-1]
        self.pairs: torch.Tensor
        self.register_buffer("pairs", torch.tril_indices(vectors, vectors, -1))

    def forward(self, dense_BI: torch.Tensor, pooled_BK: torch.Tensor) -> torch.Tensor:
        """Return the logits, [B], of dense inputs and the vectors of all tables."""
        bottom_BD = self.bottom(dense_BI)
        joined_BK = torch.cat([bottom_BD, pooled_BK.to(bottom_BD.dtype)], 1)
        vectors_BFD = joined_BK.view(len(joined_BK), -1, bottom_BD.shape[1])
        dots_BFF = torch.bmm(vectors_BFD, vectors_BFD.mT)
        dots_BP = dots_BFF[:, self.pairs[0], self.pairs[1]]
        logits_B1: torch.Tensor = self.top(torch.cat([bottom_BD, dots_BP], 1))
        return logits_B1.squeeze(1)


def layers_of(widths: list[int]) -> torch.nn.Sequential:
    """Return linear layers of some widths, with a ReLU after each."""
    linear = [torch.nn.Linear(i, o) for i, o in itertools.pairwise(widths)]
    return torch.nn.Sequential(*(part for layer in linear for part in (layer, torch.nn.ReLU())))


def build_by_hand(spec: dict[str, Any]) -> Step:
    """Return a whole training step of a DLRM around FBGEMM's fused tables, on one rank."""
    device = device_of(spec)
    torch.manual_seed(0)
    lookup = fused_lookup(spec, device)
    dense = GivenDense(spec["model"], len(spec["tables"])).to(device)
    optimizer = torch.optim.Adam(dense.parameters(), lr=1e-3, fused=True)
    numbers = torch.rand(spec["batch_size"], spec["model"]["dense"], device=device)
    labels = torch.randint(2, (spec["batch_size"],), device=device).float()

    def train(number: int) -> None:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=spec["bf16"]):
            logits = dense(numbers, lookup(number))
            loss: Any = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
        loss.backward()
        optimizer.step()

    return timed({"step": train}, device=device)


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


def join_ranks(spec: dict[str, Any]) -> torch.device:
    """Join a process group, whose ranks meet through a file, and return this rank's device."""
    device = device_of(spec)
    torch.set_num_threads(spec["threads"])
    os.environ.update(LOCAL_RANK=str(spec["rank"]), LOCAL_WORLD_SIZE=str(spec["world"]))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "nccl",
        init_method="file://" + spec["store"],
        rank=spec["rank"],
        world_size=spec["world"],
    )
    return device


def shard(
    spec: dict[str, Any], module: Any, collection: Any, path: str, device: torch.device
) -> Any:
    """Return a module as TorchRec's DistributedModelParallel under the plan of the spec.

    Args:
        spec: The spec, with `sharding`, `world`, `learning_rate` and `eps`.
        module: The whole module.
        collection: Its unsharded collection.
        path: The dotted name of the collection in the module.
        device: The device of this rank.

    Raises:
        Refusal: TorchRec's sharder does not list a sharding type of the plan for the device.
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
    refused = sorted(asked_for - set(sharder.sharding_types(device.type)) | asked_for - set(made))
    if refused:
        raise Refusal(f"no {', '.join(refused)} on {device.type}")
    tables = {table: made[kind](ranks) for table, (kind, ranks) in spec["sharding"].items()}
    plan = construct_module_sharding_plan(
        collection,
        tables,
        sharder=sharder,
        local_size=spec["world"],
        world_size=spec["world"],
        device_type=device.type,
    )
    return DistributedModelParallel(
        module, device=device, plan=ShardingPlan({path: plan}), sharders=[sharder]
    )


def features(spec: dict[str, Any], device: torch.device) -> list[Any]:
    """Return the batches as TorchRec's KeyedJaggedTensors."""
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    ids_NL, lengths_FB = load_ids(spec)
    names = [name for name, _, _ in spec["tables"]]
    return [KeyedJaggedTensor(names, ids_L, lengths=lengths_FB).to(device) for ids_L in ids_NL]


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


def dlrm_of(collection: Any, shape: dict[str, Any], device: torch.device) -> Any:
    """Return TorchRec's DLRM around a collection.

    Args:
        collection: The unsharded collection.
        shape: The number of dense inputs, and the widths of the layers `bottom` and `top`.
        device: The device of the dense part.
    """
    from torchrec.models.dlrm import DLRM

    return DLRM(collection, shape["dense"], shape["bottom"], shape["top"], dense_device=device)


def build_step(spec: dict[str, Any]) -> Step:
    """Return TorchRec's embedding step: exchange, lookup, backward, update."""
    device = join_ranks(spec)
    collection = collection_of(spec)
    model = shard(spec, collection, collection, "", device)
    optimizers = of_replicated(model, spec)
    batches = features(spec, device)
    with torch.no_grad():
        first = vectors(spec, model(batches[0]).wait())
    gradients = [torch.randn_like(v) for v in first]

    def train(number: int) -> None:
        found = vectors(spec, model(batches[number % len(batches)]).wait())
        torch.autograd.backward(found, gradients)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return timed({"step": train}, dist.barrier, device)


def build_train(spec: dict[str, Any]) -> Step:
    """Return a whole training step of TorchRec's DLRM."""
    device = join_ranks(spec)
    torch.manual_seed(0)
    collection = collection_of(spec)
    dlrm = dlrm_of(collection, spec["model"], device)
    model = shard(spec, dlrm, collection, "sparse_arch.embedding_bag_collection", device)
    dense = [p for name, p in model.named_parameters() if ".embedding_bags." not in name]
    optimizers = [torch.optim.Adam(dense, lr=1e-3, fused=True), *of_replicated(model, spec)]
    batches = features(spec, device)
    numbers = torch.rand(spec["batch_size"], spec["model"]["dense"], device=device)
    labels = torch.randint(2, (spec["batch_size"],), device=device).float()

    def train(number: int) -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=spec["bf16"]):
            logits = model(numbers, batches[number % len(batches)]).squeeze(1)
            loss: Any = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()

    return timed({"step": train}, dist.barrier, device)


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
        dlrm = dlrm_of(collection, spec["model"], torch.device("cpu")).eval()
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
    "by_hand": build_by_hand,
    "quantised": build_quantised,
    "step": build_step,
    "train": build_train,
    "inference": Scores,
}

if __name__ == "__main__":
    main()
