"""Plan files in formats of other systems; rooms above this one have the readers.

`load_plan` (`recapp/sharding/plan_file.py`) reads recapp's own YAML. A module of this list reads
other content. `import recapp` adds the module for HugeCTR's JSON. The list holds names of modules,
so that a module is imported only when a plan file is read.
"""

FOREIGN: list[str] = []
"""Modules, tried in this order. Each has

    takes(values)                                       whether plain values are in its format
    plan_from_values(values, tables, source, lookups)   the plan; `source` is the file, for errors
    AGAIN                                               arguments of `python -m recapp.plan` that
                                                        write such a file
"""
