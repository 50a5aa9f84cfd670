"""TorchRec's quantised collections: made from a `qconfig`, also by torch's `quantize_dynamic`, with
the numbers of `quantize_embeddings` and a state dict of stored rows.
"""

import pytest
import torch
from recapp.inference.modules import (
    DEFAULT_QUANT_MAPPING,
    quantize_embeddings,
    quantize_inference_model,
    shard_quant_model,
)
from recapp.modules.embedding_configs import QuantConfig
from torch import nn
from torch.ao.quantization import PlaceholderObserver, QConfig, quantize_dynamic

import recapp as torchrec
from recapp.errors import ConfigError

pytestmark = pytest.mark.usefixtures("reference_kernels")

KEYS = ["f1", "f2"]


def tables(kind=torchrec.EmbeddingBagConfig, dim=8):
    return [
        kind(name=f"t{n}", num_embeddings=10 + n, embedding_dim=dim, feature_names=[f"f{n}"])
        for n in (1, 2)
    ]


class Model(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        self.bags = torchrec.EmbeddingBagCollection(tables(), seed=seed)
        self.words = torchrec.EmbeddingCollection(
            [
                torchrec.EmbeddingConfig(
                    name="w", num_embeddings=7, embedding_dim=4, feature_names=["f1"]
                )
            ],
            need_indices=True,
            seed=seed,
        )
        self.layer = nn.Linear(16, 2)

    def forward(self, features):
        words = self.words(features)["f1"]
        return self.layer(self.bags(features).values().float()), words.values(), words.weights()


def features():
    return torchrec.KeyedJaggedTensor(
        KEYS, torch.tensor([0, 2, 6, 3, 1]), lengths=torch.tensor([2, 0, 1, 2])
    )


def observer(dtype):
    return PlaceholderObserver.with_args(dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint4x2, torch.float16])
@pytest.mark.parametrize("output", [torch.float32, torch.float16])
def test_a_qconfig_says_what_quantize_embeddings_is_told(dtype, output):
    collection = Model().bags
    collection.qconfig = QuantConfig(
        activation=observer(output), weight=observer(dtype), per_table_weight_dtype={"t2": dtype}
    )
    made = torchrec.quant.EmbeddingBagCollection.from_float(collection)
    assert isinstance(made, torchrec.quant.embedding_modules.EmbeddingBagCollection)
    wanted = quantize_embeddings(collection, dtype, output_dtype=output)
    found = made(features())
    assert torch.equal(found.values(), wanted(features()).values())
    assert found.values().dtype == output == made.output_dtype() and found.keys() == KEYS
    assert torch.allclose(found.values().float(), collection(features()).values(), atol=0.1)
    assert made.is_weighted() is False or made.is_weighted() is None
    assert [t.name for t in made.embedding_bag_configs()] == ["t1", "t2"]
    assert set(collection.state_dict()) == set(made.state_dict())


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
def test_torchs_function_swaps_collections_for_them():
    model = Model()
    qconfig = QConfig(activation=observer(torch.float), weight=observer(torch.qint8))
    kinds = {
        torchrec.EmbeddingBagCollection: torchrec.quant.EmbeddingBagCollection,
        torchrec.EmbeddingCollection: torchrec.quant.EmbeddingCollection,
    }
    swapped = quantize_dynamic(model, dict.fromkeys(kinds, qconfig), mapping=kinds)
    assert [type(swapped.bags), type(swapped.words)] == list(kinds.values())
    wanted = quantize_inference_model(Model(), quantization_mapping=DEFAULT_QUANT_MAPPING)
    wanted.layer.load_state_dict(model.layer.state_dict())
    for found, expected in zip(swapped(features()), wanted(features()), strict=True):
        assert torch.equal(found, expected)
    assert swapped.words.need_indices() and swapped.words.embedding_dim() == 4
    sharded, plan = shard_quant_model(swapped, world_size=1)
    assert sorted(plan.tables) == ["t1", "t2", "w"]
    for found, expected in zip(sharded(features()), wanted(features()), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint4x2, torch.float16, torch.float32])
def test_stored_rows_are_saved_and_loaded(tmp_path, dtype):
    first = quantize_embeddings(Model(1), dtype)
    torch.save(first.state_dict(), tmp_path / "model.pt")
    other = quantize_embeddings(Model(2), dtype)
    assert not torch.equal(other(features())[0], first(features())[0])
    other.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    for found, expected in zip(other(features()), first(features()), strict=True):
        assert torch.equal(found, expected)
    weight = first.state_dict()["bags.embedding_bags.t2.weight"]
    assert len(weight) == 12 and (weight.dtype == torch.uint8) is (
        dtype not in (torch.float16, torch.float32)
    )
    sharded, _ = shard_quant_model(other)
    assert torch.equal(sharded(features())[0], first(features())[0])
    assert list(sharded.state_dict()) == ["layer.weight", "layer.bias"]


def test_rows_that_were_stored_otherwise_do_not_load():
    state = quantize_embeddings(Model(), torch.qint8).state_dict()
    with pytest.raises(RuntimeError, match=r"rows are stored as torch\.float16 .*: quantise alike"):
        quantize_embeddings(Model(), torch.float16).load_state_dict(state)
    del state["words.embeddings.w.weight"]
    with pytest.raises(RuntimeError, match=r"words\.embeddings\.w\.weight"):
        quantize_embeddings(Model(), torch.qint8).load_state_dict(state)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: torchrec.quant.EmbeddingBagCollection.from_float(Model().bags),
            "has no qconfig: set collection.qconfig to a QuantConfig",
        ),
        (
            lambda: torchrec.quant.EmbeddingBagCollection.from_float(Model().bags, True),
            "use_precomputed_fake_quant=True",
        ),
        (
            lambda: quantize_inference_model(Model(), {"x.Y": nn.Linear}),
            r"quantization_mapping=.*x\.Y.*: must be entries of DEFAULT_QUANT_MAPPING",
        ),
        (
            lambda: quantize_inference_model(Model(), fp_weight_dtype=torch.float16),
            r"fp_weight_dtype=torch\.float16: tables with feature processors",
        ),
    ],
)
def test_what_cannot_be_quantised_is_said(make, said):
    with pytest.raises(ConfigError, match=said):
        make()


def test_a_sequence_is_no_bag():
    words = Model().words
    words.qconfig = QConfig(activation=observer(torch.float), weight=observer(torch.qint8))
    with pytest.raises(ConfigError, match=r"no quantised form quant\.EmbeddingBagCollection"):
        torchrec.quant.EmbeddingBagCollection.from_float(words)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "from recapp.distributed.quant_embeddingbag import QuantEmbeddingBagCollectionSharder",
            "shard_quant_model",
        ),
        (
            "from recapp.inference.model_packager import load_pickle_config",
            "python -m recapp.export packs a model",
        ),
        ("from recapp.inference.modules import PredictModule", "python -m recapp.export packs"),
        (
            "from recapp.inference.state_dict_transform import state_dict_gather",
            r"recapp\.gathered_state_dict\(model\) returns whole tables",
        ),
    ],
)
def test_what_stays_out_says_at_its_import_what_to_do_instead(line, said):
    with pytest.raises(ImportError, match=said):
        exec(line)
