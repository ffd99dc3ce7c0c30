"""Reading prompt files: what a line becomes, and every way in which one is refused."""

import json
from pathlib import Path

import pytest

from data.geneval import GenevalClause, parse_line, parse_prompt, read_prompts

PARITY = Path(__file__).parents[1] / "parity"
DOG = {"class": "dog", "count": 1}


def line(**changes):
    """A good two-object line with some keys replaced; a key set to ... is left out."""
    record = {"tag": "two_object", "include": [DOG, {"class": "cat", "count": 2}], "prompt": "p"}
    return json.dumps({k: v for k, v in {**record, **changes}.items() if v is not ...})


def including(**changes):
    """A line whose second include has some keys replaced."""
    clause = {"class": "cat", "count": 2, **changes}
    return line(include=[DOG, {k: v for k, v in clause.items() if v is not ...}])


def test_parity_prompts_load():
    prompts = read_prompts(PARITY / "prompts40.jsonl")
    assert len(prompts) == 40
    sheep, zebra, dogs, oven = prompts[0], prompts[2], prompts[3], prompts[22]
    assert sheep.tag == "position"
    assert sheep.prompt == "a photo of a sheep right of a handbag"
    assert sheep.include == (
        GenevalClause("handbag", 1),
        GenevalClause("sheep", 1, position=("right of", 0)),
    )
    assert zebra.include == (GenevalClause("zebra", 1),)
    assert zebra.exclude == ()
    assert dogs.include == (GenevalClause("dog", 3),)
    assert dogs.exclude == (GenevalClause("dog", 4),)
    assert oven.include == (
        GenevalClause("oven", 1, color="black"),
        GenevalClause("umbrella", 1, color="green"),
    )


def test_raw_is_the_object_of_the_line():
    text = (PARITY / "prompts40.jsonl").read_text().splitlines()
    prompts = read_prompts(PARITY / "prompts40.jsonl")
    assert [p.raw for p in prompts] == [json.loads(t) for t in text]


def test_unknown_keys_are_kept():
    text = line(source={"id": 7}, include=[{**DOG, "note": "x"}])
    assert parse_line(text, "f", 1).raw == json.loads(text)
    assert '"note"' in text and '"source"' in text


def test_coco_spellings_reach_the_service_under_geneval_names():
    mouse = {"class": "mouse", "count": 1, "note": "x"}
    text = line(include=[mouse], exclude=[{"class": "remote", "count": 2}])
    prompt = parse_line(text, "f", 1)
    assert prompt.include == (GenevalClause("computer mouse", 1),)
    assert prompt.exclude == (GenevalClause("tv remote", 2),)
    assert prompt.raw["include"] == [{"class": "computer mouse", "count": 1, "note": "x"}]
    assert prompt.raw["exclude"] == [{"class": "tv remote", "count": 2}]


def test_nulls_count_as_absent():
    text = line(include=[{**DOG, "color": None, "position": None}], exclude=None)
    prompt = parse_line(text, "f", 1)
    assert prompt.include == (GenevalClause("dog", 1),)
    assert prompt.exclude == ()


def test_position_may_point_to_any_earlier_include():
    clauses = [DOG, {"class": "cat", "count": 1}, {**DOG, "position": ["below", 1]}]
    assert parse_line(line(include=clauses), "f", 1).include[2].position == ("below", 1)


BAD_LINES = {
    "not JSON": ("{", "not JSON"),
    "nested without end": ("[" * 100_000, "not JSON: nested too deeply"),
    "number with too many digits": ("9" * 5000, "not JSON"),
    "two objects": (line() + line(), "not JSON"),
    "list": ("[]", "expected a JSON object, got list"),
    "null": ("null", "expected a JSON object, got NoneType"),
    "no prompt": (line(prompt=...), "prompt is missing"),
    "empty prompt": (line(prompt=" "), "prompt is ' ', expected non-empty text"),
    "prompt not text": (line(prompt=3), "prompt is 3, expected non-empty text"),
    "no tag": (line(tag=...), "tag is missing"),
    "unknown tag": (line(tag="shapes"), "unknown tag 'shapes', expected one of single_object"),
    "tag not text": (line(tag=["colors"]), r"tag is \['colors'\]"),
    "no include": (line(include=...), "include is missing or empty"),
    "empty include": (line(include=[]), "include is missing or empty"),
    "include not a list": (line(include=DOG), r"include is \{.*\}, expected a list"),
    "clause not an object": (line(include=["dog"]), r"include\[0\] is 'dog', expected an object"),
    "no class": (including(**{"class": ...}), r"include\[1\]: class is missing"),
    "class not text": (including(**{"class": 5}), r"include\[1\]: class is 5"),
    "unknown class": (including(**{"class": "wug"}), r"include\[1\]: unknown class 'wug'"),
    "no count": (including(count=...), r"include\[1\]: count is None, expected a positive integer"),
    "count zero": (including(count=0), r"include\[1\]: count is 0"),
    "count negative": (including(count=-1), r"include\[1\]: count is -1"),
    "count a fraction": (including(count=2.0), r"include\[1\]: count is 2.0"),
    "count text": (including(count="2"), r"include\[1\]: count is '2'"),
    "count boolean": (including(count=True), r"include\[1\]: count is True"),
    "unknown color": (including(color="gray"), r"include\[1\]: unknown color 'gray', .*red"),
    "color not text": (including(color=["red"]), r"include\[1\]: unknown color \['red'\]"),
    "position not a list": (including(position="above"), r"position is 'above'"),
    "position too short": (including(position=["above"]), r"position is \['above'\]"),
    "unknown relation": (including(position=["near", 0]), "unknown relation 'near', .*left of"),
    "relation not text": (including(position=[["above"], 0]), r"unknown relation \['above'\]"),
    "position on itself": (including(position=["above", 1]), "points to 1, .*earlier include"),
    "position on a later one": (including(position=["above", 2]), "points to 2"),
    "position negative": (including(position=["above", -1]), "points to -1"),
    "position index text": (including(position=["above", "0"]), "points to '0'"),
    "position index boolean": (including(position=["above", False]), "points to False"),
    "position on the first": (
        line(include=[{**DOG, "position": ["above", 0]}]),
        r"include\[0\]: position points to 0",
    ),
    "exclude not a list": (line(exclude={}), r"exclude is \{\}, expected a list"),
    "exclude not an object": (line(exclude=[None]), r"exclude\[0\] is None, expected an object"),
    "exclude unknown class": (
        line(exclude=[DOG, {"class": "wug", "count": 1}]),
        r"exclude\[1\]: unknown class 'wug'",
    ),
    "exclude no count": (line(exclude=[{"class": "dog"}]), r"exclude\[0\]: count is None"),
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_bad_line_names_file_line_and_fault(case, tmp_path):
    text, fault = BAD_LINES[case]
    path = tmp_path / "bad.jsonl"
    path.write_text(f"{line()}\n{line()}\n{text}\n")
    with pytest.raises(ValueError, match=rf"bad\.jsonl, line 3: .*{fault}"):
        read_prompts(path)


def test_good_line_of_the_table_is_good():
    assert parse_line(line(), "f", 1).include == (GenevalClause("dog", 1), GenevalClause("cat", 2))


def test_decoded_object_names_its_own_place():
    with pytest.raises(ValueError, match=r"^request 4: unknown tag 'x'"):
        parse_prompt(json.loads(line(tag="x")), "request 4")


def test_bytes_that_are_not_utf8_are_refused(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(line().encode() + b"\n\xff\n")
    with pytest.raises(ValueError, match=r"bad\.jsonl, line 2: not UTF-8"):
        read_prompts(path)


def test_blank_lines_count_but_hold_no_prompt(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_bytes(f"\n{line()}\r\n  \n{line(prompt='q')}\n\n".encode())
    assert [p.prompt for p in read_prompts(path)] == ["p", "q"]
    path.write_text(f"\n{line()}\n\n{line(tag='x')}\n")
    with pytest.raises(ValueError, match="line 4: unknown tag"):
        read_prompts(path)


def test_byte_order_mark_and_foreign_line_breaks(tmp_path):
    path = tmp_path / "p.jsonl"
    record = json.loads(line(prompt="a\u2028b"))
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(record, ensure_ascii=False).encode())
    assert [p.prompt for p in read_prompts(path)] == ["a\u2028b"]


def test_limit_takes_the_first_prompts_and_reads_no_further(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text(f"{line(prompt='a')}\n\n{line(prompt='b')}\nbroken\n")
    assert [p.prompt for p in read_prompts(path, limit=2)] == ["a", "b"]
    with pytest.raises(ValueError, match="line 4"):
        read_prompts(path, limit=3)


@pytest.mark.parametrize("limit", [0, -1, 1.5, True])
def test_bad_limit_is_refused(limit):
    with pytest.raises(ValueError, match=f"limit of prompts is {limit}"):
        read_prompts(PARITY / "prompts40.jsonl", limit=limit)


def test_missing_folder_and_empty_file_name_the_flags(tmp_path):
    with pytest.raises(ValueError, match="none.jsonl is not a file .--train_data_path"):
        read_prompts(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match="is not a file"):
        read_prompts(tmp_path)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="empty.jsonl holds no prompts .--train_data_path"):
        read_prompts(tmp_path / "empty.jsonl")


def test_prompts_without_clauses(tmp_path):
    path = tmp_path / "p.jsonl"
    bare = {"prompt": "three gray wugs", "tag": "color/count"}
    foreign = {**bare, "include": [{"class": "wug", "count": 3, "color": "gray"}]}
    path.write_text(f"{json.dumps(bare)}\n{json.dumps(foreign)}\n")
    prompts = read_prompts(path, require_clauses=False)
    assert [p.raw for p in prompts] == [bare, foreign]
    for prompt in prompts:
        assert (prompt.prompt, prompt.tag) == ("three gray wugs", "color/count")
        assert prompt.include == prompt.exclude == ()
    with pytest.raises(ValueError, match="line 1: unknown tag 'color/count'"):
        read_prompts(path)
    path.write_text('{"prompt": "x"}')
    with pytest.raises(ValueError, match="line 1: tag is missing"):
        read_prompts(path, require_clauses=False)
