"""Tables that begin anew at each epoch, in runs on one rank under several plans."""

import pytest
import torch
from engine.test_dynamic_tables import rows_by_key
from trainer.runs import compose, fit

from recapp.errors import ConfigError
from recapp.optim.named_rules import tables_that_restart
from recapp.optim.rules import adam, rowwise_adagrad
from recapp.tables.initial import start_hash, start_values
from recapp.transport.communicator import Comm

EPOCH = 4
SHORT = (f"trainer.limit_train_batches={EPOCH}", "trainer.limit_val_batches=1")
ADAM = ("optimizer=adam", "optimizer.sparse.lr=0.01")
GROWS = ("tables=dynamic", "tables.init_range=0.05")


def run(logs, folder, steps, *more, tables=("*",), plan="mixed", ckpt_path=None):
    """Rows and state of all tables after some steps, the dense part, and the trainer."""
    folder.mkdir(parents=True, exist_ok=True)
    named = f"optimizer.restart_tables=[{','.join(map(repr, tables))}]"
    settings = compose(logs, *SHORT, *more, named, f"trainer.max_steps={steps}", f"+plan={plan}")
    _, trainer, module = fit(settings, folder, ckpt_path=ckpt_path)
    (shared,) = trainer.strategy.sharded_tables()
    dense = {name: value.clone() for name, value in module.model.named_parameters()}
    return blocks_of(shared), dense, trainer


def blocks_of(shared):
    if any(group.dynamic for group in shared.state.layout.groups):
        return rows_by_key(Comm(), shared)
    found = {}
    for b in shared.blocks():
        whole = found.setdefault((b.table, b.tensor), torch.zeros(b.shape, dtype=b.data.dtype))
        row_N = torch.arange(b.rows.start, b.rows.stop)
        row_N = row_N if b.order is None else b.order.rows_at(row_N)
        whole[row_N, b.cols.start : b.cols.stop] = b.data[:]
    return found


def same(found, wanted):
    return found.keys() == wanted.keys() and all(
        torch.equal(found[key], wanted[key]) for key in wanted
    )


def test_named_tables_and_their_state_begin_anew_and_the_rest_stays(logs, tmp_path):
    settings = "optimizer.dense.lr=0"
    before, dense, _ = run(logs, tmp_path / "one", EPOCH, settings, tables=())
    rows, after, trainer = run(logs, tmp_path / "two", EPOCH + 1, settings, tables=["C1*", "C3"])
    assert same(after, dense)
    (shared,) = trainer.strategy.sharded_tables()
    config = {t.name: t for t in shared.tables()}
    seed = shared.seeds["C3"]
    start = start_values(torch.arange(60), config["C3"], seed, range(16), torch.float32, epoch=1)
    first = start_values(torch.arange(60), config["C3"], seed, range(16), torch.float32)
    untouched_N = rows["C3", "sum"][:, 0] == 0  # by the only step of the epoch
    assert 0 < int(untouched_N.sum()) < 60
    assert torch.equal(rows["C3", "weight"][untouched_N], start[untouched_N])
    assert not torch.equal(start, first) and float(start.abs().max()) < 60**-0.5
    assert bool((rows["C2", "sum"] >= before["C2", "sum"]).all())  # goes on
    assert not bool((rows["C12", "sum"] >= before["C12", "sum"]).all())


def test_without_a_later_epoch_nothing_begins_anew(logs, tmp_path):
    plain = run(logs, tmp_path / "plain", EPOCH, tables=())
    again = run(logs, tmp_path / "again", EPOCH)
    assert same(again[0], plain[0]) and same(again[1], plain[1])


@pytest.mark.full
@pytest.mark.parametrize(
    "more",
    [pytest.param((), marks=pytest.mark.full), ADAM, pytest.param(GROWS, marks=pytest.mark.full)],
    ids=["rowwise_adagrad", "adam", "dynamic"],
)
def test_a_resumed_run_is_the_unbroken_one_under_another_plan(logs, tmp_path, more):
    rows, dense, _ = run(logs, tmp_path / "whole", 2 * EPOCH + 2, *more)
    for stop in (EPOCH, EPOCH + 2):
        at = tmp_path / str(stop)
        run(logs, at / "half", stop, *more, plan="row_wise")
        last = at / "half/checkpoints/last.ckpt"
        found = run(logs, at / "rest", 2 * EPOCH + 2, *more, plan="column_wise", ckpt_path=last)
        assert same(found[0], rows) and same(found[1], dense)


def test_corrections_of_moments_begin_anew_too(logs, tmp_path):
    """A first update of Adam is as long as the rate, whatever its gradient."""
    rows, _, trainer = run(logs, tmp_path, EPOCH + 1, *ADAM)
    (shared,) = trainer.strategy.sharded_tables()
    (config,) = [t for t in shared.tables() if t.name == "C3"]
    start = start_values(
        torch.arange(60), config, shared.seeds["C3"], range(16), torch.float32, epoch=1
    )
    moved = (rows["C3", "weight"] - start).abs()
    touched_N = rows["C3", "exp_avg_sq"].abs().sum(1) > 1e-8
    assert touched_N.any()
    torch.testing.assert_close(moved[touched_N].median(), torch.tensor(0.01), rtol=0.05, atol=0.0)


def test_a_key_of_a_dynamic_table_keeps_its_row(logs, tmp_path):
    before, _, _ = run(logs, tmp_path / "one", EPOCH, *GROWS)
    after, _, _ = run(logs, tmp_path / "two", EPOCH + 1, *GROWS)
    old = set(before["C1", "keys"][:, 0].tolist())
    assert old <= set(after["C1", "keys"][:, 0].tolist())


def test_an_epoch_has_start_values_of_its_own():
    class Table:
        name = "C1"
        member_of = None

    assert len({start_hash(Table, 1, epoch) for epoch in range(50)}) == 50
    assert start_hash(Table, 1, 0) == start_hash(Table, 1)


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["D*"], r"optimizer.restart_tables: D\*: no such table; "),
        (["C1"], r"restart_tables=\[C1\]: C2 does not begin anew, but tables of its rule adam do"),
    ],
)
def test_tables_that_cannot_begin_anew_are_refused(patterns, message):
    rules = {"C1": adam(), "C2": adam(), "D": rowwise_adagrad(), "E1": rowwise_adagrad()}
    rules.pop("D")
    with pytest.raises(ConfigError, match=message):
        tables_that_restart(patterns, rules)


def test_globs_and_names_choose_tables():
    rules = {"C1": adam(), "C2": adam(0.1), "E1": rowwise_adagrad(), "E2": rowwise_adagrad()}
    assert tables_that_restart(["E1", "C1*"], rules) == ["C1", "E1"]
    assert tables_that_restart(["*"], rules) == list(rules)
