"""The settings of an export: the stored data types of tables, and the measurements."""

from dataclasses import dataclass
from typing import Annotated, Literal

from recapp.errors import ConfigError
from recapp.settings.values import Natural, Within, read, takes

AUTO = "auto"
Quantize = Literal["none", "fp16", "int8", "int4"]


@dataclass(frozen=True, kw_only=True)
class Export:
    """The settings of an export.

    Args:
        quantize: The stored data type of tables: none (as trained), fp16, int8, int4, or auto.
        quantize_tables: The stored data type of some tables, by name or glob.
        budget_ne: For auto only: the allowed rise of the normalised entropy of the validation rows;
            None takes 1e-4.
        report_rows: The most validation rows to measure; 0 measures none.
        compile: Whether to compile the dense part as well, which takes a minute.
        name: The name of the model; None takes the name of the directory.
        overwrite: Whether to replace an artefact of the same name.

    Raises:
        ConfigError: A value is not allowed, or two values conflict.
    """

    quantize: Quantize | Literal["auto"] = "none"
    quantize_tables: dict[str, Quantize] | None = None
    budget_ne: Annotated[float, Within(0)] | None = None
    report_rows: Natural = 100_000
    compile: bool = True
    name: str | None = None
    overwrite: bool = False

    def __post_init__(self) -> None:
        for name, annotation in takes(Export).items():  # a script makes this record itself
            read(getattr(self, name), annotation, name)
        if self.budget_ne is not None and self.quantize != AUTO:
            raise ConfigError(
                f"budget_ne={self.budget_ne:g} quantize={self.quantize}: a budget is for "
                "quantize=auto: choose that, or leave budget_ne out"
            )
        if self.quantize == AUTO and not self.report_rows:
            raise ConfigError(
                "quantize=auto report_rows=0: quantize=auto measures tables on validation rows: "
                "leave report_rows out, or choose quantize=int8"
            )
