"""A pickle reader that builds plain values only and can run nothing.

The public reward service answers in pickle, and `pickle.loads` on bytes from the network is remote
code execution. Filtering `find_class` alone leaves holes that stop a run as surely: a memo index of
2**31 makes the C reader reserve gigabytes, and a dictionary key made of nested tuples hashes for
ever. So the few opcodes that plain data needs are interpreted here, and everything else is refused.
"""

import pickletools
from collections.abc import Callable

MAX_OPCODES = 500_000

_NUMBERS = ("INT", "LONG", "LONG1", "LONG4", "BININT", "BININT1", "BININT2", "FLOAT", "BINFLOAT")
_TEXTS = ("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8")
_BYTES = ("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8")
_LITERALS = frozenset(_NUMBERS + _TEXTS + _BYTES)
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY: dict[str, Callable[[], object]] = {
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_SET": set,
    "EMPTY_TUPLE": tuple,
}
_TUPLE_SIZES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_MARK_BUILDS: dict[str, Callable[[list], object]] = {
    "LIST": list,
    "TUPLE": tuple,
    "DICT": lambda items: _pairs_to_dict({}, items),
    "FROZENSET": lambda items: frozenset(_as_keys(items)),
}
_KEY_TYPES = (str, int, float, bytes, type(None))


class UnsafePickleError(ValueError):
    """The bytes are not a pickle of plain values: cut short, malformed, or asking for more."""


def loads(data: bytes) -> object:
    """Read a pickle of builtin containers, numbers, strings, bytes, booleans and None.

    Dictionary keys and set members must be scalars. Raises UnsafePickleError for anything else,
    among it every class or function reference, before any of it takes effect.
    """
    reader = _Reader()
    try:
        for count, (opcode, argument, position) in enumerate(pickletools.genops(data)):
            if count >= MAX_OPCODES:
                raise UnsafePickleError(f"more than {MAX_OPCODES} pickle opcodes")
            if opcode.name == "STOP":
                return reader.pop()
            reader.step(opcode.name, argument, position or 0)
    except UnsafePickleError:
        raise
    except (ValueError, OverflowError) as error:
        raise UnsafePickleError(f"not a complete pickle: {error}") from error
    raise UnsafePickleError("not a complete pickle: it has no end")


class _Reader:
    """The pickle stack machine: a stack, the marks that cut it, and the memo."""

    def __init__(self) -> None:
        self.stack: list[object] = []
        self.marks: list[int] = []
        self.memo: dict[int, object] = {}

    def step(self, name: str, argument: object, position: int) -> None:
        if name in _LITERALS:
            self.stack.append(argument)
        elif name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name])
        elif name in _EMPTY:
            self.stack.append(_EMPTY[name]())
        elif name in _TUPLE_SIZES:
            items = [self.pop() for _ in range(_TUPLE_SIZES[name])]
            self.stack.append(tuple(reversed(items)))
        elif name in _MARK_BUILDS:
            items = self.pop_to_mark()
            self.stack.append(_MARK_BUILDS[name](items))
        elif name in ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS"):
            self._fill(name)
        elif name == "MARK":
            self.marks.append(len(self.stack))
        elif name == "MEMOIZE":
            self.memo[len(self.memo)] = self.top()
        elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
            self.memo[argument] = self.top()
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            if argument not in self.memo:
                raise UnsafePickleError(f"pickle refers to unknown memo entry {argument}")
            self.stack.append(self.memo[argument])
        elif name not in ("PROTO", "FRAME"):
            raise UnsafePickleError(
                f"pickle opcode {name} at byte {position} is not plain data: {str(argument)[:80]!r}"
            )

    def _fill(self, name: str) -> None:
        if name == "APPEND":
            items = [self.pop()]
        elif name == "SETITEM":
            value = self.pop()
            items = [self.pop(), value]
        else:
            items = self.pop_to_mark()
        target = self.top()
        if isinstance(target, list) and name.startswith("APPEND"):
            target.extend(items)
        elif isinstance(target, dict) and name.startswith("SETITEM"):
            _pairs_to_dict(target, items)
        elif isinstance(target, set) and name == "ADDITEMS":
            target.update(_as_keys(items))
        else:
            raise UnsafePickleError(f"pickle opcode {name} on a {type(target).__name__}")

    def top(self) -> object:
        if len(self.stack) <= (self.marks[-1] if self.marks else 0):
            raise UnsafePickleError("pickle takes from an empty stack")
        return self.stack[-1]

    def pop(self) -> object:
        value = self.top()
        self.stack.pop()
        return value

    def pop_to_mark(self) -> list:
        if not self.marks:
            raise UnsafePickleError("pickle closes a group that it never opened")
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items


def _as_keys(items: list) -> list:
    for item in items:
        if not isinstance(item, _KEY_TYPES):
            raise UnsafePickleError(f"pickle uses a {type(item).__name__} as a key")
    return items


def _pairs_to_dict(target: dict, items: list) -> dict:
    if len(items) % 2:
        raise UnsafePickleError("pickle gives a key without a value")
    target.update(zip(_as_keys(items[::2]), items[1::2], strict=True))
    return target
