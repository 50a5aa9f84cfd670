"""Adapters for programs that were written for TorchRec or HugeCTR: the module paths of both, and
the names and arguments that recapp's own API has in another form. No other room imports this one.
The tables of names (`foreign_names`) and `recapp/settings/other_systems.py` name its modules, which
are imported on first use.

| subject                    | files                                                              |
|----------------------------|--------------------------------------------------------------------|
| module paths               | foreign_paths, foreign_names                                       |
| **torchrec**               |                                                                    |
| models                     | models                                                             |
| jagged tensors, pipelines  | batches                                                            |
| modules around collections | wrapped_collections                                                |
| optimisers, fused_params   | keyed, optimizers                                                  |
| plans, sharding by hand    | planning                                                           |
| tables that take any ids   | managed_collisions                                                 |
| quantised models           | quantised                                                          |
| notebooks about TorchRec   | notebook_helpers                                                   |
| **hugectr**                |                                                                    |
| words, also in settings    | words                                                              |
| plan files                 | plans                                                              |
| a program, from the top    | program, program_settings, iteration_lines                         |
| its tables                 | collection                                                         |
| its dense layers           | graph                                                              |
"""
