"""Adapters for programs that were written for TorchRec or HugeCTR: the module paths of both, and
the names and arguments that recapp's own API has in another form. No other room imports this one.
The tables of names (`torchrec_names`, `hugectr_names`) and `recapp/settings/other_systems.py` name
its modules, which are imported on first use.

| subject                    | files                                                              |
|----------------------------|--------------------------------------------------------------------|
| module paths               | foreign_paths, torchrec_names, hugectr_names                       |
| **torchrec**               |                                                                    |
| models                     | models                                                             |
| jagged tensors, data       | batches                                                            |
| training                   | train_pipeline                                                     |
| modules around collections | wrapped_collections                                                |
| optimisers                 | keyed, optimizers, fused_params                                    |
| plans, sharding by hand    | planning, plans_by_hand                                            |
| tables that take any ids   | managed_collisions                                                 |
| quantised models           | quantised                                                          |
| notebooks about TorchRec   | notebook_helpers                                                   |
| **hugectr**                |                                                                    |
| words, also in settings    | words                                                              |
| plan files                 | plans                                                              |
| a program, from the top    | program, program_settings, iteration_lines                         |
| its tables                 | collection                                                         |
| its dense layers           | graph, layers                                                      |
"""
