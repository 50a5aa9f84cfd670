"""Models of other people's shapes: the table of their layers, and the way from training to an
artefact.
"""

import own_models
import pyarrow.parquet as pq
import pytest
import torch
from jobs import refusal, small
from own_models import MODELS, Attention, Recurrent, Sequences, TwoCollections
from torch import nn

from recapp import EmbeddingBagCollection, Export, export_model
from recapp.models.layer_table import layer_table
from recapp.stored.stored_model import read_manifest
from recapp.tables.config import EmbeddingBagConfig

FEATURES = ("C1", "C2", "C3")


def made(kind):
    """A model on the meta device's tables, as the settings would make it."""
    tables = [
        EmbeddingBagConfig(name=f, num_embeddings=20, embedding_dim=3, feature_names=[f])
        for f in FEATURES
    ]
    return kind(EmbeddingBagCollection(tables, device=torch.device("meta")), 2)


def listed(model):
    rows, failure = layer_table(model, 2, [*FEATURES, "C26"])
    assert failure is None
    assert rows[-1]["layer"] == "all"
    return {row["layer"]: row["output"] for row in rows[:-1]}


@pytest.mark.parametrize(
    ("kind", "outputs"),
    [
        (
            Recurrent,
            {
                "bags": "B x 9",
                "sequences": "2 of L x 4",
                "gru": "B x 2 x 6, 1 x B x 6",
                "score": "B x 1",
            },
        ),
        (Sequences, {"bags": "B x 9", "sequences": "2 of L x 4", "score": "B x 1"}),
        (TwoCollections, {"bags": "B x 9", "wide": "B x 1", "deep": "B x 1"}),
    ],
)
def test_outputs_of_every_kind_are_described(kind, outputs):
    assert listed(made(kind)) == outputs


@pytest.mark.parametrize("kind", MODELS)
def test_every_model_has_a_table_of_layers(kind):
    model = made(kind)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert kind is own_models.TablesOnly or listed(model)
    assert not any(m._forward_hooks for m in model.modules())
    after = model.state_dict()
    assert all(after[name].is_meta or torch.equal(after[name], v) for name, v in before.items())


class Odd(nn.Module):
    """Counts its calls in a buffer, draws numbers in any mode, and fails after its first layer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 3)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, batch):
        self.calls += torch.rand(1) + 1
        self.first(input=batch.dense_BI)
        raise RuntimeError("no batch\nlike this")


def test_a_model_that_fails_on_the_made_up_batch_ends_the_table_and_stays_as_it_was():
    model = Odd()
    random = torch.get_rng_state()
    rows, failure = layer_table(model, 2)
    assert [row["layer"] for row in rows] == ["first"]
    assert failure == "RuntimeError: no batch like this"
    assert model.calls == 0 and torch.equal(torch.get_rng_state(), random)


def options(folder, *kinds):
    """Write the option `model=NAME` of each model; the folder for `--config-dir`."""
    (folder / "mine/model").mkdir(parents=True)
    for kind in kinds:
        (folder / f"mine/model/{kind.__name__}.yaml").write_text(
            f"_target_: {kind.__module__}.{kind.__name__}\n"
        )
    return folder / "mine"


class TwoOutputs(own_models.TwoHeads):
    def forward(self, batch):
        return self.both(batch)


class Column(own_models.NoTables):
    def forward(self, batch):
        return self.score(batch.dense_BI)


@pytest.mark.parametrize(
    ("kind", "says"), [(TwoOutputs, "returned a tuple"), (Column, "returned a tensor of shape [")]
)
def test_what_is_no_logit_a_sample_is_refused_in_one_line(kind, says, jobs, tmp_path):
    mine = options(tmp_path, kind)
    _, line = refusal(
        jobs.train,
        tmp_path / "run",
        f"model={kind.__name__}",
        *small(tmp_path / "data"),
        "trainer.max_steps=1",
        folders=[mine],
        world=1,
    )
    assert says in line and "one logit for each sample, [B]" in line


def trained(jobs, folder, kind, *more, path="run"):
    mine = options(folder, kind) if not (folder / "mine").exists() else folder / "mine"
    wanted = (f"model={kind.__name__}", *small(folder / "data"), *more)
    jobs.train(folder / path, *wanted, folders=[mine])


def test_a_model_with_sequences_and_masks_trains_and_lists_its_layers(jobs, tmp_path):
    trained(jobs, tmp_path, Attention, "trainer.max_steps=2")
    said = (tmp_path / "run/rank0.out").read_text()
    assert "sequences  EmbeddingCollection     2 of L x 4" in said
    assert "the layers are listed as far as" not in said


@pytest.mark.full
@pytest.mark.parametrize(
    "kind", [k for k in MODELS if k not in (Sequences, own_models.TwoHeads, own_models.NamedOutput)]
)
def test_every_model_trains_resumes_predicts_and_is_exported(kind, jobs, tmp_path):
    trained(jobs, tmp_path, kind, "trainer.max_steps=12", path="whole")
    trained(jobs, tmp_path, kind, "trainer.max_steps=7")
    stored = tmp_path / "run/checkpoints/last.ckpt"
    trust = "trust=[own_models]"
    jobs.train(tmp_path / "run", f"ckpt_path={stored}", "trainer.max_steps=12", trust)
    whole = tmp_path / "whole/checkpoints/last.ckpt"
    assert read_manifest(stored).metrics == read_manifest(whole).metrics
    artefact = tmp_path / "artefact"
    export_model(stored, artefact, Export(compile=False), trust=["own_models"])
    scores = {}
    for source in (stored, artefact):
        output = tmp_path / f"{source.name}.parquet"
        wanted = (f"ckpt_path={source}", f"input={tmp_path}/data", f"output={output}", trust)
        jobs.run("predict", tmp_path / f"scores of {source.name}", wanted, 2)
        scores[source.name] = pq.read_table(output).column("score").to_pylist()
    assert scores["last.ckpt"] == pytest.approx(scores["artefact"], abs=1e-6)
