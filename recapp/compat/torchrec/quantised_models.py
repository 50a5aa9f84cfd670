"""TorchRec's functions and classes that make a model for serving from a trained one:
`quantize_embeddings`, then `shard_quant_model`, and the classes around such a model in a server.

    model = quantize_embeddings(model, dtype=torch.qint8)          # one process
    model, plan = shard_quant_model(model, world_size=2)           # every rank, its part

Both models are read-only. `python -m recapp.export` makes the same from a checkpoint, table by
table, without a process that holds the whole model. `PredictFactory` and `PredictModule` are for
programs with their own server; recapp's own servers need neither (`python -m recapp.serve`).
"""

import copy
import json
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from recapp.compat.torchrec.quantised_collections import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    QuantisedCollection,
    as_quantised,
    check_output_dtype,
    meta_twins,
    read_only_model,
    with_twins,
)
from recapp.engine.sharded_collection import (
    ShardedCollection,
    embedding_collections,
    shard_model,
    sharded_collections,
)
from recapp.errors import ConfigError
from recapp.inference.held_tables import HeldTables
from recapp.parallel import (
    DistributedModelParallel,
    own_device,
    process_group_of,
    tables_group,
)
from recapp.planner.constraints import Constraints
from recapp.planner.embedding_planner import serving_plan
from recapp.planner.topology import Topology
from recapp.sharding.sharding_plan import ShardingPlan
from recapp.tables.collections import embedding_lookups, embedding_tables
from recapp.tables.embedding import EmbeddingCollection as FloatSequences
from recapp.tables.embedding_bag import EmbeddingBagCollection as FloatBags
from recapp.transport.choose_transport import make_comm

DEFAULT_QUANTIZATION_DTYPE = torch.int8
TWINS: dict[type[nn.Module], type[nn.Module]] = {
    FloatBags: EmbeddingBagCollection,
    FloatSequences: EmbeddingCollection,
}
DEFAULT_QUANT_MAPPING = {torch.typename(kind): twin for kind, twin in TWINS.items()}
"""The quantised class of each class of collections, by the path of the latter."""


def quantize_embeddings(
    module: nn.Module,
    dtype: torch.dtype,
    inplace: bool = False,
    additional_qconfig_spec_keys: Sequence[type[nn.Module]] | None = None,
    additional_mapping: Mapping[type[nn.Module], type[nn.Module]] | None = None,
    output_dtype: torch.dtype = torch.float32,
    per_table_weight_dtype: Mapping[str, torch.dtype] | None = None,
) -> nn.Module:
    """Return a read-only model whose tables are stored in fewer bits, in one process. All
    collections are quantised, those of sequences too (TorchRec: those of bags alone).

    Args:
        module: A trained model or collection. Its collections are unsharded, or sharded over this
            process alone.
        dtype: The type of the stored rows: torch.qint8, torch.quint4x2, torch.float16 or
            torch.float32.
        inplace: Whether to replace the collections of the model itself instead of those of a copy.
        additional_qconfig_spec_keys: Classes of recapp's collections; all are quantised anyway.
        additional_mapping: The quantised class of each class; it must agree with recapp's.
        output_dtype: The type of the vectors: torch.float32, torch.float16 or torch.bfloat16.
        per_table_weight_dtype: The type of the stored rows of some tables, by table name.

    Raises:
        ConfigError: A type, a class or a table is unknown, tables are on the meta device, or
            several ranks hold them.
    """
    _check_classes(additional_qconfig_spec_keys or (), additional_mapping or {})
    check_output_dtype(output_dtype)
    module = module.module if isinstance(module, DistributedModelParallel) else module
    made, held = read_only_model(module, dtype, inplace, per_table_weight_dtype or {})
    return _quantised(made, held, defaultdict(lambda: output_dtype))


def quantize_inference_model(
    model: nn.Module,
    quantization_mapping: Mapping[str, type[nn.Module]] | None = None,
    per_table_weight_dtype: Mapping[str, torch.dtype] | None = None,
    fp_weight_dtype: torch.dtype = DEFAULT_QUANTIZATION_DTYPE,
    quantization_dtype: torch.dtype = DEFAULT_QUANTIZATION_DTYPE,
    output_dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """Quantise the collections of a model in place, and return the model.

    Args:
        model: A model that `quantize_embeddings` takes.
        quantization_mapping: None, or entries of `DEFAULT_QUANT_MAPPING`.
        per_table_weight_dtype: The type of the stored rows of some tables, by table name.
        fp_weight_dtype: Must equal `quantization_dtype` or its default. To store tables of feature
            processors in another type, name them in `per_table_weight_dtype`.
        quantization_dtype: The type of the stored rows.
        output_dtype: The type of the vectors.

    Raises:
        ConfigError: An argument is wrong, here or in `quantize_embeddings`.
    """
    for path, twin in (quantization_mapping or {}).items():
        if DEFAULT_QUANT_MAPPING.get(path) is not twin:
            raise ConfigError(
                f"quantization_mapping: {path} to {twin.__name__}: must be entries of "
                f"DEFAULT_QUANT_MAPPING, of {', '.join(DEFAULT_QUANT_MAPPING)}"
            )
    if fp_weight_dtype not in (DEFAULT_QUANTIZATION_DTYPE, quantization_dtype):
        raise ConfigError(
            f"fp_weight_dtype={fp_weight_dtype}: tables with feature processors have the type of "
            "quantization_dtype: name their types in per_table_weight_dtype"
        )
    return quantize_embeddings(
        model,
        quantization_dtype,
        inplace=True,
        output_dtype=output_dtype,
        per_table_weight_dtype=per_table_weight_dtype,
    )


def shard_quant_model(
    model: nn.Module,
    world_size: int | None = None,
    compute_device: str = "cpu",
    sharding_device: str = "meta",
    sharders: None = None,
    device_memory_size: int | None = None,
    constraints: Constraints | None = None,
    ddr_cap: int | None = None,
    sharding_plan: ShardingPlan | None = None,
    env: Any = None,
) -> tuple[nn.Module, ShardingPlan]:
    """Shard a quantised model by a plan, and return the sharded model and the plan. Every rank
    calls this. The outputs are those of the quantised model, bit for bit.

    Args:
        model: The result of `quantize_embeddings`, the same on every rank; it is not changed.
        world_size: The number of ranks; None takes that of `env`.
        compute_device: "cpu" or "cuda".
        sharding_device: Ignored, because each row is copied once, to its rank.
        sharders: Must be None, because a read-only model has no optimiser.
        device_memory_size: The bytes of a rank for tables; None takes the free memory.
        constraints: The constraints of the plan, by table name or glob.
        ddr_cap: The same as `device_memory_size`, for CPU ranks.
        sharding_plan: The plan; None lets recapp plan for lookups alone.
        env: The ranks, as for `DistributedModelParallel`.

    Returns:
        The model and the plan. The state dict of this model leaves the tables out; that of the
        quantised model has them.

    Raises:
        ConfigError: The model is not quantised, the number of ranks differs, sharders are given, or
            `ddr_cap` is given for GPU ranks.
        PlanError: The tables do not fit into memory.
    """
    if sharders is not None:
        raise ConfigError(
            "shard_quant_model: sharders would have no effect here, because read-only tables "
            "have no optimiser: leave them out"
        )
    if ddr_cap is not None and compute_device == "cuda":
        raise ConfigError(
            f"shard_quant_model: ddr_cap={ddr_cap}: GPU ranks keep no rows in the host's memory: "
            "give device_memory_size"
        )
    memory_size = ddr_cap if device_memory_size is None else device_memory_size
    ranks = process_group_of(env)
    device = own_device(ranks) if compute_device == "cuda" else torch.device("cpu")
    comm = make_comm(tables_group(ranks), device)
    if world_size not in (None, comm.world):
        raise ConfigError(
            f"shard_quant_model: world_size={world_size}, but there are {comm.world} ranks: "
            f"start {world_size} ranks, or leave world_size out"
        )
    found = [c for c in sharded_collections(model) if isinstance(c, QuantisedCollection)]
    tables = {name: t for c in found if c.held for name, t in c.held.tables.items()}
    if not tables:
        raise ConfigError("shard_quant_model: make the model by quantize_embeddings first")
    held = HeldTables(tables)
    twins = meta_twins(found, {})
    made = copy.deepcopy(model, dict(twins))
    made = twins.get(id(model), made)
    types = {id(twins[id(c)]): c.output_dtype() for c in found}
    paths = {path: types[id(c)] for path, c in embedding_collections(made)}
    for collection in dict.fromkeys(c for _, c in embedding_collections(made)):
        collection.store_as({name: t.data_type for name, t in tables.items()})
    plan = sharding_plan
    if plan is None:
        memory = None if memory_size is None else [memory_size] * comm.world
        topology = Topology(comm.world, compute_device=device.type, memory_bytes=memory)
        plan = serving_plan(embedding_tables(made), topology, embedding_lookups(made), constraints)
    made = shard_model(made, plan, comm, None, trains=False, make_store=held.make_store)
    made = _quantised(made, None, paths)
    return made.to(device).eval().requires_grad_(False), plan


def _quantised(
    module: nn.Module, held: HeldTables | None, output_dtypes: Mapping[str, torch.dtype]
) -> nn.Module:
    """Replace the sharded collections of a model by quantised ones of the same tables, in place.

    Args:
        module: The model, or a collection.
        held: The tables of the model if this process holds them whole, else None.
        output_dtypes: The type of each collection's vectors, by its path.
    """
    twins: dict[int, nn.Module] = {}
    found = []
    for path, part in module.named_modules():
        if isinstance(part, ShardedCollection):
            found.append(part)
            twins[id(part)] = as_quantised(part, held, output_dtypes[path])
    return with_twins(module, found, twins)


def _check_classes(
    keys: Sequence[type[nn.Module]], mapping: Mapping[type[nn.Module], type[nn.Module]]
) -> None:
    """Check that the classes of a program are collections of recapp with the right twins.

    Raises:
        ConfigError: A class is no such collection, or the program names another twin for it.
    """
    for kind in (*keys, *mapping):
        if kind not in TWINS:
            known = ", ".join(known.__name__ for known in TWINS)
            raise ConfigError(
                f"quantize_embeddings: {kind.__name__} is no collection: name one of {known}, "
                "which are also quantised within other modules"
            )
        if mapping.get(kind, TWINS[kind]) is not TWINS[kind]:
            raise ConfigError(
                f"quantize_embeddings: additional_mapping of {kind.__name__} to "
                f"{mapping[kind].__name__}: its quantised form must be "
                f"quant.{TWINS[kind].__name__}"
            )


@dataclass
class BatchingMetadata:
    """Describes the batching of one input of requests.

    Args:
        type: The kind of the input, such as "dense" or "sparse".
        device: "cpu" or "cuda".
        pinned: The suffixes of the tensors in page-locked memory; "" for all.
    """

    type: str
    device: str
    pinned: list[str]


@dataclass
class QualNameMetadata:
    """Describes the call of a method of the model.

    Args:
        need_preproc: Whether the input needs preprocessing.
    """

    need_preproc: bool


class PredictFactory(ABC):
    """Makes a model for inference, and describes its requests and answers."""

    @abstractmethod
    def create_predict_module(self) -> nn.Module:
        """Return the model with its weights, sharded if there are several ranks."""

    @abstractmethod
    def batching_metadata(self) -> dict[str, BatchingMetadata]:
        """Return the batching of requests, by the name of the input."""

    @abstractmethod
    def result_metadata(self) -> str:
        """Return the kind of the model's output, by which a server splits it into answers."""

    @abstractmethod
    def run_weights_independent_tranformations(self, predict_module: nn.Module) -> nn.Module:
        """Return the model after transformations that need no weights. The name is TorchRec's."""

    @abstractmethod
    def run_weights_dependent_transformations(self, predict_module: nn.Module) -> nn.Module:
        """Return the model after transformations that need its weights."""

    def batching_metadata_json(self) -> str:
        """Return `batching_metadata()` as JSON."""
        return _json(self.batching_metadata())

    def qualname_metadata(self) -> dict[str, QualNameMetadata]:
        """Return the descriptions of the model's methods, by name."""
        return {}

    def qualname_metadata_json(self) -> str:
        """Return `qualname_metadata()` as JSON."""
        return _json(self.qualname_metadata())

    def model_inputs_data(self) -> dict[str, Any]:
        """Return the data from which a benchmark makes inputs."""
        return {}


class PredictModule(nn.Module, ABC):
    """Wraps a model for calls with a dict of tensors; a subclass implements `predict_forward`.

    Args:
        module: The model; the constructor puts it into evaluation mode.
        device: The device of the inputs; None takes the current GPU, or the CPU if there is none.
    """

    def __init__(self, module: nn.Module, device: str | torch.device | None = None) -> None:
        super().__init__()
        self._module = module.eval()
        self._device = None if device is None else torch.device(device)

    @property
    def predict_module(self) -> nn.Module:
        """Return the model."""
        return self._module

    @property
    def device(self) -> torch.device:
        """Return the device of the inputs."""
        if self._device is not None:
            return self._device
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    @abstractmethod
    def predict_forward(self, batch: dict[str, Tensor]) -> Any:
        """Call the model with a batch, and return its output as a dict of tensors."""

    def forward(self, batch: dict[str, Tensor]) -> Any:
        """Return the output for a batch, in inference mode."""
        with torch.inference_mode():
            return self.predict_forward(batch)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state dict of the model, without a prefix in its names."""
        return self._module.state_dict(*args, **kwargs)


def _json(metadata: dict[str, Any]) -> str:
    return json.dumps({name: asdict(value) for name, value in metadata.items()})
