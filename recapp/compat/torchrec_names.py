"""The names of TorchRec 1.8 that recapp has, by their path in TorchRec's documentation, and the
module of recapp that defines each (`module:name` if the name differs).

`docs/from_torchrec.md` lists the differences of each.
"""

_OF_EVERY_HOME = {
    # not names of TorchRec: notebooks about TorchRec import these from files of their own
    "recapp.compat.benchmark_helpers": (
        "utils.benchmark.TorchRecBenchmark",
        "utils.debugging.TorchRecDebugger",
    ),
    "recapp.compat.visualizer": ("utils.visualization.TorchRecVisualizer",),
    "recapp.compat.awaitables": (
        "distributed.Awaitable",
        "distributed.NoWait",
        "distributed.types.Awaitable",
        "distributed.types.GetItemLazyAwaitable",
        "distributed.types.LazyAwaitable",
        "distributed.types.LazyGetItemMixin",
        "distributed.types.LazyNoWait",
        "distributed.types.NoWait",
    ),
    "recapp.compat.jagged_functions": (
        "sparse.jagged_tensor.ComputeJTDictToKJT",
        "sparse.jagged_tensor.ComputeKJTToJTDict",
        "sparse.jagged_tensor.jt_is_equal",
        "sparse.jagged_tensor.kjt_is_equal",
        "sparse.jagged_tensor.regroup_kts",
        "sparse.jagged_tensor_validator.validate_keyed_jagged_tensor",
    ),
    "recapp.compat.feature_processors": (
        "modules.feature_processor_.FeatureProcessor",
        "modules.feature_processor_.FeatureProcessorsCollection",
        "modules.feature_processor_.PositionWeightedModule",
        "modules.feature_processor_.PositionWeightedModuleCollection",
        "modules.fp_embedding_modules.FeatureProcessedEmbeddingBagCollection",
        "modules.fp_embedding_modules.FeatureProcessorDictWrapper",
    ),
    "recapp.compat.feature_processors:FeatureProcessedEmbeddingBagCollection": (
        "distributed.fp_embeddingbag.ShardedFeatureProcessedEmbeddingBagCollection",
    ),
    "recapp.compat.wrapped_sharders": (
        "distributed.fp_embeddingbag.FeatureProcessedEmbeddingBagCollectionSharder",
        "distributed.mc_embedding.ManagedCollisionEmbeddingCollectionSharder",
        "distributed.mc_embeddingbag.ManagedCollisionEmbeddingBagCollectionSharder",
        "distributed.mc_modules.ManagedCollisionCollectionSharder",
    ),
    "recapp.compat.eviction_policies": (
        "modules.mc_modules.DistanceLFU_EvictionPolicy",
        "modules.mc_modules.LFU_EvictionPolicy",
        "modules.mc_modules.LRU_EvictionPolicy",
        "modules.mc_modules.MCHEvictionPolicy",
        "modules.mc_modules.average_threshold_filter",
        "modules.mc_modules.dynamic_threshold_filter",
        "modules.mc_modules.probabilistic_threshold_filter",
    ),
    "recapp.compat.managed_collision_collections": (
        "modules.mc_embedding_modules.BaseManagedCollisionEmbeddingCollection",
        "modules.mc_embedding_modules.ManagedCollisionEmbeddingBagCollection",
        "modules.mc_embedding_modules.ManagedCollisionEmbeddingCollection",
    ),
    "recapp.compat.managed_collisions": (
        "modules.mc_embedding_modules.ManagedCollisionCollection",
        "modules.mc_modules.MCHManagedCollisionModule",
        "modules.mc_modules.ManagedCollisionCollection",
        "modules.mc_modules.ManagedCollisionModule",
    ),
    "recapp.compat.managed_collision_collections:ManagedCollisionEmbeddingBagCollection": (
        "distributed.mc_embeddingbag.ShardedManagedCollisionEmbeddingBagCollection",
    ),
    "recapp.compat.managed_collision_collections:ManagedCollisionEmbeddingCollection": (
        "distributed.mc_embedding.ShardedManagedCollisionEmbeddingCollection",
    ),
    "recapp.compat.planning": (
        "distributed.embedding_types.EmbeddingComputeKernel",
        "distributed.planner.EmbeddingShardingPlanner",
        "distributed.planner.ParameterConstraints",
        "distributed.planner.Topology",
        "distributed.planner.planners.EmbeddingShardingPlanner",
        "distributed.planner.storage_reservations.FixedAbsoluteStorageReservation",
        "distributed.planner.storage_reservations.FixedPercentageStorageReservation",
        "distributed.planner.storage_reservations.HeuristicalStorageReservation",
        "distributed.planner.types.ParameterConstraints",
        "distributed.planner.types.Topology",
        "distributed.types.ParameterConstraints",  # where notebooks look for it
    ),
    "recapp.compat.module_helpers": (
        "distributed.get_unsharded_module_names",
        "distributed.planner.bytes_to_gb",
        "distributed.planner.utils.bytes_to_gb",
        "distributed.planner.utils.gb_to_bytes",
        "distributed.sharding_plan.get_module_to_default_sharders",
        "distributed.utils.add_prefix_to_state_dict",
        "distributed.utils.append_prefix",
        "distributed.utils.filter_state_dict",
        "distributed.utils.get_device_type",
        "distributed.utils.get_unsharded_module_names",
        "distributed.utils.none_throws",
        "modules.embedding_configs.data_type_to_dtype",
        "inference.state_dict_transform.state_dict_gather",
        "inference.state_dict_transform.state_dict_to_device",
    ),
    "recapp.compat.movielens": (
        "datasets.movielens.DEFAULT_COLUMN_NAMES",
        "datasets.movielens.DEFAULT_MOVIES_COLUMN_NAMES",
        "datasets.movielens.DEFAULT_RATINGS_COLUMN_NAMES",
        "datasets.movielens.MOVIES_FILENAME",
        "datasets.movielens.RATINGS_FILENAME",
        "datasets.movielens.movielens_20m",
        "datasets.movielens.movielens_25m",
    ),
    "recapp.compat.plans_by_hand": (
        "distributed.ParameterSharding",
        "distributed.sharding_plan.placement",
        "distributed.types.ParameterSharding",
        "distributed.ShardingPlan",
        "distributed.planner.types.ShardingPlan",
        "distributed.sharding_plan.apply_to_all",
        "distributed.sharding_plan.column_wise",
        "distributed.sharding_plan.construct_module_sharding_plan",
        "distributed.sharding_plan.data_parallel",
        "distributed.sharding_plan.grid_shard",
        "distributed.sharding_plan.row_wise",
        "distributed.sharding_plan.table_row_wise",
        "distributed.sharding_plan.table_wise",
        "distributed.types.EmbeddingModuleShardingPlan",
        "distributed.types.ShardingPlan",
    ),
    "recapp.compat.predict_modules": (
        "inference.modules.BatchingMetadata",
        "inference.modules.PredictFactory",
        "inference.modules.PredictModule",
        "inference.modules.QualNameMetadata",
    ),
    "recapp.compat.quantised_comms": (
        "distributed.fbgemm_qcomm_codec.CommType",
        "distributed.fbgemm_qcomm_codec.QCommsConfig",
        "distributed.fbgemm_qcomm_codec.get_qcomm_codecs_registry",
    ),
    "recapp.compat.quantised_collections": (
        "modules.embedding_configs.QuantConfig",
        "quant.EmbeddingBagCollection",
        "quant.EmbeddingCollection",
        "quant.embedding_modules.EmbeddingBagCollection",
        "quant.embedding_modules.EmbeddingCollection",
    ),
    "recapp.compat.quantised_collections:EmbeddingBagCollection": (
        "distributed.quant_embeddingbag.QuantEmbeddingBagCollection",
    ),
    "recapp.compat.quantised_collections:EmbeddingCollection": (
        "distributed.quant_embedding.QuantEmbeddingCollection",
    ),
    "recapp.compat.quantised_models": (
        "distributed.quant_embeddingbag.shard_quant_model",
        "inference.modules.DEFAULT_QUANTIZATION_DTYPE",
        "inference.modules.DEFAULT_QUANT_MAPPING",
        "inference.modules.quantize_embeddings",
        "inference.modules.quantize_inference_model",
        "inference.modules.shard_quant_model",
        "quant.quantize_embeddings",
    ),
    "recapp.compat.random_data": (
        "datasets.criteo.CAT_FEATURE_COUNT",
        "datasets.criteo.DAYS",
        "datasets.criteo.DEFAULT_CAT_NAMES",
        "datasets.criteo.DEFAULT_COLUMN_NAMES",
        "datasets.criteo.DEFAULT_INT_NAMES",
        "datasets.criteo.DEFAULT_LABEL_NAME",
        "datasets.criteo.FREQUENCY_THRESHOLD",
        "datasets.criteo.INT_FEATURE_COUNT",
        "datasets.criteo.TOTAL_TRAINING_SAMPLES",
        "datasets.random.RandomRecDataset",
        "datasets.utils.Batch",
        "Multistreamable",
        "Pipelineable",
        "streamable.Multistreamable",
        "streamable.Pipelineable",
    ),
    "recapp.compat.sharding_env": (
        "distributed.ModuleSharder",
        "distributed.ShardingEnv",
        "distributed.comm.get_local_rank",
        "distributed.comm.get_local_size",
        "distributed.get_local_rank",
        "distributed.get_local_size",
        "distributed.shard.shard",
        "distributed.shard.shard_modules",
        "distributed.types.ModuleSharder",
        "distributed.types.ShardingEnv",
    ),
    "recapp.compat.small_modules": (
        "modules.activation.SwishLayerNorm",
        "modules.regroup.KTRegroupAsDict",
    ),
    "recapp.compat.torchrec_dlrm": (
        "models.dlrm.DLRM",
        "models.dlrm.DLRMTrain",
        "models.dlrm.DenseArch",
        "models.dlrm.InteractionArch",
        "models.dlrm.OverArch",
        "models.dlrm.SparseArch",
        "modules.mlp.MLP",
        "modules.mlp.Perceptron",
    ),
    "recapp.compat.train_pipeline": (
        "distributed.TrainPipelineBase",
        "distributed.TrainPipelineSparseDist",
        "distributed.train_pipeline.TrainPipelineBase",
        "distributed.train_pipeline.TrainPipelineSparseDist",
        "distributed.train_pipeline.train_pipelines.TrainPipelineBase",
        "distributed.train_pipeline.train_pipelines.TrainPipelineSparseDist",
    ),
    "recapp.engine.model_parallel": (
        "distributed.DistributedModelParallel",
        "distributed.model_parallel.DistributedModelParallel",
    ),
    "recapp.engine.sharded_collection": (
        "distributed.embedding.ShardedEmbeddingCollection",
        "distributed.embeddingbag.ShardedEmbeddingBagCollection",
    ),
    "recapp.engine.sharder": (
        "distributed.embedding.EmbeddingCollectionSharder",
        "distributed.embeddingbag.EmbeddingBagCollectionSharder",
        "distributed.model_parallel.get_default_sharders",
        "distributed.sharding_plan.get_default_sharders",
    ),
    "recapp.errors:PlanError": ("distributed.planner.types.PlannerError",),
    "recapp.compat.keyed_optimizers": (
        "optim.CombinedOptimizer",
        "optim.KeyedOptimizerWrapper",
        "optim.keyed.CombinedOptimizer",
        "optim.OptimizerWrapper",
        "optim.keyed.KeyedOptimizerWrapper",
        "optim.keyed.OptimizerWrapper",
        "optim.optimizers.in_backward_optimizer_filter",
    ),
    "recapp.optim.keyed": ("optim.KeyedOptimizer", "optim.keyed.KeyedOptimizer"),
    "recapp.optim.fused_params": ("distributed.embedding_types.EmbOptimType",),
    "recapp.compat.rowwise_adagrad": (
        "optim.RowWiseAdagrad",
        "optim.rowwise_adagrad.RowWiseAdagrad",
    ),
    "recapp.compat.clipping_optimizer": (
        "optim.clipping.GradientClipping",
        "optim.clipping.GradientClippingOptimizer",
        "optim.GradientClipping",
        "optim.GradientClippingOptimizer",
    ),
    "recapp.compat.warmup_optimizer": (
        "optim.warmup.WarmupOptimizer",
        "optim.warmup.WarmupPolicy",
        "optim.warmup.WarmupStage",
        "optim.WarmupOptimizer",
        "optim.WarmupPolicy",
        "optim.WarmupStage",
    ),
    "recapp.sharding.sharding_types": ("distributed.types.ShardingType",),
    "recapp.sparse.keyed_jagged_tensor": ("sparse.jagged_tensor.KeyedJaggedTensor",),
    "recapp.sparse.keyed_tensor": ("sparse.jagged_tensor.KeyedTensor",),
    "recapp.sparse.jagged_tensor": ("sparse.jagged_tensor.JaggedTensor",),
    "recapp.tables.config": (
        "distributed.types.DataType",
        "modules.embedding_configs.DataType",
        "modules.embedding_configs.EmbeddingBagConfig",
        "modules.embedding_configs.EmbeddingConfig",
        "modules.embedding_configs.PoolingType",
        "types.DataType",
    ),
    "recapp.tables.embedding": ("modules.embedding_modules.EmbeddingCollection",),
    "recapp.tables.embedding_bag": ("modules.embedding_modules.EmbeddingBagCollection",),
    "torch.distributed._shard.sharding_spec": (
        "distributed.types.EnumerableShardingSpec",
        "distributed.types.ShardMetadata",
        "distributed.types.ShardingSpec",
    ),
    "torch.distributed.optim:_apply_optimizer_in_backward": (
        "optim.apply_optimizer_in_backward",
        "optim.apply_optimizer_in_backward.apply_optimizer_in_backward",
    ),
    "torch.optim": (
        "optim.Adagrad",
        "optim.SGD",
        "optim.optimizers.Adagrad",
        "optim.optimizers.SGD",
    ),
    "torch.optim:SparseAdam": ("optim.Adam", "optim.optimizers.Adam"),
}
"""The paths of TorchRec's names that each module of recapp defines."""

NAMES = {path: home for home, paths in _OF_EVERY_HOME.items() for path in paths}
"""The module of recapp that defines each name, by the path of the name."""

_ABSENT_PARTS = {
    "rows that leave when they were not used for a time are those of a dynamic table: "
    'EmbeddingConfig(num_embeddings="dynamic", dynamic={"max_rows": zch_size, "eviction": "ttl", '
    '"ttl_steps": n}); MCHManagedCollisionModule numbers ids': (
        "modules.hash_mc_evictions.HashZchEvictionConfig",
        "modules.hash_mc_evictions.HashZchEvictionPolicyName",
        "modules.hash_mc_modules.HashZchManagedCollisionModule",
    ),
    "recapp's planner is one search, without parts to exchange: leave the argument out, and say "
    "what a plan must respect in constraints": (
        "distributed.planner.enumerators.EmbeddingEnumerator",
        "distributed.planner.partitioners.GreedyPerfPartitioner",
        "distributed.planner.partitioners.MemoryBalancedPartitioner",
        "distributed.planner.partitioners.SortBy",
        "distributed.planner.proposers.DynamicProgrammingProposer",
        "distributed.planner.proposers.EmbeddingOffloadScaleupProposer",
        "distributed.planner.proposers.GreedyProposer",
        "distributed.planner.proposers.GridSearchProposer",
        "distributed.planner.proposers.UniformProposer",
        "distributed.planner.types.Enumerator",
        "distributed.planner.types.Partitioner",
        "distributed.planner.types.PerfModel",
        "distributed.planner.types.Proposer",
        "distributed.planner.types.ShardEstimator",
        "distributed.planner.types.ShardingOption",
    ),
    "what a plan costs is measured and shown by `python -m recapp.plan calibrate` and "
    "`python -m recapp.plan explain`: leave estimators and statistics out": (
        "distributed.planner.perf_models.NoopPerfModel",
        "distributed.planner.shard_estimators.EmbeddingPerfEstimator",
        "distributed.planner.shard_estimators.EmbeddingStorageEstimator",
        "distributed.planner.stats.EmbeddingStats",
        "distributed.planner.types.Perf",
        "distributed.planner.types.Stats",
        "distributed.planner.types.Storage",
    ),
    "recapp.ClickData reads Criteo's logs (docs/logs.md); DEFAULT_CAT_NAMES and the other names of "
    "columns are here": (
        "datasets.criteo.BinaryCriteoUtils",
        "datasets.criteo.CriteoIterDataPipe",
        "datasets.criteo.InMemoryBinaryCriteoIterDataPipe",
        "datasets.criteo.criteo_kaggle",
        "datasets.criteo.criteo_terabyte",
    ),
    "python -m recapp.export packs a model for serving, and for C++, without torch.package and "
    "TorchScript (docs/export.md)": (
        "inference.model_packager.PredictFactoryPackager",
        "inference.model_packager.load_config_text",
        "inference.model_packager.load_pickle_config",
    ),
    "shard_quant_model(model) of recapp.inference.modules shards a quantised model; what is only "
    "read needs no sharder": (
        "distributed.quant_embedding.QuantEmbeddingCollectionSharder",
        "distributed.quant_embeddingbag.QuantEmbeddingBagCollectionSharder",
    ),
}
"""The replacements for names that programs import and recapp leaves out."""

ABSENT = {path: what for what, paths in _ABSENT_PARTS.items() for path in paths}
"""The text of the error for each name that recapp leaves out, by the path of the name."""
