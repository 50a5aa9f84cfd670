"""An artefact becomes a `Scorer`: its settings are judged, its model is built around its files, and
the example that it was exported with has to score as it did then.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from recapp import console
from recapp.app import build
from recapp.app.check_data import match_trained
from recapp.app.compose import compose_over
from recapp.dataset.raw_rows import RawRows
from recapp.dataset.schema import schema_from
from recapp.engine.shard_model import embedding_collections, sharded_collections
from recapp.engine.sharded_state import without_tables
from recapp.errors import ArtefactError, RecappError
from recapp.inference.artefact import Artefact, read_artefact
from recapp.inference.compiled import CompiledModel, NotCompiled, load_compiled
from recapp.inference.mapped_rows import mapped_tables
from recapp.inference.one_rank import one_rank
from recapp.inference.scorer import Scorer
from recapp.inference.small_files import read_dense, read_example
from recapp.settings.renamed import with_names_of_today
from recapp.tables.lookups import embedding_tables
from recapp.trainer.restored import state_must_fit

TOLERANCE = 1e-4
"""How far a logit of the example may be from the exported one, relative to the larger of 1 and its
size: other machines add numbers in another order.
"""


def load_artefact(
    path: str | Path,
    device: torch.device | str | None = None,
    trust: Sequence[str] = (),
    check_rows: bool = True,
    trust_compiled: bool = False,
) -> Scorer:
    """Return the model of an artefact, as `recapp.load_model` does.

    Args:
        path: The artefact.
        device: Where it is to compute; None is the CPU.
        trust: Packages of your own whose classes its settings may name.
        check_rows: Whether the checksums of its rows are compared, which reads all of them.
        trust_compiled: Whether its dense part may run as the machine code that it brings along.

    Raises:
        ArtefactError: It is none, incomplete, damaged, of a later version, or scores its example
            otherwise than it should.
        CheckpointError: Its settings name something that may not be called.
    """
    artefact = read_artefact(path)
    if check_rows:
        artefact.verify_all()
    settings = settings_of_artefact(artefact, trust)
    model = meta_model(artefact, settings)
    one_rank(model, torch.device(device or "cpu"), mapped_tables(artefact).make_store)
    load_dense(artefact, model)
    compiled = _compiled(artefact, model) if trust_compiled else None
    example = read_example(artefact)
    scorer = Scorer(
        compiled or model,
        raw_rows_of(settings),
        artefact.entry("name", str),
        f"{artefact.identity:08x}",
        info_of(artefact) | {"compiled": compiled is not None},
        example,
        torch.sigmoid(torch.tensor(_logits(artefact))),
    )
    check_logits(artefact, scorer(scorer.batch(example)))
    return scorer


def _compiled(artefact: Artefact, model: nn.Module) -> CompiledModel | None:
    """Return the model with its compiled dense part; None where that cannot run here, which is
    noted.
    """
    why = "it was exported without one"
    if artefact.info.get("compiled") is not None:
        try:
            if next(model.parameters()).device.type != "cpu":
                raise NotCompiled("it is code for the CPU")
            return load_compiled(artefact, artefact.entry("compiled", dict), model)
        except NotCompiled as error:
            why = str(error)
    console.note(
        f"trust_compiled=true: {console.short_path(artefact.folder)} runs without its compiled "
        f"dense part, by the portable one: {why}"
    )
    return None


def settings_of_artefact(artefact: Artefact, trust: Sequence[str] = ()) -> dict[str, Any]:
    """Return the settings that an artefact's model was made with, judged.

    Raises:
        ArtefactError: They are damaged.
        CheckpointError: They name something that may not be called.
    """
    chosen = [f"trust=[{','.join(trust)}]"] if trust else []
    stored = with_names_of_today(artefact.entry("config", dict))
    settings = compose_over(stored, "eval", chosen)
    return match_trained(settings, artefact.folder, artefact.info, artefact.numbered_rows)


def meta_model(artefact: Artefact, settings: dict[str, Any]) -> nn.Module:
    """Return the model, its tables on the meta device and to be stored as the artefact has them.

    Raises:
        ArtefactError: Its settings make other tables.
    """
    model = build.build_model(settings)
    made = {t.name: t for t in embedding_tables(model)}
    stored = {t.name: t for t in artefact.tables}
    if made.keys() != stored.keys():
        odd = ", ".join(sorted(made.keys() ^ stored.keys())[:5])
        raise artefact.damaged(f"settings and tables differ: {odd}")
    for name, table in made.items():
        own = stored[name]
        dynamic = table.dynamic is not None
        said = (table.embedding_dim, str(table.id_rule), table.min_key, dynamic)
        rows = own.rows if dynamic else table.num_embeddings
        if said != (own.dim, own.id_rule, own.min_key, own.keys is not None) or own.rows != rows:
            raise artefact.damaged(f"table {name} is another one in its settings")
    for collection in dict.fromkeys(c for _, c in embedding_collections(model)):
        collection.store_as({name: t.data_type for name, t in stored.items()})
    return model


def load_dense(artefact: Artefact, model: nn.Module) -> None:
    """Fill the dense part of a model whose tables are sharded.

    Raises:
        ArtefactError: It does not fit.
    """
    state = read_dense(artefact)
    try:
        with state_must_fit("the dense part", "model"), without_tables(sharded_collections(model)):
            model.load_state_dict(state)
    except RecappError as error:
        raise artefact.damaged(str(error)) from error


def raw_rows_of(settings: dict[str, Any]) -> RawRows:
    """Return what reads raw rows as a run's data set was read."""
    return RawRows(schema_from(settings), settings["dataset"]["dense_transform"])


def model_to_shard(artefact: Artefact, settings: dict[str, Any]) -> nn.Module:
    """Return the model with its dense part, its tables on the meta device: ranks shard them.

    Raises:
        ArtefactError: Settings and files do not fit together.
    """
    model = meta_model(artefact, settings)
    tables = {name for name, p in model.named_parameters() if p.device.type == "meta"}
    try:
        with state_must_fit("the dense part", "model"):
            missing, unknown = model.load_state_dict(read_dense(artefact), strict=False)
    except RecappError as error:
        raise artefact.damaged(str(error)) from error
    if odd := [*(set(missing) - tables), *unknown]:
        raise artefact.damaged(f"the dense part of its settings is another one: {odd[0]}")
    return model


def info_of(artefact: Artefact) -> dict[str, Any]:
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
        "bytes": sum(int(entry["bytes"]) for entry in artefact.files.values()),
    }


def check_logits(artefact: Artefact, logits: Tensor) -> None:
    """Compare logits of the example with the exported ones.

    Raises:
        ArtefactError: They differ by more than rounding does.
    """
    expected = torch.tensor(_logits(artefact), dtype=torch.float64)
    found = logits.double().cpu()
    if found.shape != expected.shape:
        raise artefact.damaged(f"its example has {len(found)} rows, and {len(expected)} scores")
    apart = (found - expected).abs() / expected.abs().clamp(min=1)
    if not bool((apart <= TOLERANCE).all()):
        worst = int(apart.nan_to_num(math.inf).argmax())
        raise ArtefactError(
            f"artefact {artefact.folder} scores its example otherwise than it was exported: row "
            f"{worst} has the logit {float(found[worst]):.6f}, must be "
            f"{float(expected[worst]):.6f}: its files do not belong together; export it again"
        )


def _logits(artefact: Artefact) -> list[float]:
    logits = artefact.entry("logits", list)
    if not all(isinstance(x, int | float) and not isinstance(x, bool) for x in logits):
        raise artefact.damaged("logits are no numbers")
    return logits
