"""L2 over all rows in runs: the same run under other plans, across resumes and epochs."""

import pytest
from trainer.runs import SCHEDULE
from trainer.test_restart_tables import ADAM, EPOCH, run, same

L2 = (*ADAM, "+optimizer.sparse.l2_all_rows=0.01", *SCHEDULE)


@pytest.mark.full
@pytest.mark.parametrize("tables", [(), ("*",)], ids=["goes_on", "begins_anew"])
def test_a_resumed_run_is_the_unbroken_one_under_another_plan(logs, tmp_path, tables):
    """The unbroken run is written at other steps, so its rows catch up at other steps."""
    rows, dense, _ = run(logs, tmp_path / "whole", EPOCH + 3, *L2, tables=tables)
    touched, _, _ = run(logs, tmp_path / "touched", EPOCH + 3, *ADAM, *SCHEDULE, tables=tables)
    assert not same(touched, rows)
    for stop in (2, EPOCH + 1):
        at = tmp_path / str(stop)
        run(logs, at / "half", stop, *L2, tables=tables, plan="row_wise")
        last = at / "half/checkpoints/last.ckpt"
        found = run(
            *(logs, at / "rest", EPOCH + 3, *L2),
            tables=tables,
            plan="column_wise",
            ckpt_path=last,
        )
        assert same(found[0], rows) and same(found[1], dense)
