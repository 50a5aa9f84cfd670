"""Import the modules of a rank that trains, evaluates or predicts, in the fork server of a command.

Every rank imports modules that are missing here once more; a test compares the lists. Triton is
left out, because it looks for GPUs, and a process that has done so must not fork.
"""

from contextlib import suppress
from importlib import import_module

MODULES = (
    "omegaconf",  # Lightning imports it when it saves
    "recapp.metrics",
    "recapp.models.published_dlrm",
    "recapp.run.run_checks",
    "recapp.run.training",
    "recapp.run.resume",
    "recapp.run.model",
    "recapp.reporting.summary",
    "recapp.tasks.losses",
    "recapp.trainer.callbacks",
    "recapp.trainer.keep_checkpoints",
    "recapp.transport.ring",
    "recapp.transport.shared_memory",
)

for _name in MODULES:
    import_module(_name)
with suppress(ImportError):  # numba may be absent
    import_module("recapp.dataset.compiled_columns")
    import_module("recapp.dataset.compiled_text")
    import_module("recapp.kernels.numba_cpu")
    import_module("recapp.kernels.numba_cache").load_compiler()
