"""The settings of a measurement as its ranks get them: checked, and with every value filled in.

Bench, the user's settings -> checked (`checks.py`) -> BenchSettings -> resolved.yaml -> ranks
"""

from dataclasses import dataclass, field
from typing import Any

from recapp.dataset.data_settings import DataSettings
from recapp.inference.export_settings import Quantize
from recapp.tables.table_settings import TableSettings


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """The settings of a measurement. `conf/bench.yaml` explains settings with the same name.

    Args:
        verb: The measurement.
        folder: The directory of temporary files.
        plans: The settings of each plan, by its name.
        recipes: The settings of a training run with each measured model of `conf/model`, by the
            model's name.
        served: The checkpoint or artefact of each model of `inference`, by the model's name.
        path: The hardware file that `calibrate` writes.
        accelerator: The devices that `calibrate` measures: cpu, gpu or auto.
    """

    verb: str
    folder: str = ""
    workload: tuple[str, ...] = ()
    model: tuple[str, ...] = ()
    plans: dict[str, dict[str, Any]] = field(default_factory=dict)
    recipes: dict[str, dict[str, Any]] = field(default_factory=dict)
    served: dict[str, str] = field(default_factory=dict)
    transport: tuple[str, ...] = ("auto",)
    backend: str = "auto"
    keep_freed_memory: bool = True
    ranks: int = 1
    threads: tuple[int, ...] = (1,)
    rounds: int = 7
    round_seconds: float = 0.5
    batch_size: tuple[int, ...] = ()
    ids: tuple[str, ...] = ("uniform",)
    bag: int = 10
    keys: int = 10_000_000
    compile: bool = False
    quantize: tuple[Quantize, ...] = ()
    artefact: str | None = None
    protocol: tuple[str, ...] = ()
    load: tuple[float, ...] = ()
    cache: tuple[str, ...] = ("warm",)
    torchrec_python: str | None = None
    baseline: str | None = None
    tables: TableSettings | None = None
    dataset: DataSettings | None = None
    path: str = ""
    accelerator: str = "cpu"
