"""Tables of an artefact are read as they were stored: on one rank from the mapped files, on several
under any plan, bit for bit.
"""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine.test_random_mixtures import batch_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inference.stored_mixtures import mapped, oracle, write
from parity.cases import sharding

from recapp.engine.read_only_store import values_of
from recapp.errors import ArtefactError
from recapp.sharding.sharding_plan import ShardingPlan
from recapp.stored.manifest import ArtefactManifest
from recapp.tables.collections import embedding_tables
from recapp.tables.positions import ROW_ORDERS


def test_one_rank_maps_the_files_and_copies_nothing(tmp_path, reference_kernels):
    artefact = write(tmp_path, 5)
    model = mapped(artefact, 5)
    stores = [s for s in model.modules() if hasattr(s, "held")]
    assert stores
    held = sum(values_of(store.held).nbytes for store in stores)
    assert held == sum(e["bytes"] for f, e in artefact.files.items() if f.endswith(".bin"))
    maps = [
        line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line
    ]
    assert {line.split()[1] for line in maps} == {"rw-p"}  # private: pages are shared till written
    assert len(maps) >= len({t.file for t in artefact.tables})


@settings(
    max_examples=12,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.integers(0, 10_000))
def test_any_mixture_answers_what_is_stored(tmp_path_factory, reference_kernels, seed):
    _compare_with_oracle(tmp_path_factory.mktemp("rows"), seed)


@pytest.mark.full
@settings(max_examples=25)
@given(st.integers(0, 10_000))
def test_any_mixture_answers_what_is_stored_with_compiled_kernels(tmp_path_factory, seed):
    _compare_with_oracle(tmp_path_factory.mktemp("rows"), seed)


def _compare_with_oracle(folder, seed):
    model = mapped(write(folder, seed), seed)
    wanted = oracle(seed)
    for rows in (5, 1, 0):
        batch = batch_of(rows, seed)
        with torch.no_grad():
            torch.testing.assert_close(
                model(batch).double(), wanted(batch).double(), rtol=1e-5, atol=1e-6
            )


def _on_ranks(comm, artefact, seed, kinds):
    rng = random.Random(f"plan {seed}/{comm.world}")
    tables = embedding_tables(mapped(artefact, seed))
    cut = {}
    for t in tables:
        order = "natural" if t.dynamic else rng.choice(ROW_ORDERS)
        made = sharding(rng.choice(kinds), t, comm.world, rng, "unique")
        cut[t.name] = replace(made, row_order=order)
    model = mapped(artefact, seed, comm, ShardingPlan(cut, comm.world))
    with torch.no_grad():
        found = model(batch_of(6, seed + comm.rank))
    held = sum(s.nbytes.rows for s in model.modules() if hasattr(s, "held"))
    return found, held


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("seed", range(6))
def test_several_ranks_answer_the_same_bits_as_one(ranks, tmp_path, seed, world, reference_kernels):
    artefact = write(tmp_path, seed)
    kinds = ["table_wise", "row_wise", "column_wise", "table_row_wise", "random"]
    found = ranks.run(_on_ranks, world, artefact, seed, kinds)
    alone = mapped(artefact, seed)
    for rank, (values, _) in enumerate(found):
        with torch.no_grad():
            wanted = alone(batch_of(6, seed + rank))
        assert torch.equal(values, wanted)


def test_each_rank_holds_its_part_alone(ranks, tmp_path, reference_kernels):
    artefact = write(tmp_path, 3)
    found = ranks.run(_on_ranks, 4, artefact, 3, ["row_wise"])
    stored = sum(int(entry["bytes"]) for entry in artefact.files.values())
    assert sum(held for _, held in found) <= stored
    assert max(held for _, held in found) < stored


def test_a_file_that_is_shorter_than_its_tables_is_named(tmp_path):
    artefact = write(tmp_path, 4)
    file = artefact.tables[0].file
    size = artefact.files[file]["bytes"] // 2
    (tmp_path / file).write_bytes((tmp_path / file).read_bytes()[:size])
    shorter = ArtefactManifest(
        tmp_path, {}, {**artefact.files, file: {"bytes": size, "crc32": ""}}, artefact.tables
    )
    with pytest.raises(ArtefactError, match="has rows that"):
        mapped(shorter, 4)


def test_a_file_of_keys_that_is_none_is_named(tmp_path):
    artefact = write(tmp_path, 3)
    file = next(t.keys for t in artefact.tables if t.keys is not None)
    (tmp_path / file).write_bytes((tmp_path / file).read_bytes() + b"abc")
    size = artefact.files[file]["bytes"] + 3
    odd = ArtefactManifest(
        tmp_path, {}, {**artefact.files, file: {"bytes": size, "crc32": ""}}, artefact.tables
    )
    with pytest.raises(ArtefactError, match="has keys that"):
        mapped(odd, 3)
