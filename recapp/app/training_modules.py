"""The modules that a rank imports which trains, evaluates or predicts, for the fork server of a
command.

What is missing here is imported by every rank again; a test compares. Triton is left out: where it
is used it looks for GPUs, which no process may do that is forked later.
"""

from contextlib import suppress
from importlib import import_module

MODULES = (
    "omegaconf",  # Lightning imports it when it saves
    "recapp.app.measured",
    "recapp.app.resume",
    "recapp.app.summary",
    "recapp.dataset.column_types",
    "recapp.engine.memory_use",
    "recapp.metrics",
    "recapp.models.published_dlrm",
    "recapp.recipe.lightning_trainer",
    "recapp.recipe.row_rules",
    "recapp.recipe.strategy_of_run",
    "recapp.recipe.training",
    "recapp.trainer.dynamic_rows",
    "recapp.trainer.ending",
    "recapp.trainer.finite",
    "recapp.trainer.performance_recorder",
    "recapp.transport.ring",
    "recapp.transport.shared_memory",
)

for _name in MODULES:
    import_module(_name)
with suppress(ImportError):  # numba may be absent
    import_module("recapp.kernels.numba_cpu")
    import_module("recapp.kernels.numba_cache").load_compiler()
