"""A model of five features whose scores a test can compute itself, and a server around it that
needs no socket.
"""

import asyncio
import json
from contextlib import asynccontextmanager

import pyarrow as pa
import torch

from recapp.dataset.collate import RawRows
from recapp.dataset.schema import Schema
from recapp.inference.scorer import Scorer
from recapp.serving.app import Server
from recapp.serving.counts import Counts
from recapp.serving.limits import Limits
from recapp.serving.served_model import Batcher, ModelInService
from recapp.tables.collections import EmbeddingBagCollection
from recapp.tables.config import EmbeddingBagConfig

SCHEMA = Schema(
    None, ("age", "price"), ("user", "item", "seen"), integers=("user",), lists=("seen",)
)
ROWS = [
    {"age": 31, "price": 2.5, "user": 3, "item": "lamp", "seen": [4, 9]},
    {"age": None, "price": 0, "user": 49, "item": "", "seen": []},
    {"age": 7, "price": 100.25, "user": None, "item": "DE", "seen": [1, 2, 3]},
]
"""Three rows with everything that may be missing."""


class Clicks(torch.nn.Module):
    """Logits that are linear in the numbers and in the pooled vectors."""

    def __init__(self, seed):
        super().__init__()
        tables = [
            EmbeddingBagConfig(
                name="user", num_embeddings=50, embedding_dim=4, feature_names=["user"],
                id_rule="error",
            ),
            EmbeddingBagConfig(
                name="item", num_embeddings=90, embedding_dim=4, feature_names=["item", "seen"],
                id_rule="hash",
            ),
        ]  # fmt: skip
        self.bags = EmbeddingBagCollection(tables, seed=seed)
        torch.manual_seed(seed)
        self.score = torch.nn.Linear(14, 1)

    def forward(self, batch):
        vectors = self.bags(batch.sparse).values()
        return self.score(torch.cat([batch.dense_BI, 30 * vectors], 1)).squeeze(1)


def scorer(seed=1, schema=SCHEMA, **more):
    """A model; another seed is another version of it."""
    model = Clicks(seed).requires_grad_(False)
    info = {"step": 5, "metrics": {"val_auc": 0.75}, "tables": [{"name": "user", "bytes": 800}]}
    return Scorer(model, RawRows(schema, "log1p"), "clicks", f"v{seed}", info, **more)


def table(rows=ROWS):
    """The rows as Arrow has them."""
    kinds = {"age": pa.float64(), "price": pa.float64(), "user": pa.int64(), "item": pa.string()}
    return pa.table(
        {
            name: pa.array([row[name] for row in rows], kinds.get(name, pa.list_(pa.int64())))
            for name in ROWS[0]
        }
    )


def arrow(rows):
    """A table as the bytes of a stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_table(rows)
    return sink.getvalue().to_pybytes()


class Answer:
    """What came back."""

    def __init__(self, status, headers, body):
        self.status = status
        self.headers = {name.decode(): value.decode() for name, value in headers}
        self.body = body

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def error(self):
        """The one line of an error that is for the client to mend."""
        assert self.status >= 400 and self.headers["content-type"] == "application/json"
        (line,) = self.json["error"].splitlines()
        return line


class Client:
    """Speaks ASGI with the routes, as an HTTP server does."""

    def __init__(self, server):
        self.server = server
        self.app = server.application()

    async def __call__(self, method, path, body=b"", headers=(), goes_after=None):
        """Ask, and return the answer; None where the client goes before it comes."""
        if not isinstance(body, bytes):
            body = json.dumps(body).encode()
        given = {"host": "here", "content-length": str(len(body))} | dict(headers)
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "scheme": "http",
            "query_string": b"",
            "headers": [(name.lower().encode(), text.encode()) for name, text in given.items()],
        }
        said = []
        sent = False

        async def receive():
            nonlocal sent
            if not sent:
                sent = True
                return {"type": "http.request", "body": body, "more_body": False}
            await asyncio.sleep(60 if goes_after is None else goes_after)
            return {"type": "http.disconnect"}

        async def send(message):
            said.append(message)

        await self.app(scope, receive, send)
        text = b"".join(part.get("body", b"") for part in said[1:])
        return Answer(said[0]["status"], said[0]["headers"], text)

    async def infer(self, body, verb="infer", **more):
        """Ask the model."""
        return await self("POST", f"/v2/models/clicks/{verb}", body, **more)


@asynccontextmanager
async def running(load=scorer, max_batch=64, max_wait_ms=0.0, leader=None, **limits):
    """A server that answers, as a `Client`."""
    counts = Counts()
    model = ModelInService(load, None, counts)
    batcher = Batcher(model.current, max_batch, max_wait_ms, counts.batch)
    server = Server(model, batcher, Limits(**limits), counts, "0.0", leader)
    batcher.start()
    try:
        yield Client(server)
    finally:
        await asyncio.to_thread(batcher.stop)


def asked(body, verb="infer", load=scorer, headers=(), **limits):
    """The answer to one request."""

    async def ask():
        async with running(load, **limits) as client:
            return await client.infer(body, verb, headers=headers)

    return asyncio.run(ask())
