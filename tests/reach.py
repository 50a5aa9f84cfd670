"""Which files of a checkout each of its tests can reach.

A test reaches, and so on from there:

- modules that it imports, wherever the import stands, but not those for type checkers alone;
- modules that it names: whole strings such as "recapp.train", and in tests code in strings.
  `f"recapp.{name}"` names the commands that the test has a word for, all where it has none;
- files and folders that it names: `REPOSITORY / "docs"`, "plain_data_script.py". A data file of the
  package belongs to all modules beside it;
- of the helpers of tests, the definitions that it uses; the fixtures that it asks for; each
  `conftest.py` of its folders;
- what the blocks of a page import and start, if it reads the page; what `_target_`s of settings
  name, if it reaches a module that imports by name.

In the package the file is the unit. Its `__init__.py` shows public names and its compat tables
foreign ones: who asks for such a name reaches its home, and who asks for a foreign module the homes
of all names in it.
"""

import re
import runpy
from collections.abc import Iterable, Iterator
from functools import cache, cached_property
from pathlib import Path, PurePosixPath

from pieces import GAP, Module, Piece

ALL_SOURCES = re.compile(r"\*\S*\.py")
IMPORT_IN_TEXT = re.compile(r"\b(?:from|import) +(\w[\w.]*)(?: +import +\(?([\w, ]+))?")
TARGET = re.compile(r"_target_: *([\w.]+)")


class Checkout:
    """The files of a checkout and what they reach.

    Args:
        root: Its folder.
        files: Paths in it; one that is gone reaches nothing.
        package: The package's name.
    """

    def __init__(self, root: Path, files: Iterable[str], package: str = "recapp") -> None:
        self.root = root
        self.files = frozenset(files)
        self.package = package
        self._dotted = re.compile(rf"\b{package}(?:\.(?:\w+|{GAP}))+")
        self._tables = re.compile(
            rf"{package}/(__init__|compat/\w+_names|compat/foreign_paths"
            r"|trainer/known_to_lightning)\.py"
        )
        self._module = cache(lambda path: Module(self._text(path)))
        self._reached_from = cache(self._read)
        self._part = cache(self._part_of)

    @property
    def tests(self) -> list[str]:
        """The files of tests."""
        return sorted(f for f in self.files if re.fullmatch(r"tests/(?:.*/)?test_\w+\.py", f))

    def reached_by(self, test: str) -> set[str]:
        """Return the files that a test can reach, its own among them."""
        conftests = tuple(f for f in self._conftests(test) if f in self.files)
        todo: list[tuple[str, str | None]] = [(test, None)]
        todo += [(c, n) for c in conftests for n, all_ in self._module(c).fixtures.items() if all_]
        seen = set(todo)
        files = {test, *conftests}
        words: set[str] = set()
        gaps: set[str] = set()
        for key in todo:
            more, piece, uses, gaps_here = self._part(*key, conftests)
            files |= more
            words |= piece.strings
            gaps |= gaps_here
            todo += uses - seen
            seen |= uses
        for dotted in gaps:
            files |= self._with_gap(dotted, words)
        return self._closure(files)

    def _part_of(
        self, path: str, name: str | None, conftests: tuple[str, ...]
    ) -> tuple[set[str], Piece, set[tuple[str, str | None]], set[str]]:
        """Return of a definition in a file of tests, or of all of it: the files that it reaches
        itself, what it names, the definitions that it uses, and modules that it names with gaps.
        """
        module = self._module(path)
        piece = module.piece(name)
        piece.imports |= {module.sources[n] for n in piece.names if n in module.sources}
        uses = set(self._uses(path, piece, conftests))
        files = {path, *(file for file, _ in uses)} | self._named_in_test(path, piece)
        if path not in conftests:  # what a helper imports runs, whether it is used or not
            files |= {f for source in module.sources.values() for f in self._imported(*source)}
        gaps = {m[0] for s in piece.strings for m in self._dotted.finditer(s) if GAP in m[0]}
        return files, piece, uses, gaps

    # ---- the helpers of tests, by definition

    def _uses(
        self, path: str, piece: Piece, conftests: tuple[str, ...]
    ) -> Iterator[tuple[str, str | None]]:
        yield from ((path, name) for name in piece.names & self._module(path).bound.keys())
        for source, name in piece.imports:
            yield from (
                (f, None) for f in self._helper(f"{source}.{name}" if name else source, path)
            )
            yield from ((f, name) for f in self._helper(source, path) if name)
        for conftest in conftests:
            fixtures = self._module(conftest).fixtures.keys()
            yield from ((conftest, name) for name in (piece.names | piece.strings) & fixtures)
        for text in piece.strings:
            named = [text] if "_" in text or "." in text else []
            named += [match[1] for match in IMPORT_IN_TEXT.finditer(text)]
            yield from ((file, None) for name in named for file in self._helper(name, path, True))

    def _helper(self, name: str, path: str, above: bool = False) -> list[str]:
        """Return the file of tests that a module has, as `path` imports it; with `above`, that of
        the longest part of the name.
        """
        if not re.fullmatch(r"\w+(\.\w+)*", name):
            return []
        parts = name.split(".")
        for count in range(len(parts), 0 if above else len(parts) - 1, -1):
            for home in (str(PurePosixPath(path).parent), "tests"):
                file = f"{home}/{'/'.join(parts[:count])}.py"
                if file in self.files:
                    return [file]
        return []

    def _conftests(self, test: str) -> list[str]:
        return [f"{folder}/conftest.py" for folder in PurePosixPath(test).parents]

    # ---- what is named

    def _named_in_test(self, path: str, piece: Piece) -> set[str]:
        """Return the files that a piece of a test names, or of another file beside the package."""
        found = {f for source in piece.imports for f in self._imported(*source, foreign=True)}
        packages = self._module(path).packages
        for owner, attribute in piece.attributes:
            found |= self._public(attribute, True) if packages.get(owner) == self.package else set()
        for text in piece.strings:
            found |= self._in_text(text) | self._files_of_path(text, path)
        for text in piece.paths:
            found |= self._files_of_path(text, path, behind_slash=True)
        return found

    def _named_in_package(self, piece: Piece) -> set[str]:
        """Return the files that a file of the package names."""
        found = {f for source in piece.imports for f in self._imported(*source)}
        whole = {text for text in piece.strings if self._dotted.fullmatch(text)}
        for text in whole:
            if GAP not in text:
                found |= self._imported(text)
            elif text in piece.loaded:
                found |= self._with_gap(text, set())
        for text in piece.paths:
            found |= self._files_of_path(text, "", behind_slash=True)
        return found

    def _in_text(self, text: str) -> set[str]:
        """Return the modules that code or a command line in a text names."""
        if self.package not in text:
            return set()
        dotted = [match[0] for match in self._dotted.finditer(text) if GAP not in match[0]]
        found = {f for name in dotted for f in self._imported(name, foreign=True)}
        for match in IMPORT_IN_TEXT.finditer(text):
            for name in re.findall(r"\w+", match[2] or ""):
                found |= self._imported(match[1], name, foreign=True)
        return found

    def _with_gap(self, dotted: str, words: set[str]) -> set[str]:
        """Return the modules of a folder; of the package itself those that there is a word for."""
        known, _, _ = dotted.partition(f".{GAP}")
        folder = known.replace(".", "/")
        inside = {
            f
            for f in self._folders.get(folder, ())
            if re.fullmatch(r"\w+\.py", f[len(folder) + 1 :])
        }
        named = {f for f in inside if PurePosixPath(f).stem in words}
        return named if named and known == self.package else inside

    def _imported(self, module: str, name: str | None = None, foreign: bool = False) -> set[str]:
        """Return the files of the package that the import of a name runs.

        Args:
            module: The module, or a name in it.
            name: A name in it, or None.
            foreign: Whether a name that is not the package's own is one of its foreign ones.
        """
        parts = [*module.split("."), *([name] if name else [])]
        if parts[0] != self.package:
            return set()
        inits = {"/".join([*parts[:count], "__init__.py"]) for count in range(1, len(parts) + 1)}
        found = set(inits & self.files)
        for count in range(len(parts), 1, -1):
            file = "/".join(parts[:count]) + ".py"
            if file in self.files:
                return found | {file}
        if len(parts) == 2:
            return found | self._public(parts[1], foreign)
        whole = f"{'/'.join(parts)}/__init__.py" in self.files
        return found | (
            self._foreign(parts[1:]) if foreign and len(parts) > 2 and not whole else set()
        )

    def _public(self, name: str, foreign: bool) -> set[str]:
        """Return the files behind a name of the package itself."""
        own = {f"{self.package}/{name}.py", f"{self.package}/{name}/__init__.py"} & self.files
        if own or name.startswith("__"):
            return own
        if name in self._homes:
            return self._imported(self._homes[name])
        return self._foreign([name]) if foreign else set()

    @cached_property
    def _homes(self) -> dict[str, str]:
        text = self._text(f"{self.package}/__init__.py")
        return dict(re.findall(rf'"(\w+)": "({self.package}[\w.]+)"', text))

    def _foreign(self, asked: list[str]) -> set[str]:
        """Return the homes of the foreign names in a module, or behind a name, by its parts."""
        homes = {
            home
            for path, home in self._foreign_homes.items()
            if all(a == b for a, b in zip(asked, path.split("."), strict=False))
        }
        return {f for home in homes for f in self._imported(home.partition(":")[0])}

    @cached_property
    def _foreign_homes(self) -> dict[str, str]:
        """The home of every foreign name by its path, as the table has it."""
        table = f"{self.package}/compat/foreign_names.py"
        names: dict[str, str] = {}
        return runpy.run_path(str(self.root / table))["NAMES"] if table in self.files else names

    @cached_property
    def _targets(self) -> set[str]:
        """The files of all that settings make."""
        texts = [self._text(f) for f in self._folders.get("conf", ())]
        return {f for text in texts for m in TARGET.finditer(text) for f in self._imported(m[1])}

    def _files_of_path(self, text: str, path: str, behind_slash: bool = False) -> set[str]:
        """Return the files that a string names as a path, from the root or beside the file."""
        if ALL_SOURCES.fullmatch(text):
            return {f for f in self.files if f.endswith(".py")}
        text = text.split("*")[0].rstrip("/")
        if not (behind_slash or "." in text or "/" in text) or not re.fullmatch(
            r"[\w./-]*\w[\w./-]*", text
        ):
            return set()
        homes = ("", "tests/", f"{self.package}/", f"{PurePosixPath(path).parent}/")
        wholes = {f"{home}{text}" for home in homes}
        return (wholes & self.files).union(*(self._folders.get(whole, ()) for whole in wholes))

    @cached_property
    def _folders(self) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for file in self.files:
            for folder in PurePosixPath(file).parents:
                found.setdefault(str(folder), set()).add(file)
        return found

    # ---- from file to file

    def _closure(self, files: set[str]) -> set[str]:
        todo = list(files)
        for file in todo:
            more = self._reached_from(file) - files
            files |= more
            todo += more
        return files

    def _read(self, path: str) -> set[str]:
        """Return the files that a file reaches directly. (Those of tests do by definition.)"""
        if path.startswith("tests/") or not path.endswith((".py", ".md")):
            return set()
        if path.endswith(".md"):
            return self._in_text(self._text(path))
        piece = self._module(path).piece()
        if not path.startswith(f"{self.package}/"):
            return self._named_in_test(path, piece)
        makes = "import_module" in piece.names and not self._tables.fullmatch(path)
        if self._tables.fullmatch(path):
            piece.strings.clear()
        room = str(PurePosixPath(path).parent)
        beside = self._folders[room] if room != self.package else set()
        made = self._targets if makes else set()
        return self._named_in_package(piece) | made | {f for f in beside if not f.endswith(".py")}

    def _text(self, path: str) -> str:
        file = self.root / path
        return file.read_text() if file.is_file() else ""
