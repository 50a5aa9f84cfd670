"""The notebook of the documents has the cells of its Python file, and runs."""

import json

import jupytext
import pytest
from documents import REPOSITORY
from nbclient import NotebookClient

CELLS = REPOSITORY / "docs" / "sharding_strategies.py"
STORED = CELLS.with_suffix(".ipynb")
MOST_BYTES = 400_000
SECONDS_OF_A_CELL = 300
ROUNDS = "rounds=7, round_seconds=0.2"  # of what is measured


def stored_cells():
    return json.loads(STORED.read_text())["cells"]


def outputs_of(cell):
    """What a cell has printed and shown, without pictures."""
    return [
        "".join(output.get("text", output.get("data", {}).get("text/markdown", "")))
        for output in cell.get("outputs", [])
    ]


def test_the_stored_notebook_has_the_cells_of_its_file():
    stored = [(cell["cell_type"], "".join(cell["source"])) for cell in stored_cells()]
    written = [(cell.cell_type, cell.source) for cell in jupytext.read(CELLS).cells]
    assert stored == written, "run jupytext --to ipynb --execute docs/sharding_strategies.py"
    assert STORED.stat().st_size < MOST_BYTES


def test_the_stored_notebook_was_run_whole_and_in_order_without_errors():
    code = [cell for cell in stored_cells() if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    shown = [output for cell in code for output in cell["outputs"]]
    assert {output["output_type"] for output in shown} == {
        "display_data",
        "execute_result",
        "stream",
    }
    assert not any(output.get("name") == "stderr" for output in shown)
    pictures = [output for output in shown if "image/png" in output.get("data", {})]
    assert len(pictures) == 8


@pytest.mark.full
def test_the_notebook_runs_and_counts_what_the_stored_one_counts():
    notebook = jupytext.read(CELLS)
    (measuring,) = [cell for cell in notebook.cells if ROUNDS in cell.source]
    measuring.source = measuring.source.replace(ROUNDS, "rounds=3, round_seconds=0.01")
    client = NotebookClient(notebook, timeout=SECONDS_OF_A_CELL, kernel_name="python3")
    ran = client.execute()
    measured = ("compare(SAMPLES)", "apart(results")  # differ from run to run
    for new, stored in zip(ran.cells, stored_cells(), strict=True):
        if not any(word in new.source for word in measured):
            assert outputs_of(new) == outputs_of(stored), new.source
