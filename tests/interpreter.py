"""Triton's interpreter, without what it does again and again.

Before every launch, and before every function that a kernel calls, it puts its operations in the
place of the language's; for every operation it makes a table of types, and for every sum and
product of integers a check of which it never says what it finds. For every value it makes its
shape, of numbers that are each wrapped, and takes it apart to compare it with another. All this
takes longer than the arithmetic of small arrays. Here it is done once in a process, for each shape,
and the check not at all.
"""

import sys
from functools import cache


def quicken():
    """Spare the interpreter all that, once somebody has imported it."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None or hasattr(interpreter, "patch_for_each_call"):
        return
    interpreter.patch_for_each_call = patch = interpreter._patch_lang
    of_a_type = interpreter._get_np_dtype
    found = {}

    @cache
    def patch_once(function):
        patch(function)
        return interpreter._LangPatchScope()  # which restores nothing after the launch

    def numpy_type(kind):
        name = kind.scalar.name
        if name not in found:
            found[name] = of_a_type(kind)
        return found[name]

    interpreter._patch_lang = patch_once
    interpreter._get_np_dtype = numpy_type
    interpreter.interpreter_semantic.binary_op_sanitize_overflow_impl = lambda *_: None
    _keep_shapes(sys.modules["triton.language.core"])


def _keep_shapes(core):
    """Make what a shape is kept as once: for types, for values and for their comparison."""
    make_type = core.block_type.__init__
    make_value = core.tensor.__init__
    equals = core.tuple.__eq__
    of_types = {}
    of_values = {}
    answers = core.constexpr(False), core.constexpr(True)

    def block_type(self, element_ty, shape):
        numbers = tuple(shape)
        if numbers not in of_types:
            make_type(self, element_ty, shape)
            of_types[numbers] = vars(self).copy()
        kept = of_types[numbers]
        self.element_ty = element_ty
        self.shape = kept["shape"]
        self.numel = kept["numel"]

    def tensor(self, handle, type):
        numbers = tuple(type.shape) if type.is_block() else ()
        if numbers not in of_values:
            make_value(self, handle, type)
            of_values[numbers] = self.shape, self.numel
        self.handle = handle
        self.type = type
        self.dtype = type.scalar
        self.shape, self.numel = of_values[numbers]

    def equal(self, other):
        if isinstance(other, (list, tuple, core.tuple)):
            return answers[self.values == list(other)]
        return equals(self, other)

    core.block_type.name = property(
        lambda kind: f"<{kind.shape}, {kind.element_ty}>", lambda kind, name: None
    )
    core.block_type.__init__ = block_type
    core.tensor.__init__ = tensor
    core.tuple.__eq__ = equal
