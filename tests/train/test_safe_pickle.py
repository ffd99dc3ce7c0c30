"""The pickle reader: plain values come through, everything else is refused and runs nothing."""

import os
import pickle
import random
import struct

import pytest

from train import safe_pickle
from train.safe_pickle import UnsafePickleError

PLAIN = {
    "scores": [0.25, 1, -3, 2**70, True, None],
    "group": {"colors": [1.0], 3: (1, (2, 3), ()), None: {"a", "b"}},
    "bytes": [b"", b"\xff" * 300],
    "text": ["", "gr\u00fcn", "x" * 300],
    "frozen": frozenset({1, 2}),
    "long": list(range(2000)),
}


class Runs:
    """Unpickling this writes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", [4, 5])
def test_plain_values_come_through(protocol):
    assert safe_pickle.loads(pickle.dumps(PLAIN, protocol=protocol)) == PLAIN


@pytest.mark.parametrize("protocol", [0, 1, 2, 3])
def test_old_protocols_of_plain_answers(protocol):
    record = {"scores": [0.5, 1], "tags": {"colors": (True, None)}, "text": "gr\u00fcn"}
    assert safe_pickle.loads(pickle.dumps(record, protocol=protocol)) == record


def test_shared_and_recursive_lists_keep_their_identity():
    shared = [1.0]
    own = [shared, shared]
    own.append(own)
    copy = safe_pickle.loads(pickle.dumps(own))
    assert copy[0] is copy[1] and copy[2] is copy


@pytest.mark.parametrize("protocol", range(6))
def test_code_is_not_run(tmp_path, protocol):
    target = tmp_path / "ran"
    data = pickle.dumps({"scores": [Runs(target)]}, protocol=protocol)
    with pytest.raises(UnsafePickleError, match="not plain data"):
        safe_pickle.loads(data)
    assert not target.exists()
    pickle.loads(data)  # the trap is a real one
    assert target.exists()


@pytest.mark.parametrize(
    "data",
    [
        b"cos\nsystem\n.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
        b"(S'echo'\nios\nsystem\n.",
        b"\x80\x02\x82\x01.",
        b"Psome id\n.",
        b"\x80\x04]Q.",
        b"\x80\x04\x95.",
        b"\x80\x04a.",
        b"\x80\x04t.",
        b"\x80\x04(K\x01d.",
        b"\x80\x04h\x05.",
        b"\x80\x04}K\x01a.",
        b"",
        b"\x80",
        b"<html>",
    ],
)
def test_anything_else_is_refused(data):
    with pytest.raises(UnsafePickleError):
        safe_pickle.loads(data)


def test_a_huge_memo_index_takes_no_memory():
    data = b"\x80\x04]r" + struct.pack("<I", 2**32 - 1) + b"."
    assert safe_pickle.loads(data) == []


def test_a_key_that_would_hash_for_ever_is_refused():
    bomb = b"\x80\x04})"
    for level in range(60):
        bomb += b"q" + bytes([level]) + b"h" + bytes([level]) + b"\x86"
    with pytest.raises(UnsafePickleError, match="tuple as a key"):
        safe_pickle.loads(bomb + b"K\x01s.")


def test_every_truncation_is_refused():
    data = pickle.dumps({"scores": [0.5], "rewards": [1.0], "tags": {"a": (1, 2)}})
    for length in range(len(data)):
        with pytest.raises(UnsafePickleError):
            safe_pickle.loads(data[:length])


def test_mutated_bytes_raise_nothing_else():
    rng = random.Random(0)
    clean = pickle.dumps({"scores": [0.5, 1], "x": [b"ab", "cd", {1: (2, 3)}]})
    refused = 0
    for _ in range(3000):
        data = bytearray(clean)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            safe_pickle.loads(bytes(data))
        except UnsafePickleError:
            refused += 1
    assert 1000 < refused < 3000


def test_opcode_count_is_bounded(monkeypatch):
    monkeypatch.setattr(safe_pickle, "MAX_OPCODES", 50)
    assert safe_pickle.loads(pickle.dumps([1] * 20)) == [1] * 20
    with pytest.raises(UnsafePickleError, match="more than 50"):
        safe_pickle.loads(pickle.dumps([1] * 60))
