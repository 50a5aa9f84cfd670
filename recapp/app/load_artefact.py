"""An artefact becomes a `Scorer`: its settings are judged, its model is built around its files, and
the example that it was exported with has to score as it did then.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from recapp import console
from recapp.app.artefact_model import (
    check_logits,
    load_dense,
    logits_of,
    meta_model,
    raw_rows_of,
)
from recapp.app.check_data import match_trained
from recapp.app.compose import compose_over, trusting
from recapp.inference.compiled import CompiledModel, NotCompiled, load_compiled
from recapp.inference.mapped_rows import mapped_tables
from recapp.inference.placed_model import placed, together
from recapp.inference.scorer import Scorer
from recapp.stored.artefact_files import read_example
from recapp.stored.artefact_manifest import ArtefactManifest
from recapp.stored.snapshot import Artefact
from recapp.stored.stored_model import open_artefact
from recapp.transport.communicator import Comm


def load_artefact(
    comm: Comm,
    path: str | Path,
    trust: Sequence[str] = (),
    check_rows: bool = True,
    trust_compiled: bool = False,
) -> Scorer:
    """Return the model of an artefact, as `recapp.load_model` does. Every rank calls it.

    Args:
        comm: The ranks that hold its tables together, and this one's device.
        path: The artefact.
        trust: Packages of your own whose classes its settings may name.
        check_rows: Whether the checksums of its rows are compared, which reads all of them.
        trust_compiled: Whether its dense part may run as the machine code that it brings along.

    Raises:
        ArtefactError: It is none, incomplete, damaged, of a later version, or scores its example
            otherwise than it should.
        CheckpointError: Its settings name something that may not be called.
    """

    artefact = open_artefact(path, comm)
    manifest = artefact.manifest

    def read() -> tuple[dict[str, Any], nn.Module]:
        if check_rows and comm.rank == 0:
            artefact.verify()
        settings = settings_of_artefact(manifest, trust)
        return settings, meta_model(manifest, settings)

    settings, model = together(comm, read)
    make_store = together(comm, lambda: mapped_tables(artefact).make_store)
    placed(model, comm, make_store)
    together(comm, lambda: load_dense(artefact, model))
    compiled = together(comm, lambda: _compiled(artefact, model)) if trust_compiled else None
    example = together(comm, lambda: read_example(artefact))
    scorer = Scorer(
        compiled or model,
        raw_rows_of(settings),
        manifest.entry("name", str),
        f"{manifest.identity:08x}",
        info_of(manifest) | {"compiled": compiled is not None},
        example,
        torch.sigmoid(torch.tensor(logits_of(manifest))),
    )
    check_logits(manifest, scorer(scorer.batch(example)))
    return scorer


def _compiled(artefact: Artefact, model: nn.Module) -> CompiledModel | None:
    """Return the model with its compiled dense part; None where that cannot run here, which is
    noted.
    """
    why = "it was exported without one"
    if artefact.manifest.info.get("compiled") is not None:
        try:
            if next(model.parameters()).device.type != "cpu":
                raise NotCompiled("it is code for the CPU")
            return load_compiled(artefact, artefact.manifest.entry("compiled", dict), model)
        except NotCompiled as error:
            why = str(error)
    console.note(
        f"trust_compiled=true: {console.short_path(artefact.path)} runs without its compiled "
        f"dense part, by the portable one: {why}"
    )
    return None


def settings_of_artefact(artefact: ArtefactManifest, trust: Sequence[str] = ()) -> dict[str, Any]:
    """Return the settings that an artefact's model was made with, judged.

    Raises:
        ArtefactError: They are damaged.
        CheckpointError: They name something that may not be called.
    """
    settings = compose_over(artefact.config, "eval", trusting(trust))
    return match_trained(settings, artefact.folder, artefact.info, artefact.numbered_rows)


def info_of(artefact: ArtefactManifest) -> dict[str, Any]:
    """Return plain facts about an artefact, for people and servers."""
    return {
        "path": str(artefact.folder.absolute()),
        "metrics": artefact.entry("metrics", dict),
        "made": artefact.entry("made", dict),
        "tables": [
            {
                "name": t.name,
                "rows": t.rows,
                "dim": t.dim,
                "storage": t.storage,
                "dynamic": t.keys is not None,
            }
            for t in artefact.tables
        ],
        "bytes": artefact.bytes,
    }
