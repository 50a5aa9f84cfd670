"""TorchRec's module paths: by import and by attribute, without torch until something is asked for,
and never in the way of recapp's own.
"""

import pickle
import subprocess
import sys
from importlib import import_module

import pytest

import recapp
from recapp.compat.foreign_names import NAMES


def by_attributes(path):
    found = recapp
    for part in path.split("."):
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("path", sorted(NAMES))
def test_every_name_is_found_by_import_and_by_attribute(path):
    module, _, name = f"recapp.{path}".rpartition(".")
    imported = getattr(import_module(module), name)
    home, _, target = NAMES[path].partition(":")
    expected = getattr(import_module(home), target or name)
    for found in (imported, by_attributes(path)):
        assert getattr(found, name, found) is expected  # a module of the function's own name


def python(program):
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_importing_the_package_loads_neither_torch_nor_an_adapter():
    loaded = python("import recapp, sys; print(*sys.modules)").split()
    assert "torch" not in loaded and "recapp.compat.torchrec.planning" not in loaded


def test_a_module_that_recapp_has_too_keeps_its_own_names_and_gets_the_others():
    module = import_module("recapp.sparse.jagged_tensor")
    assert module.__file__.endswith("recapp/sparse/jagged_tensor.py")
    assert "JaggedTensor" in vars(module) and "KeyedJaggedTensor" not in vars(module)
    assert module.KeyedJaggedTensor is recapp.KeyedJaggedTensor


@pytest.mark.full
def test_a_function_and_the_module_of_its_name_are_both_called_alike():
    called = python(
        "import recapp\n"
        "from recapp.optim.apply_optimizer_in_backward import apply_optimizer_in_backward as one\n"
        "from recapp.optim import apply_optimizer_in_backward as other\n"
        "from torch import nn, optim\n"
        "for apply in (one, other, recapp.optim.apply_optimizer_in_backward):\n"
        "    weight = nn.Parameter(nn.Linear(1, 1).weight)\n"
        "    apply(optim.SGD, [weight], {'lr': 0.1})\n"
        "    print(type(weight._in_backward_optimizers[0]).__name__)\n"
    )
    assert called.split() == ["SGD"] * 3


def test_what_is_not_there_is_the_error_of_python():
    with pytest.raises(AttributeError, match=r"module 'recapp\.distributed' has no attribute 'x'"):
        by_attributes("distributed.x")
    with pytest.raises(AttributeError, match="module 'recapp' has no attribute 'Nothing'"):
        by_attributes("Nothing")
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'recapp\.fx'"):
        import_module("recapp.fx")
    with pytest.raises(ImportError, match="cannot import name 'Tower'"):
        exec("from recapp.modules.embedding_modules import Tower")


def test_a_module_is_pickled_by_its_path():
    module = import_module("recapp.distributed.types")
    assert pickle.loads(pickle.dumps(module)) is module
