"""A plan as pictures and as a page: what must be seen in them, from one rank to a hundred."""

import xml.etree.ElementTree as ET

import pytest
from reporting.pages import opened, parts
from reporting.records import plan_report

from recapp.reporting import drawing
from recapp.reporting.plan_views import plan_page, plan_pictures


def fills(svg):
    """Return how many shapes there are of each colour."""
    found = {}
    for element in ET.fromstring(svg).iter():
        for part in element.get("style", "").split(";"):
            name, _, value = part.strip().partition(": ")
            if name == "fill":
                found[value] = found.get(value, 0) + 1
    return found


def test_the_unit_of_what_ranks_send_stands_once_above_the_cells(monkeypatch):
    said = {}

    def finish(sheet, name, *rest):
        axes = sheet.axes[0]
        said[name] = (axes.get_title(loc="left"), [text.get_text() for text in axes.texts])
        return drawing.Picture(name, "", "", "", "<svg></svg>")

    monkeypatch.setattr(drawing.Sheet, "finish", finish)
    plan_pictures(plan_report(tables=8, ranks=3))
    title, cells = said["plan_traffic"]
    assert title == "Bytes per step: 6.0 kB in all, cells in kB"
    assert cells == ["1.00"] * 6


def test_every_shard_has_the_colour_of_its_rank():
    tables = plan_pictures(plan_report(tables=8, ranks=4))[0]
    colors = drawing.rank_colors(4)
    found = fills(tables.svg)
    whole = [2, 0, 0, 0]
    halves = [0, 2, 2, 0]
    strips = [2, 2, 2, 2]
    legend = [1, 1, 1, 1]
    assert [found[color.lower()] for color in colors] == [
        sum(of) for of in zip(whole, halves, strips, legend, strict=True)
    ]
    assert "8 tables" in tables.alt and "2 row_wise" in tables.alt


def test_equal_plans_give_equal_pictures(tmp_path):
    first, second = (plan_pictures(plan_report(tables=3)) for _ in range(2))
    assert [each.name for each in first] == ["plan_tables", "plan_ranks", "plan_traffic"]
    assert [each.svg for each in first] == [each.svg for each in second]
    file = first[0].write(tmp_path)
    assert file.name == "plan_tables.svg" and file.read_text().startswith("<svg")


def test_one_rank_sends_nothing_and_is_said_to(tmp_path):
    alone = plan_report(tables=3, ranks=1)
    assert [picture.name for picture in plan_pictures(alone)] == ["plan_tables", "plan_ranks"]
    assert "Nothing travels between ranks." in parts(plan_page(alone, tmp_path / "plan.html")).said


def test_colours_of_ranks_differ_also_where_there_are_many():
    for world in (1, 2, 8, 9, 80, 128):
        assert len(set(drawing.rank_colors(world))) == world


def test_the_page_holds_everything_and_needs_nothing(tmp_path):
    found = parts(
        plan_page(plan_report(tables=26, ranks=4, hosts=2), tmp_path / "new" / "plan.html")
    )
    said = " ".join(found.said)
    assert len(found.images) == 3
    assert (
        "26 tables (7 table_wise, 7 column_wise, 6 row_wise, 6 data_parallel)" in said
        and "on 4 ranks of 2 hosts" in said
    )
    assert "at most 25.0% above the least possible" in said
    assert (
        all(f"table_{i}" in found.said for i in range(26))
        and "it moves <fewer> bytes & waits less" in found.said
    )


def test_the_page_says_what_reads_and_trains_tables_where_that_differs(tmp_path):
    uses = [{"table": "items", "lookups": "seen concat of 3", "rule": "ftrl", "rows": "dynamic"}]
    said = plan_page(plan_report(tables=3, uses=uses), tmp_path / "uses.html").read_text()
    plain = plan_page(plan_report(tables=3), tmp_path / "plain.html").read_text()
    assert "Lookups and rules" not in plain
    for words in ("Lookups and rules", "seen concat of 3", "ftrl", "dynamic"):
        assert words in said


@pytest.mark.full
def test_a_thousand_tables_on_many_ranks_stay_a_page_one_can_open(tmp_path):
    path = plan_page(plan_report(tables=1000, ranks=80, hosts=10), tmp_path / "plan.html")
    assert path.stat().st_size < 6e6
    assert "table_999" in parts(path).said


@pytest.mark.full
def test_a_browser_shows_every_picture_of_a_plan(tmp_path):
    page = plan_page(plan_report(tables=26, ranks=8), tmp_path / "plan.html")
    for width, found in zip(
        (400, 1280, 1920), opened(page, tmp_path, 400, 1280, 1920), strict=True
    ):
        assert len(found["images"]) == 3 and all(shown > 300 for _, shown in found["images"])
        assert found["faults"] == [] and found["asked"] == [] and found["wide"] <= width
        assert found["columns"] == (2 if width == 1920 else 1)
