"""Suggest the settings of a data set from the facts of its columns.

    facts of columns -> a use for each, with a reason -> settings of the group `dataset`

A column gets the first use that fits:

    left out    one value, or another value in each row; nested
    label       a usual name of a label and values 0 and 1; else the only column of 0 and 1
    time        Arrow's times; text such as 2026-11-29 17:16:11; whole numbers of this century under
                a name such as ts or timestamp
    vector      lists of numbers with fractions, all of one length
    list        lists of ids, or text with one sign between ids
    weights     lists of numbers with fractions, as long in each row as those of one column of ids
    number      fractions; true and false; whole numbers under a name such as price or count
    id          all others

The uses are guesses, which the file of settings leaves to its reader to change.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.types as pt
import yaml  # type: ignore[import-untyped]

from recapp.dataset.data_settings import ISO
from recapp.dataset.schema import criteo_schema
from recapp.errors import DataError
from recapp.logs.column_facts import ColumnFacts

LABELS = (
    *("label", "click", "clicked", "is_click", "is_clicked", "target", "y", "converted"),
    *("conversion", "is_attributed", "purchase", "purchased", "bought", "liked", "like"),
)
RATINGS = ("rating", "ratings", "stars", "score")
_NUMBER = re.compile(
    r"(^|_)(price|age|amount|amt|count|counts|cnt|num|number|ratio|rate|duration|len|length|days|"
    r"size|share|avg|mean|sum|total)(_|$)|^I\d+$",
    re.IGNORECASE,
)
_TIME = re.compile(r"(^|_)(time|ts|timestamp|datetime|date|at)(_|$)", re.IGNORECASE)
_NAMELESS = re.compile(r"f\d+\Z")  # of a column of text without a header
# without the 0000-00-00 of MySQL, which is no time
_DAY = r"[1-9]\d{3}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])"
_CLOCK = r"[T ]\d{2}:\d{2}(:\d{2}([.,]\d+)?)?(Z| UTC|[+-]\d{2}:?\d{2})?"
_TIME_TEXT = re.compile(rf"{_DAY}({_CLOCK})?\Z")
# units of whole numbers since 1970, by their size between the years 1990 and 2100
_UNITS = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}
_SOONEST = 6.3e8
_LATEST = 4.1e9
# Signs between ids in text, and the most different parts for each different text: words of a title
# also have blanks between them.
_SEPARATORS = {"|": 0.8, ";": 0.8, ",": 0.8, " ": 0.1}
_RAGGED = ("left out", "has lists of fractions, of several lengths")
KEY_ROWS = 100  # fewer rows may have different ids by chance
RARE_IDS = 10_000  # a column with more ids, half of which occur once, gets a vocabulary
BATCH = 1024
LANES = 16
STEPS = 50  # in the first epoch, so that few rows are trained in smaller batches


@dataclass(frozen=True)
class Suggestion:
    """The suggested use of each column, and the settings.

    Args:
        uses: Column -> (use, reason).
        settings: The settings of the group `dataset`, without `path`.
        command: Further settings on the command line, such as `task=rating`.
    """

    uses: Mapping[str, tuple[str, str]]
    settings: Mapping[str, Any]
    command: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())


def suggest_settings(
    columns: Sequence[ColumnFacts], schema: pa.Schema, of_files: Mapping[str, Any] | None = None
) -> Suggestion:
    """Return the suggestion for the columns of some files.

    Args:
        columns: The facts of the columns.
        schema: Their names and types.
        of_files: Settings by which the files were read, which it begins with.
    """
    known = dict(of_files or {})
    if _is_criteo(schema):
        canonical = criteo_schema().resolve(schema, "the files")
        used = {own: name for name, own in canonical.items()}
        kind = {"l": "label", "I": "number", "C": "id"}
        uses = {
            facts.name: (kind[used[facts.name][0]], f"{used[facts.name]} of Criteo's logs")
            if facts.name in used
            else ("left out", "is no column of Criteo's logs")
            for facts in columns
        }
        return Suggestion(uses, {**known, "naming": "criteo", **_sizes(columns, [])})
    label = _label(columns)
    uses = {facts.name: _use(facts, label) for facts in columns}
    weights = _weights(columns, uses)
    uses |= {name: ("weights", f"of the ids of {ids}") for ids, name in weights.items()}
    names = {
        use: [name for name, (its, _) in uses.items() if its == use] for use, _ in uses.values()
    }
    lists = [facts for facts in columns if uses[facts.name][0] == "list"]
    separators = {one.name: sign for one in lists if (sign := separator_of(one))}
    sparse = [name for name, (use, _) in uses.items() if use in ("id", "list")]
    by_name = {facts.name: facts for facts in columns}
    found = {**known, "label": label, "dense": names.get("number", []), "sparse": sparse}
    if weights:
        found["id_weights"] = weights
    if separators:
        found["separator"] = separators
    if times := names.get("time"):
        found["times"] = {name: unit_of(by_name[name]) or "s" for name in times}
        texts = [name for name in times if by_name[name].numbers is None and by_name[name].texts]
        if texts:
            found["text"] = known.get("text", {}) | {"times": dict.fromkeys(texts, ISO)}
    if vectors := names.get("vector"):
        found["vectors"] = {name: (by_name[name].lengths or (0, 0))[1] for name in vectors}
    found |= _sizes(columns, [] if separators else sparse)
    command, notes = _remarks(found, by_name)
    return Suggestion(uses, found, command, notes)


def _remarks(
    found: Mapping[str, Any], by_name: Mapping[str, ColumnFacts]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return what some settings need on the command line to train, and what keeps them from it."""
    notes: list[str] = []
    command: list[str] = []
    label = found["label"]
    sparse = found["sparse"]
    if label is None:
        notes.append("no column of 0 and 1 was found for the label: name the column")
        command.append("dataset.label=COLUMN")
    elif not by_name[label].is_binary:
        command.append("task=rating")
    elif missing := by_name[label].missing:
        notes.append(
            f"{label} is missing in {missing:,} rows, so it does not train: leave them out, or "
            "write 0 there, and a weight of 0 (dataset.weight)"
        )
    if len(sparse) == 1 and not found.keys() & {"times", "vectors"} and not found["dense"]:
        command.append("model=logistic")
    if not sparse:
        notes.append("no column of ids was found: name at least one")
        command.append("dataset.sparse=[COLUMN]")
    return tuple(command), tuple(notes)


def _is_criteo(schema: pa.Schema) -> bool:
    try:
        criteo_schema().resolve(schema, "the files")
    except DataError:
        return False
    return True


def _label(columns: Sequence[ColumnFacts]) -> str | None:
    binary = [facts.name for facts in columns if facts.is_binary]
    named = [name for word in LABELS for name in binary if _plain(name) == word]
    ratings = [facts.name for facts in columns if _plain(facts.name) in RATINGS and facts.numbers]
    if named or len(binary) == 1:
        return (named or binary)[0]
    return next(iter(ratings or binary or _nameless_rating(columns)), None)


def _nameless_rating(columns: Sequence[ColumnFacts]) -> list[str]:
    """Return the only column of few whole numbers from 0 to 10 in a text without a header."""
    found = [
        facts.name
        for facts in columns
        if facts.numbers and facts.whole and facts.numbers[0] >= 0 and facts.numbers[-1] <= 10
    ]
    nameless = all(_NAMELESS.match(facts.name) for facts in columns)
    return found if nameless and len(found) == 1 else []


def _plain(name: str) -> str:
    """Return a name without RecBole's type: `rating:float` is a rating."""
    return name.partition(":")[0].lower()


def _use(facts: ColumnFacts, label: str | None) -> tuple[str, str]:
    """Return the use of a column, and the reason."""
    if facts.name == label:
        return "label", "0 and 1" if facts.is_binary else "a number to predict"
    if facts.distinct is None:
        hint = f": name values by key, {facts.name}.KEY" if pt.is_map(facts.type) else ""
        return "left out", f"is nested ({facts.type}){hint}"
    if facts.distinct < 2 and facts.lengths is None:
        return "left out", "has one value" if facts.distinct else "has no value"
    if pt.is_temporal(facts.type):
        if pt.is_timestamp(facts.type) or pt.is_date(facts.type):
            return "time", "has a type of times"
        return "left out", f"has type {facts.type}: write it as a number"
    timely = _TIME.search(_plain(facts.name)) or _NAMELESS.match(facts.name)
    if timely and (unit := unit_of(facts)):
        return "time", f"whole numbers of {unit} since 1970"
    points = any("." in text for text in facts.texts)
    points = points or pt.is_boolean(facts.type)
    fractions = facts.numbers is not None and (points or not facts.whole)
    if facts.lengths is not None:
        if not fractions:
            return "list", f"{facts.ids_per_row or 0:.3g} ids a row"
        if facts.lengths[0] == facts.lengths[1] > 0:
            return "vector", f"lists of {facts.lengths[1]} numbers"
        return _RAGGED
    if sign := separator_of(facts):
        return "list", f"ids with {sign!r} between them"
    if facts.numbers is None and facts.texts and all(map(_TIME_TEXT.match, facts.texts)):
        return "time", "text of times"
    if fractions:
        return "number", "numbers with a point, or true and false"
    present = facts.rows - facts.missing
    if present >= KEY_ROWS and facts.distinct >= 0.99 * present:
        return "left out", "has another value in each row"
    if facts.numbers is not None and _NUMBER.search(_plain(facts.name)):
        return "number", "whole numbers with such a name"
    return "id", "whole numbers" if facts.numbers is not None else "text"


def _weights(columns: Sequence[ColumnFacts], uses: Mapping[str, tuple[str, str]]) -> dict[str, str]:
    """Return the columns of ids for which just one column has as many fractions in each row."""
    found: dict[str, str] = {}
    for facts in columns:
        ids = [
            one.name
            for one in columns
            if uses[one.name][0] == "list"
            and (one.lengths, one.ids_per_row) == (facts.lengths, facts.ids_per_row)
        ]
        if uses[facts.name] == _RAGGED and len(ids) == 1:
            found[ids[0]] = facts.name
    return found


def unit_of(facts: ColumnFacts) -> str | None:
    """Return the unit of whole numbers that may be times since 1970; None if they may not."""
    if pt.is_temporal(facts.type) or facts.numbers is None or not facts.whole:
        return None
    least, *_, most = facts.numbers
    units = (
        u for u, scale in _UNITS.items() if _SOONEST <= least / scale <= most / scale <= _LATEST
    )
    return next(units, None)


def separator_of(facts: ColumnFacts) -> str | None:
    """Return the sign that stands between the ids of a column of text; None without one."""
    if facts.numbers is not None or facts.lengths is not None:
        return None
    for sign, most in _SEPARATORS.items():
        several = [text for text in facts.texts if sign in text.strip(sign)]
        parts = {part for text in facts.texts for part in text.split(sign)}
        if 2 * len(several) > len(facts.texts) and len(parts) <= most * len(facts.texts):
            return sign
    return None


def _sizes(columns: Sequence[ColumnFacts], sparse: Sequence[str]) -> dict[str, Any]:
    """Return the settings that follow from numbers of rows and ids."""
    by_name = {facts.name: facts for facts in columns}
    found: dict[str, Any] = {}
    if sparse:
        found["cardinality"] = [by_name[name].distinct or 1 for name in sparse]
        rare = [
            name
            for name in sparse
            if (by_name[name].distinct or 0) > RARE_IDS and by_name[name].singles > 0.5
        ]
        if rare:
            found["min_frequency"] = dict.fromkeys(rare, 2)
    found["val_share"] = "1/10"
    rows = max((facts.rows for facts in columns), default=0)
    if rows * 0.9 < STEPS * BATCH:
        found["batch_size"] = max(int(rows * 0.9 / STEPS / LANES), 1) * LANES
    return found


_WHY = {
    "label": "the column to predict",
    "dense": "numbers",
    "sparse": "ids",
    "id_weights": "numbers by which the vectors of ids are multiplied",
    "separator": "the sign between the ids of a text",
    "times": "times, which become hour, weekday and waves",
    "vectors": "lists of numbers that are taken as they are",
    "cardinality": "distinct ids of each sparse column, in the order of `sparse`",
    "min_frequency": "ids that occur less often share a row: more than half occur once",
    "val_share": "the last rows validate, in the order of the files",
    "batch_size": f"few rows: some {STEPS} steps in an epoch",
}


def as_yaml(path: str | Sequence[str], suggestion: Suggestion, head: Sequence[str]) -> str:
    """Return a file of settings: an option of the group `dataset`.

    Args:
        path: The data, as the setting `dataset.path`.
        suggestion: The settings.
        head: Lines of comment at its beginning.
    """
    return "\n".join([*(f"# {line}" for line in head), *_lines(path, suggestion), ""])


def _lines(path: str | Sequence[str], suggestion: Suggestion) -> Iterator[str]:
    yield "defaults: [custom]"
    yield ""
    yield from _entry("path", path)
    for key, value in suggestion.settings.items():
        if why := _WHY.get(key):
            yield f"# {why}"
        yield from _entry(key, value)
    left = {name: reason for name, (use, reason) in suggestion.uses.items() if use == "left out"}
    if left:
        yield "# left out:"
        yield from (f"#   {name}: {reason}" for name, reason in left.items())


def _entry(key: str, value: Any) -> list[str]:
    text: str = yaml.safe_dump(value, default_flow_style=True, width=90, sort_keys=False)
    first, *rest = text.removesuffix("...\n").replace("${", r"\${").splitlines()
    return [f"{key}: {first}", *rest]
