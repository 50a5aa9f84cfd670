"""Training steps on a GPU: nothing waits for the device but where sizes are read, and a stream for
what is early changes no bit.
"""

import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from engine.engine_cases import Head, batch_of, make_plan, make_tables
from parity.cases import RULES

from recapp.benchmarks.kernel_costs import Mirror
from recapp.engine.sharded_collection import shard_bags
from recapp.metrics import click_metrics
from recapp.optim.rules import adam
from recapp.sparse.keyed_jagged_tensor import Batch
from recapp.sparse.transfer import to_device, to_host, true_indices
from recapp.trainer.lookahead import LookAhead
from recapp.transport.batch_slots import MOST_SLOTS, BatchSlots
from recapp.transport.communicator import Comm, GpuSideStream

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

WORLDS = [
    1,
    "mirror",
    pytest.param(
        2,
        marks=pytest.mark.skipif(
            torch.cuda.device_count() < 2, reason="NCCL wants a GPU for each rank"
        ),
    ),
]
WARM = 4
STEPS = 12


def _rank(rank, world, folder, fn, args):
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl", init_method=f"file://{folder}/store", rank=rank, world_size=world, device_id=device
    )
    torch.save(fn(Comm(dist.new_group(), device), *args), f"{folder}/{rank}")
    dist.destroy_process_group()


def on_gpus(world, fn, *args):
    """What `fn(comm, *args)` returns on each rank; of the mirror's two, on the one that is
    there.
    """
    if world in (1, "mirror"):
        device = torch.device("cuda", torch.cuda.current_device())
        return [fn(Mirror(device) if world == "mirror" else Comm(None, device), *args)]
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_rank, (world, folder, fn, args), world)
        return [torch.load(f"{folder}/{rank}") for rank in range(world)]


WITH_ALL_ROWS = {**RULES, "l2_all_rows": adam(l2_all_rows=1e-3)}


def batches(tables, rank, steps, rows):
    """As a loader has them: on the host."""
    return [
        Batch(
            torch.randn(rows, 1),
            batch_of(tables, rows, 100 * step + rank),
            (torch.rand(rows) > 0.5).float(),
        )
        for step in range(steps)
    ]


def trained(comm, backend, kind, mode, rule, depth, rows=3000, strict=False):
    """Losses and rows. `strict`: with an error for whatever waits for the device in steps after the
    first.
    """
    # even, so that both ranks of the mirror have rows of the same numbers
    tables = make_tables(rows=(20_000, 3000, 8))
    plan = make_plan(kind, tables, comm.world, mode=mode)
    collection = shard_bags(tables, plan, comm, WITH_ALL_ROWS[rule], 1, backend)
    head = Head(collection).to(comm.device)
    metrics = [m.to(comm.device) for m in click_metrics().values()]
    optimizer = torch.optim.Adam(head.parameters())
    losses = []
    torch.manual_seed(comm.rank)
    plain = batches(tables, comm.rank, STEPS, rows)

    moved = BatchSlots(comm.device).to_device
    loader = (
        LookAhead(plain, depth, lambda: [collection.shared], moved, comm.side)
        if depth
        else map(moved, plain)
    )
    for step, batch in enumerate(loader):
        if strict and step == WARM:
            torch.cuda.set_sync_debug_mode("error")
        logits_B = head(batch.sparse)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits_B, batch.labels_B)
        for metric in metrics:
            metric.update(logits_B.detach(), batch.labels_B)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    torch.cuda.set_sync_debug_mode("default")
    collection.shared.forget_ahead()
    return [torch.stack(losses).cpu(), *(store.weights.cpu() for store in collection.shared.stores)]


@pytest.fixture(autouse=True)
def waiting_is_allowed_afterwards():
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(params=["triton", "torch"])
def backend(request):
    if request.param == "triton":
        pytest.importorskip("triton", reason="triton is not installed")
    return request.param


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(
    ("kind", "mode", "rule"),
    [
        ("row_wise", "unique", "rowwise_adagrad"),
        ("row_wise", "pooled", "adam"),
        ("column_wise", "unique", "rowwise_adagrad"),
    ],
)
def test_a_step_waits_for_the_device_only_where_sizes_are_read(
    world, backend, kind, mode, rule, depth
):
    if world == "mirror" and kind != "row_wise":
        pytest.skip("the mirror's ranks have the same rows only where tables are cut by rows")
    assert on_gpus(world, trained, backend, kind, mode, rule, depth, 3000, True)


@pytest.mark.parametrize("world", WORLDS)
def test_missed_steps_wait_for_nothing(world):
    pytest.importorskip("triton", reason="triton is not installed")
    assert on_gpus(world, trained, "triton", "row_wise", "unique", "l2_all_rows", 0, 3000, True)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("kind", "mode"), [("row_wise", "unique"), ("row_wise", "pooled")])
def test_looking_ahead_on_a_stream_changes_no_bit(world, backend, kind, mode):
    plain = on_gpus(world, trained, backend, kind, mode, "rowwise_adagrad", 0, 20_000)
    for depth in (1, 2, 1):
        ahead = on_gpus(world, trained, backend, kind, mode, "rowwise_adagrad", depth, 20_000)
        assert all(
            torch.equal(a, b)
            for there, here in zip(plain, ahead, strict=True)
            for a, b in zip(there, here, strict=True)
        )


def test_one_function_waits_and_torch_tells_of_the_others():
    mask = torch.rand(1000, device="cuda") < 0.3
    expected = mask.cpu().nonzero().view(-1)
    torch.cuda.set_sync_debug_mode("error")
    assert torch.equal(to_host(true_indices(mask)), expected)
    assert to_host(to_device([3, 1, 2], mask.device) + 1).tolist() == [4, 2, 3]
    for waits in (
        lambda: mask.nonzero(),
        lambda: mask.cpu(),
        lambda: torch.tensor([1], device="cuda"),
    ):
        with pytest.raises(RuntimeError, match="synchroniz"):
            waits()


def test_a_graph_of_lightnings_loop_has_the_bits_of_its_launched_steps(tmp_path, capsys):
    pytest.importorskip("triton", reason="triton is not installed")
    from kernels.test_recorded_training import Run

    runs = [
        Run(tmp_path / str(graphs), graphs=graphs, accelerator="gpu") for graphs in (False, True)
    ]
    for run in runs:
        run.strategy.capture = None  # a CUDA graph
        run.fit()
    assert "launched one by one" not in capsys.readouterr().err
    launched, recorded = runs
    assert all(map(torch.equal, recorded.tensors(), launched.tensors()))
    assert recorded.log.rows == launched.log.rows


def test_graphs_of_a_models_calls_have_the_bits_of_its_launched_calls(capsys):
    pytest.importorskip("triton", reason="triton is not installed")
    from kernels.test_module_graph import RECORDED, Loop, equal, ragged

    device = torch.device("cuda", torch.cuda.current_device())
    numbers = [[9, 6, 4], [3, 6, 7], [12, 6, 5], [10, 6, 1], [14, 6, 9], [0, 6, 0], [15, 6, 2]]
    samples = [ragged(seed, per_F).to(device) for seed, per_F in enumerate([*numbers, [99, 6, 1]])]
    recorded = Loop(device=device)
    assert equal(recorded, Loop(False, device=device), samples)
    assert recorded.graph._steps[0].forward and len(numbers) > RECORDED
    assert "launched one by one" not in capsys.readouterr().err


def test_memory_of_the_side_is_not_lent_again_before_it_was_used():
    """A long computation holds compute back; what it will read is freed at once, and the side would
    like the memory.
    """
    comm = Comm(None, torch.device("cuda", torch.cuda.current_device()))
    assert isinstance(comm.side, GpuSideStream)
    busy = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    with comm.side.beside():
        made = torch.full((1 << 20,), 7, device="cuda")
    for _ in range(30):
        busy = busy @ busy * 1e-3
    comm.side.hand_over([made])
    read = made.clone()
    del made
    with comm.side.beside():
        for _ in range(8):
            torch.zeros(1 << 20, dtype=torch.int64, device="cuda")
    assert bool((read == 7).all())


def test_batches_go_through_slots_while_what_reads_them_is_late():
    device = torch.device("cuda", torch.cuda.current_device())
    tables = make_tables(rows=(2000, 300, 8))
    plain = batches(tables, 0, 3 * MOST_SLOTS, 500)
    slots = BatchSlots(device)
    busy = torch.randn(4096, 4096, device=device)
    torch.cuda.synchronize()
    seen = []
    for batch in plain:
        busy = busy @ busy * 1e-3
        there = slots.to_device(batch)
        seen.append([tensor.clone() for tensor in there.tensors()])
    for batch, copies in zip(plain, seen, strict=True):
        for tensor, there in zip(batch.tensors(), copies, strict=True):
            assert torch.equal(tensor, there.cpu())
    assert len(slots._slots) <= MOST_SLOTS
