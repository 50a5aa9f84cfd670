"""Bandwidths as TorchRec's `Topology` takes them, in bytes a millisecond, as the hardware that
recapp's planner prices plans by.

TorchRec's price of a plan is bytes over bandwidths. Here a price has latencies and costs of single
ids as well, which stay those of the device's default hardware; `python -m recapp.plan calibrate`
measures all of them.
"""

from collections.abc import Mapping
from dataclasses import replace

from recapp.errors import ConfigError
from recapp.planner.hardware import Hardware, Link, default_hardware

BYTES_PER_MS = 1e-6  # of 10^9 bytes a second
RANKS = [2**k for k in range(1, 11)]  # for which a ring is priced; between them it is interpolated
BETWEEN = {"intra_host_bw": "host", "inter_host_bw": "network"}


def hardware_of_bandwidths(
    compute_device: str, bandwidths: Mapping[str, float | None]
) -> Hardware | None:
    """Return the default hardware of a device with other bandwidths; None where none is given.

    Args:
        compute_device: "cpu" or "cuda".
        bandwidths: Bytes a millisecond. `intra_host_bw` and `inter_host_bw`: between two ranks of
            one host and of two. `hbm_mem_bw` and `ddr_mem_bw`: of a GPU's and of a CPU rank's
            memory; the one of the other device is not used.

    Raises:
        ConfigError: A bandwidth that is no number above 0.
    """
    given = {name: value for name, value in bandwidths.items() if value is not None}
    for name, value in given.items():
        if not isinstance(value, int | float) or not value > 0:
            raise ConfigError(f"Topology: {name}={value}: must be bytes a millisecond, above 0")
    if not given:
        return None
    made = default_hardware(compute_device)
    memory = given.get("hbm_mem_bw" if compute_device == "cuda" else "ddr_mem_bw")
    if memory is not None:
        gb_per_s = memory * BYTES_PER_MS
        kernels = {
            name: work if work.gb_per_s == float("inf") else replace(work, gb_per_s=gb_per_s)
            for name, work in made.kernels.items()
        }
        made = replace(made, kernels=kernels)
    for name, kind in BETWEEN.items():
        if name in given:
            gb_per_s = given[name] * BYTES_PER_MS
            made = replace(
                made,
                all_to_all={**made.all_to_all, kind: _all_to_all(made.all_to_all[kind], gb_per_s)},
                all_reduce={**made.all_reduce, kind: _ring(made.all_reduce[kind], gb_per_s)},
            )
    said = ", ".join(f"{name}={value:g}" for name, value in given.items())
    return replace(made, source=f"{made.source} Bandwidths as Topology was given them: {said}.")


def _all_to_all(link: Link, gb_per_s: float) -> Link:
    """Return a link on which the busiest rank sends so many bytes a second."""
    return replace(link, gb_per_s=dict.fromkeys(link.gb_per_s, gb_per_s))


def _ring(link: Link, gb_per_s: float) -> Link:
    """Return a link whose all-reduce is a ring: of n ranks each sends 2 (n - 1) / n of the bytes
    that are reduced.
    """
    return replace(link, gb_per_s={n: gb_per_s * n / (2 * (n - 1)) for n in RANKS})
