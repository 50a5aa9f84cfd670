"""Plan files in formats of other systems, which rooms above this one read.

`load_plan` (`recapp/sharding/plan_file.py`) reads recapp's own YAML. Other content is read by the
module in this list that takes it. `import recapp` adds the one for HugeCTR's JSON; it stands here
by name, so that it is imported when a plan file is read and not before.
"""

FOREIGN: list[str] = []
"""Modules, tried in this order. Each has

    takes(values)                                       whether plain values are in its format
    plan_from_values(values, tables, source, lookups)   the plan; `source` is the file, for errors
    AGAIN                                               arguments of `python -m recapp.plan` that
                                                        write such a file
"""
