"""The average of a store's rows: the same bits under every plan, for growing tables and for tables
of 16 bits.
"""

import pytest
import torch
from engine.engine_cases import same_bits
from engine.test_dynamic_tables import batch_of, made, rows_by_key, tables, train

from recapp.engine.row_average import CONVERTED_ROWS, RowAverage
from recapp.kernels.row_memory import RowMemory
from recapp.transport.communicator import Comm

PLANS = ("table_wise", "row_wise", "column_wise", "data_parallel", "mixed")
CPU = torch.device("cpu")


class AsStored:
    """What a checkpoint with the average would hold."""

    def __init__(self, collection):
        self.blocks = lambda: collection.shared.blocks(averaged=True)


def averaged(kind, dynamic, dtype="fp32"):
    """All stored tensors by key, after steps whose average is updated twice."""
    comm = Comm()
    collection = made(
        comm, kind, "sgd", backend="torch", configs=tables(dynamic=dynamic, dtype=dtype)
    )
    collection.shared.keep_average()
    for step, share in enumerate((None, 1.0, None, 0.3)):
        train(collection, comm, 1, first=step)
        if share is not None:
            collection.shared.update_average(share)
    return rows_by_key(comm, AsStored(collection)), collection


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_the_average_has_the_same_bits_under_every_plan(dynamic):
    first, _ = averaged(PLANS[0], dynamic)
    assert not same_bits(first["t0", "weight"], first["t0", "raw"])
    for kind in PLANS[1:]:
        found, _ = averaged(kind, dynamic)
        assert found.keys() == first.keys()
        assert all(same_bits(found[key], first[key]) for key in first)


def test_the_average_of_a_growing_table_is_that_of_the_whole_table():
    """A key without a row counts with its start value, as its row would in a whole table."""
    grown, _ = averaged("mixed", True)
    whole, _ = averaged("mixed", False)
    for (table, tensor), values in whole.items():
        keys = grown[table, "keys"][:, 0]
        assert len(keys) > 20 and same_bits(grown[table, tensor], values[keys])


def test_a_key_without_a_row_answers_its_start_value_while_the_average_is_shown():
    _, collection = averaged("mixed", True)
    unseen = torch.arange(10**6, 10**6 + 40)
    asked = batch_of(9, 0, keys=unseen)
    with torch.no_grad():
        wanted = collection(asked).values()
        collection.shared.show_average(True)
        assert same_bits(collection(asked).values(), wanted)


def test_a_table_of_16_bits_is_averaged_in_32_and_read_in_16():
    held, collection = averaged("mixed", False, "bf16")
    wide = held["t0", "average"]
    assert wide.dtype == torch.float32 and held["t0", "raw"].dtype == torch.bfloat16
    assert same_bits(held["t0", "weight"], wide.to(torch.bfloat16))
    assert not same_bits(held["t0", "weight"].float(), wide)
    collection.shared.show_average(True)
    shown = {b.table: b.data for b in collection.shared.blocks() if b.tensor == "weight"}
    assert all(rows.dtype == torch.bfloat16 for rows in shown.values())
    for _ in range(2):  # a signal may save while the average is shown
        again = rows_by_key(Comm(), AsStored(collection))
        assert all(same_bits(again[key], held[key]) for key in held)
        collection.shared.show_average(False)


def test_rows_that_are_converted_piece_by_piece_are_averaged_alike():
    rows = CONVERTED_ROWS + 3
    memory = RowMemory(rows, 2, torch.bfloat16, CPU)
    memory.grow(rows)
    memory.rows.normal_(generator=torch.Generator().manual_seed(1))
    average = RowAverage(memory, torch.float32)
    average.update(1.0)
    before = average.rows.clone()
    assert torch.equal(before, memory.rows.float())
    memory.rows.mul_(3)
    average.update(0.25)
    assert torch.equal(average.rows, before.lerp(memory.rows.float(), 0.25))


def test_rows_that_begin_anew_have_no_average_of_the_rows_before_them():
    comm = Comm()
    _, collection = averaged("mixed", False)
    begun = torch.tensor([0, 5, 17])
    before = rows_by_key(comm, AsStored(collection))
    collection.shared.begin_rows("t0", begun)
    after = rows_by_key(comm, AsStored(collection))
    assert not same_bits(after["t0", "weight"][begun], before["t0", "weight"][begun])
    assert same_bits(after["t0", "weight"][begun], after["t0", "raw"][begun])
    others = torch.tensor([1, 6, 18])
    assert same_bits(after["t0", "weight"][others], before["t0", "weight"][others])
