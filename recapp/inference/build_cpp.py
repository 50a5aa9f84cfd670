"""Build the C++ program that scores with an artefact without Python (`recapp/inference/cpp`).

The build links the libraries of the installed torch and pyarrow; `docs/cpp.md` shows how to build
the program by hand.
"""

import shutil
import subprocess
from os import environ
from pathlib import Path

import pyarrow as pa
import torch

from recapp.errors import ConfigError

SOURCE = Path(__file__).parent / "cpp"
PROGRAM = "recapp_score"


def missing_tools() -> list[str]:
    """Return the tools that a build needs and that are not installed."""
    needed = ("cmake", environ.get("CXX", "g++"))
    return [tool for tool in needed if shutil.which(tool) is None]


def build(folder: str | Path, arrow: bool = True, sanitize: str = "") -> Path:
    """Build the program, and return its path.

    Args:
        folder: The directory of the build; files of an earlier build are used again.
        arrow: Whether the program reads Arrow; without it, the program reads only JSON lines.
        sanitize: Sanitizers of the compiler, such as "address,undefined".

    Raises:
        ConfigError: cmake or a compiler is missing, or the build fails.
    """
    if missing := missing_tools():
        raise ConfigError(
            f"{PROGRAM} cannot be built: {', '.join(missing)} is missing: install a C++ compiler "
            "(or name yours in CXX) and cmake"
        )
    options = {
        "CMAKE_PREFIX_PATH": torch.utils.cmake_prefix_path,
        "PYARROW_INCLUDE": pa.get_include() if arrow else "",
        "PYARROW_LIBRARIES": pa.get_library_dirs()[0] if arrow else "",
        "CMAKE_DISABLE_FIND_PACKAGE_Arrow": "OFF" if arrow else "ON",
        "RECAPP_SANITIZE": sanitize,
    }
    defined = [f"-D{name}={value}" for name, value in options.items()]
    for command in (
        ["cmake", "-S", str(SOURCE), "-B", str(folder), *defined],
        ["cmake", "--build", str(folder), "--parallel", "2"],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            lines = [x for x in (done.stderr + done.stdout).splitlines() if "rror" in x]
            why = lines[0].strip() if lines else f"exit code {done.returncode}"
            raise ConfigError(f"{PROGRAM} cannot be built: {' '.join(command[:2])}: {why}")
    return Path(folder) / PROGRAM
