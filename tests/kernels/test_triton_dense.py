"""The dense layers as a GPU runs them: dots of pairs in kernels, and linear layers filled up for
tensor cores. Kernels run in Triton's interpreter here; tests/kernels/test_on_gpu.py runs them where
there is a GPU.
"""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from recapp.metrics import AUC
from recapp.models import layers, linear_stack
from recapp.models.layers import MLP, DotInteraction
from recapp.models.published_dlrm import DLRM
from recapp.sparse.keyed_jagged_tensor import Batch, KeyedJaggedTensor
from recapp.tables.collections import EmbeddingBagCollection
from recapp.tables.config import EmbeddingBagConfig
from recapp.tasks.task import ClickTask

TESTS = Path(__file__).parents[1]
CLOSE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float16: {"rtol": 1e-2, "atol": 1e-2},
    torch.bfloat16: {"rtol": 5e-2, "atol": 5e-2},
}


def widened(handle):
    """Return a bf16 tensor of Triton's in fp32; numpy would multiply its bits as integers."""
    from triton import language as tl
    from triton.runtime.interpreter import TensorHandle

    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


@pytest.fixture
def kernels(interpreted, monkeypatch):
    """Return the kernels, which layers take for tensors of a CPU, too; `used` has their calls."""
    from recapp.kernels import triton_dense

    builder = "triton.runtime.interpreter.InterpreterBuilder.create_dot"
    dot = pytest.importorskip("triton.runtime.interpreter").InterpreterBuilder.create_dot
    monkeypatch.setattr(builder, lambda self, a, b, *more: dot(self, widened(a), widened(b), *more))
    used = []
    for name in ("pair_dots", "pair_dots_backward"):
        kernel = getattr(triton_dense, name)
        monkeypatch.setattr(
            triton_dense, name, lambda *a, k=kernel, n=name: used.append(n) or k(*a)
        )
    for module in (linear_stack, layers):
        monkeypatch.setattr(module, "on_gpu", lambda x: True)
    torch.manual_seed(1)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield SimpleNamespace(module=triton_dense, used=used)
    torch.set_float32_matmul_precision(before)


def defined(vectors_BFD, grad_BK, keeps_first):
    """Return the dots of pairs and the gradient of the vectors, in fp64 by autograd."""
    wide_BFD = vectors_BFD.detach().double().requires_grad_()
    row_P, col_P = torch.tril_indices(wide_BFD.shape[1], wide_BFD.shape[1], -1)
    out_BK = (wide_BFD @ wide_BFD.mT)[:, row_P, col_P]
    if keeps_first:
        out_BK = torch.cat([wide_BFD[:, 0], out_BK], 1)
    out_BK.backward(grad_BK[:, : out_BK.shape[1]].double())
    return out_BK.detach(), wide_BFD.grad


@pytest.mark.parametrize("keeps_first", [False, True])
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize(
    ("shape", "tile", "block"),
    [
        ((3, 5, 4), 64, 128),
        ((2, 27, 16), 64, 128),
        ((2, 18, 20), 16, 16),  # several tiles and blocks, neither full
        ((2, 1, 3), 64, 128),
        ((0, 4, 3), 64, 128),
    ],
    ids=str,
)
def test_dots_and_their_gradients_are_those_of_autograd(
    kernels, monkeypatch, shape, tile, block, dtype, keeps_first
):
    monkeypatch.setattr(kernels.module, "MOST_TILE", tile)
    monkeypatch.setattr(kernels.module, "MOST_BLOCK", block)
    vectors_BFD = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    vectors_BFD.requires_grad_()
    out_BK = DotInteraction(shape[1], keeps_first)(vectors_BFD)
    # in the columns behind the products the gradient is not read
    grad_BK = torch.randn(out_BK.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    expected_BK, expected_BFD = defined(vectors_BFD, grad_BK, keeps_first)
    columns = expected_BK.shape[1]
    if keeps_first:
        grad_BK[:, columns:] = torch.nan
    out_BK.backward(grad_BK)
    assert kernels.used == ["pair_dots", "pair_dots_backward"]
    assert out_BK.dtype == vectors_BFD.grad.dtype == dtype
    assert not out_BK[:, columns:].any()
    assert out_BK.shape[1] == (-(-columns // 8) * 8 if keeps_first else columns)
    torch.testing.assert_close(out_BK[:, :columns].detach().double(), expected_BK, **CLOSE[dtype])
    torch.testing.assert_close(vectors_BFD.grad.double(), expected_BFD, **CLOSE[dtype])


def test_vectors_and_gradients_may_lie_anywhere(kernels):
    wide_BK = torch.randn(3, 40)
    for vectors_BFD in (wide_BK[:, 4:24].view(3, 5, 4), wide_BK[:, :20].view(3, 4, 5).mT):
        vectors_BFD = vectors_BFD.detach().requires_grad_()
        out_BP = DotInteraction(5)(vectors_BFD)
        out_BP.sum().backward()
        expected_BP, expected_BFD = defined(vectors_BFD, torch.ones(3, 10), False)
        torch.testing.assert_close(out_BP.detach().double(), expected_BP, **CLOSE[torch.float32])
        torch.testing.assert_close(vectors_BFD.grad.double(), expected_BFD, **CLOSE[torch.float32])


def test_under_autocast_fp32_vectors_have_dots_in_16_bits_and_gradients_in_fp32(kernels):
    vectors_BFD = torch.randn(4, 3, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out_BP = DotInteraction(3)(vectors_BFD)
    out_BP.float().sum().backward()
    expected_BP, expected_BFD = defined(vectors_BFD.bfloat16(), torch.ones(4, 3), False)
    assert (out_BP.dtype, vectors_BFD.grad.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(out_BP.detach().double(), expected_BP, **CLOSE[torch.bfloat16])
    torch.testing.assert_close(vectors_BFD.grad.double(), expected_BFD, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("keeps_first", [False, True])
def test_gradients_of_gradients_and_several_at_once_are_torchs(kernels, keeps_first):
    vectors_BFD = torch.randn(2, 4, 3, requires_grad=True)

    def derivatives():
        out_BK = DotInteraction(4, keeps_first)(vectors_BFD)
        out_BK = out_BK[:, : 6 + 3 * keeps_first]
        (first,) = torch.autograd.grad(out_BK.square().sum(), vectors_BFD, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), vectors_BFD)
        out_BK = DotInteraction(4, keeps_first)(vectors_BFD)
        grad_NBK = torch.eye(out_BK.numel()).view(-1, *out_BK.shape)[:3]
        several = torch.autograd.grad(out_BK, vectors_BFD, grad_NBK, is_grads_batched=True)
        return first.detach(), second, *several

    on_gpu = derivatives()
    # the second derivative goes back through the products themselves, once
    assert kernels.used == ["pair_dots", "pair_dots_backward", "pair_dots"]
    torch.set_float32_matmul_precision("highest")
    torch.testing.assert_close(on_gpu, derivatives(), rtol=1e-4, atol=1e-4)
    assert len(kernels.used) == 3


def test_fp64_exact_fp32_compiled_layers_and_cpus_are_left_to_torch(kernels, monkeypatch):
    takes = kernels.module.takes
    assert takes(torch.zeros(1)) and takes(torch.zeros(1).half())
    assert not takes(torch.zeros(1).double())
    torch.set_float32_matmul_precision("highest")
    assert not takes(torch.zeros(1)) and takes(torch.zeros(1).bfloat16())
    torch.set_float32_matmul_precision("high")
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    DotInteraction(3)(torch.zeros(1, 3, 2))
    assert not kernels.used
    monkeypatch.undo()
    DotInteraction(3)(torch.zeros(1, 3, 2))
    assert not kernels.used


def gradients_of(module, x_BK):
    x_BK = x_BK.clone().requires_grad_()
    y_BO = module(x_BK)
    module.zero_grad()
    y_BO.square().sum().backward()
    return [y_BO.detach(), x_BK.grad, *(p.grad for p in module.parameters())]


class Products(TorchDispatchMode):
    """Notes the names of layers' products, and the shapes of inputs and weights."""

    def __init__(self):
        super().__init__()
        self.noted = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if "addmm" in name:
            self.noted.append((name, *(tuple(x.shape) for x in args[1:3])))
        return function(*args, **(kwargs or {}))


def test_linear_layers_are_filled_up_have_their_relu_inside_and_keep_their_weights(
    kernels, monkeypatch
):
    tower = MLP(13, [6, 16, 3], last_relu=False)
    x_BK = torch.randn(5, 13)
    shapes = [((5, 16), (16, 6)), ((5, 8), (8, 16)), ((5, 16), (16, 3))]
    names = ["_addmm_activation", "_addmm_activation", "addmm"]
    with Products() as products:
        on_gpu = gradients_of(tower, x_BK)
    assert products.noted == [(n, *s) for n, s in zip(names, shapes, strict=True)]
    with Products() as products:
        evaluated_BO = tower.eval()(x_BK)
    assert products.noted == [("addmm", *s) for s in shapes]
    assert [tuple(p.shape) for p in tower.parameters()][:3] == [(6, 13), (6,), (16, 6)]
    filled_BK = functional.pad(x_BK, (0, 3))
    filled = gradients_of(tower.train(), filled_BK)
    monkeypatch.undo()
    expected = gradients_of(tower, x_BK)
    torch.testing.assert_close(on_gpu, expected)
    torch.testing.assert_close(evaluated_BO, expected[0])
    filled[1] = filled[1][:, :13]
    torch.testing.assert_close(filled, expected)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        tower(filled_BK)


def test_under_autocast_layers_compute_in_16_bits_and_weights_have_gradients_in_fp32(
    kernels, monkeypatch
):
    tower = MLP(13, [6, 3], last_relu=False)
    x_BK = torch.randn(5, 13)

    def learnt():
        with torch.autocast("cpu", torch.bfloat16):
            return gradients_of(tower, x_BK)

    with Products() as products:
        on_gpu = learnt()
    assert [name for name, *_ in products.noted] == ["_addmm_activation", "addmm"]
    monkeypatch.undo()
    expected = learnt()
    assert [x.dtype for x in on_gpu] == [x.dtype for x in expected]
    torch.testing.assert_close(on_gpu, expected, rtol=0.05, atol=0.05)


def test_each_layer_is_a_node_of_its_own_that_has_second_derivatives(kernels, monkeypatch):
    tower = MLP(8, [16, 3], last_relu=False)

    def second():
        x_BK = torch.linspace(-1, 1, 16).view(2, 8).requires_grad_()
        y_BO = tower(x_BK)
        (first_BK,) = torch.autograd.grad(y_BO.pow(3).sum(), x_BK, create_graph=True)
        return y_BO, torch.autograd.grad(first_BK.square().sum(), [*tower.parameters()])

    y_BO, on_gpu = second()
    node = y_BO.grad_fn
    names = [type(one).__name__ for one in (node, node.next_functions[0][0])]
    assert names == ["_StackBackward"] * 2
    monkeypatch.undo()
    torch.testing.assert_close(on_gpu, second()[1])


def test_a_dlrm_trains_on_these_layers_as_on_torchs(kernels, monkeypatch):
    tables = [
        EmbeddingBagConfig(
            name=f"t{n}", embedding_dim=4, num_embeddings=10, feature_names=[f"c{n}"]
        )
        for n in range(5)
    ]
    model = DLRM(EmbeddingBagCollection(tables), 3, [6, 4], [5, 1])
    ids = KeyedJaggedTensor(
        [f"c{n}" for n in range(5)],
        torch.randint(0, 10, (5 * 6,), generator=torch.Generator().manual_seed(3)),
        lengths=torch.ones(5 * 6, dtype=torch.int32),
    )
    samples = Batch(torch.rand(6, 3), ids, {})

    def gradients():
        model.zero_grad()
        logits_B = model(samples)
        logits_B.square().sum().backward()
        return [logits_B.detach(), *(p.grad for p in model.parameters())]

    on_gpu = gradients()
    assert kernels.used == ["pair_dots", "pair_dots_backward"]
    monkeypatch.undo()
    torch.testing.assert_close(on_gpu, gradients())


class Towers(nn.Module):
    """The dense part of a DLRM, with given vectors in the place of tables."""

    def __init__(self):
        super().__init__()
        self.bottom = MLP(13, [8, 4])
        self.dots = DotInteraction(4, keeps_first=True)
        self.top = MLP(10, [6, 1], last_relu=False)

    def forward(self, dense_BI, vectors_BK):
        joined_BK = torch.cat([self.bottom(dense_BI), vectors_BK], 1)
        return self.top(self.dots(joined_BK.view(-1, 4, 4)))[:, 0]


def test_the_record_of_a_dense_part_loss_and_metric_repeats_on_another_batch_without_a_wait(
    kernels,
):
    from gpu_first.recorder import Recorder

    model = Towers()
    batches = [(torch.rand(6, 13), torch.randn(6, 12), torch.rand(6).round()) for _ in range(3)]
    held = [x.clone() for x in batches[0]]

    task = ClickTask()
    auc = AUC()

    def step(dense_BI, vectors_BK, labels_B):
        model.zero_grad()
        samples = SimpleNamespace(labels_B=labels_B, weights={}, rows=len(labels_B))
        outputs = {task.outputs[0].name: model(dense_BI, vectors_BK)}
        loss = task.loss(outputs, samples)
        task.update({"auc": auc}, outputs, samples)
        loss.backward()
        return loss.detach()

    records = []
    for batch in batches[:2]:
        for memory, values in zip(held, batch, strict=True):
            memory.copy_(values)
        record = Recorder()
        with record.recording():
            loss = step(*held)
        records.append(record)
        grads = [p.grad for p in model.parameters()]
    assert records[0].difference(records[1]) is None
    assert records[1].counts()["waits"] == records[1].counts()["copies"] == 0
    for memory, values in zip(held, batches[2], strict=True):
        memory.copy_(values)
    auc.counts.zero_()
    records[1].replay()
    again = [loss.clone(), auc.counts.clone(), *(g.clone() for g in grads)]
    auc.counts.zero_()
    eager = [step(*batches[2]), auc.counts, *(p.grad for p in model.parameters())]
    assert auc.counts.sum() == 6
    assert all(torch.equal(x, y) for x, y in zip(again, eager, strict=True))


@pytest.mark.full
def test_kernels_compile_for_a_gpu_that_is_not_here():
    """Both load 16 bytes at a time, multiply on tensor cores and keep what they have in registers
    and shared memory.
    """
    pytest.importorskip("triton", reason="triton is not installed")
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)]),
    }
    done = subprocess.run(
        [sys.executable, "-m", "kernels.compile_dense_for_gpu"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert {name for name, *_ in lines} == {"write_dots", "write_gradients"}
    for name, case, *signs in lines:
        assert "tensor_cores" in signs and "fma" not in signs, (name, case)
        assert "wide_loads" in signs, (name, case)
