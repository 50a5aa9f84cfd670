"""A model with every kind of lookup, and logs with every kind of column."""

import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from omegaconf import OmegaConf
from torch import nn

from recapp.cli import compose as settings_of
from recapp.run.recipe import read_settings
from recapp.tables.collections import EmbeddingCollection
from recapp.tables.config import EmbeddingConfig

DENSE = ("n1", "n2", "n3")
SINGLES = ("hexed", "words", "keys", "errors", "clamped")
LISTS = ("dropped", "many", "text_keys")
ROWS = 900


class AnyLookups(nn.Module):
    """A linear model of the numbers, pooled and concatenated vectors, and sums of two sequences."""

    def __init__(self, embedding_bag_collection, dense_in_features, dims, data_type):
        super().__init__()
        self.bags = embedding_bag_collection
        sequences = [
            EmbeddingConfig(
                name="sequence",
                num_embeddings=40,
                embedding_dim=dims[0],
                feature_names=["dropped", "clamped"],
                id_rule="drop",
                data_type=data_type,
            ),
            EmbeddingConfig(
                name="sequence_keys",
                num_embeddings="dynamic",
                embedding_dim=dims[1],
                feature_names=["text_keys"],
            ),
        ]
        self.sequences = EmbeddingCollection(sequences, device=torch.device("meta"))
        columns = sum(x.columns for x in embedding_bag_collection.lookups)
        columns += sum(x.dim for x in self.sequences.lookups)
        self.deep = nn.Linear(dense_in_features + columns, 24)
        self.score = nn.Linear(24, 1)

    def forward(self, batch):
        parts = [batch.dense_BI, self.bags(batch.sparse).values().float()]
        for jagged in self.sequences(batch.sparse).values():
            sums = nn.functional.pad(jagged.values().float().cumsum(0), (0, 0, 1, 0))
            ends = jagged.lengths().cumsum(0)
            parts.append(sums[ends] - sums[ends - jagged.lengths()])
        return self.score(self.deep(torch.cat(parts, 1)).relu()).squeeze(1)


def raw_rows(seed, rows=ROWS, known=60):
    """Rows of all kinds of columns; ids of dynamic tables are below `known`, or beyond."""
    rng = random.Random(f"rows {seed}")

    def maybe(value, share=0.1):
        return None if rng.random() < share else value

    def bag(make, most=5):
        return maybe([make() for _ in range(rng.randint(0, most))])

    def word():
        letters = rng.choice(["a", "żó", "0", "x" * 40])
        return rng.choice([str(rng.randrange(-9, 50)), letters * rng.randint(0, 3), "-0", "007"])

    def key():
        return rng.choice([rng.randrange(known), rng.randrange(known), -rng.getrandbits(60)])

    columns = {
        "label": [rng.randint(0, 1) for _ in range(rows)],
        "n1": [maybe(rng.randrange(-3, 10**6)) for _ in range(rows)],
        "n2": [maybe(rng.lognormvariate(0, 5)) for _ in range(rows)],
        "n3": [maybe(rng.choice(["", "1e-3", "-7", "250.5"])) for _ in range(rows)],
        "hexed": [maybe(f"{rng.getrandbits(rng.choice([4, 32, 64])):x}") for _ in range(rows)],
        "words": [maybe(word()) for _ in range(rows)],
        "keys": [maybe(key()) for _ in range(rows)],
        "errors": [maybe(rng.randrange(-5, 45)) for _ in range(rows)],
        "clamped": [rng.randrange(-10, 70) for _ in range(rows)],
        "dropped": [bag(lambda: rng.randrange(-3, 60)) for _ in range(rows)],
        "many": [bag(lambda: maybe(rng.getrandbits(40))) for _ in range(rows)],
        "text_keys": [bag(lambda: str(key())) for _ in range(rows)],
    }
    return pa.table(columns)


def write_logs(folder, seed):
    Path(folder).mkdir(parents=True)
    pq.write_table(raw_rows(seed), Path(folder) / "rows.parquet")
    return Path(folder)


def widest(seed):
    """The type of a table in each collection, on which it depends what is computed in."""
    return ("fp32", "fp64")[seed % 2]


def storages(seed):
    """How each table is to be stored."""
    rng = random.Random(f"storages {seed}")
    names = [t["name"] for t in tables(seed)["tables"]] + ["sequence", "sequence_keys"]
    chosen = {name: rng.choice(["none", "fp16", "int8", "int4"]) for name in names}
    return chosen | ({"errors": "none", "sequence": "none"} if seed % 2 else {})


def tables(seed):
    """Tables under every id rule and lookups of every pooling, of random widths and floats."""
    rng = random.Random(f"tables {seed}")

    def table(name, rows, **more):
        dim = rng.choice([1, 3, 4, 8, 12, 16, 33, 64, 70, 128])
        kind = rng.choice(["fp32", "fp32", "fp16", "bf16"])
        return {
            "name": name,
            "num_embeddings": rows,
            "embedding_dim": dim,
            "data_type": kind,
            **more,
        }

    def combiner():
        return rng.choice(["sum", "mean"])

    listed = [
        table("hashed", 700, id_rule="hash"),
        table("words", 900, id_rule="hash"),
        table("keys", "dynamic"),
        table("errors", 50, id_rule="error", min_key=-5) | {"data_type": widest(seed)},
        table("clamped", 30, id_rule="clamp"),
        table("dropped", 40, id_rule="drop"),
        table("text_keys", "dynamic"),
    ]
    lookups = [
        {"table": "hashed", "feature": "hexed", "combiner": combiner()},
        {"table": "words", "feature": "words", "combiner": combiner()},
        {"table": "keys", "feature": "keys", "combiner": combiner()},
        {"table": "errors", "feature": "errors", "combiner": "sum"},
        {"table": "clamped", "feature": "clamped", "combiner": "mean"},
        {"table": "dropped", "feature": "dropped", "combiner": "mean"},
        {"table": "hashed", "feature": "many", "combiner": "mean"},
        {"table": "words", "feature": "many", "output": "wide", "combiner": "concat", "hotness": 3,
         "truncates": True},
        {"table": "text_keys", "feature": "text_keys", "combiner": "sum"},
        {"table": "text_keys", "feature": "text_keys", "output": "wide keys", "combiner": "concat",
         "hotness": 2, "truncates": True},
    ]  # fmt: skip
    rng.shuffle(lookups)
    return {"source": "list", "tables": listed, "lookups": lookups}


def settings(logs, seed):
    """Settings that train the model on such logs."""
    rng = random.Random(f"settings {seed}")
    config = settings_of.compose(
        "train",
        [
            "dataset=custom",
            f"dataset.path={logs}",
            f"dataset.dense=[{','.join(DENSE)}]",
            f"dataset.sparse=[{','.join(SINGLES + LISTS)}]",
            "dataset.hex=[hexed]",
            f"dataset.dense_transform={('log1p', 'log3', 'none')[seed % 3]}",
            "dataset.batch_size=64",
            "dataset.val_batch_size=64",
            "logger=none",
            "trainer.enable_progress_bar=false",
            "trainer.max_steps=5",
            "topology.reserve_bytes=0",
        ],
    )
    OmegaConf.set_struct(config, False)
    config.pop("hydra")
    plain = settings_of.to_plain(config)
    plain["tables"] = tables(seed)
    dims = [rng.choice([3, 8, 17]), rng.choice([4, 16])]
    plain["model"] = {
        "_target_": "inference.scored_models.AnyLookups",
        "dims": dims,
        "data_type": widest(seed),
    }
    plain["trust"] = ["inference"]
    return read_settings(plain, "train")
