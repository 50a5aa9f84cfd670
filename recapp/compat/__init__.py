"""Adapters for programs that were written for TorchRec or HugeCTR: the module paths of both, and
the names and arguments that recapp's own API has in another form. Two places use this room: the
`__init__` of the package makes the paths importable, and `cli` reads HugeCTR's words and plans.

| subject                    | files                                                              |
|----------------------------|--------------------------------------------------------------------|
| module paths               | foreign_paths, torchrec_names, hugectr_names                       |
| **TorchRec**               |                                                                    |
| models, functions, modules | torchrec_dlrm, torchrec_crosses, torchrec_deepfm, small_helpers    |
| training                   | train_pipeline                                                     |
| modules around collections | collection_wrapper, feature_processors                             |
| optimisers                 | keyed_optimizers, warmup_optimizer                                 |
| plans, sharding by hand    | planning, plans_by_hand                                            |
| tables that take any ids   | managed_collisions, managed_collision_collections,                 |
|                            | eviction_policies                                                  |
| quantised models           | quantised_models, quantised_collections                            |
| data                       | example_data                                                       |
| notebooks about TorchRec   | notebook_helpers                                                   |
| **HugeCTR**                |                                                                    |
| words in recapp's settings | hugectr_words                                                      |
| plan files                 | hugectr_plan_lists, hugectr_plan_matrix                            |
| a program, from the top    | hugectr_model, hugectr_program, hugectr_solver, hugectr_reader     |
| its tables                 | hugectr_collection                                                 |
| its dense layers           | hugectr_graph, hugectr_layers, hugectr_layer_modules               |
| its arguments              | hugectr_arguments                                                  |
"""
