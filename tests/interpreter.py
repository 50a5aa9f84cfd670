"""Triton's interpreter, without what it does again and again.

Before every launch, and before every function that a kernel calls, it puts its operations in the
place of the language's; for every operation it makes a table of types, and for every sum and
product of integers a check of which it never says what it finds. All this takes longer than the
arithmetic of small arrays. Here it is done once in a process, and the check not at all.
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
