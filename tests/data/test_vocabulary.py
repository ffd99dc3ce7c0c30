"""The word lists: sizes, order and spellings."""

import pytest

from data.vocabulary import CLASS_NAMES, COCO_SPELLINGS, COLORS, RELATIONS, TAGS, canonical_class


def test_sizes_and_no_repeats():
    sizes = ((CLASS_NAMES, 80), (COLORS, 10), (TAGS, 6), (RELATIONS, 4))
    for words, size in sizes:
        assert len(words) == len(set(words)) == size


def test_classes_stand_in_coco_order():
    # COCO's contiguous index of a class, as detectors number them.
    known = {0: "person", 15: "cat", 24: "backpack", 39: "bottle", 56: "chair", 60: "dining table"}
    renamed = {62: "tv", 64: "computer mouse", 65: "tv remote", 66: "computer keyboard"}
    last = {67: "cell phone", 78: "hair drier", 79: "toothbrush"}
    for index, name in {**known, **renamed, **last}.items():
        assert CLASS_NAMES[index] == name


@pytest.mark.parametrize(("coco", "geneval"), COCO_SPELLINGS.items())
def test_coco_spellings_become_geneval_names(coco, geneval):
    assert coco not in CLASS_NAMES
    assert canonical_class(coco) == geneval
    assert canonical_class(geneval) == geneval


@pytest.mark.parametrize("name", ["unicorn", "Dog", "dogs", "television", ""])
def test_unknown_class_is_refused(name):
    with pytest.raises(ValueError, match=f"unknown class '{name}'"):
        canonical_class(name)
