"""Finds the best runs of a sweep by the metric that chooses checkpoints, and how sure the order is.

A setting that does not change the trained model, such as the plan, makes no variants here. If seeds
differ by as much as variants do, the order of the variants is called noise.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from recapp.reporting.comparison import SEED
from recapp.reporting.variants import Interval, Run, Variant, together, varied_settings
from recapp.tasks.click import CLICK
from recapp.tasks.measures import VALIDATION, Measures

EQUAL = 5e-6  # metrics are shown with five decimals
NAMED = 4  # variants in a sentence, before "and 12 more"


@dataclass(frozen=True)
class Objective:
    """The metric by which the best run is chosen.

    Args:
        name: The metric's name in `metrics.json`.
        highest: Whether the highest value is best; else the lowest is.
        measures: The metrics of the task.
    """

    name: str = CLICK.objective
    highest: bool = True
    measures: Measures = CLICK

    @property
    def title(self) -> str:
        """The metric's name as people read it: `validation AUC`."""
        found = self.measures.get(self.name) if self.name.startswith(VALIDATION) else None
        return f"validation {found.title}" if found else self.name

    def named(self, name: str) -> "Objective":
        """Return another metric of the same task."""
        return replace(self, name=name)

    @property
    def heading(self) -> str:
        """The title with a capital letter, to begin a sentence."""
        return f"{self.title[0].upper()}{self.title[1:]}"

    def of(self, variant: Variant) -> Interval | None:
        """Return the metric of a variant's runs."""
        return variant.measure(lambda run: run.value(self.name))

    def ranked(self, variants: Sequence[Variant]) -> list[tuple[Variant, Interval]]:
        """Return the variants that have the metric, the best first."""
        found = [(variant, interval) for variant in variants if (interval := self.of(variant))]
        return sorted(found, key=lambda one: one[1].mean, reverse=self.highest)

    def best_runs(self, runs: Sequence[Run]) -> list[Run]:
        """Return the runs with the best metric: several runs if their shown digits are equal."""
        found = [(run, value) for run in runs if (value := run.value(self.name)) is not None]
        best = (max if self.highest else min)((value for _, value in found), default=0.0)
        return [run for run, value in found if abs(value - best) < EQUAL]


def objective_of(run: Run) -> Objective:
    """Return the metric that chooses a run's best checkpoint, `callbacks.checkpoint.monitor` and
    `mode`; the best metric of the task if no callback chooses checkpoints.
    """
    callbacks = run.settings.get("callbacks")
    found = callbacks.get("checkpoint") if isinstance(callbacks, dict) else None
    if not isinstance(found, dict) or not isinstance(found.get("monitor"), str):
        best = run.measures
        return Objective(best.objective, highest=best.mode == "max", measures=best)
    mode = found.get("mode", "min")  # Lightning's default
    return Objective(found["monitor"], highest=mode == "max", measures=run.measures)


def without_effect(runs: Sequence[Run], objective: Objective) -> list[str]:
    """Return the varied settings, except the seed, that do not change the metric.

    Runs that differ in such a setting alone have the same metric, to the shown digits.
    """
    found: list[str] = []
    good = [run for run in runs if run.value(objective.name) is not None]
    for name in varied_settings(good):
        alike = [variant.runs for variant in together(good, {name, *found})]
        several = any(len({str(run.setting(name)) for run in group}) > 1 for group in alike)
        if name != SEED and several and all(_equal(group, objective) for group in alike):
            found.append(name)
    return found


def _equal(runs: Sequence[Run], objective: Objective) -> bool:
    values = [value for run in runs if (value := run.value(objective.name)) is not None]
    return max(values) - min(values) < EQUAL


def learned_variants_of(runs: Sequence[Run], objective: Objective) -> list[Variant]:
    """Return the variants that may differ in their metric, each with one run per seed."""
    variants = together(runs, {SEED, *without_effect(runs, objective)})
    return [
        Variant(v.name, tuple({str(run.setting(SEED)): run for run in v.runs[::-1]}.values())[::-1])
        for v in variants
    ]


def metric_verdict(
    variants: Sequence[Variant], objective: Objective, no_effect: Sequence[str] = ()
) -> list[str]:
    """Return sentences about the best variant by the metric; the first sentence is the verdict.

    Args:
        variants: The variants to compare.
        objective: The metric.
        no_effect: The varied settings that do not change the metric.
    """
    ranked = objective.ranked(variants)
    if not ranked:
        return [f"No run has {objective.name}, so none is best."]
    (best, first), *others = ranked
    same = _no_effect(no_effect, objective)
    if not others:
        every = "All runs reach the same " if no_effect else ""
        title = f"{every}{objective.title}" if every else objective.heading
        return [f"{title}: {_metric(first)}.", *same]
    more = "higher" if objective.highest else "lower"
    verdict = f"Best: {best.name}, {objective.title} {_metric(first)}; {more} is better."
    return [verdict, *_how_sure(ranked), *same]


def _no_effect(names: Sequence[str], objective: Objective) -> list[str]:
    if not names:
        return []
    said = "do not change" if len(names) > 1 else "does not change"
    what = listed(["The plan" if name == "plan" else name for name in names])
    same = f"runs that differ in nothing else have the same {objective.title}"
    return [f"{what} {said} what is learned: {same}."]


def _how_sure(ranked: Sequence[tuple[Variant, Interval]]) -> list[str]:
    """Return sentences on whether the order is more than chance, as far as the seeds show."""
    (best, first), *others = ranked
    close = [variant.name for variant, interval in others if interval.overlaps(first)]
    if all(len(interval.values) == 1 for _, interval in ranked):
        lead = abs(first.mean - others[0][1].mean)
        seeds = "Each was run with one seed, so how much of that is chance is not known"
        return [f"It leads {others[0][0].name} by {lead:.5f}. {seeds}; seed=1,2,3 shows it."]
    if not close:
        return []
    return [
        f"Seeds differ by as much as settings do: the runs of {best.name} and those of "
        f"{listed(close)} overlap, so which of these is best is noise until more seeds are run."
    ]


def _metric(found: Interval) -> str:
    several = f" (mean of {len(found.values)} seeds, {found.low:.5f} to {found.high:.5f})"
    return f"{found.mean:.5f}{several if len(found.values) > 1 else ''}"


def listed(names: Sequence[str]) -> str:
    """Return names as part of a sentence: `a, b and c`; of many names the first ones and a
    count.
    """
    more = len(names) - NAMED
    shown = [*names[:NAMED], f"{more} more"] if more > 0 else list(names)
    return f"{', '.join(shown[:-1])} and {shown[-1]}" if len(shown) > 1 else shown[0]


def objectives_of(runs: Sequence[Run]) -> list[Objective]:
    """Return the metrics that chose the checkpoints of some runs, each once."""
    return list(dict.fromkeys(map(objective_of, runs)))
