"""The costs of a machine: measured numbers, with a sentence about their source.

    kernels      a call, an item, a byte      lookup and update, by touched rows
    links        a message, a byte            all-to-all and all-reduce, within a host and between
                                              hosts, by number of ranks
    dense part   floating point operations    per second of one rank, and the overhead of a step

`python -m recapp.plan calibrate` measures this machine and writes such a file. `topology=dgx_h100`
and the other files of `conf/topology` contain one each, from data sheets. Every time is latency +
work / rate, because this form fits every measured kernel and message, and because a person can
check it by hand.

| kernel  | an item is                                | bytes are                                  |
|---------|-------------------------------------------|--------------------------------------------|
| route   | an id of the batch, for each strip with   |                                            |
|         | requests for it                           |                                            |
| link    | an id of the batch, for each strip;       |                                            |
|         | vectors are requested by row or by bag    |                                            |
| serve   | a row that a rank requests from this one  |                                            |
| group   | a row that a rank requests from this one  |                                            |
| answer  | a row that is read for a rank             | rows read, vectors written                 |
| combine | a vector read: one per id, pooled: per    | vectors read, output written               |
|         | (bag, owner)                              |                                            |
| spread  | a vector as for combine; its gradient is  | gradients read, gradients of requested     |
|         | read from that of the output              | vectors written                            |
| update  | a distinct row that is updated            | gradients read, rows and state read and    |
|         |                                           | written                                    |

A call is for one group of tables (`recapp/sharding/layout.py`): tables of equal width, mode and
type. The cost of a link within a host depends on the number of its ranks that take part, and
between hosts on the number of hosts.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml  # type: ignore[import-untyped]

from recapp.errors import ConfigError, suggest
from recapp.settings.option_files import conf_dir, read_yaml
from recapp.settings.records import absent, fields_of, record, to_plain
from recapp.settings.values import Positive, Within, typed
from recapp.settings.whole_file import write_whole

FILE_BYTES = 2**20

KERNELS = ("route", "link", "serve", "group", "answer", "combine", "spread", "update")
WITHOUT_BYTES = KERNELS[:4]  # kernels of integers, whose items include their bytes
LINK_KINDS = ("host", "network")
DEVICES = ("cpu", "cuda")
DEFAULTS = {"cpu": "cpu_2core", "cuda": "dgx_a100"}  # the machine of a device without calibration
Cost = Annotated[float, Within(0)]
Rate = Annotated[float, Within(above=0)]
CONF = "topology"  # the group of settings with the shipped machines


@dataclass(frozen=True)
class Work:
    """The cost of a kernel: a time for each step, call and item, and a rate of bytes.

    Args:
        call_us: Microseconds of an empty call.
        item_ns: Nanoseconds for each item.
        gb_per_s: 10^9 bytes a second; infinite if the items include the bytes.
        step_us: Microseconds around the calls of a step, once for a step with calls.
    """

    call_us: Cost
    item_ns: Cost
    gb_per_s: Rate = absent(math.inf)
    step_us: Cost = absent(0.0)

    def seconds(self, calls: Any, items: Any, bytes: Any = 0) -> Any:
        """Return the seconds of a step's calls.

        Args:
            calls: The number of calls of the kernel; like the others a number or a numpy array.
            items: The number of items of all calls.
            bytes: The bytes of all calls.
        """
        whole = (calls > 0) * (self.step_us * 1e-6) + calls * (self.call_us * 1e-6)
        return whole + items * (self.item_ns * 1e-9) + bytes * (1e-9 / self.gb_per_s)


@dataclass(frozen=True)
class Link:
    """The cost of a collective, by the number of ranks; between hosts, by the number of hosts.

    Args:
        latency_us: Microseconds of an empty collective.
        gb_per_s: 10^9 bytes a second, counted at the rank that sends or receives most; for an
            all-reduce, the bytes to reduce.
    """

    latency_us: dict[Any, Cost]
    gb_per_s: dict[Any, Rate]

    def __post_init__(self) -> None:
        for name, by_ranks in list(vars(self).items()):
            for ranks in by_ranks:
                if not str(ranks).isdecimal() or int(ranks) < 2:
                    raise ConfigError(
                        f"{name}: {ranks}: the keys must be numbers of ranks, 2 or more"
                    )
            if not by_ranks:
                raise ConfigError(
                    f"{name} is empty: give at least one number of ranks, as in {{2: 5.0}}"
                )
            numbers = {int(ranks): value for ranks, value in by_ranks.items()}  # JSON's are texts
            object.__setattr__(self, name, numbers)

    def seconds(self, ranks: Any, bytes: Any) -> Any:
        """Return the seconds of one collective; 0 for a single rank.

        Values between measured numbers of ranks are interpolated in log2 of the ranks; beyond these
        numbers the last value holds.

        Args:
            ranks: The ranks that take part, a number or a numpy array.
            bytes: The bytes at the busiest rank, a number or a numpy array.
        """
        import numpy as np

        latency, speed = (
            np.interp(
                np.log2(ranks), np.log2(sorted(numbers)), [numbers[r] for r in sorted(numbers)]
            )
            for numbers in (self.latency_us, self.gb_per_s)
        )
        known = latency * 1e-6 + bytes * (1e-9 / speed)
        return np.where(np.asarray(ranks) > 1, known, 0.0)[()]


@dataclass(frozen=True)
class Hardware:
    """The costs and sizes of a machine, for the planner.

    Args:
        name: Its name in reports.
        source: A sentence: the time and place of the measurement, or the documents and assumptions
            behind the numbers.
        compute_device: "cpu" or "cuda".
        ranks_per_host: The number of ranks of one host.
        memory_bytes: The total memory of a rank; None if unknown.
        kernels: A `Work` for each of `KERNELS`.
        all_to_all: A `Link` for each of `LINK_KINDS`: among ranks of one host, and of several.
        all_reduce: A `Link` for each of `LINK_KINDS`.
        flops_per_s: Operations a second of one rank's dense part in training, for each further
            sample.
        overlap: The share of the dense gradients' all-reduce that overlaps with the backward of the
            tables, 0 to 1.
        step_overhead_us: Microseconds of a training step that depend on no sample, table or
            message: the loop, the loader, loss, autograd, metrics and optimiser in Python.
        graph_us: Microseconds that a step which is recorded as a whole needs in the place of the
            calls of its kernels; None where steps are not recorded.
        dense_us: Microseconds of the calls of the dense part where it is launched; None counts
            them in `step_overhead_us`.
        cut_us: The same where what is between lookup and update is recorded.

    Raises:
        ConfigError: An entry is missing or unknown, or its number is impossible; the text names the
            entry.
    """

    name: str
    source: str
    compute_device: Literal["cpu", "cuda"]
    ranks_per_host: Positive
    memory_bytes: Positive | None
    kernels: dict[str, Work]
    all_to_all: dict[str, Link]
    all_reduce: dict[str, Link]
    flops_per_s: Rate
    overlap: Annotated[float, Within(0, 1)]
    step_overhead_us: Cost
    graph_us: Cost | None = absent()
    dense_us: Cost | None = absent()
    cut_us: Cost | None = absent()

    def __post_init__(self) -> None:
        _check_names("kernels", self.kernels, KERNELS)
        for name, work in self.kernels.items():
            if math.isfinite(work.gb_per_s) != (name not in WITHOUT_BYTES):
                fault = "unknown entry gb_per_s" if name in WITHOUT_BYTES else "gb_per_s is missing"
                raise ConfigError(f"kernels.{name}: {fault}")
        _check_names("all_to_all", self.all_to_all, LINK_KINDS)
        _check_names("all_reduce", self.all_reduce, LINK_KINDS)


def _check_names(entry: str, entries: Mapping[str, Any], known: Sequence[str]) -> None:
    for name in entries:
        if name not in known:
            raise ConfigError(f"{entry}: unknown entry {name}; {suggest(name, known)}")
    for name in known:
        if name not in entries:
            raise ConfigError(f"{entry}: {name} is missing")


def hardware_from(values: Any, where: str = "hardware") -> Hardware:
    """Return hardware from plain values of a YAML file.

    Args:
        values: All fields of `Hardware` by name, with the fields of each `Work` and `Link`, and no
            other keys.
        where: The file or setting, for messages.

    Raises:
        ConfigError: An entry is wrong; the text names the entry in one line.
    """
    try:
        if not isinstance(values, Mapping):
            raise ConfigError(f"must be a mapping with {', '.join(fields_of(Hardware))}")
        return record(Hardware, _with_numbers(values), check=True)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _with_numbers(value: Any) -> Any:
    """Return plain values with numbers in place of texts such as 1e12, which YAML 1.1 does not read
    as numbers.
    """
    if isinstance(value, Mapping):
        return {key: _with_numbers(part) for key, part in value.items()}
    if not isinstance(value, str):
        return value
    try:
        return float(value)
    except ValueError:
        return value


def read_hardware(name: str | Path) -> Hardware:
    """Return the hardware of a file or of a shipped machine.

    Args:
        name: The path of a file, from `write_hardware` or written by hand (hardware alone, or under
            `hardware:` beside the settings of a topology); or a name without a suffix for a shipped
            machine, such as `dgx_h100`.

    Raises:
        ConfigError: The file or machine does not exist, the file is not YAML, or an entry is wrong.
    """
    if isinstance(name, str) and "/" not in name and "." not in name:
        return _shipped(name)
    path = Path(name).expanduser()
    values = _read(
        path,
        f"topology.hardware={path}: no such file; `python -m recapp.plan calibrate "
        f"{typed('path', path)}` writes one, and "
        f"topology={path.stem if path.stem in shipped_machines() else 'dgx_h100'} "
        "chooses a shipped machine",
    )
    return hardware_from(
        values.get("hardware", values) if isinstance(values, dict) else values, str(name)
    )


def read_machine(name: str) -> dict[str, Any]:
    """Return the settings of a shipped machine, with its hardware as plain values. Merge the
    machines in its `defaults` as Hydra does.

    Raises:
        ConfigError: The machine does not exist; the text has close matches.
    """
    machines = shipped_machines()
    if name not in machines:
        raise ConfigError(f"topology={name}: unknown machine; {suggest(name, machines)}")
    return _settings(machines[name])


def _settings(path: Path) -> dict[str, Any]:
    file_settings: dict[str, Any] = _read(path, "")
    settings: dict[str, Any] = {}
    for base in file_settings.pop("defaults", []):
        settings |= file_settings if base == "_self_" else _settings(path.with_name(f"{base}.yaml"))
    return settings or file_settings


def _read(path: Path, missing: str) -> Any:
    try:
        return read_yaml(path, FILE_BYTES)
    except (FileNotFoundError, IsADirectoryError):
        raise ConfigError(missing) from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise ConfigError(f"topology.hardware={path}: {error}") from None


def write_hardware(hardware: Hardware, path: str | Path) -> None:
    """Write a file for `read_hardware`, which people may edit.

    Raises:
        ConfigError: The file cannot be written.
    """
    head = (
        "# For topology.hardware=PATH. Times are step_us + calls * call_us + items * item_ns + "
        "bytes / gb_per_s (10^9 bytes/s);\n# links go by ranks of a host and by hosts of the "
        "network; what items and bytes are: recapp/planner/hardware.py\n"
    )
    body = yaml.safe_dump(
        to_plain(hardware),
        sort_keys=False,
        width=140,
        default_flow_style=None,
        allow_unicode=True,
    )
    try:
        write_whole(path, head + body)
    except OSError as error:
        raise ConfigError(
            f"path={path}: cannot be written ({error.strerror}): choose another path=FILE"
        ) from None


def default_hardware(compute_device: str) -> Hardware:
    """Return the assumed hardware of a device without measured or chosen hardware (`DEFAULTS`)."""
    return _shipped(DEFAULTS[compute_device])


@lru_cache
def _shipped(name: str) -> Hardware:
    return hardware_from(read_machine(name)["hardware"], f"topology={name}")


def shipped_machines() -> dict[str, Path]:
    """Return the files of `conf/topology` with hardware, by name."""
    files = sorted((conf_dir() / CONF).glob("*.yaml"))
    return {path.stem: path for path in files if path.stem != "auto"}
