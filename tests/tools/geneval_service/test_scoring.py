"""GenEval's rules on made-up detections; every expected number was worked out by hand."""

import math

import pytest

from data.geneval import parse_prompt
from data.make_geneval import color_attr, colors, counting, position, single_object, two_object
from tools.geneval_service.scoring import (
    Detection,
    detections_to_color,
    group_rewards,
    keep_detections,
    relations_of,
    score_image,
)


def at(name, x, y, score=0.95, color=None, size=10):
    """A square detection with its center at (x, y)."""
    half = size / 2
    return Detection(name, (x - half, y - half, x + half, y + half), score, color)


def many(count, name="dog", **keys):
    return [at(name, 20 * i, 0, **keys) for i in range(count)]


def score(record, detections):
    return score_image(parse_prompt(record, "test"), detections)


def clause(name, count, **keys):
    return {"class": name, "count": count, **keys}


def record(tag, include, **keys):
    return {"tag": tag, "include": include, "prompt": "p", **keys}


DOG, CAT = at("dog", 0, 0), at("cat", 50, 0)
RED_CAR = colors("car", "red")
PAIR = color_attr(("car", "red"), ("cup", "blue"))
CAT_RIGHT = position("dog", "cat", "right of")
THREE_RED = record("colors", [clause("car", 3, color="red")])
TWO_RIGHT = record("position", [clause("dog", 1), clause("cat", 2, position=["right of", 0])])
CAT_OF_TWO_DOGS = record(
    "position", [clause("dog", 2), clause("cat", 1, position=["right of", 0])]
)
RED_CAT_RIGHT = record(
    "position", [clause("dog", 1), clause("cat", 1, color="red", position=["right of", 0])]
)
RED_DOG_THEN_CAT = record(
    "position", [clause("dog", 1, color="red"), clause("cat", 1, position=["right of", 0])]
)
CHAIN = record(
    "position",
    [clause("dog", 1), clause("cat", 1), clause("cup", 1, position=["below", 1])],
)
NO_CATS = record("single_object", [clause("dog", 1)], exclude=[clause("cat", 1)])


def car(color, x=0, confidence=0.95):
    return at("car", x, 0, confidence, color)


# name: (prompt, detections, reward, strict_reward, score)
CASES = {
    "single: there": (single_object("dog"), [DOG, CAT], 1, 1, 1.0),
    "single: missing": (single_object("dog"), [CAT], 0, 0, 0.0),
    "single: nothing at all": (single_object("dog"), [], 0, 0, 0.0),
    "single: two of them": (single_object("dog"), many(2), 1, 0, 0.0),
    "single: four of them": (single_object("dog"), many(4), 1, 0, -2.0),
    "single: twenty, 16 counted": (single_object("dog"), many(20), 1, 0, -14.0),
    "single: at the threshold": (single_object("dog"), many(1, score=0.3), 0, 0, 0.0),
    "single: over the threshold": (single_object("dog"), many(1, score=0.31), 1, 1, 1.0),
    "single: COCO's spelling": (single_object("tv remote"), [at("remote", 0, 0)], 1, 1, 1.0),
    "single: excluded cat": (NO_CATS, [DOG, CAT], 0, 0, 1.0),
    "single: no excluded cat": (NO_CATS, [DOG], 1, 1, 1.0),
    "two: both": (two_object("dog", "cat"), [DOG, CAT], 1, 1, 1.0),
    "two: one": (two_object("dog", "cat"), [CAT], 0, 0, 0.5),
    "two: one and three": (two_object("dog", "cat"), [*many(3), CAT], 1, 0, 0.0),
    "counting: exact": (counting("dog", 3), many(3), 1, 1, 1.0),
    "counting: one short": (counting("dog", 3), many(2), 0, 0, 2 / 3),
    "counting: one more": (counting("dog", 3), many(4), 0, 0, 2 / 3),
    "counting: seven": (counting("dog", 3), many(7), 0, 0, -1 / 3),
    "counting: unsure ones do not count": (
        counting("dog", 3),
        [*many(3), *many(5, score=0.9), *many(5, score=0.8)],
        1,
        1,
        1.0,
    ),
    "counting: only unsure ones": (counting("dog", 3), many(3, score=0.89), 0, 0, 0.0),
    "counting: others do not matter": (counting("dog", 2), [*many(2), CAT], 1, 1, 1.0),
    "colors: right": (RED_CAR, [car("red")], 1, 1, 1.0),
    "colors: wrong": (RED_CAR, [car("blue")], 0, 0, 0.5),
    "colors: missing": (RED_CAR, [], 0, 0, 0.0),
    "colors: the surer of two is red": (
        RED_CAR,
        [car("blue", 0, 0.5), car("red", 50, 0.8)],
        1,
        0,
        0.0,
    ),
    "colors: the surer of two is blue": (
        RED_CAR,
        [car("red", 0, 0.5), car("blue", 50, 0.8)],
        0,
        0,
        0.0,
    ),
    "colors: two of three red": (
        THREE_RED,
        [car("red", 0), car("red", 50), car("pink", 99)],
        0,
        0,
        (1 + 2 / 3) / 2,
    ),
    "colors: two red, one missing": (THREE_RED, [car("red", 0), car("red", 50)], 0, 0, 1 / 3),
    "color_attr: both": (PAIR, [car("red"), at("cup", 50, 0, color="blue")], 1, 1, 1.0),
    "color_attr: swapped": (PAIR, [car("blue"), at("cup", 50, 0, color="red")], 0, 0, 0.5),
    "color_attr: one wrong": (PAIR, [car("red"), at("cup", 50, 0, color="red")], 0, 0, 0.75),
    "color_attr: one missing": (PAIR, [car("red")], 0, 0, 0.5),
    "position: right": (CAT_RIGHT, [DOG, CAT], 1, 1, 1.0),
    "position: wrong side": (CAT_RIGHT, [DOG, at("cat", -50, 0)], 0, 0, 0.75),
    "position: no cat": (CAT_RIGHT, [DOG], 0, 0, 1 / 3),
    "position: no dog": (CAT_RIGHT, [CAT], 0, 0, 1 / 3),
    "position: nothing": (CAT_RIGHT, [], 0, 0, 0.0),
    "position: two dogs, the surer one fits": (
        CAT_RIGHT,
        [at("dog", 0, 0, 0.9), at("dog", 99, 0, 0.5), CAT],
        1,
        0,
        1 / 3,
    ),
    "position: two dogs, the surer one does not": (
        CAT_RIGHT,
        [at("dog", 0, 0, 0.5), at("dog", 99, 0, 0.9), CAT],
        0,
        0,
        1 / 3,
    ),
    "position: one of two cats misplaced": (
        TWO_RIGHT,
        [DOG, at("cat", 50, 0), at("cat", -50, 0)],
        0,
        0,
        3 / 4,
    ),
    "position: two of two cats misplaced": (
        TWO_RIGHT,
        [DOG, at("cat", -90, 0), at("cat", -50, 0)],
        0,
        0,
        3 / 5,
    ),
    "position: between two targets": (
        CAT_OF_TWO_DOGS,
        [at("dog", 0, 0), at("dog", 99, 0), CAT],
        0,
        0,
        3 / 4,
    ),
    "position: right of two targets": (
        CAT_OF_TWO_DOGS,
        [at("dog", 0, 0), at("dog", 20, 0), CAT],
        1,
        1,
        1.0,
    ),
    "position: with a color": (RED_CAT_RIGHT, [DOG, at("cat", 50, 0, color="red")], 1, 1, 1.0),
    "position: not looked at after a wrong color": (
        RED_CAT_RIGHT,
        [DOG, at("cat", 50, 0, color="blue")],
        0,
        0,
        2 / 3,
    ),
    "position: one zero for a missing cat with color": (RED_CAT_RIGHT, [DOG], 0, 0, 1 / 3),
    "position: target of the wrong color": (
        RED_DOG_THEN_CAT,
        [at("dog", 0, 0, color="blue"), CAT],
        0,
        0,
        2 / 4,
    ),
    "position: target is the second include": (
        CHAIN,
        [at("dog", 50, 99), CAT, at("cup", 50, 50)],
        1,
        1,
        1.0,
    ),
    "position: below the first but not the second": (
        CHAIN,
        [at("dog", 50, -99), CAT, at("cup", 50, -50)],
        0,
        0,
        4 / 5,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_cases_worked_out_by_hand(case):
    prompt, detections, reward, strict_reward, graded = CASES[case]
    result = score(prompt, detections)
    assert (result.reward, result.strict_reward) == (reward, strict_reward)
    assert result.score == pytest.approx(graded, abs=1e-12)
    assert bool(result.reasons) == (strict_reward == 0)


@pytest.mark.parametrize("case", CASES)
def test_order_of_detections_does_not_matter(case):
    prompt, detections, *_ = CASES[case]
    assert score(prompt, detections[::-1]).score == score(prompt, detections).score


def test_reasons_say_what_is_wrong():
    assert score(counting("dog", 3), many(4)).reasons == (
        "expected exactly 3 dog, found 4",
        "expected fewer than 4 dog, found 4",
    )
    assert score(RED_CAR, [car("blue")]).reasons == ("expected 1 red car, found blue",)
    assert score(CAT_RIGHT, [CAT]).reasons == (
        "expected exactly 1 dog, found 0",
        "no target for cat to be right of",
    )
    (misplaced,) = score(CAT_RIGHT, [DOG, at("cat", -50, 0)]).reasons
    assert "is not right of its target" in misplaced


# Boxes of side 10: the margin is 0.1 * (10 + 10) = 2 on each axis.
@pytest.mark.parametrize(
    ("x", "y", "expected"),
    [
        (50, 0, {"right of"}),
        (-50, 0, {"left of"}),
        (0, 50, {"below"}),
        (0, -50, {"above"}),
        (50, 50, {"right of", "below"}),  # 48 / 70.7 = 0.68 on both axes
        (-50, -50, {"left of", "above"}),
        (50, 24, {"right of"}),  # 22 / 55.5 = 0.40 downwards
        (4.1, 0, {"right of"}),  # 2.1 / 4.1 = 0.51
        (3.9, 0, set()),  # 1.9 / 3.9 = 0.49
        (4, 0, set()),  # 2 / 4 is not beyond 0.5
        (6, 6, set()),  # 4 / 8.49 = 0.47 on both axes
        (1, 1, set()),  # inside the margin
        (0, 0, set()),
    ],
)
def test_relations(x, y, expected):
    assert relations_of(at("cat", x, y).box, at("dog", 0, 0).box) == expected


def test_margin_grows_with_the_extent_along_its_own_axis():
    wide = (-50.0, -5.0, 50.0, 5.0)  # margins against a side of 10: 11 across, 2 down
    assert relations_of(at("cat", 20, 0).box, wide) == set()  # 9 / 20
    assert relations_of(at("cat", 23, 0).box, wide) == {"right of"}  # 12 / 23
    assert relations_of(at("cat", 0, 20).box, wide) == {"below"}


def test_the_most_confident_sixteen_are_kept_in_order():
    detections = [at("dog", i, 0, 0.31 + 0.01 * i) for i in range(20)]
    kept = keep_detections("colors", detections)["dog"]
    assert kept == detections[:3:-1]
    assert keep_detections("counting", [DOG, at("dog", 0, 0, 0.9)])["dog"] == [DOG]


def test_colors_are_wanted_only_where_they_are_judged():
    prompt = parse_prompt(PAIR, "test")
    sure, unsure, cup = car(None, 0, 0.9), car(None, 50, 0.5), at("cup", 0, 0)
    assert detections_to_color(prompt, [unsure, cup, DOG, sure]) == [sure, cup]
    assert detections_to_color(parse_prompt(THREE_RED, "test"), [sure, unsure]) == []
    assert detections_to_color(parse_prompt(CAT_RIGHT, "test"), [DOG, CAT]) == []
    score_image(prompt, [unsure, car("red", 0, 0.9), at("cup", 0, 0, color="blue")])
    with pytest.raises(ValueError, match="car is judged by its color but has none"):
        score_image(prompt, [sure, cup])


def test_rewards_by_tag_keep_the_length_of_the_batch():
    grouped = group_rewards(["colors", "counting", "colors"], [1.0, 0.5, 0.0])
    assert grouped == {
        "single_object": [-10, -10, -10],
        "two_object": [-10, -10, -10],
        "counting": [-10, 0.5, -10],
        "colors": [1.0, -10, 0.0],
        "position": [-10, -10, -10],
        "color_attr": [-10, -10, -10],
    }
    with pytest.raises(ValueError, match="1 tags for 2 rewards"):
        group_rewards(["colors"], [1.0, 0.0])
    with pytest.raises(ValueError, match="unknown tags .'shapes'"):
        group_rewards(["shapes"], [1.0])


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (("unicorn", (0, 0, 1, 1), 0.5), "unknown class 'unicorn'"),
        (("dog", (0, 0, 1, 1), 0.5, "gray"), "unknown color 'gray'"),
        (("dog", (0, 0, 1), 0.5), "expected five finite numbers"),
        (("dog", (0, 0, 1, math.inf), 0.5), "expected five finite numbers"),
        (("dog", (0, 0, 1, 1), math.nan), "expected five finite numbers"),
        (("dog", (2, 0, 1, 1), 0.5), "is not ordered"),
        (("dog", (0, 2, 1, 1), 0.5), "is not ordered"),
    ],
)
def test_bad_detections_are_refused(arguments, fault):
    with pytest.raises(ValueError, match=fault):
        Detection(*arguments)
