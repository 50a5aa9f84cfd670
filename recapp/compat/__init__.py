"""Adapters for programs that were written for TorchRec or HugeCTR: the module paths of both, and
the names and arguments that recapp's own API has in another form. No other room imports this one.
The tables of names (`torchrec_names`, `hugectr_names`) and `recapp/settings/other_systems.py` name
its modules, which are imported on first use.

| subject                    | files                                                              |
|----------------------------|--------------------------------------------------------------------|
| module paths               | foreign_paths, torchrec_names, hugectr_names                       |
| **torchrec**               |                                                                    |
| models, functions, modules | dlrm, crosses, deepfm, small_helpers                               |
| training                   | train_pipeline                                                     |
| modules around collections | collection_wrapper, feature_processors                             |
| optimisers                 | keyed_optimizers, warmup_optimizer                                 |
| plans, sharding by hand    | planning, plans_by_hand                                            |
| tables that take any ids   | managed_collisions, managed_collections, eviction_policies         |
| quantised models           | quantised_models, quantised_collections                            |
| data                       | example_data                                                       |
| notebooks about TorchRec   | notebook_helpers                                                   |
| **hugectr**                |                                                                    |
| words in recapp's settings | words                                                              |
| plan files                 | plan_lists, plan_matrix                                            |
| a program, from the top    | model, program, solver, reader, iteration_lines                    |
| its tables                 | collection                                                         |
| its dense layers           | graph, layers, layer_modules                                       |
| its arguments              | arguments                                                          |
"""
