"""The JSON reader: what json reads, but nothing deep, and that without descending."""

import json

import pytest

from data import safe_json
from data.safe_json import MAX_DEPTH, loads


def nested(depth: int) -> str:
    return "[" * (depth // 2) + '{"a": [' * (depth // 4) + "]}" * (depth // 4) + "]" * (depth // 2)


@pytest.mark.parametrize(
    "value",
    [
        {"prompt": "a [cat] {", "include": [{"count": 1}], "none": None},
        [[] for _ in range(5 * MAX_DEPTH)],
        "[" * 500,
        ['"' + "[" * 500, "\\" + "{" * 500, '\\"' + "[" * 500],
        {"{" * 500: "\\"},
    ],
)
def test_it_reads_what_json_reads(value):
    text = json.dumps(value)
    assert loads(text) == value
    assert loads(text.encode()) == value
    assert loads(b"\xef\xbb\xbf" + text.encode()) == value


def test_the_limit_is_on_depth():
    assert nested(MAX_DEPTH).count("[") + nested(MAX_DEPTH).count("{") == MAX_DEPTH
    wide = f"[{nested(MAX_DEPTH - 4)}, {nested(MAX_DEPTH - 4)}]"
    assert loads(nested(MAX_DEPTH)) and loads(wide) == json.loads(wide)
    with pytest.raises(ValueError, match="nested too deeply: 100 levels"):
        loads(nested(MAX_DEPTH + 4))


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, b"[" * 100_000, '{"a":' * 100_000, '["\\"", ' + "[" * 200, nested(50_000)],
)
def test_deep_text_never_gets_to_the_parser(text, monkeypatch):
    monkeypatch.setattr(safe_json.json, "loads", lambda _: pytest.fail("it was parsed"))
    with pytest.raises(ValueError, match="nested too deeply"):
        loads(text)


@pytest.mark.parametrize(
    "text", ["", "{", "[1] [2]", '"\\' * 200 + "[" * 200, b"\xff\xfe", "9" * 5000]
)
def test_what_is_no_json_is_a_value_error(text):
    with pytest.raises(ValueError):
        loads(text)
