"""What pictures share: sizes in words, axes of bytes and of steps, legends and names that are
whole.
"""

from itertools import pairwise

import pytest
from reporting.sweeps import make_run, make_sweep

from recapp.console import size
from recapp.reporting import drawing, run_figures
from recapp.reporting.runs import read_runs
from recapp.reporting.variants import Objective, Variant, learned_variants_of


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0 B"),
        (0.2, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (41_774_780, "41.8 MB"),
        (3.2e9, "3.2 GB"),
        (4e13, "40.0 TB"),
    ],
)
def test_bytes_have_one_unit_and_never_parts_of_a_byte(n, text):
    assert size(n) == text


def axes_of(draw, monkeypatch):
    """Return the axes of the picture that `draw` makes."""
    seen = []
    finish = drawing.Sheet.finish

    def listening(self, *args):
        seen.append(self)
        return finish(self, *args)

    monkeypatch.setattr(drawing.Sheet, "finish", listening)
    draw()
    return seen[-1]


def one(folder, **options):
    return Variant("mixed", tuple(read_runs(folder))) if make_run(folder, **options) else None


@pytest.mark.parametrize(("steps", "readings"), [(3, 3), (4, 3), (40, 3), (2, 1), (40, 1)])
def test_an_axis_of_steps_has_no_half_steps(tmp_path, monkeypatch, steps, readings):
    variant = one(tmp_path / "run", curves=False)
    (tmp_path / "run/csv").mkdir()
    rows = [f"{step},0.{60 - step}" for step in range(steps - readings, steps)]
    (tmp_path / "run/csv/metrics.csv").write_text("\n".join(["step,val_auc", *rows]) + "\n")
    variants = [variant] * (1 if readings > 1 else 2)  # one reading of one run is said in words
    drawn = axes_of(lambda: run_figures.curves("val_auc", variants, Objective()), monkeypatch)
    assert all(tick == int(tick) for tick in drawn.axes[0].get_xticks())
    trained = list(range(steps - readings + 1, steps + 1))  # not the numbers of steps from 0
    assert list(drawn.axes[0].lines[0].get_xdata()) == trained


@pytest.mark.parametrize(
    ("rates", "scale"),
    [((0.001, 0.01, 0.1), "log"), ((0.01, 0.02), "linear"), ((0.0, 0.5), "linear")],
)
def test_the_metric_stands_on_a_log_axis_where_numbers_span_a_decade(
    tmp_path, monkeypatch, rates, scale
):
    jobs = [
        {"overrides": [f"optimizer.dense.lr={rate}", f"seed={seed}"], "auc": 0.7 + rate * seed}
        for rate in rates
        for seed in (1, 2)
    ]
    runs = read_runs(make_sweep(tmp_path, None, jobs))
    drawn = axes_of(
        lambda: run_figures.metric_by("optimizer.dense.lr", runs, Objective()), monkeypatch
    )
    means, dots, best = drawn.axes[0].lines
    assert drawn.axes[0].get_xscale() == scale
    assert drawn.axes[0].get_xlabel() == "lr"
    assert list(dots.get_xdata()) == [rate for rate in rates for _ in (1, 2)]
    assert list(means.get_ydata()) == pytest.approx([0.7 + 1.5 * rate for rate in rates])
    assert list(best.get_ydata()) == pytest.approx([0.7 + 2 * rates[-1]])
    assert [label.get_text() for label in drawn.axes[0].get_xticklabels()] == [
        f"{rate:g}" for rate in rates
    ]


def test_many_words_stand_upright_and_do_not_run_into_each_other(tmp_path, monkeypatch):
    jobs = [
        {"overrides": [f"experiment=a_longer_name_{n}"], "auc": 0.7 + n / 100, "curves": False}
        for n in range(12)
    ]
    runs = read_runs(make_sweep(tmp_path, None, jobs))
    drawn = axes_of(lambda: run_figures.metric_by("experiment", runs, Objective()), monkeypatch)
    drawn.figure.draw_without_rendering()
    boxes = [label.get_window_extent() for label in drawn.axes[0].get_xticklabels()]
    assert len(boxes) == 12 and all(one.x1 <= other.x0 for one, other in pairwise(boxes))
    assert all(box.y0 >= drawn.figure.bbox.y0 for box in boxes)


def test_words_stand_on_an_axis_of_their_own(tmp_path, monkeypatch):
    jobs = [
        {"overrides": [f"model={name}"], "auc": auc}
        for name, auc in (("dlrm", 0.7), ("dlrm_of_another_kind", 0.71))
    ]
    runs = read_runs(make_sweep(tmp_path, None, jobs))
    drawn = axes_of(lambda: run_figures.metric_by("model", runs, Objective()), monkeypatch)
    assert (
        "".join("".join(t.get_text().split()) for t in drawn.axes[0].get_xticklabels())
        == "dlrmdlrm_of_another_kind"
    )


LONG = (
    "dense.lr=0.000981507 sparse.lr=0.0723 bottom_layers=[512,256,64,16] "
    "top_layers=[1024,1024,512,256,1] batch_size=4096 "
    "devices=2 precision=bf16-mixed"
)


def test_a_long_name_is_folded_and_not_cut():
    with drawing.horizontal_bars([LONG, "short"], ["1 ms", "2 ms"]) as s:
        for position in s.positions:
            s.axes[0].barh(position, 1, label=LONG)
        drawing.legend_below(s.figure, s.axes[0])
        s.figure.draw_without_rendering()
        window = s.figure.bbox
        legend = s.figure.legends[0]
        texts = [*s.axes[0].texts, *legend.get_texts()]
        assert sum(" ".join(text.get_text().split()) == LONG for text in texts) == 3
        for text in texts:
            box = text.get_window_extent()
            assert (
                box.x0 >= window.x0 - 1 and box.x1 <= window.x1 + 1 and box.y0 >= window.y0 - 1
            ), text
        assert len({round(position, 3) for position in s.positions}) == 2


def test_of_many_runs_the_best_have_colours_and_names_and_the_others_are_grey(
    tmp_path, monkeypatch
):
    jobs = [{"overrides": [f"tables.dim={8 * n}"], "auc": 0.7 + n / 100} for n in range(1, 11)]
    variants = learned_variants_of(read_runs(make_sweep(tmp_path, None, jobs)), Objective())
    drawn = axes_of(lambda: run_figures.curves("val_auc", variants, Objective()), monkeypatch)
    named = [text.get_text() for text in drawn.figure.legends[0].get_texts()]
    assert named == ["dim=64", "dim=72", "dim=80", "the other runs", "validation", "training"]
    assert (
        sum(
            line.get_color() == drawing.GRID
            for line in drawn.axes[0].lines
            if len(line.get_xdata())
        )
        == 2 * 7
    )


def test_first_readings_that_would_press_the_others_flat_lie_outside_and_that_is_said(
    tmp_path, monkeypatch
):
    variant = one(tmp_path / "run", curves=False)
    (tmp_path / "run/csv").mkdir()
    rows = [f"{step},{9.0 if step < 5 else 0.5 - step / 1000}" for step in range(4, 40, 5)]
    (tmp_path / "run/csv/metrics.csv").write_text("\n".join(["step,train_loss", *rows]) + "\n")
    drawn = axes_of(lambda: run_figures.curves("val_log_loss", [variant], Objective()), monkeypatch)
    assert drawn.axes[0].get_ylim()[1] < 0.6
    picture = run_figures.curves("val_log_loss", [variant], Objective())
    assert picture.caption.endswith("Some readings of the first 25% of the steps lie outside.")


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ([39, 49.9, 91.7, 52], ["39.0", "49.9", "91.7", "52.0"]),
        ([0.0281, 0.031], ["0.0281", "0.0310"]),
        ([134.2, 90], ["134.2", "90.0"]),
        ([1200.4, 90.2], ["1,200", "90"]),
        ([22.84, 0.0281], ["22.8", "0.0"]),
        ([], []),
        ([0.0, None], ["0.0"]),
    ],
)
def test_numbers_of_a_column_have_as_many_decimals(values, texts):
    assert [f"{value:{drawing.spec_of(values)}}" for value in values if value is not None] == texts
