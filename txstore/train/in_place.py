"""What a function changes in place, by its code, and which of it the function has made itself.

A list that a function changes may be one that outlives the call, under another name: ``kept = self.kept; kept += [1]``.
So only a name is trusted that never holds anything but constants and literals of this function.
"""

from __future__ import annotations

import dis
import inspect
from types import CodeType

_LITERALS = frozenset(("BUILD_LIST", "BUILD_MAP", "BUILD_CONST_KEY_MAP", "BUILD_STRING"))
METHODS = frozenset((
    "append", "extend", "insert", "remove", "pop", "clear", "sort", "reverse", "update", "setdefault", "popitem",
))  # fmt: skip


def own_names(code: CodeType) -> set[str]:
    """Local variables that hold, wherever they are set, a constant, a literal, or what they held, changed in place."""
    flags = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    own = set(code.co_varnames[code.co_argcount + code.co_kwonlyargcount + flags :])
    made, before = 0, ""
    for instruction in dis.get_instructions(code):
        # Where two ways meet, as in ``a if b else []``, what was read last is only one of them.
        made = 0 if instruction.is_jump_target else made
        for at, name in enumerate(stored(instruction)):
            if made <= at:
                own.discard(name)
        made, before = _made(made, instruction, before), instruction.opname
    return own


def _made(made: int, instruction: dis.Instruction, before: str) -> int:
    """How many values on top of the stack are surely the function's own after an instruction, by how many were."""
    operation, count = instruction.opname, instruction.arg or 0
    now = int(_is_in_place(instruction))  # the name's on its left, which is set next
    if operation in {"LOAD_CONST", "LOAD_SMALL_INT"} or (operation == "COPY" and count <= made):
        now = made + 1
    elif operation in _LITERALS:
        now = 1 if count else made + 1
    elif operation == "LIST_EXTEND":  # the end of a literal, such as [1, 2, 3]
        now = max(1, made - 1)
    elif operation == "UNPACK_SEQUENCE" and before == "LOAD_CONST" and made:
        now = made - 1 + count
    elif operation in {"STORE_FAST", "STORE_FAST_STORE_FAST"}:
        now = max(0, made - len(stored(instruction)))
    return now


def change(
    before: dis.Instruction | None, instruction: dis.Instruction, after: dis.Instruction | None, own: set[str]
) -> str:
    """How an instruction may change something that the function has not made; "" if it does not.

    Args:
        before: The instruction before it.
        instruction: That instruction.
        after: The one behind it.
        own: The function's `own_names`.
    """
    operation = instruction.opname
    if operation in {"STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE"}:
        return "an item of it"
    if _is_in_place(instruction):
        name = next(iter(stored(after)), "") if after is not None else ""
        return "" if name in own else f"in place: {name!r}" if name else "in place"
    if operation in {"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"} and instruction.argval in METHODS:
        is_own = before is not None and _loaded(before) in own and not instruction.is_jump_target
        return "" if is_own else f"by {instruction.argval!r}"
    return ""


def _is_in_place(instruction: dis.Instruction) -> bool:
    return instruction.opname == "BINARY_OP" and instruction.argrepr.endswith("=")


def stored(instruction: dis.Instruction) -> list[str]:
    """Local variables that an instruction sets; later versions of Python set two with one, or set one and read one."""
    operation, names = instruction.opname, instruction.argval
    if operation == "STORE_FAST_LOAD_FAST":
        return [names[0]]
    return _names(names) if operation.startswith("STORE_FAST") else []


def _loaded(instruction: dis.Instruction) -> str:
    """The local variable that an instruction has put on top of the stack."""
    is_load = instruction.opname.startswith("LOAD_FAST") or instruction.opname == "STORE_FAST_LOAD_FAST"
    return _names(instruction.argval)[-1] if is_load else ""


def _names(found: object) -> list[str]:
    return [str(name) for name in found] if isinstance(found, tuple) else [str(found)]
