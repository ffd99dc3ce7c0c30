"""The prompt files: as the generator writes them, sizes, wording, and train apart from test."""

from collections import Counter
from pathlib import Path

import pytest

from data import make_geneval
from data.geneval import read_prompts
from data.make_geneval import TEST_FILE, TRAIN_FILE, make_files, write_files
from data.vocabulary import CLASS_NAMES

DATA = Path(make_geneval.__file__).parent
TRAIN_TAGS = {
    "color_attr": 4976,
    "position": 4546,
    "two_object": 1745,
    "colors": 772,
    "counting": 240,
    "single_object": 80,
}
TEST_TAGS = {
    "position": 100,
    "color_attr": 100,
    "two_object": 99,
    "colors": 94,
    "counting": 80,
    "single_object": 80,
}
OPPOSITE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}


@pytest.fixture(scope="module")
def train():
    return read_prompts(DATA / TRAIN_FILE)


@pytest.fixture(scope="module")
def test():
    return read_prompts(DATA / TEST_FILE)


def scene(prompt):
    """What a prompt asks for, the same for every way to say it."""
    clauses = prompt.include
    if prompt.tag == "position":
        first, second = clauses
        relation, target = second.position
        assert target == 0
        there = (second.class_name, relation, first.class_name)
        back = (first.class_name, OPPOSITE[relation], second.class_name)
        return frozenset((there, back))
    return prompt.tag, frozenset((c.class_name, c.count, c.color) for c in clauses)


def test_committed_files_are_what_the_generator_writes(tmp_path):
    write_files(42, tmp_path)
    for name in (TRAIN_FILE, TEST_FILE):
        assert (tmp_path / name).read_bytes() == (DATA / name).read_bytes()


def test_command_line(tmp_path):
    make_geneval.main(["--seed", "7", "--out", str(tmp_path)])
    prompts = read_prompts(tmp_path / TEST_FILE)
    assert [p.raw for p in prompts] == make_files(7)[1]
    assert [p.raw for p in prompts] != make_files(42)[1]


def test_sizes(train, test):
    assert Counter(p.tag for p in train) == TRAIN_TAGS
    assert Counter(p.tag for p in test) == TEST_TAGS
    assert (len(train), len(test)) == (12_359, 553)


def test_no_prompt_twice(train, test):
    prompts = [p.prompt for p in (*train, *test)]
    assert len(set(prompts)) == len(prompts) == 12_912


def test_what_the_test_asks_for_is_not_trained(train, test):
    trained = {scene(p) for p in train}
    shared = [p for p in test if scene(p) in trained]
    assert Counter(p.tag for p in shared) == {"single_object": 80}


def test_only_the_documented_scenes_are_trained_twice(train):
    times = Counter(scene(p) for p in train)
    again = [p for p in train if times[scene(p)] > 1 and "photograph" in p.prompt]
    assert Counter(p.tag for p in again) == {"counting": 80, "colors": 77}
    assert len(train) - len(times) == 157


def test_the_test_uses_the_wording_of_geneval_throughout(train, test):
    assert all(p.prompt.startswith("a photo of ") for p in test)
    reworded = Counter(p.tag for p in train if not p.prompt.startswith("a photo of "))
    assert reworded == {"single_object": 80, "counting": 80, "colors": 77}


def test_clauses_have_the_form_of_their_tag(train, test):
    for prompt in (*train, *test):
        clauses, tag = prompt.include, prompt.tag
        assert len(clauses) == (2 if tag in ("two_object", "position", "color_attr") else 1)
        assert len({c.class_name for c in clauses}) == len(clauses)
        assert all((c.color is not None) == (tag in ("colors", "color_attr")) for c in clauses)
        assert clauses[0].position is None
        assert (clauses[-1].position is not None) == (tag == "position")
        colors = [c.color for c in clauses if c.color]
        assert len(set(colors)) == len(colors)
        assert all(c.class_name not in ("person", c.color) for c in clauses if c.color)
        if tag == "counting":
            (include,), (exclude,) = clauses, prompt.exclude
            assert include.count in (2, 3, 4)
            assert (exclude.class_name, exclude.count) == (include.class_name, include.count + 1)
        else:
            assert prompt.exclude == ()
            assert all(c.count == 1 for c in clauses)


def test_every_class_is_counted_in_both_files(train, test):
    for prompts, times in ((train, 3), (test, 1)):
        counted = Counter(p.include[0].class_name for p in prompts if p.tag == "counting")
        assert counted == dict.fromkeys(CLASS_NAMES, times)


def test_first_test_lines_show_several_tags(test):
    assert len({p.tag for p in test[:8]}) >= 4  # they are the default evaluation set


def test_generator_reproduces_the_wording_of_the_parity_prompts():
    parity = read_prompts(Path(__file__).parents[1] / "parity" / "prompts40.jsonl")
    for prompt in parity:
        clauses = prompt.include
        names = [c.class_name for c in clauses]
        if prompt.tag == "position":
            made = make_geneval.position(*names, clauses[1].position[0])
        elif prompt.tag == "color_attr":
            made = make_geneval.color_attr(*((c.class_name, c.color) for c in clauses))
        elif prompt.tag == "colors":
            made = make_geneval.colors(names[0], clauses[0].color)
        elif prompt.tag == "counting":
            made = make_geneval.counting(names[0], clauses[0].count)
        else:
            made = getattr(make_geneval, prompt.tag)(*names)
        assert made == prompt.raw


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("zebra", "zebras"),
        ("bus", "buses"),
        ("bench", "benches"),
        ("couch", "couches"),
        ("sandwich", "sandwiches"),
        ("wine glass", "wine glasses"),
        ("toothbrush", "toothbrushes"),
        ("knife", "knives"),
        ("person", "people"),
        ("sheep", "sheep"),
        ("computer mouse", "computer mice"),
        ("skis", "pairs of skis"),
        ("scissors", "pairs of scissors"),
        ("giraffe", "giraffes"),
        ("tie", "ties"),
        ("cell phone", "cell phones"),
    ],
)
def test_plurals(name, words):
    assert name in CLASS_NAMES
    assert make_geneval.counting(name, 4)["prompt"] == f"a photo of four {words}"


@pytest.mark.parametrize(
    ("name", "color", "words"),
    [
        ("zebra", None, "a zebra"),
        ("apple", None, "an apple"),
        ("apple", "green", "a green apple"),
        ("zebra", "orange", "an orange zebra"),
        ("umbrella", None, "an umbrella"),
        ("scissors", None, "a pair of scissors"),
        ("skis", "orange", "an orange pair of skis"),
    ],
)
def test_articles(name, color, words):
    assert make_geneval.singular(name, color) == words
