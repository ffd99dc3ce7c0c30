"""Seeded generator of the training and test prompt files: `python -m data.make_geneval`.

Both files are in GenEval's format and wording ("a photo of a sheep right of a handbag").

No prompt occurs twice, and what the test asks for is kept out of training as far as 80 classes
allow. The test is drawn first, in GenEval's own wording. Training never repeats a (class, count) of
its counting prompts, a (class, color) of its colors prompts, a pair of its two_object prompts in
either order, or a scene of its position and color_attr prompts, described from either side.

Two tags then have too few things left to ask for, so training asks for some of its own a second
time, as "a photograph of ...": 80 of 240 counting prompts (one for each class) and 77 of 772 colors
prompts. Only single_object must share its 80 classes with the test: training words all of them "a
photograph of ...".

As in GenEval a person is never given a color; nor is an orange called orange. Skis and scissors
come in pairs ("three pairs of scissors").
"""

import argparse
import json
import logging
import random
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TypeVar

from data.vocabulary import CLASS_NAMES, COLORS, RELATIONS

TRAIN_FILE = Path("rl_train/train_geneval.jsonl")
TEST_FILE = Path("rl_test/test_geneval.jsonl")
TRAIN_COUNTS = {
    "color_attr": 4976,
    "position": 4546,
    "two_object": 1745,
    "colors": 772,
    "counting": 240,
    "single_object": 80,
}
TEST_COUNTS = {
    "position": 100,
    "color_attr": 100,
    "two_object": 99,
    "colors": 94,
    "counting": 80,
    "single_object": 80,
}

PHOTO = "a photo of"
PHOTOGRAPH = "a photograph of"
NUMBER_WORDS = {2: "two", 3: "three", 4: "four"}
IRREGULAR_PLURALS = {
    "person": "people",
    "sheep": "sheep",
    "knife": "knives",
    "computer mouse": "computer mice",
    "skis": "pairs of skis",
    "scissors": "pairs of scissors",
}
PAIRED = ("skis", "scissors")
OPPOSITE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}

T = TypeVar("T")
Draw = tuple[Hashable, dict]
logger = logging.getLogger("faster_r3")


def singular(class_name: str, color: str | None = None) -> str:
    """The class with its article and, if given, its color: "an orange toaster"."""
    noun = f"pair of {class_name}" if class_name in PAIRED else class_name
    words = f"{color} {noun}" if color else noun
    return f"an {words}" if words[0] in "aeiou" else f"a {words}"


def plural(class_name: str) -> str:
    """The plural of a class: "buses", "knives", "pairs of scissors"."""
    if class_name in IRREGULAR_PLURALS:
        return IRREGULAR_PLURALS[class_name]
    return class_name + ("es" if class_name.endswith(("s", "sh", "ch")) else "s")


def single_object(class_name: str, opening: str = PHOTO) -> dict:
    """One line of the file: one object."""
    include = [{"class": class_name, "count": 1}]
    return _record("single_object", include, f"{opening} {singular(class_name)}")


def counting(class_name: str, count: int, opening: str = PHOTO) -> dict:
    """`count` objects of a class, and not one more."""
    return {
        "tag": "counting",
        "include": [{"class": class_name, "count": count}],
        "exclude": [{"class": class_name, "count": count + 1}],
        "prompt": f"{opening} {NUMBER_WORDS[count]} {plural(class_name)}",
    }


def colors(class_name: str, color: str, opening: str = PHOTO) -> dict:
    """One object of a color."""
    include = [{"class": class_name, "count": 1, "color": color}]
    return _record("colors", include, f"{opening} {singular(class_name, color)}")


def two_object(first: str, second: str) -> dict:
    """Two objects of different classes."""
    include = [{"class": first, "count": 1}, {"class": second, "count": 1}]
    return _record("two_object", include, f"{PHOTO} {singular(first)} and {singular(second)}")


def position(first: str, second: str, relation: str) -> dict:
    """Two objects; the second, which the prompt names first, stands in a relation to the first."""
    include = [
        {"class": first, "count": 1},
        {"class": second, "count": 1, "position": [relation, 0]},
    ]
    return _record("position", include, f"{PHOTO} {singular(second)} {relation} {singular(first)}")


def color_attr(first: tuple[str, str], second: tuple[str, str]) -> dict:
    """Two objects, each given as (class, color)."""
    include = [{"class": name, "count": 1, "color": color} for name, color in (first, second)]
    return _record("color_attr", include, f"{PHOTO} {singular(*first)} and {singular(*second)}")


def make_files(seed: int) -> tuple[list[dict], list[dict]]:
    """The objects of the training and of the test file, in the order of their lines.

    Draws only through `random.Random.random`, whose numbers do not change between Python versions.
    """
    rng = random.Random(seed)
    train, test = [], []
    draws = {
        "two_object": _draw_two_object,
        "position": _draw_position,
        "color_attr": _draw_color_attr,
    }
    for tag, draw in draws.items():
        scenes = _distinct(rng, draw)
        test += islice(scenes, TEST_COUNTS[tag])
        train += islice(scenes, TRAIN_COUNTS[tag])
    test += [single_object(name) for name in CLASS_NAMES]
    train += [single_object(name, PHOTOGRAPH) for name in CLASS_NAMES]
    for split in (_split_counting, _split_colors):
        for_train, for_test = split(rng)
        train += for_train
        test += for_test
    # Mixed, so that the first lines of a file (the default evaluation set) show several tags.
    return _shuffled(rng, train), _shuffled(rng, test)


def write_files(seed: int, folder: Path) -> None:
    """Writes both files below `folder`, one JSON object a line."""
    for name, records in zip((TRAIN_FILE, TEST_FILE), make_files(seed), strict=True):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(record) + "\n" for record in records)
        path.write_bytes(text.encode("ascii"))
        logger.info("%s: %d prompts", path, len(records))


def _split_counting(rng: random.Random) -> tuple[list[dict], list[dict]]:
    """Of each class the test gets one count, training the other two, one of them worded twice."""
    train, test = [], []
    for name in CLASS_NAMES:
        held_out, again, once = _shuffled(rng, list(NUMBER_WORDS))
        test.append(counting(name, held_out))
        train += [counting(name, again), counting(name, once), counting(name, again, PHOTOGRAPH)]
    return train, test


def _split_colors(rng: random.Random) -> tuple[list[dict], list[dict]]:
    """The test's pairs of class and color first; training gets the rest, then some of it again."""
    pairs = _shuffled(rng, [(n, c) for n in CLASS_NAMES for c in COLORS if _can_be(n, c)])
    held_out, rest = pairs[: TEST_COUNTS["colors"]], pairs[TEST_COUNTS["colors"] :]
    again = rest[: TRAIN_COUNTS["colors"] - len(rest)]
    train = [colors(*pair) for pair in rest] + [colors(*pair, PHOTOGRAPH) for pair in again]
    return train, [colors(*pair) for pair in held_out]


def _draw_two_object(rng: random.Random) -> Draw:
    first, second = _pick_two(rng, CLASS_NAMES)
    return frozenset((first, second)), two_object(first, second)


def _draw_position(rng: random.Random) -> Draw:
    first, second = _pick_two(rng, CLASS_NAMES)
    relation = _pick(rng, RELATIONS)
    scene = frozenset(((second, relation, first), (first, OPPOSITE[relation], second)))
    return scene, position(first, second, relation)


def _draw_color_attr(rng: random.Random) -> Draw:
    while True:
        pairs = tuple(zip(_pick_two(rng, CLASS_NAMES), _pick_two(rng, COLORS), strict=True))
        if all(_can_be(*pair) for pair in pairs):
            return frozenset(pairs), color_attr(*pairs)


def _can_be(class_name: str, color: str) -> bool:
    return class_name not in ("person", color)


def _distinct(rng: random.Random, draw: Callable[[random.Random], Draw]) -> Iterator[dict]:
    """Draws without end, leaving out every scene that came before."""
    seen = set()
    while True:
        scene, record = draw(rng)
        if scene not in seen:
            seen.add(scene)
            yield record


def _record(tag: str, include: list[dict], prompt: str) -> dict:
    return {"tag": tag, "include": include, "prompt": prompt}


def _below(rng: random.Random, limit: int) -> int:
    return int(rng.random() * limit)


def _pick(rng: random.Random, items: Sequence[T]) -> T:
    return items[_below(rng, len(items))]


def _pick_two(rng: random.Random, items: Sequence[T]) -> tuple[T, T]:
    first = _below(rng, len(items))
    second = _below(rng, len(items) - 1)
    return items[first], items[second + (second >= first)]


def _shuffled(rng: random.Random, items: list[T]) -> list[T]:
    """Fisher and Yates, spelled out for the same reason as in `make_files`."""
    items = list(items)
    for last in range(len(items) - 1, 0, -1):
        other = _below(rng, last + 1)
        items[last], items[other] = items[other], items[last]
    return items


def main(arguments: list[str] | None = None) -> None:
    """Command line: `--seed` and the folder `--out`."""
    parser = argparse.ArgumentParser(prog="python -m data.make_geneval", description=__doc__)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--out", type=Path, default=Path("data"))
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    write_files(options.seed, options.out)


if __name__ == "__main__":
    main()
