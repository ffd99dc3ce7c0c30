"""The strings that are part of the model's input format, and the format reward judged by them."""

import re

GENERATE_SYSTEM = (
    "You should first think about the planning process in the mind and then generate the image. \n"
    "The planning process is enclosed within <think> </think> tags, i.e. "
    "<think> planning process here </think> image here."
)
REFLECT_SYSTEM = (
    "You should first think about the reasoning process in the mind and then provide the user "
    "with the answer. \n"
    "The reasoning process is enclosed within <think> </think> tags, i.e. "
    "<think> reasoning process here </think> answer here"
)
REFLECT_TEMPLATE = (
    "The description of the target image is: {prompt}\n"
    "How to further edit the provided image to make it consistent with the target description? "
    "Please provide concrete editing instructions in a single sentence. "
    "If no editing operation is needed, answer: no further edit needed."
)
THINK_START = "<think>"
THINK_END = "</think>"
NO_EDIT_OPERATION = "No further edit needed"

_THOUGHT = re.compile(r"<think>((?:(?!</?think>).)*)</think>", re.DOTALL)


def reflect_request(prompt: str) -> str:
    """The question that follows the picture in a reflect turn."""
    return REFLECT_TEMPLATE.replace("{prompt}", prompt)


def format_reward(text: str, is_answer_due: bool) -> float:
    """1 if the stripped text is exactly one think block, with an answer behind it if one is due.

    The answer must not be empty and must hold no think tags; tags must not nest.
    """
    text = text.strip()
    match = _THOUGHT.match(text)
    if match is None:
        return 0.0
    answer = text[match.end() :].strip()
    if not is_answer_due:
        return 0.0 if answer else 1.0
    return 1.0 if answer and THINK_START not in answer and THINK_END not in answer else 0.0
