"""The tensors of tables that a run loads from a checkpoint, with or without Lightning."""

from collections.abc import Iterator, Mapping, Sequence

from recapp import console
from recapp.engine.dynamic_keys import (
    ALWAYS_LOADED,
    OF_ADMISSION,
    SKETCH,
    WAITING_COUNTS,
    without_waiting,
)
from recapp.engine.sharded_tables import ShardedTables
from recapp.optim.rules import FROZEN
from recapp.sharding.layout import AVERAGE, OF_WEIGHTS, RAW, WEIGHT, Block
from recapp.stored.model_manifests import CheckpointManifest
from recapp.tables.dynamic import Counter


class StoredTables:
    """Fills tables from a checkpoint of any plan.

    Args:
        tables: The sharded tables of the model.
        fitting: Whether the run trains, so that it needs the optimiser's state too.
        speaks: Whether this rank prints notes about state that is not loaded.
    """

    def __init__(self, tables: Sequence[ShardedTables], fitting: bool, speaks: bool) -> None:
        self.tables = list(tables)
        self.fitting = fitting
        self.speaks = speaks

    def to_fill(self, manifest: CheckpointManifest) -> Iterator[Block]:
        """Yield the rectangles that this rank reads from a checkpoint."""
        changed = self._changed_rules(manifest)
        dynamic = manifest.dynamic if self.fitting else without_waiting(manifest.dynamic)
        updates = [*manifest.updates, *([0] * len(self.tables))]
        averaged = self.fitting and manifest.is_averaged
        for shared, number in zip(self.tables, updates, strict=False):
            for block in shared.stored.blocks_to_load(dynamic, number, averaged=averaged):
                if self._is_wanted(block, changed, manifest):
                    yield _as_stored(block, manifest) if averaged else block

    def _is_wanted(
        self, block: Block, changed: Mapping[str, tuple[str, str]], manifest: CheckpointManifest
    ) -> bool:
        if block.tensor in (*ALWAYS_LOADED, *OF_WEIGHTS) or not self.fitting:
            return block.tensor in (*ALWAYS_LOADED, *OF_WEIGHTS)
        if block.tensor in OF_ADMISSION:
            return (block.table, block.tensor) in manifest.tensors
        return block.table not in changed

    def filled(self, manifest: CheckpointManifest) -> None:
        """Take over the loaded rows and the counts of updates. It is collective.

        Raises:
            CheckpointError: Keys of dynamic tables are in the wrong place.
        """
        for shared in self.tables:
            shared.stored.loaded()
        changed = self._changed_rules(manifest)
        for shared, number in zip(self.tables, manifest.updates, strict=False):
            shared.updates = number
            # state that begins anew is corrected as that of first updates
            shared.update.count_from(manifest.begun | dict.fromkeys(changed, number))
        if self.speaks:
            _say(changed)
            if others := self._other_counters(manifest):
                console.note(
                    f"{_some(others)}: the checkpoint counted keys by another dynamic.counter: how "
                    "often keys without a row were seen is counted anew"
                )

    def _other_counters(self, manifest: CheckpointManifest) -> list[str]:
        """Return the tables whose keys the checkpoint has counted with another counter than this
        run; empty if the run does not train.
        """
        # the tensor of the other counter
        tensor_of = {Counter.SKETCH: WAITING_COUNTS, Counter.EXACT: SKETCH}
        return [
            table.name
            for shared in self.tables
            for table in shared.state.layout.tables
            if self.fitting
            and table.dynamic is not None
            and table.dynamic.seen > 1
            and (table.name, tensor_of[table.dynamic.counter]) in manifest.tensors
        ]

    def _changed_rules(self, manifest: CheckpointManifest) -> dict[str, tuple[str, str]]:
        """Return the names of the stored row rule and of the current one, by table, for tables
        whose row rule has changed. Their optimiser state is not loaded; empty if the run does not
        train.
        """
        if not self.fitting:
            return {}
        now = {name: rule.name for t in self.tables for name, rule in t.rules.items()}
        before = manifest.rules
        return {
            name: (before[name], rule)
            for name, rule in now.items()
            if before.get(name, rule) != rule
        }


def _as_stored(block: Block, manifest: CheckpointManifest) -> Block:
    """Return a block under the name of its tensor in a checkpoint with an average.

    Training goes on with the raw weights. Where the average has the type of the table, it is stored
    as the weights alone.
    """
    if block.tensor == WEIGHT:
        return block._replace(tensor=RAW)
    if block.tensor == AVERAGE and (block.table, AVERAGE) not in manifest.tensors:
        return block._replace(tensor=WEIGHT)
    return block


def _say(changed: Mapping[str, tuple[str, str]]) -> None:
    """Print a note for the tables whose row rule has changed."""
    for rules in dict.fromkeys(changed.values()):
        alike = [name for name in changed if changed[name] == rules]
        one = len(alike) == 1
        if rules[1] == FROZEN.name:
            console.note(f"{_some(alike)} {'is' if one else 'are'} frozen from here on")
            continue
        console.note(
            f"{_some(alike)} go{'es' if one else ''} on by {rules[1]}, the "
            f"checkpoint has {rules[0]}: weights stay, the optimizer's state begins anew"
        )


def _some(tables: Sequence[str]) -> str:
    """Return a few names of tables, and the number of the others, as text."""
    named = ", ".join(tables[:3])
    more = f" and {len(tables) - 3} more" if len(tables) > 3 else ""
    return f"table{'s' if len(tables) > 1 else ''} {named}{more}"
