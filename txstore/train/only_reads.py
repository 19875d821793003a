"""Whether a function only reads, by its code and by what the names in it stand for: then to ask it moves nothing.

A function of a scheduler may keep a running minimum, draw a random number, or write a log. To look at such a one by a
call is to act. So its code is read first, with that of all functions that it calls. Known are constants, plain values
and containers of them, records (objects without special methods, such as a namespace), and what is on the lists below.
Whatever comes into a function is known, or made of the known; all else is not proved.
"""

from __future__ import annotations

import builtins
import dis
import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from txstore.errors import describe
from txstore.train.in_place import change, own_names, stored
from txstore.train.iterated import is_container, is_plain
from txstore.train.known_values import OF_VALUES, UNKNOWN, VALUES, attribute_of, is_library, is_record
from txstore.train.rng import Generator

_MOST_FUNCTIONS = 100
_DEEPEST = 20
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_UNCERTAIN = frozenset(
    (
        "IMPORT_NAME",
        "STORE_ATTR",
        "DELETE_ATTR",
        "LOAD_SUPER_ATTR",
        "IMPORT_FROM",
        "LOAD_BUILD_CLASS",
        "STORE_NAME",
    )
)


@dataclass(slots=True)
class Reading:
    """What the code of a function shows, each as the rest of a sentence.

    Attributes:
        keeps: State that it surely keeps; "" if none was found.
        unproved: What in it may act; "" if it only reads.
        reads: The objects that it reads from.
    """

    keeps: str = ""
    unproved: str = ""
    reads: list[object] = field(default_factory=list)


def reading_of(function: Callable[..., Any]) -> Reading:
    """Read the code of a function, and of all that it calls."""
    reader = _Reader()
    try:
        reader.meet(function)
        return reader.read()
    except Exception as error:  # noqa: BLE001 - of objects that answer in their own way: then nothing is proved
        return Reading(unproved=f"cannot be read ({describe(error)})")


class _Reader:
    """Reads functions until none is left. What has no name counts as changed only where a container outlives a call."""

    def __init__(self) -> None:
        self.found = Reading()
        self.set: dict[object, str] = {}
        """What is set that outlives a call, and how, by object and name. It is state if it is also..."""
        self.asked: set[object] = set()
        self.of_values: set[str] = set()
        """Attributes of what is only known to be plain, or of a record."""
        self.change = ""
        self._holds = False
        self._waiting: list[tuple[FunctionType, Mapping[str, Any]]] = []
        self._seen: dict[object, object] = {}
        self._records: list[Any] = []

    def read(self) -> Reading:
        while self._waiting and len(self._seen) < _MOST_FUNCTIONS:
            self._function(*self._waiting.pop())
            if not self._waiting:
                # A record may come in late, and its method be called like one of a text.
                self._call_methods()
        for name in self.of_values - OF_VALUES:
            if not any(hasattr(type(one), name) or name in vars(one) for one in self._records):
                self.may(f"uses {name!r}")
        if self._waiting:
            self.may("calls too many functions")
        for key, what in self.set.items():
            if key in self.asked:
                self.keeps(f"{what}, and reads it")
            self.may(what)
        if self._holds and self.change:
            self.may(self.change)
        return self.found

    def keeps(self, what: str) -> None:
        self.found.keeps = self.found.keeps or what

    def may(self, what: str) -> None:
        self.found.unproved = self.found.unproved or what

    def meet(self, value: Any, name: str = "", depth: int = 0) -> None:
        """Something that outlives the call comes in: it may be called, and so may anything that it holds."""
        what = name or getattr(value, "__qualname__", type(value).__name__)
        if isinstance(value, Generator) or isinstance(getattr(value, "__self__", None), Generator):
            self.may(f"draws random numbers by {what!r}")
        elif is_library(value):
            return
        elif value is None or is_plain(value):
            self._holds |= is_container(value)
        elif depth > _DEEPEST:
            self.may(f"uses {what!r}")
        elif type(value) in {list, tuple, set, frozenset, dict}:
            self._holds |= type(value) is not frozenset
            for one in [*value, *value.values()] if isinstance(value, dict) else value:
                self.meet(one, name, depth + 1)
        else:
            self._object(value, what, depth)

    def _object(self, value: Any, what: str, depth: int) -> None:
        if isinstance(value, FunctionType):
            self._wait(value, {})
        elif isinstance(value, MethodType):
            self._method(value.__func__, value.__self__)
        elif isinstance(value, functools.partial):
            self._partial(value)
        elif isinstance(value, functools._lru_cache_wrapper):  # noqa: SLF001 - what it keeps would be computed again
            self.meet(value.__wrapped__)
        elif callable(value) and isinstance(type(value).__call__, FunctionType) and not isinstance(value, type):
            self._method(type(value).__call__, value)
        elif is_record(value):
            self._record(value, depth)
        else:
            self.may(f"uses {what!r}")

    def _method(self, function: object, owner: object) -> None:
        self.found.reads.append(owner)
        if isinstance(function, FunctionType):
            self._wait(function, dict.fromkeys(function.__code__.co_varnames[:1], owner))
        else:
            self.meet(function)

    def _partial(self, value: functools.partial[Any]) -> None:
        function, given, rest = value.func, dict(value.keywords), [*value.args]
        if isinstance(function, FunctionType):
            code = function.__code__
            given |= dict(zip(code.co_varnames[: code.co_argcount], rest, strict=False))
            rest = rest[code.co_argcount :]
            named = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            self._wait(function, {name: one for name, one in given.items() if name in named})
            given = {name: one for name, one in given.items() if name not in named}
        else:
            self.meet(function)
        for one in [*rest, *given.values()]:
            self.meet(one)

    def _record(self, value: Any, depth: int) -> None:
        if not any(value is one for one in self._records):
            self._records.append(value)
            self.found.reads.append(value)
            for name, one in vars(value).items():
                self.meet(one, name, depth + 1)

    def _call_methods(self) -> None:
        """What an attribute of something that may be a record would call."""
        for record in self._records:
            for name in self.of_values:
                method = inspect.getattr_static(type(record), name, None)
                method = method.fget if isinstance(method, property) else method
                if isinstance(method, FunctionType):
                    self._wait(method, {})
                elif method is not None and name not in vars(record):
                    self.meet(method)

    def _wait(self, function: FunctionType, given: Mapping[str, Any]) -> None:
        key = (id(function), *map(id, given.values()))
        if key not in self._seen:
            self._seen[key] = (function, given)
            self._waiting.append((function, given))

    def _function(self, function: FunctionType, given: Mapping[str, Any]) -> None:
        for default in [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]:
            self.meet(default)
        names = dict(given)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                names[name] = cell.cell_contents
            except ValueError:  # empty
                self.may(f"uses {name!r}")
        _Code(self, function.__code__, function, names).read()


class _Code:
    """Reads one code object. What is on top of the stack is known as long as it is a chain of names, as in `a.b.c`."""

    def __init__(self, reader: _Reader, code: CodeType, function: FunctionType, names: Mapping[str, Any]) -> None:
        self._reader, self._code, self._function = reader, code, function
        self._space, self._where = function.__globals__, function.__name__
        self._is_ours = not _is_of_library(function)
        self._instructions = [*dis.get_instructions(code)]
        local = [name for one in self._instructions for name in stored(one)]
        self._once = {name for name in local if local.count(name) == 1 and name not in names}
        moved = {*local, *_set_in(code)} - {*code.co_freevars}
        self._names = {name: value for name, value in names.items() if name not in moved}
        for name in names.keys() & moved:
            reader.meet(names[name], name)
        self._own = own_names(code)
        self._top, self._chain = UNKNOWN, ""
        self._module: ModuleType | None = None
        self._roots: dict[object, str] = {}
        """Chains of names, by where they begin in the source."""

    def read(self) -> None:
        before: dis.Instruction | None = None
        for instruction, after in itertools.pairwise([*self._instructions, None]):
            assert instruction is not None
            for operation, name in _simple(instruction):
                self._step(operation, name, instruction)
            changed = change(before, instruction, after, self._own)
            root = self._roots.get(_start(instruction))
            if changed and root is not None and self._is_ours:
                self._reader.keeps(f"changes {root!r} in {self._where}")
            elif changed and not self._reader.change:
                self._reader.change = f"may change a list, dict or array ({changed}) in {self._where}"
            before = instruction
        for constant in self._code.co_consts:
            if isinstance(constant, CodeType):
                names = {name: one for name, one in self._names.items() if name in constant.co_freevars}
                _Code(self._reader, constant, self._function, names).read()
            elif isinstance(constant, tuple) and "out" in constant:
                self._reader.may("writes into 'out'")

    def _step(self, operation: str, name: str, instruction: dis.Instruction) -> None:
        top, chain = self._top, self._chain
        is_named = top is not UNKNOWN and not instruction.is_jump_target
        self._top, self._chain = UNKNOWN, ""
        if operation in _ATTRIBUTES and is_named:
            self._attribute(top, name, chain)
        elif operation in _ATTRIBUTES:
            self._reader.of_values.add(name)
        elif operation == "STORE_ATTR" and is_named:
            self._sets((id(top), name), f"sets '{chain}.{name}' in {self._where}")
        elif operation == "STORE_FAST" and is_named and name in self._once:
            self._names[name] = top
        else:
            is_named = False
            self._other(operation, name)
        if top is not UNKNOWN and not is_named:
            self._reader.meet(top, chain)
        position = _start(instruction)
        if position is not None and self._top is not UNKNOWN and not isinstance(self._top, type):
            self._roots[position] = self._chain
        elif operation.startswith("CALL"):
            self._roots.pop(position, None)

    def _sets(self, key: object, what: str) -> None:
        if self._is_ours:
            self._reader.set[key] = what
        else:
            self._reader.may(what)  # a cache or a counter of a library, such as those of logging

    def _other(self, operation: str, name: str) -> None:
        reader = self._reader
        if operation in {"LOAD_GLOBAL", "LOAD_NAME"}:
            reader.asked.add((id(self._space), name))
            self._top, self._chain = self._space.get(name, getattr(builtins, name, UNKNOWN)), name
            if self._top is UNKNOWN:
                reader.may(f"uses {name!r}")
        elif operation in {"LOAD_FAST", "LOAD_DEREF"} and name in self._names:
            reader.asked.add(name)
            self._top, self._chain = self._names[name], name
        elif operation == "IMPORT_NAME" and name in sys.modules and "." not in name:
            self._top = self._module = sys.modules[name]
            self._chain = name
        elif operation == "IMPORT_FROM" and self._module is not None:
            self._attribute(self._module, name, self._module.__name__)
        elif operation in {"STORE_GLOBAL", "DELETE_GLOBAL"}:
            self._sets((id(self._space), name), f"sets {name!r} in {self._where}")
        elif operation in {"STORE_DEREF", "DELETE_DEREF"} and name in self._function.__code__.co_freevars:
            self._sets(name, f"sets {name!r} in {self._where}")
        elif operation in _UNCERTAIN:
            reader.may(f"uses {name!r}")

    def _attribute(self, owner: Any, name: str, chain: str) -> None:
        """An attribute of something known, found without running its code."""
        reader, path = self._reader, f"{chain}.{name}"
        reader.asked.add((id(owner), name))
        if type(owner) in VALUES:
            reader.meet(owner, chain)
            reader.of_values.add(name)
            return
        if not isinstance(owner, ModuleType | type):
            reader.found.reads.append(owner)
        value = vars(owner).get(name, UNKNOWN) if isinstance(owner, ModuleType) else attribute_of(owner, name)
        if isinstance(value, property) and value.fget is not None:
            reader.meet(MethodType(value.fget, owner))
        elif value is UNKNOWN:
            reader.may(f"uses {path!r}")
        else:
            self._top, self._chain = value, path


def _is_of_library(function: FunctionType) -> bool:
    module = (function.__module__ or "").partition(".")[0]
    return module in sys.stdlib_module_names or "site-packages" in function.__code__.co_filename


def _set_in(code: CodeType) -> Iterator[str]:
    """Variables of a function that it or a function in it sets, where both know them."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in {"STORE_DEREF", "DELETE_DEREF"}:
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _set_in(constant)


def _simple(instruction: dis.Instruction) -> Iterator[tuple[str, Any]]:
    """An instruction as simple ones: later versions of Python read or set two variables with one."""
    operation, names = instruction.opname, instruction.argval
    if isinstance(names, tuple) and operation.startswith(("LOAD_FAST", "STORE_FAST")):
        first = operation[: operation.index("_FAST") + 5]
        yield first, names[0]
        yield ("STORE_FAST" if operation.endswith("STORE_FAST") else "LOAD_FAST"), names[1]
    elif operation.startswith("LOAD_FAST"):
        yield "LOAD_FAST", names
    else:
        yield (
            {"LOAD_CLASSDEREF": "LOAD_DEREF", "LOAD_FROM_DICT_OR_DEREF": "LOAD_DEREF"}.get(operation, operation),
            names,
        )


def _start(instruction: dis.Instruction) -> object:
    """Where the source of an instruction begins: that of ``a.b[c] = d`` begins where that of ``a`` does."""
    at = instruction.positions
    return None if at is None or at.lineno is None or at.col_offset is None else (at.lineno, at.col_offset)
