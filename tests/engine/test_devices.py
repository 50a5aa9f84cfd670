"""Whatever makes a tensor in the engine says on which device: torch's own default is the CPU, which
is right on a CPU only.
"""

import ast
from pathlib import Path

import recapp

ROOMS = ("engine", "kernels", "optim", "sparse", "tables", "transport")
OF_THE_CPU = ("numba_", "backend")  # which warms the kernels of numba up
FACTORIES = {
    "arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm",
    "tensor", "zeros",
}  # fmt: skip


def factory_calls(source):
    """The calls of torch's factories in a source, and whether each names a device."""
    for node in ast.walk(ast.parse(source)):
        called = node.func if isinstance(node, ast.Call) else None
        if (
            isinstance(called, ast.Attribute)
            and ast.unparse(called.value) == "torch"
            and called.attr in FACTORIES
        ):
            yield ast.unparse(node), any(word.arg == "device" for word in node.keywords)


def test_a_call_without_a_device_is_found():
    source = "torch.arange(3)\ntorch.zeros(2, device=d)\nnumpy.zeros(1)\ntorch.zeros_like(x)\n"
    assert dict(factory_calls(source)) == {
        "torch.arange(3)": False,
        "torch.zeros(2, device=d)": True,
    }


def test_every_tensor_of_the_engine_is_made_on_a_device_that_is_named():
    package = Path(recapp.__file__).parent
    files = [
        file
        for room in ROOMS
        for file in sorted((package / room).rglob("*.py"))
        if not file.name.startswith(OF_THE_CPU)
    ]
    assert len(files) > 50
    calls = [(file.name, *call) for file in files for call in factory_calls(file.read_text())]
    assert len(calls) > 50
    assert [call for call in calls if not call[-1]] == []
