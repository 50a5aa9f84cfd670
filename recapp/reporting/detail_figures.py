"""Pictures of the details of a validation: calibration by bucket, and the worst slices."""

from collections.abc import Mapping, Sequence
from typing import Any

from recapp.reporting.details import TITLES, WORST, key_of, slices_of
from recapp.reporting.drawing import BAR, BEST, COLUMN, QUIET, Picture, sheet
from recapp.reporting.page import Gallery

LINE = 0.26  # inches of a slice
LETTERS = 24  # of a value


def part_of_details(details: Mapping[str, Any], gallery: Gallery) -> list[str]:
    """Return the part of a page about the details of a validation; empty if there are none.

    Args:
        details: The details by name.
        gallery: Collects the pictures.
    """
    shown = []
    if buckets := details.get("buckets"):
        title = "Calibration by bucket"
        shown.append(gallery.show("calibration", title, calibration(buckets, title)))
    for column, slices in slices_of(details):
        title = f"Worst slices by {column}"
        name = f"slices_by_{column.replace('/', '.')}"
        shown.append(gallery.show(name, title, worst(slices, name, title)))
    return gallery.part("Where the model is wrong", [], shown) if shown else []


def calibration(buckets: Sequence[Mapping[str, float]], title: str) -> Picture:
    """Draw the share of clicks of each bucket over its mean prediction.

    Args:
        buckets: The buckets of `recapp.tasks.slices.Buckets`.
        title: The title of the picture.
    """
    predicted = [bucket["predicted"] for bucket in buckets]
    clicks = [bucket["clicks"] for bucket in buckets]
    with sheet(COLUMN, 3.6) as s:
        axes = s.axes[0]
        ends = [min(predicted + clicks), max(predicted + clicks)]
        axes.plot(ends, ends, color=QUIET, linewidth=1, linestyle="--")
        axes.plot(predicted, clicks, "o-", color=BAR, markersize=5, linewidth=1.2)
        axes.set(xlabel="mean prediction", ylabel="share of clicks")
        axes.grid(True)
        pairs = zip(predicted, clicks, strict=True)
        read = "; ".join(f"{mean:.3f} predicted, {share:.3f} clicks" for mean, share in pairs)
        caption = "Buckets of equal size. Above the dashed line the model predicts too little."
        return s.finish("calibration", title, f"Dots: {read}.", caption)


def worst(slices: Sequence[Mapping[str, Any]], name: str, title: str) -> Picture | str:
    """Draw the worst slices of a column as bars.

    Args:
        slices: The slices, the worst first.
        name: The name of the picture's file, without suffix.
        title: The title of the picture.

    Returns:
        The picture, or a sentence with the reason why there is none.
    """
    key = key_of(slices)
    known = [one for one in slices if one[key] is not None][:WORST]
    if not known:
        return f"no slice has {TITLES[key]}: each has rows of one class only"
    values = [one[key] for one in known]
    names = [f"{one['value'][:LETTERS]} ({one['rows']:,})" for one in known]
    with sheet(COLUMN, 1.0 + LINE * len(known)) as s:
        axes = s.axes[0]
        places = range(len(known))
        colors = [BEST if one["other"] else BAR for one in known]
        axes.barh(places, values, color=colors, height=0.7)
        axes.set_yticks(places, names)
        axes.invert_yaxis()
        least = min(values)
        reach = max(values) - least
        axes.set_xlim(max(0.0, least - reach / 2 - 0.01), max(values) + reach / 10 + 0.01)
        axes.locator_params(axis="x", nbins=6)
        axes.set(xlabel=TITLES[key])
        axes.grid(True, axis="x")
        pairs = zip(names, values, strict=True)
        read = "; ".join(f"{label} {value:.5f}" for label, value in pairs)
        caption = "The worst of the most frequent values, with their rows; the axis is cut."
        return s.finish(name, title, f"Bars, {TITLES[key]}: {read}.", caption)
