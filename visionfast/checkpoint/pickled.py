"""A pickle, read as data: nothing that it names is imported, looked up, called or built.

A pickle is a program for a stack machine whose instructions GLOBAL, REDUCE, NEWOBJ and BUILD import, call and
mutate what they name. Here those four only make records (`Global`, `Inert`), so reading a hostile file cannot
do more than reading a JPEG can. On top of that an allow-list says which names a checkpoint may mention at
all.

Why not `torch.load(weights_only=True)` with the model's classes made safe: its allow-list is one set for the
whole process, which other threads share and which ultralytics fills with its real classes (`_SafeLoad`, 8.4),
so that a stand-in for `ultralytics.nn.tasks.DetectionModel` would be replaced by the class itself.

The instructions are decoded by the standard library's `pickletools.genops`, which executes nothing.
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from visionfast.errors import CheckpointError, UnsafeCheckpointError

__all__ = ["Global", "Inert", "printable", "read_pickle"]

# Protocols 2 and 3 write Python 2's module names for these.
_RENAMED_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}
_SCALARS = (str, int, float, bytes, type(None))
# A fused model pickles `conv.forward = conv.forward_fuse`, a bound method: getattr(conv, "forward_fuse").
_BOUND_METHODS = frozenset({"forward_fuse"})
_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_NUMBERS_AND_STRINGS = frozenset(
    {
        *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
        *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
        *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
    }
)


@dataclass(frozen=True, slots=True)
class Global:
    """A name that the pickle mentions, e.g. `torch.nn.modules.conv.Conv2d`. Only ever a string."""

    name: str


@dataclass(slots=True, eq=False, repr=False)
class Inert:
    """What would have been an object: its class's or function's name, and what the pickle says about it.

    Attributes:
        name: dotted name of the class or function.
        args: it would have been called with these.
        state: it would have been given this state.
        items: what would have been added to it: values, or (key, value) pairs.
    """

    name: str
    args: tuple[Any, ...]
    state: Any = None
    items: list[Any] = field(default_factory=list)


def printable(text: object, limit: int = 80) -> str:
    """Text of a file, fit for one line of a message."""
    line = "".join(c if c.isprintable() else "?" for c in str(text)[: limit + 1])
    return line if len(line) <= limit else line[:limit] + "…"


def read_pickle(
    data: bytes,
    *,
    source: str,
    is_allowed: Callable[[str], bool],
    make: Callable[[str, tuple[Any, ...]], Any],
    persistent: Callable[[Any], Any],
) -> Any:
    """What a pickle describes, made of plain values, `Global` and `Inert` records, and what `make` gives.

    Args:
        data: the whole pickle; protocols 2 to 5.
        source: what messages call the file.
        is_allowed: whether a global may be mentioned.
        make: called as `make(name, args)` where the pickle would call `name(*args)`. It must not call
            anything that it is given.
        persistent: what a persistent id stands for.

    Raises:
        UnsafeCheckpointError: it mentions a global that is not allowed.
        CheckpointError: it is damaged.
    """
    machine = _Machine(is_allowed, make, persistent)
    try:
        value = machine.run(data)
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, struct.error, MemoryError) as error:
        machine.raise_if_refused(source)
        raise CheckpointError(
            f"{source}: damaged: its pickle cannot be read ({printable(error)}); fetch or save the file again"
        ) from error
    machine.raise_if_refused(source)
    return value


class _Machine:
    def __init__(
        self,
        is_allowed: Callable[[str], bool],
        make: Callable[[str, tuple[Any, ...]], Any],
        persistent: Callable[[Any], Any],
    ) -> None:
        self._is_allowed = is_allowed
        self._make = make
        self._persistent = persistent
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._refused: dict[str, None] = {}  # in the order of their appearance

    def raise_if_refused(self, source: str) -> None:
        if not self._refused:
            return
        names = list(self._refused)
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise UnsafeCheckpointError(
            f"{source}: asks for {', '.join(printable(n) for n in names[:3])}{more}, which weights do not need "
            "and which could run code; nothing of it was run. Only if you trust whoever made the file, open it "
            "with --trust-checkpoint"
        )

    def run(self, data: bytes) -> Any:
        for opcode, argument, _position in pickletools.genops(data):
            if opcode.name == "STOP":
                return self._stack.pop()
            self._step(opcode.name, argument)
        raise ValueError("it has no end")

    def _step(self, opcode: str, argument: Any) -> None:
        stack = self._stack
        if opcode in _CONSTANTS:
            stack.append(_CONSTANTS[opcode])
            return
        if opcode in _NUMBERS_AND_STRINGS:
            stack.append(argument)
            return
        match opcode:
            case "PROTO" | "FRAME":
                pass
            case "MARK":
                self._marks.append(stack)
                self._stack = []
            case "POP":
                stack.pop()
            case "POP_MARK":
                self._pop_mark()
            case "DUP":
                stack.append(stack[-1])
            case "BINPUT" | "LONG_BINPUT":
                self._memo[argument] = stack[-1]
            case "MEMOIZE":
                self._memo[len(self._memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(self._memo[argument])
            case "EMPTY_TUPLE":
                stack.append(())
            case "EMPTY_LIST":
                stack.append([])
            case "EMPTY_DICT":
                stack.append({})
            case "EMPTY_SET":
                stack.append(Inert("builtins.set", ()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                n = int(opcode[-1])
                if len(stack) < n:
                    raise IndexError("its stack ran empty")
                stack[-n:] = [tuple(stack[-n:])]
            case "TUPLE":
                items = self._pop_mark()
                self._stack.append(tuple(items))
            case "FROZENSET":
                items = self._pop_mark()
                self._stack.append(Inert("builtins.frozenset", (items,)))
            case "APPEND":
                item = stack.pop()
                _extend(stack[-1], [item])
            case "APPENDS" | "ADDITEMS":
                items = self._pop_mark()
                _extend(self._stack[-1], items)
            case "SETITEM":
                value, key = stack.pop(), stack.pop()
                _set_items(stack[-1], [key, value])
            case "SETITEMS":
                items = self._pop_mark()
                _set_items(self._stack[-1], items)
            case "BINPERSID":
                stack.append(self._persistent(stack.pop()))
            case "GLOBAL" | "INST":
                module, _, name = argument.partition(" ")
                if opcode == "INST":
                    self._refuse(f"{_RENAMED_MODULES.get(module, module)}.{name}")
                    raise ValueError("INST is not an instruction that torch.save writes")
                self._mention(module, name)
            case "STACK_GLOBAL":
                name, module = stack.pop(), stack.pop()
                self._mention(str(module), str(name))
            case "REDUCE" | "NEWOBJ":
                args, called = stack.pop(), stack.pop()
                stack.append(self._record_call(called, args))
            case "NEWOBJ_EX":
                _keywords, args, called = stack.pop(), stack.pop(), stack.pop()
                stack.append(self._record_call(called, args))
            case "BUILD":
                state = stack.pop()
                # An OrderedDict's attributes (a state dict's `_metadata`) are of no use here, and no other
                # made value takes a state.
                if isinstance(stack[-1], Inert):
                    stack[-1].state = state
            case _:
                self._refuse(f"the pickle instruction {opcode}")
                raise ValueError(f"{opcode} is not an instruction that torch.save writes")

    def _pop_mark(self) -> list[Any]:
        items = self._stack
        self._stack = self._marks.pop()
        return items

    def _refuse(self, name: str) -> None:
        self._refused.setdefault(name)

    def _mention(self, module: str, name: str) -> None:
        full = f"{_RENAMED_MODULES.get(module, module)}.{name}"
        # getattr is judged by its arguments, in _record_call.
        if full != "builtins.getattr" and not self._is_allowed(full):
            self._refuse(full)
        self._stack.append(Global(full))

    def _record_call(self, called: Any, args: Any) -> Any:
        if not isinstance(called, Global) or not isinstance(args, tuple):
            raise TypeError("it calls something that is not a name")
        if called.name == "builtins.getattr":
            bound = len(args) == 2 and isinstance(args[0], Inert) and args[1] in _BOUND_METHODS
            if not bound:
                self._refuse(called.name)
            return Inert(called.name, args)
        if called.name in self._refused:
            return Inert(called.name, args)
        return self._make(called.name, args)


def _extend(target: Any, items: list[Any]) -> None:
    if isinstance(target, list):
        target.extend(items)
    elif isinstance(target, Inert):
        target.items.extend(items)
    else:
        raise TypeError("it appends to something that is not a list")


def _set_items(target: Any, items: list[Any]) -> None:
    if len(items) % 2:
        raise ValueError("a key has no value")
    pairs = list(zip(items[::2], items[1::2], strict=True))
    if isinstance(target, dict):
        for key, value in pairs:
            # Hashing a deeply nested tuple recurses in C, without a limit; no checkpoint has such keys.
            if not isinstance(key, _SCALARS) and not (
                isinstance(key, tuple) and all(isinstance(part, _SCALARS) for part in key)
            ):
                raise TypeError("a key is neither a name nor a number")
            target[key] = value
    elif isinstance(target, Inert):
        target.items.extend(pairs)
    else:
        raise TypeError("it sets items of something that is not a dict")
