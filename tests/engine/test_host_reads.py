"""Functions of a training step do not come to wait for a GPU: what they read is listed here."""

from pathlib import Path

import pytest
from gpu_first.host_reads import host_reads

PACKAGE = Path(__file__).parents[2] / "recapp"
OF_A_STEP = (
    *("engine/*.py", "graphs/*.py", "trainer/*.py", "parallel.py"),
    *("data_parallel.py", "optim/optimizer.py"),
    "sparse/transfer.py",
    *("kernels/links.py", "kernels/reference.py", "kernels/sums.py", "kernels/row_memory.py"),
    "kernels/triton_*.py",
    *("tables/ids.py", "tables/bags_of_samples.py", "tables/positions.py"),
    *("transport/communicator.py", "transport/step_messages.py"),
)
ALLOWED = {  # the reads of a function, of numpy arrays too: they may become fewer
    "engine/admission.py": {
        "Admission._evict": 1,
        "Admission._make_room": 1,
        "Admission._seen_often": 2,
        "Admission.changes": 2,
        "Admission.decide": 2,
        "Admission.expired": 2,
        "_first_of_parts": 1,
    },
    "engine/batch_places.py": {
        "heads_of_requests": 3,
        "in_regions": 2,
    },
    "engine/dynamic_keys.py": {
        "ExactCounter.blocks": 1,  # of a checkpoint, like the next
        "ExactCounter.keys_of_stretches": 3,
        "KeySlots.loaded": 2,
        "KeySlots.most": 1,  # of numbers that have arrived
        "KeySlots.of_pieces": 2,
        "KeySlots.used": 1,
    },
    "engine/dynamic_store.py": {
        "DynamicStore._admit": 1,
        "DynamicStore._only_read": 1,
        "DynamicStore._write_start_values": 1,
        "DynamicStore.rows_of_stretches": 1,
    },
    "engine/exchange_modes.py": {
        "ServedRequests.serve": 2,
        "UniqueRequests.write_requests": 1,
    },
    "engine/fused_integers.py": {
        "FusedBatch._cut_to_pieces": 3,
        "FusedBatch.read_here": 1,
        "FusedBatch.send": 2,
        "FusedBatch.serve": 2,
        "FusedBatch._link_sums": 1,
        "FusedBatch._search": 2,  # whether the device has stopped, where the host chooses keys
        "FusedIntegers.__init__": 3,
    },
    "engine/fused_update.py": {
        "_from_ranks": 1,
    },
    "engine/lookup.py": {
        "LocalLookup.__init__": 4,
        "LocalLookup._form": 1,
        "LocalLookup._group_form": 1,
        "_ids_of_slots": 2,
        "send_back": 1,
    },
    "engine/read_only_store.py": {
        "KeyedStore._with_start_rows": 2,
        "KeyedStore.locate": 1,
    },
    "graphs/recorded_batch.py": {
        "DeviceVerdict.settle": 1,
    },
    "engine/requests.py": {
        "Requests._check_room": 1,
        "Requests._finish": 1,
        "_raise_together": 2,
    },
    "engine/sharded_state.py": {
        "_GivenKeys.of": 3,
        "_covers": 1,
        "_fault_of_ranks": 2,
        "_fill": 2,
        "_has_rows": 1,
    },
    "engine/sharded_tables.py": {
        "ShardedTables._trained": 2,
        "ShardedTables.advance_ahead": 1,
    },
    "engine/row_statistics.py": {
        "RowStatistics._exchange": 4,
        "RowStatistics.mean_squares": 1,
    },
    "engine/state.py": {
        "EngineState._where": 1,
        "EngineState.bags": 2,
        "Outputs.parts": 1,
        "Outputs.where": 2,
    },
    "engine/table_numbers.py": {
        "pieces_on_device": 1,
        "numbers_of_pieces": 4,
        "numbers_of_slots": 3,
        "numbers_of_tables": 1,
    },
    "kernels/links.py": {
        "Bags.pairs": 1,
        "Bags.per_bag": 2,
        "Links.exact": 3,
        "Routes.key_dtype": 2,
        "group": 1,
    },
    "kernels/reference.py": {
        "SortedIndex._hold": 2,
        "SortedIndex.find": 1,
        "SortedIndex.find_or_insert": 1,
        "SortedIndex.remove": 1,
        "SortedIndex.slots_of": 1,
        "SortedIndex.slots_of_stretches": 1,
        "TorchBackend.catch_up": 2,
        "TorchBackend.find_pieces": 1,
        "TorchBackend.route_bags": 1,
        "TorchBackend.route_rows": 1,
        "TorchBackend.serve": 5,
        "rows_behind": 2,
    },
    "kernels/sums.py": {
        "bag_sums": 4,
    },
    "kernels/triton_key_index.py": {
        "DeviceKeyIndex._all_slots": 1,
        "DeviceKeyIndex.find_or_insert": 1,
    },
    "optim/optimizer.py": {
        "_norm": 1,
    },
    "sparse/transfer.py": {
        "copy_to_device": 1,
        "true_indices": 2,
    },
    "tables/bags_of_samples.py": {
        "sequences_of_samples": 1,
    },
    "tables/ids.py": {
        "IdRules._check_outside": 4,
        "IdRules._in_one_pass": 1,
        "IdRules.count_changed": 1,
        "_at_most_hot": 1,
        "_drop": 2,
    },
    "tables/positions.py": {
        "moved_rows": 1,
    },
    "trainer/datamodule.py": {
        "ScoreWriter.on_predict_batch_end": 2,
    },
    "trainer/recorded_steps.py": {
        "RecordedSteps.__call__": 1,
    },
    "transport/communicator.py": {
        "GpuSideStream.hand_over": 1,
    },
    "transport/step_messages.py": {
        "MessageLayout.answers": 2,
        "MessageLayout.gradients": 2,
        "swap_counts": 1,
    },
}


def test_no_function_of_a_step_reads_more_from_the_device_than_before():
    more = []
    for pattern in OF_A_STEP:
        for path in PACKAGE.glob(pattern):
            file = path.relative_to(PACKAGE).as_posix()
            allowed = ALLOWED.get(file, {})
            more += [
                f"{file}: {name} has {n} reads of the device, {allowed.get(name, 0)} are allowed"
                for name, n in host_reads(path.read_text()).items()
                if n > allowed.get(name, 0)
            ]
    assert not more


@pytest.mark.parametrize(
    "line",
    [
        "n = count_U.sum().item()",
        "n = int(count_U[0])",
        "n = int(x.lengths_M.max())",
        "n = float(loss.mean())",
        "list_U = row_U.tolist()",
        "a = torch.repeat_interleave(a_K, n_K)",
        "a = a_K.repeat_interleave(n_K, dim=0)",
        "a = row_N[row_N >= 0]",
        "a = row_N[~(there_N & here_N)]",
        "mask = row_N == 1; a = row_N[mask]",
        "n_K = to_host(n_K).numpy()",
        "index_K = true_indices(keep_N)",
        "a_K.record_stream(s)",
    ],
)
def test_a_read_is_found_in_a_method(line):
    body = "".join(f"    {part.strip()}\n    " for part in line.split(";"))
    assert host_reads(f"class A:\n  def f(self):\n    {body}\n") == {"A.f": 1}


@pytest.mark.parametrize(
    "line",
    [
        "n = int(text)",
        "n = len(row_U)",
        "a = torch.repeat_interleave(a_K, n_K, output_size=n)",
        "a = row_N[first:last]",
        "a = torch.where(row_N >= 0, row_N, 0)",
        "row_N[row_N < 0] = 0",
        "a = names[world == 1]",
    ],
)
def test_what_reads_nothing_is_not_found(line):
    assert host_reads(f"def f():\n    {line}\n") == {}
