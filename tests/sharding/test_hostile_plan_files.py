"""Whatever stands in a plan file, reading it ends in a plan or in one line; nothing in it is run,
and nothing grows beyond it.
"""

import copy
import json
import os
import random
import signal
from contextlib import contextmanager

import pytest
import yaml

from recapp.cli.command import one_line
from recapp.errors import PlanError
from recapp.sharding.plan_file import load_plan, plan_to_yaml, read_plan
from recapp.sharding.sharding_plan import PlannedFor, Shard, ShardingPlan, TableSharding
from recapp.tables.config import EmbeddingBagConfig

TABLES = [
    EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=8, feature_names=[name])
    for name, rows in (("A", 100), ("B", 4))
]
PLAN = ShardingPlan(
    {
        "A": TableSharding(
            (Shard(0, range(50), range(8)), Shard(1, range(50, 100), range(8))),
            "unique",
            "row_wise",
        ),
        "B": TableSharding((Shard(1, range(4), range(8)),), "pooled", "table_wise"),
    },
    2,
    "mine",
    ("a note",),
    made_for=PlannedFor(
        tuple(TABLES),
        64,
        {"A": {"ids_per_sample": 1.0, "distinct": [[64, 60]], "load": [0.5, 0.5]}},
    ),
)
LISTS = [
    [
        {
            "local_embedding_list": [0, 1],
            "global_embedding_list": [[0, 1], [0, 1]],
            "table_placement_strategy": "mp",
            "shards_count": 2,
            "shard_id": rank,
        }
    ]
    for rank in (0, 1)
]
WRONG = [
    None,
    True,
    -1,
    0,
    1.5,
    float("nan"),
    float("inf"),
    10**30,
    "x",
    "",
    [],
    [1],
    [[1]],
    ["A", ["A"]],
    {},
    {"x": 1},
    {1: 2},
    [None],
    [{}],
    "é\u2028",
    {"rank": 0},
]
DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


@contextmanager
def within_seconds(seconds=20):
    def late(*_):
        raise TimeoutError(f"still reading after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def reads(path, plain):
    """Read a plan file of this content with both readers, and return the line in which it is
    refused, or None.
    """
    path.unlink(missing_ok=True)  # a file system writes at once what replaces a file's contents
    if isinstance(plain, bytes):
        path.write_bytes(plain)
    else:
        path.write_text(plain if isinstance(plain, str) else json.dumps(plain))
    said = None
    with within_seconds():
        for read in (lambda: load_plan(path, TABLES, 2), lambda: read_plan(path)):
            try:
                assert isinstance(read(), ShardingPlan)
            except PlanError as error:
                said = one_line(error)  # as a command prints it
                assert len(said.splitlines()) == 1 and len(said) < 2000, said
    return said


def paths_in(plain, here=()):
    """Yield the path of every value in plain values: keys and indices from the top."""
    yield here
    if isinstance(plain, dict | list):
        for key, part in plain.items() if isinstance(plain, dict) else enumerate(plain):
            yield from paths_in(part, (*here, key))


def at(plain, path):
    for key in path:
        plain = plain[key]
    return plain


@pytest.mark.parametrize("form", ["yaml", "lists"])
def test_whatever_is_wrong_in_a_plan_file_is_one_line(tmp_path, form):
    right = {"yaml": yaml.safe_load(plan_to_yaml(PLAN)), "lists": LISTS}[form]
    for path in list(paths_in(right))[1:]:
        for number, wrong in enumerate([*WRONG, "gone"]):
            changed = copy.deepcopy(right)
            holder = at(changed, path[:-1])
            if wrong == "gone":
                del holder[path[-1]]
            else:
                holder[path[-1]] = wrong
            reads(tmp_path / "plan.yaml", changed)
            if form == "yaml" and number % 4 == len(path) % 4:
                reads(tmp_path / "plan.yaml", yaml.dump(changed, Dumper=DUMPER, allow_unicode=True))


def test_whatever_bytes_are_wrong_in_a_plan_file_is_one_line(tmp_path):
    rng = random.Random(2)
    raw = plan_to_yaml(PLAN).encode()
    for number in range(400):
        changed = bytearray(raw)
        where = rng.randrange(len(raw))
        if number % 3 == 0:
            changed[where] ^= 1 << rng.randrange(8)
        elif number % 3 == 1:
            del changed[where : where + rng.randrange(1, 30)]
        else:
            changed[where:where] = rng.choice(
                [
                    b"!!python/object/apply:os.system [true]",
                    b"!!binary x",
                    b"!!timestamp x",
                    b"*a",
                    b"&a",
                    b"[",
                    b"{",
                    b"!!int x",
                    b"!!float x",
                    b"!!set {a}",
                    b"2001-99-99",
                    b"? [a]",
                    b"<<: 1",
                    b"\x00",
                    b"%YAML 9",
                ]
            )
        reads(tmp_path / "plan.yaml", bytes(changed))


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12)
)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "{" * 100_000,
        '{"a":' * 100_000,
        "- " * 50_000,
        "[" * 5000 + "]" * 5000,
        BOMB,
        BOMB + "ranks: *a11\ntables: {A: *a11}\n",
        BOMB + "ranks: 2\ntables: *a11\n",
        "a: &a [*a]\n",
        "&a {ranks: 2, tables: *a}",
        "!!map [a]",
        "!!map x",
        "!!python/name:os.system",
        "!!python/object/new:os.system [id]",
        "!!int x",
        "!!float [a]",
        "!!binary é",
        "!!timestamp x",
        "!!bool x",
        "!!null [a]",
        "!!omap [a: 1]",
        "!!set {a, b}",
        "!!pairs [a: 1]",
        "2001-01-01",
        "? [a, b]\n: 1",
        "? {a: 1}\n: 1",
        "!x y",
        "--- a\n--- b\n",
        "\ufeff{}",
        "\x00",
        "9" * 5000,
        f"ranks: {'9' * 5000}\ntables: {{}}",
        "ranks: 1000000000000\ntables: {A: {table: {rows: 1, dim: 1}, mode: replicated}}",
        "",
        "null",
        "[]",
        "{}",
        "[[]]",
        "[{}]",
        '{"shard_matrix": {}}',
        "ranks: 2\ntables: {A: {table: {rows: 1e30, dim: 8}, shards: [{rank: 0}]}}",
    ],
)
def test_bombs_and_what_is_no_plan_are_refused_in_one_line(tmp_path, text):
    assert reads(tmp_path / "plan.yaml", text)


@pytest.mark.parametrize("kind", ["pipe", "directory", "device", "nothing"])
def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path, kind):
    path = tmp_path / "plan.yaml"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    with within_seconds(), pytest.raises(PlanError, match="name a plan file"):
        read_plan(path)


def test_anchors_that_repeat_little_are_read(tmp_path):
    text = (
        "ranks: 2\ntables:\n  A: {table: {rows: 100, dim: 8}, shards: &whole [{rank: 0}]}\n"
        "  B: {table: {rows: 4, dim: 8}, shards: *whole}\n"
    )
    assert reads(tmp_path / "plan.yaml", text) is None
