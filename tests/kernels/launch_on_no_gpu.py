"""Launches kernels through Triton's own launcher, on a CUDA driver that is not there: it notes the
grid and the arguments of a launch, and runs nothing.

    python -m kernels.launch_on_no_gpu FOLDER

prints a line for each compiled kernel: its name, and `same` if the launch that recapp keeps
(`triton_launch.py`) reaches the driver like Triton's. FOLDER, in LD_LIBRARY_PATH, has what
`build` makes. Kernels are compiled for a Hopper GPU. Their results are whatever was in memory.
"""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

DRIVER = """
#include <stdint.h>
#include <string.h>
unsigned grid[4];
uint64_t given[64];
int count, launches;
int cuLaunchKernelEx(const unsigned *config, void *kernel, void **arguments, void **extra) {
    memcpy(grid, config, sizeof grid);
    for (int i = 0; i < count; i++) memcpy(given + i, arguments[i], 8);
    launches++;
    return 0;
}
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuDeviceGetAttribute(int *value) { *value = 1 << 17; return 0; }
int cuFuncGetAttribute(int *value, int which) { *value = which ? 0 : 1024; return 0; }
int cuCtxGetCurrent(void **made) { *made = grid; return 0; }
int cuPointerGetAttribute(uint64_t *found, int which, uint64_t address) {
    *found = address;
    return 0;
}
int cuModuleLoadData(void **made) { *made = grid; return 0; }
int cuModuleGetFunction(void **made) { *made = grid; return 0; }
"""
OTHERS = (  # that the launcher wants to find
    *("cuGetErrorString", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent"),
    *("cuCtxSetLimit", "cuCtxGetLimit", "cuFuncSetAttribute", "cuFuncSetCacheConfig"),
    *("cuPointerGetAttributes", "cuOccupancyMaxActiveClusters", "cuTensorMapEncodeTiled"),
)


def build(folder):
    """Make the driver in a folder."""
    others = "".join(f"int {name}(void) {{ return 0; }}\n" for name in OTHERS)
    (folder / "driver.c").write_text(DRIVER + others)
    library = str(folder / "libcuda.so.1")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, str(folder / "driver.c")], check=True)
    (folder / "libcuda.so").symlink_to(library)


def use(folder):
    """Let Triton launch on this driver. Return it."""
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
    import triton
    from triton.backends.nvidia.driver import CudaDriver

    class NoGpu(CudaDriver):
        def __init__(self):
            super().__init__()
            self.get_device_capability = lambda device=0: (9, 0)
            self.get_current_stream = lambda device=0: 0
            self.get_current_device = lambda: 0

    triton.runtime.driver.set_active(NoGpu())
    return ctypes.CDLL("libcuda.so.1")


def watch(driver):
    """Launch whatever is launched for the first time by Triton, and again, and compare."""
    from recapp.kernels.triton_launch import Launch

    call = Launch.__call__
    grid = (ctypes.c_uint * 4).in_dll(driver, "grid")
    given = (ctypes.c_uint64 * 64).in_dll(driver, "given")
    count, launches = (ctypes.c_int.in_dll(driver, name) for name in ("count", "launches"))

    def noted(wide):
        return [*grid], [
            x if is_wide else x & 0xFFFFFFFF for x, is_wide in zip(given, wide, strict=False)
        ]

    def compared(self, places, arguments, constants, warps=4):
        known = set(self._compiled)
        call(self, places, arguments, constants, warps)
        new = [kernel for kind, kernel in self._compiled.items() if kind not in known]
        if not new:
            return
        kinds = [kind for kind in new[0].src.signature.values() if kind != "constexpr"]
        wide = [kind.startswith("*") or kind.endswith("64") for kind in kinds]
        before = launches.value
        count.value = len(kinds)
        self._kernel[places](*arguments, *constants, num_warps=warps, enable_fp_fusion=False)
        by_triton = noted(wide)
        call(self, places, arguments, constants, warps)
        same = noted(wide) == by_triton and launches.value == before + 2
        count.value = 0
        print(self._kernel.fn.__name__, "same" if same else f"{by_triton} / {noted(wide)}")

    Launch.__call__ = compared


def launch_everything():
    """Launch the kernels of a step of one rank and of two whose owners sum bags, of dots, and of an
    index of keys.
    """
    import torch
    from gpu_first import counts

    from recapp.kernels import backend
    from recapp.kernels.triton_dense import pair_dots, pair_dots_backward
    from recapp.kernels.triton_key_index import DeviceKeyIndex

    backend._no_triton = lambda device: ""
    for ranks, mode in ((1, "unique"), (2, "pooled")):
        step = counts.tables_alone(counts.sharded(ranks, 1, mode), counts.SAMPLES)
        step(counts.batch_of(ranks))
    vectors_BFD = torch.zeros(8, 27, 128)
    pair_dots(vectors_BFD, 480, True)
    pair_dots_backward(vectors_BFD, torch.zeros(8, 480), True)
    index = DeviceKeyIndex([64], 4096, torch.device("cpu"))
    index.find(torch.arange(300), torch.zeros(300, dtype=torch.int16))


if __name__ == "__main__":
    watch(use(Path(sys.argv[1])))
    launch_everything()
