"""The tokenizer against the thoughts of the golden traces, odd ids, and broken folders."""

import json
import shutil
from pathlib import Path

import pytest

from modeling.bagel.tokenizer import load_tokenizer

PARITY = Path(__file__).parents[2] / "parity"
TINY = PARITY / "tiny_bagel"
TRACES = ("trace_upstream", "trace_consistent", "trace_upstream_edges", "trace_consistent_edges")
FILES = ("vocab.json", "merges.txt", "tokenizer_config.json")


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(TINY)


@pytest.fixture
def folder(tmp_path):
    for name in FILES:
        shutil.copy(TINY / name, tmp_path / name)
    return tmp_path


def _thoughts(trace: str) -> list[tuple[list[int], str]]:
    ranks = json.loads((PARITY / trace / "trace.json").read_text(encoding="utf-8"))["ranks"]
    found = []
    for steps in ranks:
        for sample in (sample for step in steps for sample in step["samples"]):
            if sample.get("generated_ids"):
                is_thought = zip(sample["content_type_list"], sample["need_loss_list"], strict=True)
                index = list(is_thought).index(("text", True))
                found.append((sample["generated_ids"], sample["text"][index]))
    return found


def test_markers_are_found_by_name(tokenizer):
    assert (tokenizer.bos, tokenizer.eos) == (601, 602)
    assert (tokenizer.vision_start, tokenizer.vision_end) == (603, 604)


@pytest.mark.parametrize("trace", TRACES)
def test_thoughts_of_a_trace(tokenizer, trace):
    thoughts = _thoughts(trace)
    assert len(thoughts) >= 24
    for ids, text in thoughts:
        assert tokenizer.extract_generated_text(ids) == text
    if trace.endswith("_edges"):
        assert any("\ufffd" in text for _, text in thoughts)


def test_encode_adds_nothing_and_decode_keeps_all(tokenizer):
    text = " a  <|im_start|>photo ,<|vision_end|> n't\n"
    ids = tokenizer.encode(text)
    assert ids.count(tokenizer.bos) == 1 and ids.count(tokenizer.vision_end) == 1
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode("") == []
    assert tokenizer.decode([]) == ""


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("x{bos}one{eos}two", "one"),
        ("{bos}one{bos}two{eos}", "one"),
        ("{eos}{bos}one{eos}", "one"),
        ("{bos}one", "one"),
        ("one{eos}two", "one"),
        ("one", "one"),
        ("{bos}{eos}", ""),
        ("{eos}one", ""),
        ("", ""),
    ],
)
def test_text_between_markers(tokenizer, template, expected):
    text = template.format(bos="<|im_start|>", eos="<|im_end|>")
    assert tokenizer.extract_generated_text(tokenizer.encode(text)) == expected


def test_ids_beyond_the_vocabulary_are_left_out(tokenizer):
    ids = [tokenizer.bos, *tokenizer.encode("a"), 630, *tokenizer.encode("b"), tokenizer.eos]
    assert tokenizer.extract_generated_text(ids) == "ab"


def test_broken_config_json_is_never_opened(folder, tokenizer):
    (folder / "config.json").write_text('{"llm_config": {,}')
    assert load_tokenizer(folder).encode("a photo") == tokenizer.encode("a photo")


def test_large_vocabulary_beside_a_broken_config_json(folder):
    vocab = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    vocab |= {f"filler{index}": index for index in range(605, 100_200)}
    (folder / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    (folder / "config.json").write_text("not JSON")
    loaded = load_tokenizer(folder)
    assert loaded.decode(loaded.encode("a photo")) == "a photo"


def test_lacking_markers_are_added_after_the_vocabulary(folder, tokenizer):
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["added_tokens_decoder"] = {"600": config["added_tokens_decoder"]["600"]}
    del config["additional_special_tokens"]
    path.write_text(json.dumps(config), encoding="utf-8")
    loaded = load_tokenizer(folder, vocab_size=640)
    markers = [loaded.bos, loaded.eos, loaded.vision_start, loaded.vision_end]
    assert markers == list(range(markers[0], markers[0] + 4))
    assert markers[0] > max(json.loads((folder / "vocab.json").read_text()).values())
    ids = loaded.encode("<|im_start|>a<|im_end|>")
    assert ids == [loaded.bos, *tokenizer.encode("a"), loaded.eos]
    with pytest.raises(ValueError, match="vocab_size 603"):
        load_tokenizer(folder, vocab_size=603)


def test_missing_and_broken_files(folder):
    (folder / "merges.txt").unlink()
    with pytest.raises(ValueError, match="--model_path .*vocab.json and merges.txt"):
        load_tokenizer(folder)
    (folder / "merges.txt").write_text("#version: 0.2\n")
    (folder / "vocab.json").write_text("{")
    with pytest.raises(ValueError, match="--model_path .*unreadable"):
        load_tokenizer(folder)
