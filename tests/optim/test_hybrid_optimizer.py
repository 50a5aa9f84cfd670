"""One optimiser object for dense parameters and tables."""

import torch
from torch.optim.lr_scheduler import LambdaLR

from recapp.optim.optimizer import HybridOptimizer, hybrid


class Collection:
    """What the optimiser sees of a sharded collection: its param group."""

    def __init__(self, lr):
        self.param_group = {"params": [], "lr": lr, "name": "sparse/sgd"}
        self.param_groups = [self.param_group]


def dense(lr=0.1, groups=1):
    return torch.optim.Adam(
        [{"params": [torch.nn.Parameter(torch.ones(2))]} for _ in range(groups)], lr
    )


def test_groups_of_tables_stand_beside_the_dense_ones_under_names_of_their_own():
    one = hybrid(dense(), [Collection(0.5)])
    assert [(g["name"], g["lr"]) for g in one.param_groups] == [("dense", 0.1), ("sparse/sgd", 0.5)]
    many = hybrid(dense(groups=2), [Collection(0.5), Collection(0.6)])
    assert [g["name"] for g in many.param_groups] == [
        "dense/0",
        "dense/1",
        "sparse/sgd/0",
        "sparse/sgd/1",
    ]


def test_a_schedule_moves_the_very_number_that_the_fused_update_reads():
    collection = Collection(0.5)
    optimizer = hybrid(dense(), [collection])
    schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    seen = []
    for _ in range(3):
        seen.append((optimizer.param_groups[0]["lr"], collection.param_group["lr"]))
        optimizer.step()
        schedule.step()
    assert seen == [(0.1, 0.5), (0.05, 0.25), (0.1 / 3, 0.5 / 3)]


def test_a_step_runs_the_closure_once_with_gradients_and_moves_the_dense_part():
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = HybridOptimizer(torch.optim.SGD([parameter], 0.1), [])
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = (parameter * torch.tensor([1.0, 2.0])).sum()
        loss.backward()
        return loss

    with torch.no_grad():
        assert float(optimizer.step(closure)) == 3.0
    assert calls == [True]
    torch.testing.assert_close(parameter.detach(), torch.tensor([0.9, 0.8]))
    optimizer.zero_grad()
    assert parameter.grad is None


def step(optimizer):
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.full_like(p, 0.5)
    optimizer.step()


def test_state_survives_a_round_trip_and_the_updates_keep_reading_their_own_group(tmp_path):
    first = dense()
    collection = Collection(0.5)
    optimizer = hybrid(first, [collection])
    collection.param_group["lr"] = 0.125
    optimizer.param_groups[0]["lr"] = 0.025
    step(optimizer)
    torch.save(optimizer.state_dict(), tmp_path / "state")
    again = dense()
    fresh = Collection(0.5)
    restored = hybrid(again, [fresh])
    restored.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    assert fresh.param_group["lr"] == 0.125 and restored.param_groups[1] is fresh.param_group
    assert (
        restored.param_groups[0] is again.param_groups[0] and again.param_groups[0]["lr"] == 0.025
    )
    for o in (optimizer, restored):
        step(o)
    a = first.param_groups[0]["params"][0]
    b = again.param_groups[0]["params"][0]
    moved = (a - 1).abs()
    assert torch.all(moved > 0) and len(restored.state) == 1
    torch.testing.assert_close(
        restored.state[b]["exp_avg"], optimizer.state[a]["exp_avg"], rtol=0, atol=0
    )
    assert restored.state[b]["step"] == 2
    LambdaLR(restored, lambda step: 0.5)
    assert fresh.param_group["lr"] == 0.0625  # a schedule goes on from the restored rate


def test_groups_named_once_keep_their_names_in_another_optimiser():
    groups = [{"params": [], "lr": 0.1, "name": "sparse/sgd"} for _ in range(2)]
    for _ in range(2):
        made = HybridOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1), groups)
        assert [g["name"] for g in made.param_groups] == ["dense", "sparse/sgd/0", "sparse/sgd/1"]
