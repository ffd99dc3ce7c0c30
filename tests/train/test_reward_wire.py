"""The wire format, both forms and both directions, and the checks of an answer."""

import io
import json
import pickle

import pytest
from PIL import Image

from train.reward_wire import (
    RewardAnswerError,
    RewardRequest,
    RewardStatusError,
    Scores,
    decode_answer,
    decode_request,
    encode_answer,
    encode_jpeg,
    encode_request,
    excerpt,
)

META = {"tag": "colors", "include": [{"class": "cat", "count": 1, "color": "red"}], "prompt": "p"}
GOOD = {"scores": [0.5], "rewards": [1.0], "strict_rewards": [0.0]}


@pytest.mark.parametrize("form", ["json", "pickle"])
def test_request_round_trip(form):
    request = RewardRequest([b"\xff\xd8jpeg", b""], [META, META], True)
    assert decode_request(encode_request(request, form), form) == request


def test_pickled_request_is_what_the_public_service_reads():
    body = encode_request(RewardRequest([b"jpeg"], [META], False), "pickle")
    assert pickle.loads(body) == {"images": [b"jpeg"], "meta_datas": [META], "only_strict": False}


@pytest.mark.parametrize("form", ["json", "pickle"])
def test_answer_round_trip_with_group_lists(form):
    scores = [Scores(0.25, 1.0, 0.0), Scores(-0.5, 0.0, 1.0)]
    body = encode_answer(scores, ["colors", "position"], form)
    assert decode_answer(body, 2) == scores
    record = pickle.loads(body) if form == "pickle" else json.loads(body)
    assert record["group_rewards"]["colors"] == [1.0, -10.0]
    assert record["group_strict_rewards"]["position"] == [-10.0, 1.0]
    assert record["group_rewards"]["counting"] == [-10.0, -10.0]


def test_public_answer_with_integers_and_booleans():
    body = pickle.dumps({"scores": [0], "rewards": [True], "strict_rewards": (0.0,)})
    assert decode_answer(body, 1) == [Scores(0.0, 1.0, 0.0)]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({**GOOD, "scores": []}, "'scores' has 0 entries for 1 images"),
        ({**GOOD, "rewards": [1.0, 1.0]}, "'rewards' has 2 entries"),
        ({**GOOD, "strict_rewards": [float("nan")]}, "'strict_rewards' holds nan"),
        ({**GOOD, "scores": [float("inf")]}, "holds inf"),
        ({**GOOD, "scores": [10**400]}, "holds a int"),
        ({**GOOD, "scores": ["1"]}, "holds a str"),
        ({**GOOD, "scores": [None]}, "holds a NoneType"),
        ({**GOOD, "scores": 1.0}, "'scores' is missing"),
        ({"scores": [1.0], "rewards": [1.0]}, "'strict_rewards' is missing"),
        ([1.0], "not a mapping"),
    ],
)
@pytest.mark.parametrize("dumps", [pickle.dumps, lambda value: json.dumps(value).encode()])
def test_bad_answers_are_named(record, message, dumps):
    with pytest.raises(RewardAnswerError, match=message):
        decode_answer(dumps(record), 1)


@pytest.mark.parametrize(
    "body",
    [b"", b"<html>busy</html>", b"\x80\x04\x95", b"[" * 100_000, b"\xff\xfe", b"x" * (5 << 20)],
)
def test_bodies_that_are_no_answer(body):
    with pytest.raises(RewardAnswerError, match="bad reward answer"):
        decode_answer(body, 1)


def test_answer_error_shows_what_came():
    with pytest.raises(RewardAnswerError, match="it began: <html> <b>Busy</b>"):
        decode_answer(b"<html>\n  <b>Busy</b>" + b"z" * 1000, 1)


def test_excerpt_is_short_and_keeps_a_tracebacks_last_line():
    assert excerpt(b"a" * 500) == "a" * 200
    assert excerpt(b"") == "(nothing)"
    assert excerpt(b"a\x1b[31m\n\nb") == "a?[31m b"
    trace = b"Traceback (most recent call last):\n" + b'  File "x"\n' * 99 + b"ValueError: boom\n"
    assert excerpt(trace).startswith("Traceback") and excerpt(trace).endswith("ValueError: boom")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ([], "must be a mapping"),
        ({"images": ["eA=="]}, "needs the lists"),
        ({"images": [], "meta_datas": []}, "at least one image"),
        ({"images": ["eA=="], "meta_datas": [META, META]}, "1 images but 2 meta_datas"),
        ({"images": [3], "meta_datas": [META]}, "image 0 must be base64 text"),
        ({"images": ["!"], "meta_datas": [META]}, "image 0 is not base64"),
        ({"images": ["eA=="], "meta_datas": ["x"]}, "meta_datas 0 must be a mapping"),
        ({"images": ["eA=="], "meta_datas": [META], "only_strict": 1}, "only_strict"),
    ],
)
def test_bad_requests_are_named(record, message):
    with pytest.raises(ValueError, match=message):
        decode_request(json.dumps(record).encode(), "json")


def test_only_passing_statuses_are_tried_again():
    retryable = [s for s in range(300, 600) if RewardStatusError("x", s).is_retryable]
    assert retryable == [429, 500, 502, 503, 504]


def test_jpeg_has_the_public_clients_quality():
    image = Image.radial_gradient("L").convert("RGB")
    plain = io.BytesIO()
    image.save(plain, format="JPEG")
    assert encode_jpeg(image, 75) == plain.getvalue()
    assert encode_jpeg(image, 30) != plain.getvalue()
    assert encode_jpeg(image.convert("RGBA"), 75) == plain.getvalue()
