"""The strings of the model's input format, and the format reward."""

import json

import pytest

from tests.tiny import PARITY
from train.interface_strings import (
    GENERATE_SYSTEM,
    REFLECT_SYSTEM,
    REFLECT_TEMPLATE,
    format_reward,
    reflect_request,
)

GOLDEN = json.loads((PARITY / "prompts.json").read_text(encoding="utf-8"))


def test_strings_are_the_golden_ones():
    assert GOLDEN["generate_system"] == GENERATE_SYSTEM
    assert GOLDEN["reflect_system"] == REFLECT_SYSTEM
    assert GOLDEN["reflect_template"] == REFLECT_TEMPLATE


def test_request_takes_the_prompt_as_it_is():
    prompt = "a {brace} and a {prompt}"
    assert reflect_request(prompt) == GOLDEN["reflect_template"].replace("{prompt}", prompt, 1)


@pytest.mark.parametrize(
    ("text", "thought_alone", "with_answer"),
    [
        ("<think> a plan </think>", 1, 0),
        ("<think></think>", 1, 0),
        ("  \n<think>two\nlines</think>\t ", 1, 0),
        ("<think>a</think> make it red", 0, 1),
        ("<think>a</think>\nmake it\nred\n", 0, 1),
        ("<think>a</think> \n\t ", 1, 0),
        ("", 0, 0),
        ("make it red", 0, 0),
        ("<think>a", 0, 0),
        ("<think>a make it red", 0, 0),
        ("a</think> make it red", 0, 0),
        ("so <think>a</think> make it red", 0, 0),
        ("<think>a<think>b</think></think> red", 0, 0),
        ("<think>a<think>b</think> red", 0, 0),
        ("<think>a</think></think> red", 0, 0),
        ("<think>a</think> <think>b</think> red", 0, 0),
        ("<think>a</think> red </think>", 0, 0),
        ("<think>a</think> red <think>", 0, 0),
        ("<think>a</think><think>b</think>", 0, 0),
        ("<Think>a</Think> red", 0, 0),
        ("<think>a</think >red", 0, 0),
    ],
)
def test_format_reward(text, thought_alone, with_answer):
    assert format_reward(text, is_answer_due=False) == thought_alone
    assert format_reward(text, is_answer_due=True) == with_answer
