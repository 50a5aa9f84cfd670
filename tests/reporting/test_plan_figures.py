"""A plan as pictures and as a page: what must be seen in them, from one rank to a hundred."""

import xml.etree.ElementTree as ET

import pytest
from reporting.pages import opened, parts

from recapp.reporting import drawing
from recapp.reporting.phases import PHASES
from recapp.reporting.plan_figures import draw_plan, plan_pictures
from recapp.reporting.plan_tables import plan_page


def explained(tables, world, hosts=1):
    """Return a plan in which a fourth of the tables each is whole, cut by columns, cut by rows, on
    all ranks.
    """
    rows = []
    for i in range(tables):
        n = 10 + 37 * i * i
        dim = (32, 64, 128)[i % 3]
        kind = ("table_wise", "column_wise", "row_wise", "data_parallel")[i % 4]
        shards = {
            "table_wise": [[i % world, 0, n, 0, dim]],
            "column_wise": [
                [(i + k) % world, 0, n, k * dim // 2, (k + 1) * dim // 2] for k in range(2)
            ],
            "row_wise": [[r, n * r // world, n * (r + 1) // world, 0, dim] for r in range(world)],
            "data_parallel": [[r, 0, n, 0, dim] for r in range(world)],
        }[kind]
        rows.append(
            {
                "table": f"table_{i}",
                "rows": n,
                "dim": dim,
                "type": kind,
                "shards": shards,
                "mode": "replicated" if kind == "data_parallel" else "unique",
                "ranks": sorted({shard[0] for shard in shards}),
                "bytes": 4 * n * dim,
                "predicted_ms": 0.6,
                **{f"{phase}_ms": 0.1 for phase in PHASES},
                "runner_up": "row_wise",
                "runner_up_ms": 0.7,
                "why": "it moves <fewer> bytes & waits less",
            }
        )
    ranks = [
        {
            "rank": r,
            "host": r * hosts // world,
            "bytes": 7 << 20,
            "weights": 5 << 20,
            "state": 1 << 20,
            "buffers": 1 << 20,
            "capacity": None,
            "predicted_ms": 3.0 + r,
            **{f"{phase}_ms": 0.5 for phase in PHASES},
        }
        for r in range(world)
    ]
    return {
        "name": "mixed",
        "world_size": world,
        "hosts": [[r for r in range(world) if r * hosts // world == h] for h in range(hosts)],
        "batch_per_rank": 512,
        "step_ms": 4.0,
        "lower_bound_ms": 3.2,
        "rows": rows,
        "ranks": ranks,
        "between_ranks": [
            {"source": a, "target": b, "bytes": 1000 * (a + 1)}
            for a in range(world)
            for b in range(world)
            if a != b
        ],
    }


def fills(svg):
    """Return how many shapes there are of each colour."""
    found = {}
    for element in ET.fromstring(svg).iter():
        for part in element.get("style", "").split(";"):
            name, _, value = part.strip().partition(": ")
            if name == "fill":
                found[value] = found.get(value, 0) + 1
    return found


def test_a_plan_is_drawn_as_png_and_svg(tmp_path):
    paths = draw_plan(explained(8, 4), tmp_path / "pictures")
    assert [path.name for path in paths] == [
        "plan_tables.png",
        "plan_tables.svg",
        "plan_ranks.png",
        "plan_ranks.svg",
        "plan_traffic.png",
        "plan_traffic.svg",
    ]
    for path in paths:
        assert path.read_bytes().startswith(b"\x89PNG" if path.suffix == ".png" else b"<svg")


def test_the_unit_of_what_ranks_send_stands_once_above_the_cells(monkeypatch):
    said = {}

    def finish(sheet, name, *rest):
        axes = sheet.axes[0]
        said[name] = (axes.get_title(loc="left"), [text.get_text() for text in axes.texts])
        return drawing.Picture(name, "", "", "", "<svg></svg>", b"")

    monkeypatch.setattr(drawing.Sheet, "finish", finish)
    plan_pictures(explained(8, 3))
    title, cells = said["plan_traffic"]
    assert title == "Bytes per step: 12.0 kB in all, cells in kB"
    assert cells == ["1.00", "1.00", "2.00", "2.00", "3.00", "3.00"]


def test_every_shard_has_the_colour_of_its_rank():
    tables = plan_pictures(explained(8, 4))[0]
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


def test_equal_plans_give_equal_files(tmp_path):
    first, second = (
        [path.read_bytes() for path in draw_plan(explained(3, 1), tmp_path / name)] for name in "ab"
    )
    assert first == second


def test_one_rank_sends_nothing_and_is_said_to(tmp_path):
    alone = explained(3, 1)
    assert [picture.name for picture in plan_pictures(alone)] == ["plan_tables", "plan_ranks"]
    assert "Nothing travels between ranks." in parts(plan_page(alone, tmp_path / "plan.html")).said


def test_colours_of_ranks_differ_also_where_there_are_many():
    for world in (1, 2, 8, 9, 80, 128):
        assert len(set(drawing.rank_colors(world))) == world


def test_the_page_holds_everything_and_needs_nothing(tmp_path):
    found = parts(plan_page(explained(26, 4, hosts=2), tmp_path / "new" / "plan.html"))
    said = " ".join(found.said)
    assert len(found.images) == 3
    assert (
        "26 tables (7 table_wise, 7 column_wise, 6 row_wise, 6 data_parallel) on 4 ranks of 2 hosts"
    ) in said
    assert "at most 25.0 % above the best possible" in said
    assert (
        all(f"table_{i}" in found.said for i in range(26))
        and "it moves <fewer> bytes & waits less" in found.said
    )


def test_the_page_says_what_reads_and_trains_tables_where_that_differs(tmp_path):
    uses = [{"table": "items", "lookups": "seen concat of 3", "rule": "ftrl", "rows": "dynamic"}]
    said = plan_page(explained(3, 2) | {"uses": uses}, tmp_path / "uses.html").read_text()
    plain = plan_page(explained(3, 2) | {"uses": []}, tmp_path / "plain.html").read_text()
    assert "Lookups and rules" not in plain
    for words in ("Lookups and rules: all 1", "seen concat of 3", "ftrl", "dynamic"):
        assert words in said


@pytest.mark.full
def test_a_thousand_tables_on_many_ranks_stay_a_page_one_can_open(tmp_path):
    path = plan_page(explained(1000, 80, hosts=10), tmp_path / "plan.html")
    assert path.stat().st_size < 6e6
    assert "table_999" in parts(path).said


@pytest.mark.full
def test_a_browser_shows_every_picture_of_a_plan(tmp_path):
    page = plan_page(explained(26, 8), tmp_path / "plan.html")
    for width, found in zip(
        (400, 1280, 1920), opened(page, tmp_path, 400, 1280, 1920), strict=True
    ):
        assert len(found["images"]) == 3 and all(shown > 300 for _, shown in found["images"])
        assert found["faults"] == [] and found["asked"] == [] and found["wide"] <= width
        assert found["columns"] == (2 if width == 1920 else 1)
