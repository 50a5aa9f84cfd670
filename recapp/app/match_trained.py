"""Make a recipe fit a trained model: the same ids from text, and tables of the same sizes."""

from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from recapp.console import note, short_path
from recapp.processes.rank_environment import external_rank
from recapp.recipe.recipe import Recipe
from recapp.tables.table_settings import TablesOfDataset

if TYPE_CHECKING:
    from recapp.stored.manifest import Manifest

R = TypeVar("R", bound=Recipe)


def match_stored(recipe: R, manifest: "Manifest") -> R:
    """Return a recipe with which a stored model reads the same ids into tables of the same sizes.

    Tables that the ids of the data set would size keep the stored sizes. A checkpoint of an earlier
    recapp does not store how it read text ids. It read all of them as hexadecimal, so they are read
    as hexadecimal again, and a note is printed.

    Args:
        recipe: The recipe of a run that loads the model.
        manifest: The manifest of the checkpoint or artefact.

    Raises:
        CheckpointError: Text ids would be read differently than in training.
    """
    from recapp.dataset.schema import TEXT_HASH

    sparse = recipe.schema.sparse
    stored = manifest.info.get("ids")
    if "ids" not in manifest.info:
        stored = {"text": TEXT_HASH, "hex": list(sparse)}
        hex = recipe.dataset.hex or sparse
        recipe = replace(recipe, dataset=replace(recipe.dataset, hex=hex))
        if not external_rank():
            note(
                f"{short_path(manifest.folder)} does not say how text ids were read: "
                "it was as hexadecimal, so it is now"
            )
    if stored is not None:
        recipe.schema.check_id_encoding(stored, str(manifest.folder))
    rows = {name: shape.rows for name, shape in manifest.shapes.items() if shape.rows}
    dataset = recipe.dataset
    sized = dataset.table_rows or dataset.cardinality or dataset.generate
    known = all(name in rows for name in sparse)
    if sized or not known or not isinstance(recipe.tables, TablesOfDataset):
        return recipe
    return recipe.sized([rows[name] for name in sparse])
