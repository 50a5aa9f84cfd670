"""A store of whole objects under keys, as S3 has them: put, get, list by prefix and delete, but no
directories, renames or links. The objects are rows of one file of SQLite, so that ranks and later
processes see them.

    a.ckpt@               a pointer: the name a.ckpt leads to the objects below a.ckpt@7
    a.ckpt@7/meta.pt      an object of that version
    last.ckpt@            a pointer to another name
    a.ckpt.tmp/meta.pt    an object of a version that has no name yet
"""

import io
import os
import sqlite3
import time
from contextlib import contextmanager
from pathlib import Path

from recapp.stored.store import Entry

LINK = "link:"


class Objects:
    """The objects.

    Args:
        file: The file of SQLite.
    """

    def __init__(self, file):
        self._file = file
        self._ask("create table if not exists objects (key text primary key, body blob, at int)")

    def _ask(self, query, *values):
        base = sqlite3.connect(self._file, timeout=60)
        try:
            with base:
                return base.execute(query, values).fetchall()
        finally:
            base.close()

    def put(self, key, body):
        self._ask("insert or replace into objects values (?, ?, ?)", key, body, time.time_ns())

    def put_new(self, key):
        """Put an object if there is none; return whether there was none."""
        try:
            self._ask("insert into objects values (?, '', 0)", key)
        except sqlite3.IntegrityError:
            return False
        return True

    def get(self, key):
        rows = self._ask("select body from objects where key = ?", key)
        return rows[0][0] if rows else None

    def listed(self, prefix):
        """Return {key: (bytes, time)} of the keys with a prefix."""
        query = "select key, length(body), at from objects where substr(key, 1, ?) = ? order by key"
        return {key: (size, at) for key, size, at in self._ask(query, len(prefix), prefix)}

    def delete(self, key):
        self._ask("delete from objects where key = ?", key)


class ObjectFiles:
    """The files of stored models as objects (a `recapp.stored.store.Files`)."""

    def __init__(self, objects):
        self.objects = objects

    def _pointer(self, key):
        body = self.objects.get(f"{key}@")
        return None if body is None else body.decode()

    def _key(self, path):
        """Return the prefix of the objects of a path, behind all pointers."""
        key = ""
        for part in Path(path).parts[1:]:
            key = f"{key}/{part}"
            while pointer := self._pointer(key):
                key = self._key(pointer.removeprefix(LINK)) if LINK in pointer else pointer
        return key

    def _entry(self, path):
        key = f"{self._key(path.parent)}/{path.name}"
        pointer = self._pointer(key) or ""
        target = Path(pointer.removeprefix(LINK)) if LINK in pointer else None
        real = self._key(path)
        known = self.objects.listed(real)
        if real in known:
            size, at = known[real]
            return Entry(path, "file", size, target, (hash(real),), (hash(real), at))
        if pointer or any(name.startswith(f"{real}/") for name in known):
            return Entry(path, "folder", 0, target, (hash(real),), (hash(real),))
        return None

    def entries(self, path, inside=False):
        if not inside:
            yield from filter(None, [self._entry(path)])
            return
        prefix = f"{self._key(path)}/"
        keys = self.objects.listed(prefix)
        names = {key.removeprefix(prefix).split("/")[0].split("@")[0] for key in keys}
        yield from filter(None, (self._entry(path / name) for name in sorted(names)))

    def current(self, name):
        return name

    def open_folder(self, folder):
        prefix = f"{self._key(folder)}/"
        if not (known := self.objects.listed(prefix)):
            raise FileNotFoundError(str(folder))
        return ObjectFolder(self.objects, prefix, known)

    @contextmanager
    def create(self, file):
        out = io.BytesIO()
        yield out
        self.objects.put(self._key(file), out.getvalue())

    def publish(self, folder, name, *, link=False):
        key = f"{self._key(name.parent)}/{name.name}"
        earlier = self._pointer(key)
        pointer = f"{LINK}{folder}"
        if not link:
            source = f"{self._key(folder)}/"
            pointer = f"{key}@{time.time_ns()}"
            for one in self.objects.listed(source):
                self.objects.put(f"{pointer}/{one.removeprefix(source)}", self.objects.get(one))
        self.objects.put(f"{key}@", pointer.encode())
        self._delete(None if link else self._key(folder))
        self._delete(None if not earlier or LINK in earlier else earlier)

    def _delete(self, key):
        for one in self.objects.listed(f"{key}/") if key else ():
            self.objects.delete(one)

    def remove(self, path):
        key = f"{self._key(path.parent)}/{path.name}"
        pointer = self._pointer(key)
        self.objects.delete(f"{key}@")
        self.objects.delete(key)
        self._delete(key)
        self._delete(None if not pointer or LINK in pointer else pointer)

    @contextmanager
    def locked(self, folder):
        lock = f"{self._key(folder)}.lock"
        alone = self.objects.put_new(lock)
        try:
            if alone:
                self.remove(folder)
            yield alone
        finally:
            if alone:
                self.objects.delete(lock)


class ObjectFolder:
    """The objects of one version; one that is deleted meanwhile cannot be opened any more."""

    def __init__(self, objects, prefix, known):
        self._objects = objects
        self._prefix = prefix
        self._known = known

    def close(self): ...

    def size(self, file):
        return self._known.get(f"{self._prefix}{file}", (None,))[0]

    def descriptor(self, file):
        body = self._objects.get(f"{self._prefix}{file}")
        if body is None:
            raise FileNotFoundError(file)
        descriptor = os.memfd_create(file)
        with open(descriptor, "wb", closefd=False) as local:
            local.write(body)
        os.lseek(descriptor, 0, os.SEEK_SET)
        return descriptor
