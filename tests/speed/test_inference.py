"""How fast a model answers: everybody scores the same rows alike."""

from pathlib import Path

import numpy as np
import pytest
import torch
from trainer.runs import compose, fit, make_logs

from recapp.inference_bench import stored_models

from .inference import no_twin, plain_model, torchrec_spec, write_batches
from .lab import Settings
from .mapped_memory import memory_of_two


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A tiny DLRM, trained for three steps, as an artefact."""
    folder = tmp_path_factory.mktemp("served")
    fit(compose(make_logs(folder / "logs"), "trainer.max_steps=3"), folder / "run")
    path = folder / "run" / "checkpoints" / "last.ckpt"
    settings = Settings(verb="inference", quantize=("none",), batch_size=(40, 8))
    (model,) = stored_models(path, settings, folder)
    return model


@pytest.mark.full
def test_plain_torch_scores_the_rows_as_the_artefact_does(stored):
    plain = plain_model(stored.path)
    batches = stored.batches[0]
    assert len(batches.raw) >= 2
    for batch in batches.decoded:
        with torch.no_grad():
            torch.testing.assert_close(stored.eager.scores(batch), torch.sigmoid(plain(batch)))


@pytest.mark.full
def test_torchrec_gets_the_layers_and_the_rows_of_the_model(stored, tmp_path):
    plain = plain_model(stored.path)
    batches = stored.batches[1].decoded[:3]
    file = tmp_path / "8.npz"
    write_batches(plain, batches, file)
    assert no_twin(plain) == ""
    spec = torchrec_spec(plain, "int8", {"8": file})
    assert spec["model"] == {"dense": 13, "bottom": [8, 16], "top": [8, 1]}
    assert len(spec["tables"]) == len(spec["features"]) == 26
    arrays = np.load(spec["batches"]["8"])
    rows = plain.embedding_bag_collection.id_rules(batches[1].sparse)
    first = arrays["ids_of_batch"][0]
    ids = arrays["ids"][first : first + arrays["ids_of_batch"][1]]
    assert ids.tolist() == rows.rows_L.tolist()
    assert arrays["lengths"][1].tolist() == rows.lengths_FB.flatten().tolist()
    assert arrays["dense"].shape == (3, 8, 13)
    for number, (_, sizes, _, _) in enumerate(spec["tables"]):
        assert int(rows.of(range(number, number + 1)).rows_L.max()) < sizes


def test_a_model_that_torchrec_does_not_have_is_named_as_such():
    assert (
        no_twin(torch.nn.Linear(2, 1)) == no_twin(None) == "the model is no DLRM of static tables"
    )


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="no /proc/self/smaps")
def test_two_processes_hold_the_rows_of_an_artefact_once(stored):
    size = sum(file.stat().st_size for file in (stored.path / "rows").iterdir())
    memory = memory_of_two(stored.path)
    assert size <= memory["rows_resident_bytes"] < size + 2 * 4096
    assert memory["two_resident_bytes"] == memory["rows_resident_bytes"]
