"""Finds in the text of a program what makes the host wait for a GPU, or could: it reads a number of
a tensor, or asks for a size that only the device knows.

Types are not in the text. So `int(...)`, `float(...)` and `bool(...)` count where their argument
has the name of an array (`rows_U`: CONTRIBUTING.md) or reduces something, whether the array is one
of the device or of numpy; a mask counts where it is written as one.
"""

import ast
import re
from collections import Counter

METHODS = {
    *("item", "tolist", "cpu", "numpy", "nonzero", "masked_select", "unique", "bincount"),
    *("record_stream", "pin_memory"),  # hold the host up, too
}
READS = {"to_host", "true_indices"}  # where the house waits: recapp/sparse/transfer.py
NUMBERS = {"int", "float", "bool"}
REDUCES = {"sum", "max", "min", "amax", "amin", "any", "all", "mean"}
ARRAY = re.compile(r"_[A-Z][A-Z0-9]*$")


def host_reads(text):
    """Return the number of reads in each function or method of a program, by its name."""
    reads = Counter()
    for name, function in _functions(ast.parse(text), ()):
        nodes = [*ast.walk(function)]
        masks = {mask for node in nodes for mask in _masks(node)}
        reads[name] = sum(_reads(node, masks) for node in nodes)
    return +reads


def _functions(tree, path):
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield ".".join((*path, node.name)), node
        if isinstance(node, ast.ClassDef):
            yield from _functions(node, (*path, node.name))


def _masks(node):
    """Yield the names to which a statement gives a mask."""
    if isinstance(node, ast.Assign) and _is_mask(node.value, ()):
        yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def _is_mask(node, names):
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
        return True
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd | ast.BitOr):
        return _is_mask(node.left, names) or _is_mask(node.right, names)
    if isinstance(node, ast.Compare):
        return any(map(_is_array, (node.left, *node.comparators)))
    return isinstance(node, ast.Name) and node.id in names


def _is_array(node):
    """Return whether an expression is an array by its name."""
    if isinstance(node, ast.Subscript):
        return _is_array(node.value)
    name = getattr(node, "id", getattr(node, "attr", ""))
    return bool(ARRAY.search(name))


def _reads(node, masks):
    """Return whether a node reads from the device."""
    if isinstance(node, ast.Subscript):
        return isinstance(node.ctx, ast.Load) and _is_mask(node.slice, masks)
    if not isinstance(node, ast.Call):
        return False
    called = node.func
    if isinstance(called, ast.Name):
        return called.id in READS or (
            called.id in NUMBERS
            and any(
                _is_array(part) or (isinstance(part, ast.Attribute) and part.attr in REDUCES)
                for argument in node.args
                for part in ast.walk(argument)
            )
        )
    name = getattr(called, "attr", "")
    if name == "repeat_interleave":
        return all(word.arg != "output_size" for word in node.keywords)
    return name in METHODS and not _is_read(called.value)


def _is_read(node):
    """Return whether an expression is on the host already: a read of its own."""
    return isinstance(node, ast.Call) and getattr(node.func, "id", "") in READS
