"""recapp trains and evaluates recommenders on click logs, with embedding tables sharded over ranks.

The public names are here: `from recapp import KeyedJaggedTensor`. Each name is loaded on first use,
so `import recapp` does not import torch. Objects that TorchRec has, too, have TorchRec's names. The
modules below are private: they may move, but the public names stay.

TorchRec's other module paths and names also work, so a TorchRec program changes only its import
lines (`recapp/compat`).

Commands are modules: `python -m recapp.train`, or `recapp train` if the package is installed;
`python -m recapp` lists them. `docs/` explains how recapp works, and why.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from recapp.compat import foreign_paths
from recapp.trainer.known_to_lightning import make_known

if TYPE_CHECKING:
    from recapp.compat.torchrec.keyed import EmbOptimType
    from recapp.compat.torchrec.managed_collisions import (
        DistanceLFU_EvictionPolicy,
        LFU_EvictionPolicy,
        LRU_EvictionPolicy,
        ManagedCollisionCollection,
        MCHManagedCollisionModule,
    )
    from recapp.compat.torchrec.wrapped_collections import (
        ManagedCollisionEmbeddingBagCollection,
        ManagedCollisionEmbeddingCollection,
    )
    from recapp.dataset.data_settings import DataSettings, ScoringSettings
    from recapp.engine.sharded_collection import (
        ShardedEmbeddingBagCollection,
        ShardedEmbeddingCollection,
        shard_model,
    )
    from recapp.engine.sharded_state import gathered_state_dict
    from recapp.graphs.step_graph import StepGraph
    from recapp.inference.export_settings import Export
    from recapp.metrics import AUC, Calibration, LogLoss, NormalizedEntropy
    from recapp.model_export import export_model
    from recapp.model_loading import load_model
    from recapp.models.published_dlrm import DLRM
    from recapp.optim.optimizer import HybridOptimizer
    from recapp.optim.rules import (
        adagrad,
        adam,
        ftrl,
        lamb,
        lars_sgd,
        momentum_sgd,
        partial_row_wise_adam,
        partial_row_wise_lamb,
        rowwise_adagrad,
        sgd,
    )
    from recapp.parallel import (
        DistributedModelParallel,
        EmbeddingBagCollectionSharder,
        EmbeddingCollectionSharder,
    )
    from recapp.planner.embedding_planner import EmbeddingShardingPlanner
    from recapp.planner.planner_settings import ParameterConstraints
    from recapp.planner.problem import Topology
    from recapp.reporting.plan_report import analyze_plan
    from recapp.sharding.plan_file import read_plan, write_plan
    from recapp.sharding.sharding_plan import ShardingPlan
    from recapp.sharding.sharding_types import ShardingType
    from recapp.sparse.jagged_tensor import JaggedTensor, KeyedTensor
    from recapp.sparse.keyed_jagged_tensor import Batch, KeyedJaggedTensor
    from recapp.stored.stored_model import load_table, static_table
    from recapp.tables.collections import EmbeddingBagCollection, EmbeddingCollection
    from recapp.tables.config import (
        DataType,
        EmbeddingBagConfig,
        EmbeddingConfig,
        IdRule,
        PoolingType,
        TableLookup,
    )
    from recapp.tables.positions import DynamicRows
    from recapp.tasks.measures import Measure
    from recapp.tasks.task import ClickTask, Output, Task
    from recapp.trainer.datamodule import ClickData, ScoreWriter
    from recapp.trainer.module import TaskModule
    from recapp.trainer.strategy import EmbeddingShardingStrategy
    from recapp.transport.join_ranks import run_ranks

_HOMES = {
    "AUC": "recapp.metrics",
    "Batch": "recapp.sparse.keyed_jagged_tensor",
    "Calibration": "recapp.metrics",
    "ClickData": "recapp.trainer.datamodule",
    "ClickTask": "recapp.tasks.task",
    "DLRM": "recapp.models.published_dlrm",
    "DataSettings": "recapp.dataset.data_settings",
    "DataType": "recapp.tables.config",
    "DistanceLFU_EvictionPolicy": "recapp.compat.torchrec.managed_collisions",
    "DistributedModelParallel": "recapp.parallel",
    "DynamicRows": "recapp.tables.positions",
    "EmbOptimType": "recapp.compat.torchrec.keyed",
    "EmbeddingBagCollection": "recapp.tables.collections",
    "EmbeddingBagCollectionSharder": "recapp.parallel",
    "EmbeddingBagConfig": "recapp.tables.config",
    "EmbeddingCollection": "recapp.tables.collections",
    "EmbeddingCollectionSharder": "recapp.parallel",
    "EmbeddingConfig": "recapp.tables.config",
    "EmbeddingShardingPlanner": "recapp.planner.embedding_planner",
    "EmbeddingShardingStrategy": "recapp.trainer.strategy",
    "Export": "recapp.inference.export_settings",
    "HybridOptimizer": "recapp.optim.optimizer",
    "IdRule": "recapp.tables.config",
    "JaggedTensor": "recapp.sparse.jagged_tensor",
    "KeyedJaggedTensor": "recapp.sparse.keyed_jagged_tensor",
    "KeyedTensor": "recapp.sparse.jagged_tensor",
    "LFU_EvictionPolicy": "recapp.compat.torchrec.managed_collisions",
    "LRU_EvictionPolicy": "recapp.compat.torchrec.managed_collisions",
    "LogLoss": "recapp.metrics",
    "MCHManagedCollisionModule": "recapp.compat.torchrec.managed_collisions",
    "ManagedCollisionCollection": "recapp.compat.torchrec.managed_collisions",
    "ManagedCollisionEmbeddingBagCollection": "recapp.compat.torchrec.wrapped_collections",
    "ManagedCollisionEmbeddingCollection": "recapp.compat.torchrec.wrapped_collections",
    "Measure": "recapp.tasks.measures",
    "NormalizedEntropy": "recapp.metrics",
    "Output": "recapp.tasks.task",
    "ParameterConstraints": "recapp.planner.planner_settings",
    "PoolingType": "recapp.tables.config",
    "ScoreWriter": "recapp.trainer.datamodule",
    "ScoringSettings": "recapp.dataset.data_settings",
    "ShardedEmbeddingBagCollection": "recapp.engine.sharded_collection",
    "ShardedEmbeddingCollection": "recapp.engine.sharded_collection",
    "ShardingPlan": "recapp.sharding.sharding_plan",
    "ShardingType": "recapp.sharding.sharding_types",
    "StepGraph": "recapp.graphs.step_graph",
    "TableLookup": "recapp.tables.config",
    "Task": "recapp.tasks.task",
    "TaskModule": "recapp.trainer.module",
    "Topology": "recapp.planner.problem",
    "adagrad": "recapp.optim.rules",
    "adam": "recapp.optim.rules",
    "analyze_plan": "recapp.reporting.plan_report",
    "export_model": "recapp.model_export",
    "ftrl": "recapp.optim.rules",
    "gathered_state_dict": "recapp.engine.sharded_state",
    "lamb": "recapp.optim.rules",
    "lars_sgd": "recapp.optim.rules",
    "load_model": "recapp.model_loading",
    "load_table": "recapp.stored.stored_model",
    "momentum_sgd": "recapp.optim.rules",
    "partial_row_wise_adam": "recapp.optim.rules",
    "partial_row_wise_lamb": "recapp.optim.rules",
    "read_plan": "recapp.sharding.plan_file",
    "rowwise_adagrad": "recapp.optim.rules",
    "run_ranks": "recapp.transport.join_ranks",
    "sgd": "recapp.optim.rules",
    "shard_model": "recapp.engine.sharded_collection",
    "static_table": "recapp.stored.stored_model",
    "write_plan": "recapp.sharding.plan_file",
}

__all__ = [
    "AUC",
    "DLRM",
    "Batch",
    "Calibration",
    "ClickData",
    "ClickTask",
    "DataSettings",
    "DataType",
    "DistanceLFU_EvictionPolicy",
    "DistributedModelParallel",
    "DynamicRows",
    "EmbOptimType",
    "EmbeddingBagCollection",
    "EmbeddingBagCollectionSharder",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingCollectionSharder",
    "EmbeddingConfig",
    "EmbeddingShardingPlanner",
    "EmbeddingShardingStrategy",
    "Export",
    "HybridOptimizer",
    "IdRule",
    "JaggedTensor",
    "KeyedJaggedTensor",
    "KeyedTensor",
    "LFU_EvictionPolicy",
    "LRU_EvictionPolicy",
    "LogLoss",
    "MCHManagedCollisionModule",
    "ManagedCollisionCollection",
    "ManagedCollisionEmbeddingBagCollection",
    "ManagedCollisionEmbeddingCollection",
    "Measure",
    "NormalizedEntropy",
    "Output",
    "ParameterConstraints",
    "PoolingType",
    "ScoreWriter",
    "ScoringSettings",
    "ShardedEmbeddingBagCollection",
    "ShardedEmbeddingCollection",
    "ShardingPlan",
    "ShardingType",
    "StepGraph",
    "TableLookup",
    "Task",
    "TaskModule",
    "Topology",
    "adagrad",
    "adam",
    "analyze_plan",
    "export_model",
    "ftrl",
    "gathered_state_dict",
    "lamb",
    "lars_sgd",
    "load_model",
    "load_table",
    "momentum_sgd",
    "partial_row_wise_adam",
    "partial_row_wise_lamb",
    "read_plan",
    "rowwise_adagrad",
    "run_ranks",
    "sgd",
    "shard_model",
    "static_table",
    "write_plan",
]


def __getattr__(name: str) -> Any:
    """Load a public name from its module on first use, or the version from the metadata."""
    if name == "__version__":
        from importlib.metadata import version

        return version("recapp")
    if name not in _HOMES:
        return foreign_paths.object_at("", name)
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    make_known()
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


foreign_paths.install()
make_known()
