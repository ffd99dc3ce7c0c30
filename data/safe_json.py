"""A JSON reader that refuses deep nesting before it parses."""

import json
import re

MAX_DEPTH = 100  # plain data are below 10

# Escapes are matched so that an escaped quote does not end its string.
_MARKS = re.compile(r'\[|\]|\{|\}|"|\\.', re.DOTALL)


def loads(text: str | bytes) -> object:
    """Read JSON text, or its UTF-8 bytes with or without a byte order mark.

    Raises ValueError for anything else, and for arrays and objects nested more than 100 deep.
    The parser of the standard library would go down to the interpreter's recursion limit, and
    finalizers of unrelated objects that the garbage collector happens to run there fail.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8-sig")
    _check_depth(text)
    return json.loads(text)


def _check_depth(text: str) -> None:
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return
    depth, in_string = 0, False
    for found in _MARKS.finditer(text):
        mark = found[0]
        if mark == '"':
            in_string = not in_string
        elif in_string:
            continue
        elif mark in ("[", "{"):
            depth += 1
            if depth > MAX_DEPTH:
                raise ValueError(f"nested too deeply: {MAX_DEPTH} levels are allowed")
        elif mark in ("]", "}"):
            depth -= 1
