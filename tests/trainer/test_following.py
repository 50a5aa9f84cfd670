"""Files that appear while training runs train once each, in order, wherever runs stop."""

import os
import random
from itertools import chain
from threading import Timer

import pytest
import torch
from dataset.places import s3, shelf
from jobs import Failed
from trainer.followed_runs import BATCH, LANES, Numbers, of_run, put, settings
from trainer.runs import fit

from recapp.dataset.click_rows import ClickRows
from recapp.dataset.source import open_source
from recapp.errors import CheckpointError, ConfigError, DataError, RecappError
from recapp.run.run_checks import check_resumed, check_run
from recapp.stored.stored_model import read_manifest

__all__ = ["s3", "shelf"]  # fixtures


class Killed(Exception):
    """The end of a run that has no time to save anything."""


def kill():
    raise Killed


def newest(folder):
    """The newest checkpoint of a run, whoever wrote it; None without one."""
    found = [path for path in (folder / "checkpoints").glob("*.ckpt") if path.exists()]
    return str(max(found, key=lambda path: read_manifest(path).step)) if found else None


class Run:
    """Runs that go on from one another.

    Attributes:
        rows: The numbers of the rows of each step that has counted in the end.
        losses: The loss of each.
    """

    def __init__(self, logs, folder):
        self.logs = logs
        self.folder = folder
        self.rows = []
        self.losses = []
        self.checkpoint = None
        self.count = 0

    def __call__(self, *overrides, events=None):
        """Train, from where the last run stands; return its trainer, None if it was killed."""
        self.count += 1
        folder = self.folder / f"run{self.count}"
        numbers = Numbers(events)
        before = read_manifest(self.checkpoint).step if self.checkpoint else 0
        trainer = None
        try:
            config = settings(self.logs, *overrides)
            _, trainer, _ = fit(config, folder, numbers, ckpt_path=self.checkpoint)
        except Killed:
            pass
        self.rows[before:] = numbers.steps
        self.losses[before:] = numbers.losses
        self.checkpoint = newest(folder) or self.checkpoint
        return trainer


@pytest.fixture
def logs(tmp_path):
    (tmp_path / "logs").mkdir()
    return tmp_path / "logs"


def files_of(run, firsts):
    """The names of files in the order in which all their rows have trained, each once."""
    owners = [
        {name for name, numbers in firsts.items() if number in numbers}
        for step in run.rows
        for number in step
    ]
    assert sorted(chain(*run.rows)) == sorted(n for one in firsts.values() for n in one)
    names = [one.pop() for one in owners]
    order = list(dict.fromkeys(names))
    assert names == [name for name in order for _ in firsts[name]]  # one file after another
    return order


def full(*values):
    """Cases of the full tier."""
    return [pytest.param(value, marks=pytest.mark.full) for value in values]


EVERY_3 = (
    "+callbacks.steps={_target_: lightning.pytorch.callbacks.ModelCheckpoint, "
    "every_n_train_steps: 3, save_top_k: -1, filename: 'at_{step:06d}'}"
)


@pytest.mark.parametrize("seed", [2, *full(1, *range(3, 15))])
def test_each_row_trains_once_wherever_runs_stop_and_whenever_files_come(logs, tmp_path, seed):
    draw = random.Random(seed)
    run = Run(logs, tmp_path)
    firsts = {}

    def drop():
        first = sum(map(len, firsts.values()))
        rows = draw.choice([3, 7, 40, 130, 260])
        name = f"part-{draw.randrange(1000)}-{len(firsts)}.parquet"
        firsts[name] = range(first, first + rows)
        put(logs / name, rows, first)

    drop()
    for _ in range(draw.randint(2, 4)):
        end = draw.choice(["killed", "max_steps", "idle"])
        step = draw.randint(1, 12)
        events = {draw.randint(1, 10): drop for _ in range(2)}
        more = [EVERY_3] if draw.random() < 0.5 else []
        if end == "killed":
            events[step] = kill
        elif end == "max_steps":
            done = read_manifest(run.checkpoint).step if run.checkpoint else 0
            more.append(f"trainer.max_steps={done + step}")
        run(*more, events=events)
    trainer = run()
    files_of(run, firsts)
    known = {one["file"]: one for one in trainer.datamodule.trained()}
    assert {name: one["rows"] for name, one in known.items()} == {
        name: len(numbers) for name, numbers in firsts.items()
    }
    for name, one in known.items():  # also where a run has stopped in the middle of the file
        steps = [n for n, rows in enumerate(run.rows) if rows[0] in firsts[name]]
        total = sum(run.losses[n] * len(run.rows[n]) for n in steps)
        assert one["log_loss"] == pytest.approx(total / one["rows"], rel=1e-5)


@pytest.mark.parametrize(
    ("overrides", "order"),
    [((), ["p1", "p2", "p10"]), (["dataset.follow_time=clock"], ["p2", "p10", "p1"])],
)
def test_files_train_in_the_order_of_names_or_of_times(logs, tmp_path, overrides, order):
    # the clock of row n is 100,000 - n
    firsts = {"p10": range(100, 140), "p2": range(140, 180), "p1": range(40)}
    for name, numbers in firsts.items():
        put(logs / f"{name}.parquet", len(numbers), numbers[0])
    run = Run(logs, tmp_path)
    run(*overrides)
    assert files_of(run, firsts) == order


@pytest.mark.full
def test_a_late_name_trains_too(logs, tmp_path):
    put(logs / "p5.parquet", 40)
    run = Run(logs, tmp_path)
    run(events={1: lambda: (put(logs / "p9.parquet", 40, 40), put(logs / "p1.parquet", 40, 80))})
    firsts = {"p5": range(40), "p9": range(40, 80), "p1": range(80, 120)}
    assert files_of(run, firsts) == ["p5", "p1", "p9"]


def test_a_file_that_is_being_written_waits_until_it_is_whole(logs, tmp_path, capsys):
    put(logs / "a.parquet", 40)
    put(tmp_path / "b.parquet", 40, 40)
    whole = (tmp_path / "b.parquet").read_bytes()
    half = logs / "b.parquet"
    half.write_bytes(whole[: len(whole) // 2])
    (logs / "empty.csv").touch()  # another format, as long as it is empty
    (logs / "empty.csv").unlink()
    (logs / "c.parquet").touch()
    put(logs / "d.parquet", 40, 80)

    run = Run(logs, tmp_path)
    run(events={3: lambda: half.write_bytes(whole)})
    firsts = {"a": range(40), "d": range(80, 120), "b": range(40, 80)}
    assert files_of(run, firsts) == ["a", "d", "b"]
    says = [line for line in capsys.readouterr().err.splitlines() if "not a whole file" in line]
    assert len(says) == 1 and says[0].startswith(f"{half}: is not a whole file yet (")


@pytest.mark.full
def test_text_that_grows_is_taken_when_it_rests(logs, tmp_path):
    head = "label,number,user,item\n"
    lines = [f"{n % 2},{n},1,2\n" for n in range(80)]
    (logs / "a.csv").write_text(head + "".join(lines[:40]))
    grown = logs / "b.csv"
    run = Run(logs, tmp_path)

    def write(until):
        return lambda: grown.write_text(head + "".join(lines[40:until]))

    # nothing rests for a second, so the last text is what trains
    run("dataset.follow_seconds=0.5", "dataset.follow_idle=2", events={1: write(50), 2: write(80)})
    assert files_of(run, {"a": range(40), "b": range(40, 80)}) == ["a", "b"]


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("rows", [1, 7, 8, 39, 40, 300, *full(31, 32, 33, 95, 96, 103, 104)])
def test_the_last_batch_of_a_file_has_all_that_is_left(tmp_path, rows, world):
    put(tmp_path / "a.parquet", rows)
    config = settings(tmp_path)
    train = open_source(str(tmp_path), config.schema)
    of_file = ClickRows(config.dataset, config.schema, 1, train, train.slice(0, 0))
    streams = [of_file.training_stream(rank, world) for rank in range(world)]
    batches = [list(stream) for stream in streams]
    assert len({len(stream) for stream in streams} | {len(one) for one in batches}) == 1
    sizes = [sum(one.rows for one in parts) for parts in zip(*batches, strict=True)]
    assert sizes[:-1] == [BATCH] * (len(sizes) - 1)
    assert sizes[-1] < BATCH + 2 * LANES
    if rows >= 2 * LANES:
        assert min(one.rows for one in chain(*batches)) >= 2
    numbers = torch.cat([one.dense_BI[:, 0] for one in chain(*batches)])
    assert sorted(numbers.tolist()) == list(range(rows))
    for rank, stream in enumerate(streams):  # from any batch on
        for first in range(len(stream)):
            stream.set_position(0, first)
            rest = [one.dense_BI.tolist() for one in stream]
            assert rest == [one.dense_BI.tolist() for one in batches[rank][first:]]


def test_a_file_that_has_trained_may_go_and_trains_no_more_if_it_changes(logs, tmp_path, capsys):
    put(logs / "a.parquet", 40)
    put(logs / "b.parquet", 40, 40)
    run = Run(logs, tmp_path)
    run()
    put(logs / "a.parquet", 50)
    os.remove(logs / "b.parquet")
    put(logs / "c.parquet", 40, 80)
    capsys.readouterr()
    run()
    said = capsys.readouterr().err
    assert said.count("a.parquet: has changed since it trained; no file trains twice") == 1
    assert "b.parquet" not in said
    assert files_of(run, {"a": range(40), "b": range(40, 80), "c": range(80, 120)})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda file: os.remove(file), r"after 2 batches of a\.parquet, which is gone: bring it"),
        (lambda file: put(file, 90), r"after 2 batches of an epoch: a\.parquet had 100 rows and"),
    ],
)
def test_a_file_that_changes_in_the_middle_ends_the_run_in_one_line(logs, tmp_path, change, says):
    put(logs / "a.parquet", 100)
    put(logs / "b.parquet", 100)
    run = Run(logs, tmp_path)
    run("trainer.max_steps=2")
    change(logs / "a.parquet")
    with pytest.raises(CheckpointError, match=says):
        run()
    with pytest.raises(CheckpointError, match=says):  # before ranks meet
        check_resumed(settings(logs), read_manifest(run.checkpoint))


def test_a_file_that_goes_while_it_trains_ends_the_run_in_one_line(logs, tmp_path):
    put(logs / "a.parquet", 4000)
    with pytest.raises(DataError, match=r"a\.parquet: can be read no more"):
        gone = {1: lambda: os.remove(logs / "a.parquet")}
        Run(logs, tmp_path)("dataset.num_threads=0", events=gone)


@pytest.mark.full
def test_a_followed_place_may_move(logs, tmp_path):
    for day in (1, 2):
        (logs / f"dt={day}").mkdir()
        put(logs / f"dt={day}/part-0.parquet", 40, 40 * day)
    run = Run(logs, tmp_path)
    run("trainer.max_steps=3")
    run.logs = logs.rename(tmp_path / "elsewhere")
    run()
    assert files_of(run, {"1": range(40, 80), "2": range(80, 120)}) == ["1", "2"]


def test_a_run_that_has_trained_on_all_files_goes_on_with_those_that_come(logs, tmp_path):
    put(logs / "a.parquet", 96)
    put(logs / "b.parquet", 96, 96)
    run = Run(logs, tmp_path)
    none = ["dataset.follow=false", "dataset.follow_seconds=10", "dataset.follow_idle=null"]
    run(*none, "dataset.val_share=0")
    put(logs / "c.parquet", 40, 192)
    run()
    firsts = {"a": range(96), "b": range(96, 192), "c": range(192, 232)}
    assert sorted(chain(*run.rows)) == list(range(232))
    assert all(number in firsts["c"] for number in chain(*run.rows[6:]))
    put(logs / "a.parquet", 95)
    run.checkpoint = newest(tmp_path / "run1")
    with pytest.raises(CheckpointError, match=r"of which a\.parquet had 96 rows and has 95"):
        run()


def test_two_files_of_one_name_are_refused(logs, tmp_path):
    for place in ("x", "y"):
        (logs / place).mkdir()
        put(logs / place / "a.parquet", 40)
    with pytest.raises(DataError, match="have one name below the places that are followed"):
        Run(f"[{logs}/x,{logs}/y]", tmp_path)()
    Run(f"{logs}/*/a.parquet", tmp_path)()


def test_an_order_by_time_needs_the_column(logs, tmp_path):
    put(logs / "a.parquet", 40)
    with pytest.raises(DataError, match=r"a\.parquet: has no column when \(dataset\.follow_time\)"):
        Run(logs, tmp_path)("dataset.follow_time=when")


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("optimizer.restart_tables=[user]", "tables would forget at each file"),
        ("snapshots=2", "there is no last epoch"),
        ("trainer.max_epochs=2", "trainer.max_steps or dataset.follow_idle end training"),
        ("trainer.limit_train_batches=2", "would leave rows of each file out"),
        ("dataset.generate={rows: 10}", "generated files do not grow"),
    ],
)
def test_what_cannot_be_with_files_that_come_is_refused_in_one_line(logs, override, says):
    put(logs / "a.parquet", 400)
    setting = override.partition("=")[0]
    with pytest.raises(RecappError, match=rf"^{setting}=.*: cannot be with dataset.follow.*{says}"):
        check_run(settings(logs, override), None)


def test_a_batch_of_several_steps_and_validations_inside_of_them_are_refused(logs):
    put(logs / "a.parquet", 400)
    more = ["trainer.accumulate_grad_batches=2", "trainer.val_check_interval=4"]
    with pytest.raises(ConfigError, match=r"^trainer\.val_check_interval=4 trainer\.accumulate"):
        check_run(settings(logs, *more), None)


@pytest.mark.parametrize("setting", ["follow_time=clock", "follow_seconds=3", "follow_idle=3"])
def test_settings_of_following_have_no_effect_alone(logs, setting):
    none = ["dataset.follow=false", "dataset.follow_seconds=10", "dataset.follow_idle=null"]
    with pytest.raises(ConfigError, match=f"dataset.{setting}.*: has no effect without"):
        settings(logs, *none, f"dataset.{setting}")


@pytest.mark.full
def test_a_schedule_that_needs_the_number_of_steps_gets_max_steps_or_says_so(logs, tmp_path):
    put(logs / "a.parquet", 96)
    schedule = "+optimizer.schedule={_target_: torch.optim.lr_scheduler.OneCycleLR, max_lr: 0.01, "
    schedule += "cycle_momentum: false}"
    with pytest.raises(ConfigError, match=r"^optimizer\.schedule .*total_steps"):
        Run(logs, tmp_path)(schedule)
    run = Run(logs, tmp_path / "more")
    run(schedule, "trainer.max_steps=2")
    assert len(run.rows) == 2


@pytest.mark.full
def test_validations_and_logs_have_files_as_epochs(logs, tmp_path):
    for number in range(3):
        put(logs / f"a{number}.parquet", 40, 40 * number)
    put(tmp_path / "val.parquet", 64)
    run = Run(logs, tmp_path)
    val = [f"dataset.val_path={tmp_path}/val.parquet", "trainer.limit_val_batches=null"]
    trainer = run(*val, "logger=csv", "trainer.log_every_n_steps=1")
    assert "val_auc" in trainer.callback_metrics
    assert read_manifest(run.checkpoint).metrics
    curves = (tmp_path / "run1/csv/metrics.csv").read_text().splitlines()
    assert "file_auc" in curves[0] and "file_rows" in curves[0]
    assert trainer.datamodule.rows == (120, 64)


def test_a_directory_without_a_file_is_awaited(logs, tmp_path, capsys):
    Timer(0.3, lambda: put(logs / "a.parquet", 40)).start()
    run = Run(logs, tmp_path)
    run("dataset.follow_idle=1")
    assert files_of(run, {"a": range(40)}) == ["a"]
    said = capsys.readouterr().err
    assert said.count(f"dataset.follow=true: waiting for files in {logs}; Ctrl-C ends") == 1
    with pytest.raises(DataError, match="no such file or directory"):
        Run(logs / "none", tmp_path)()
    os.remove(logs / "a.parquet")
    with pytest.raises(
        DataError, match=r"has no file to train on, for dataset\.follow_idle=0\.1 s"
    ):
        Run(logs, tmp_path)()


@pytest.mark.full
def test_several_ranks_train_as_one_and_go_on_from_one_another(jobs, logs, tmp_path):
    sizes = [130, 3, 200, 41]
    for number, rows in enumerate(sizes):
        put(logs / f"a{number}.parquet", rows, sum(sizes[:number]))
    of_one = Run(logs, tmp_path / "one")().datamodule.trained()
    last = []
    for job, (world, steps) in enumerate([(2, 3), (1, 6), (3, 8), (2, -1)]):
        folder = tmp_path / f"job{job}"
        limit = f"trainer.max_steps={steps}"
        measured = jobs.train(folder, *of_run(logs), *last, limit, world=world)
        last = [f"ckpt_path={folder}/checkpoints/last.ckpt"]
    assert measured["rows_train"] == sum(sizes) and measured["status"] == "ok"
    for mine, theirs in zip(measured["files_trained"], of_one, strict=True):
        assert mine.pop("file") == theirs.pop("file")
        assert {name: value or 0 for name, value in mine.items()} == pytest.approx(
            {name: value or 0 for name, value in theirs.items()}, rel=1e-4
        )  # no value: a file of one class has no AUC
    (logs / "a0.parquet").rename(logs / "b.parquet")
    with pytest.raises(Failed, match="no such file"):
        jobs.train(tmp_path / "none", *of_run(logs / "none"), world=2)


@pytest.mark.full
def test_other_places_are_followed_too(shelf, tmp_path):
    put(shelf.folder / "a.parquet", 40)
    shelf.put()

    def drop():
        put(shelf.folder / "b.parquet", 300, 40)
        put(shelf.folder / "c.parquet", 40, 340)
        shelf.put()

    run = Run(shelf.uri, tmp_path)
    idle = "dataset.follow_idle=2"
    run(idle, "trainer.max_steps=4", events={1: drop})
    run(idle)
    firsts = {"a": range(40), "b": range(40, 340), "c": range(340, 380)}
    assert files_of(run, firsts) == ["a", "b", "c"]


@pytest.mark.full
def test_dynamic_tables_take_the_ids_of_later_files(logs, tmp_path):
    put(logs / "a.parquet", 40)
    run = Run(logs, tmp_path)
    more = ["tables=dynamic", "dataset.sparse=[clock]", "dataset.table_rows=null"]
    more += [
        "dataset.dense=[number]",
        "tables.dynamic.eviction=ttl",
        "tables.dynamic.ttl_steps=4",
    ]
    trainer = run(*more, events={1: lambda: put(logs / "b.parquet", 300, 40)})
    (shared,) = trainer.strategy.sharded_tables()
    (rows,) = shared.changes().values()
    assert len(run.rows) == 12 and rows.new == 340
    assert rows.evicted > 100
