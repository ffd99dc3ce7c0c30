"""The refine buffer: its split, its draws, and its way through a checkpoint."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from data.geneval import parse_prompt
from train.records import BufferEntry
from train.refine_buffer import RefineBuffer, entry_from_record, entry_to_record


def entry(name: str, score: float) -> BufferEntry:
    """Scores tell entries apart."""
    raw = {"tag": "colors", "include": [{"class": "cat", "count": 1}], "prompt": name}
    rng = np.random.default_rng(len(name))
    pixels = rng.integers(0, 256, (5, 4, 3), dtype=np.uint8)
    return BufferEntry(parse_prompt(raw, "test"), score, Image.fromarray(pixels))


def buffer(scores: list[float], perfect_probability: float = 0.15) -> RefineBuffer:
    filled = RefineBuffer(perfect_probability)
    filled.replace([entry(f"prompt {i}", score) for i, score in enumerate(scores)])
    return filled


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_only_a_score_of_exactly_one_is_perfect():
    filled = buffer([1.0, 0.9999999, 0.3, 1.0000001, 1.0, -0.5])
    assert [e.score for e in filled.perfect] == [1.0, 1.0]
    assert [e.score for e in filled.rest] == [0.9999999, 0.3, 1.0000001, -0.5]
    assert len(filled) == 6


def test_replace_forgets():
    filled = buffer([1.0, 0.3])
    filled.replace([entry("new", 0.5)])
    assert (len(filled.perfect), [e.score for e in filled.rest]) == (0, [0.5])


@pytest.mark.parametrize("seed", range(10))
def test_a_draw_is_a_bernoulli_and_an_index(seed):
    filled, stream = buffer([0.1, 1.0, 0.2, 0.3, 1.0], 0.4), generator(seed)
    drawn = filled.draw(stream)
    expected = generator(seed)
    wants_perfect = torch.bernoulli(torch.tensor([0.4]), generator=expected).item() == 1
    entries = filled.perfect if wants_perfect else filled.rest
    index = torch.randint(0, len(entries), (1,), generator=expected).item()
    assert drawn is entries[index]
    assert torch.equal(stream.get_state(), expected.get_state())


def test_draws_reach_every_entry():
    filled = buffer([0.1, 1.0, 0.2], 0.4)
    drawn = {filled.draw(generator(seed)).prompt.prompt for seed in range(40)}
    assert drawn == {"prompt 0", "prompt 1", "prompt 2"}


@pytest.mark.parametrize(("probability", "score"), [(0.0, 0.3), (1.0, 1.0)])
def test_probability_chooses_the_list(probability, score):
    filled = buffer([0.3, 1.0], probability)
    assert {filled.draw(generator(seed)).score for seed in range(10)} == {score}


@pytest.mark.parametrize(("probability", "score"), [(0.0, 1.0), (1.0, 0.3)])
def test_an_empty_list_yields_the_other(probability, score):
    filled = buffer([score], probability)
    assert filled.draw(generator(0)).score == score


def test_drawing_from_nothing_is_refused():
    with pytest.raises(ValueError, match="the refine buffer is empty"):
        RefineBuffer(0.15).draw(generator(0))


def test_records_are_plain_and_lossless():
    original = entry("a prompt with \u00e9", 0.25)
    record = entry_to_record(original)
    assert {type(value) for value in record.values()} == {str, float, bytes}
    json.loads(record["prompt"])
    restored = entry_from_record(record)
    assert restored.score == original.score
    assert restored.prompt.raw == original.prompt.raw
    assert restored.prompt.prompt == original.prompt.prompt
    assert restored.prompt.include == original.prompt.include
    assert np.array_equal(np.asarray(restored.picture), np.asarray(original.picture))


def test_a_restored_buffer_draws_alike():
    filled, restored = buffer([0.1, 1.0, 0.2, 1.0, 0.4]), RefineBuffer(0.15)
    restored.replace([entry_from_record(entry_to_record(e)) for e in filled.entries()])
    for seed in range(10):
        mine, theirs = restored.draw(generator(seed)), filled.draw(generator(seed))
        assert (mine.prompt.prompt, mine.score) == (theirs.prompt.prompt, theirs.score)
