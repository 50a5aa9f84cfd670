"""TorchRec's `quantize_embeddings` and `shard_quant_model`: fewer bits on one process, the same
bits on several.
"""

import pytest
import torch
from engine.test_random_mixtures import Mixture, batch_of
from torch import nn

from recapp.compat.torchrec.quantised import quantize_embeddings, shard_quant_model
from recapp.errors import ConfigError
from recapp.inference.held_tables import stored, values
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.tables.collections import EmbeddingBagCollection
from recapp.tables.config import DataType, EmbeddingBagConfig

TYPES = {torch.qint8: DataType.INT8, torch.quint4x2: DataType.INT4, torch.float16: DataType.FP16}


def rounded(model, data_type):
    for part in model.parts:
        for t in part.tables():
            weight = part.weight(t.name)
            weight.data = values(stored(weight.data, data_type), weight.dtype)
    return model


@pytest.mark.parametrize("dtype", list(TYPES))
@pytest.mark.parametrize("inplace", [False, True])
def test_a_model_answers_by_rounded_rows(reference_kernels, dtype, inplace):
    model = Mixture(11)
    wanted = rounded(Mixture(11), TYPES[dtype])
    made = quantize_embeddings(model, dtype, inplace)
    assert (made is model) is inplace
    batch = batch_of(7, 1)
    with torch.no_grad():
        torch.testing.assert_close(made(batch).double(), wanted(batch).double())
        if not inplace:
            assert torch.equal(model(batch), Mixture(11)(batch))


def test_tables_may_have_widths_of_their_own_and_a_collection_alone_is_a_model(reference_kernels):
    tables = [
        EmbeddingBagConfig(name=n, num_embeddings=9, embedding_dim=4, feature_names=[n])
        for n in "ab"
    ]
    collection = EmbeddingBagCollection(tables)
    made = quantize_embeddings(collection, torch.qint8, per_table_weight_dtype={"b": torch.float32})
    ids = KeyedJaggedTensor(["a", "b"], torch.tensor([3, 4]), lengths=torch.tensor([1, 1]))
    with torch.no_grad():
        found = made(ids).to_dict()
    assert torch.equal(found["b"][0], collection.weight("b")[4])
    row = values(stored(collection.weight("a").detach()[3:4], DataType.INT8))
    assert torch.equal(found["a"], row) and not torch.equal(
        found["a"][0], collection.weight("a")[3]
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"dtype": torch.int32}, r"dtype=torch\.int32: must be one of torch\.qint8"),
        (
            {"output_dtype": torch.int8},
            r"output_dtype=torch\.int8: must be one of torch\.float32, ",
        ),
        (
            {"additional_qconfig_spec_keys": [nn.Linear]},
            "of Linear: recapp quantises EmbeddingBagCollection as quant",
        ),
        (
            {"additional_mapping": {EmbeddingBagCollection: nn.Linear}},
            "of EmbeddingBagCollection: recapp quantises EmbeddingBagCollection as quant",
        ),
        (
            {"per_table_weight_dtype": {"x": torch.qint8}},
            "per_table_weight_dtype: x: the model has the tables",
        ),
    ],
)
def test_what_cannot_be_is_said(arguments, said):
    with pytest.raises(ConfigError, match=said):
        quantize_embeddings(Mixture(11), **({"dtype": torch.qint8} | arguments))
    with pytest.raises(ConfigError, match="make the model by quantize_embeddings first"):
        shard_quant_model(Mixture(11))
    made = quantize_embeddings(Mixture(11), torch.qint8)
    with pytest.raises(ConfigError, match="world_size=3, but there are 1 ranks"):
        shard_quant_model(made, world_size=3)
    with pytest.raises(ConfigError, match="sharders would have no effect here"):
        shard_quant_model(made, sharders=[])
    with pytest.raises(ConfigError, match="ddr_cap=9: GPU ranks keep no rows in the host's memory"):
        shard_quant_model(made, compute_device="cuda", ddr_cap=9)


def on_ranks(comm, memory):
    model = quantize_embeddings(Mixture(12), torch.qint8)
    made, plan = shard_quant_model(model, comm.world, device_memory_size=memory, env=comm.group)
    again, _ = shard_quant_model(model, comm.world, ddr_cap=memory, env=comm.group)
    batch = batch_of(6, comm.rank)
    halves = quantize_embeddings(Mixture(12), torch.qint8, output_dtype=torch.float16)
    narrow, _ = shard_quant_model(halves, comm.world, env=comm.group)
    assert {part.output_dtype() for part in narrow.parts} == {torch.float16}
    with torch.no_grad():
        assert torch.equal(again(batch), made(batch))
        return made(batch), model(batch), plan.world_size


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_answer_the_bits_of_one_process(ranks, world):
    for found, wanted, size in ranks.run(on_ranks, world, 4000):
        assert torch.equal(found, wanted) and size == world
