"""Training resumes on the files it was stopped on; what has changed since is said or refused."""

import os
import re
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from jobs import command, refusal, validation
from lightning.pytorch import Callback
from trainer.runs import compose, fit, make_logs, on_logs

from recapp.errors import CheckpointError
from recapp.run.run_checks import check_resumed
from recapp.stored.stored_model import read_manifest
from recapp.trainer.datamodule import ClickData

OLD = 12  # batches of an epoch of the two files that are there first: 1,200 of 1,400 rows train
ALL = 18  # with the third one
STOP = 5


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return pq.read_table(make_logs(tmp_path_factory.mktemp("rows") / "set"))


@pytest.fixture
def logs(rows, tmp_path):
    return write(tmp_path / "logs", rows, 0, 1)


def write(folder, rows, *parts, **how):
    """Write some of the three parts of the rows, each in a file of its own."""
    folder.mkdir(exist_ok=True)
    for part in parts:
        pq.write_table(rows.slice(700 * part, 700), folder / f"part-{part}.parquet", **how)
    return folder


def put_in_front(logs, rows):
    pq.write_table(rows.slice(1400, 700), logs / "a.parquet")


def reverse_rows(logs, rows):
    reversed_rows = rows.slice(700, 700).take(pa.array(range(699, -1, -1)))
    pq.write_table(reversed_rows, logs / "part-1.parquet")


def cut_rows(logs, rows):
    pq.write_table(rows.slice(700, 100), logs / "part-1.parquet")


def remove_last(logs, rows):
    (logs / "part-1.parquet").unlink()


def remove_first(logs, rows):
    (logs / "part-0.parquet").unlink()


def rename(logs, rows):
    (logs / "part-1.parquet").rename(logs / "part-1b.parquet")


def swap(logs, rows):
    write(logs, rows.take(pa.array([*range(700, 1400), *range(700)])), 0, 1)


def compress(logs, rows):
    write(logs, rows, 1, compression="zstd")


def encode(logs, rows):
    """Another footer over as many rows and bytes."""
    file = logs / "part-1.parquet"
    raw = file.read_bytes()
    changed = raw.replace(b"parquet-cpp-arrow", b"parquet-cpp-arroz")
    assert changed != raw
    file.write_bytes(changed)


def append(logs, rows):
    write(logs, rows, 2)


def touch(logs, rows):
    for file in logs.iterdir():
        os.utime(file, (1, 1))


def nothing(logs, rows):
    pass


def stopped(logs, folder, *overrides, steps=STOP):
    """A checkpoint of a run that has ended after some steps."""
    fit(compose(logs, f"trainer.max_steps={steps}", *overrides), folder)
    return folder / "checkpoints" / "last.ckpt"


def going_on(logs, checkpoint, *overrides):
    return compose(logs, f"ckpt_path={checkpoint}", "trainer.max_epochs=2", *overrides)


def check_going_on(recipe):
    check_resumed(recipe, read_manifest(recipe.ckpt_path))


def go_on(logs, checkpoint, *overrides):
    """Train until two epochs are over."""
    settings = going_on(logs, checkpoint, *overrides)
    return fit(settings, checkpoint.parent / "rest", ckpt_path=str(checkpoint))


def note_of(capsys):
    """The one line on standard error."""
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def full(*cases):
    """Cases of the full tier."""
    return [pytest.param(*case, marks=pytest.mark.full) for case in cases]


@pytest.fixture(scope="module")
def five_steps(rows, tmp_path_factory):
    folder = tmp_path_factory.mktemp("five")
    return stopped(write(folder / "logs", rows, 0, 1), folder)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (nothing, ""),
        (touch, ""),
        (append, ""),
        (put_in_front, "a.parquet stands where part-0.parquet stood"),
        (reverse_rows, r"part-1.parquet had [\d,]+ bytes and has [\d,]+"),
        (cut_rows, "part-1.parquet had 700 rows and has 100"),
        (remove_last, "part-1.parquet is gone"),
        (remove_first, "part-0.parquet is gone"),
        (rename, "part-1.parquet is gone"),
        (swap, r"part-0.parquet had [\d,]+ bytes and has [\d,]+"),
        (compress, r"part-1.parquet had [\d,]+ bytes and has [\d,]+"),
        (encode, "part-1.parquet has other contents, with as many rows and bytes as before"),
    ],
)
def test_files_that_have_changed_inside_of_an_epoch_are_refused_before_ranks_start(
    logs, rows, five_steps, change, says
):
    change(logs, rows)
    check_going_on(going_on(logs, five_steps, "resume_data=ignore"))
    if not says:
        return check_going_on(going_on(logs, five_steps))
    with pytest.raises(
        CheckpointError, match=f"five.*last.ckpt was saved, after 5 batches of an epoch: {says}; "
    ) as error:
        check_going_on(going_on(logs, five_steps))
    assert str(error.value).endswith("or set resume_data=ignore")
    return None


def test_files_in_another_order_are_refused(logs, five_steps):
    paths = f"[{logs}/part-1.parquet,{logs}/part-0.parquet]"
    says = r"part-1\.parquet stands where part-0\.parquet stood"
    with pytest.raises(CheckpointError, match=says):
        check_going_on(going_on(paths, five_steps))


@pytest.mark.full
def test_a_run_goes_on_in_a_directory_that_was_moved(logs, rows, tmp_path, capsys):
    whole, _, _ = fit(compose(logs, "trainer.max_epochs=2"), tmp_path / "whole")
    checkpoint = stopped(logs, tmp_path / "first")
    moved = tmp_path / "elsewhere"
    logs.rename(moved)
    touch(moved, rows)
    rest, _, _ = go_on(moved, checkpoint)
    assert rest.losses == whole.losses[STOP:] and not capsys.readouterr().err


def test_a_partition_is_part_of_a_files_name(rows, tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    for day in (1, 2):
        write(logs / f"dt={day}", rows, 0)
    checkpoint = stopped(logs, tmp_path)
    names = [file[0] for file in read_manifest(checkpoint).info["position"]["files"]["first"]]
    assert names == ["dt=1/part-0.parquet", "dt=2/part-0.parquet"]
    shutil.move(logs / "dt=2", logs / "dt=3")
    says = r"dt=2/part-0\.parquet is gone"
    with pytest.raises(CheckpointError, match=says):
        check_going_on(going_on(logs, checkpoint))


class Validated(Callback):
    """The metrics of every validation, and its rows."""

    def __init__(self):
        self.metrics = []
        self.rows = [0]

    def on_validation_batch_end(
        self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0
    ):
        self.rows[-1] += batch.rows

    def on_validation_end(self, trainer, pl_module):
        self.metrics.append(validation(trainer.callback_metrics))
        self.rows.append(0)


@pytest.mark.parametrize(
    "more",
    [
        (),
        *full(
            (["dataset.num_threads=2"],),
            (["engine.look_ahead=0"],),
            (["trainer.max_epochs=null", f"trainer.max_steps={OLD + ALL}"],),
        ),
    ],
)
def test_files_that_were_added_begin_with_the_next_epoch(logs, rows, tmp_path, capsys, more):
    old, trainer, _ = fit(compose(logs, "trainer.max_epochs=1"), tmp_path / "old")
    first_epoch = validation(trainer.callback_metrics)
    checkpoint = stopped(logs, tmp_path / "first")
    append(logs, rows)
    new, _, _ = fit(compose(logs, "trainer.max_epochs=2"), tmp_path / "new")
    capsys.readouterr()
    settings = going_on(logs, checkpoint, *more)
    validated = Validated()
    rest, trainer, _ = fit(settings, tmp_path / "rest", validated, ckpt_path=str(checkpoint))
    assert note_of(capsys).endswith(": 1 with 700 rows; they begin with the next epoch")
    assert rest.losses[: OLD - STOP] == old.losses[STOP:]
    assert validated.metrics[0] == first_epoch
    assert rest.batches[OLD - STOP :] == new.batches[ALL:]
    assert rest.validations == [OLD, OLD + ALL] and validated.rows == [200, 300, 0]


@pytest.mark.full
def test_an_epoch_without_the_files_that_were_added_may_be_stopped_again(
    logs, rows, tmp_path, capsys
):
    old, _, _ = fit(compose(logs, "trainer.max_epochs=1"), tmp_path / "old")
    checkpoint = stopped(logs, tmp_path / "first")
    append(logs, rows)
    more = compose(logs, f"trainer.max_steps={STOP + 2}")
    fit(more, tmp_path / "again", ckpt_path=str(checkpoint))
    again = tmp_path / "again" / "checkpoints" / "last.ckpt"
    held = read_manifest(again).info["position"]["files"]
    assert held == read_manifest(checkpoint).info["position"]["files"] and held["count"] == 2
    capsys.readouterr()
    rest, _, _ = go_on(logs, again)
    assert "begin with the next epoch" in note_of(capsys)
    assert rest.losses[: OLD - STOP - 2] == old.losses[STOP + 2 :]
    assert len(rest.losses) == OLD - STOP - 2 + ALL
    last = again.parent / "rest" / "checkpoints" / "last.ckpt"
    assert read_manifest(last).info["position"]["files"]["count"] == 3


@pytest.mark.full
@pytest.mark.parametrize(
    ("change", "says", "batches"),
    [
        (append, "training files were added since .* 1 with 700 rows; they begin now", ALL),
        *full(
            (remove_last, "part-1.parquet is gone; the next epoch reads them as they are", 6),
            (put_in_front, "a.parquet stands where .*; the next epoch reads them as they are", ALL),
            (touch, None, OLD),
        ),
    ],
)
def test_between_two_epochs_any_files_may_be_others(
    logs, rows, tmp_path, capsys, change, says, batches
):
    checkpoint = stopped(logs, tmp_path, steps=OLD)
    change(logs, rows)
    check_going_on(going_on(logs, checkpoint))
    whole, _, _ = fit(compose(logs, "trainer.max_epochs=2"), tmp_path / "whole")
    capsys.readouterr()
    rest, _, _ = go_on(logs, checkpoint)
    assert rest.batches == whole.batches[batches:] and len(rest.batches) == batches
    if says:
        assert re.search(says, note_of(capsys))
    else:
        assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "in_epoch"),
    [(cut_rows, 2), *full((put_in_front, ALL - STOP), (remove_last, 1))],
)
def test_changed_files_are_ignored_where_that_is_said(
    logs, rows, tmp_path, capsys, change, in_epoch
):
    checkpoint = stopped(logs, tmp_path)
    change(logs, rows)
    whole, _, _ = fit(compose(logs, "trainer.max_epochs=2"), tmp_path / "whole")
    capsys.readouterr()
    rest, trainer, _ = go_on(logs, checkpoint, "resume_data=ignore")
    assert rest.batches == whole.batches[STOP:] and trainer.global_step == len(whole.batches)
    assert rest.validations[0] == STOP + in_epoch
    said = note_of(capsys)
    assert said.startswith("resume_data=ignore: the training files have changed since")
    assert "after 5 batches" in said and said.endswith("as many batches of what is there now")


@pytest.mark.full
def test_an_epoch_that_has_no_batch_left_is_over(logs, rows, tmp_path):
    checkpoint = stopped(logs, tmp_path, steps=OLD - 1)
    remove_last(logs, rows)
    whole, _, _ = fit(compose(logs, "trainer.max_epochs=2"), tmp_path / "whole")
    rest, _, _ = go_on(logs, checkpoint, "resume_data=ignore")
    assert rest.batches == whole.batches[6:]


def test_other_files_are_refused_by_the_data_module_too(logs, rows, five_steps, tmp_path):
    put_in_front(logs, rows)
    settings = going_on(logs, five_steps)
    with pytest.raises(CheckpointError, match=r"a\.parquet stands where"):
        fit(settings, tmp_path, ckpt_path=str(five_steps))


@pytest.mark.full
def test_a_checkpoint_that_knows_no_files_goes_on(logs, tmp_path, capsys, monkeypatch):
    whole, _, _ = fit(compose(logs, "trainer.max_epochs=2"), tmp_path / "whole")
    with monkeypatch.context() as before:
        state_dict = ClickData.state_dict

        def without_files(self):
            return {k: v for k, v in state_dict(self).items() if k != "files"}

        before.setattr(ClickData, "state_dict", without_files)
        checkpoint = stopped(logs, tmp_path / "first")
    capsys.readouterr()
    check_going_on(going_on(logs, checkpoint))
    rest, _, _ = go_on(logs, checkpoint)
    assert "was written before checkpoints knew their data" in note_of(capsys)
    assert rest.losses == whole.losses[STOP:]


@pytest.mark.full
def test_two_ranks_finish_the_epoch_without_the_files_that_were_added(logs, rows, tmp_path, jobs):
    own = on_logs(logs)
    old = jobs.train(tmp_path / "old", *own, "trainer.max_epochs=1")
    jobs.train(tmp_path / "run", *own, f"trainer.max_steps={STOP}")
    again = f"ckpt_path={tmp_path}/run/checkpoints/last.ckpt"
    append(logs, rows)
    rest = jobs.train(tmp_path / "rest", again, "trainer.max_epochs=1")
    assert rest["steps"] == OLD and validation(rest) == validation(old)
    both = jobs.train(tmp_path / "both", again, "trainer.max_epochs=2", world=1)
    assert both["steps"] == OLD + ALL
    put_in_front(logs, rows)
    kind, line = refusal(jobs.train, tmp_path / "none", again, "trainer.max_epochs=1")
    assert kind == "CheckpointError" and "a.parquet stands where" in line


@pytest.mark.full
def test_a_command_refuses_changed_files_and_ignores_them_where_that_is_said(
    logs, rows, five_steps, tmp_path
):
    cut_rows(logs, rows)
    own = [f"ckpt_path={five_steps}", f"dataset.path={logs}", "hydra.run.dir=run"]
    line = command("train", *own, "trainer.max_epochs=2", cwd=tmp_path).error()
    assert "after 5 batches of an epoch: part-1.parquet had 700 rows and has 100; " in line
    wrong = command("train", *own, "resume_data=perhaps", cwd=tmp_path).error()
    assert wrong == "resume_data=perhaps: known: check, ignore"


@pytest.mark.full
def test_a_command_goes_on_with_changed_files_and_forgets_that_it_did(
    logs, rows, five_steps, tmp_path
):
    cut_rows(logs, rows)
    own = [f"ckpt_path={five_steps}", f"dataset.path={logs}"]
    done = command("eval", *own, "hydra.run.dir=eval", cwd=tmp_path)
    assert done.code == 0 and "changed" not in done.err
    more = ["resume_data=ignore", f"trainer.max_steps={STOP + 4}", "hydra.run.dir=run"]
    done = command("train", *own, *more, cwd=tmp_path)
    assert done.code == 0 and done.err.count("resume_data=ignore: the training files") == 1
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    cut = read_manifest(last).info["position"]["files"]["first"][1]
    assert cut[:2] == ["part-1.parquet", 100]
    write(logs, rows, 1)
    line = command("train", f"ckpt_path={last}", "trainer.max_epochs=3", cwd=tmp_path).error()
    assert "part-1.parquet had 100 rows and has 700" in line
