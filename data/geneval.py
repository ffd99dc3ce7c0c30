"""GenEval prompt files: typed records, and a reader that refuses a bad line with its number."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from data import safe_json
from data.vocabulary import COLORS, RELATIONS, TAGS, canonical_class


@dataclass(frozen=True)
class GenevalClause:
    """Objects that a picture must show.

    `position` is (relation, index): these objects stand in that relation to those of the earlier
    include with that index. `class_name` is GenEval's name of the class.
    """

    class_name: str
    count: int
    color: str | None = None
    position: tuple[str, int] | None = None


@dataclass(frozen=True)
class GenevalPrompt:
    """One line of a prompt file.

    All includes must hold; no exclude may be reached (`count` objects of the class or more).
    `raw` is the JSON object that is sent to the reward service, unknown keys included; its classes
    carry GenEval's names too.
    """

    prompt: str
    tag: str
    include: tuple[GenevalClause, ...]
    exclude: tuple[GenevalClause, ...]
    raw: dict = field(repr=False)


def read_prompts(
    path: str | Path, limit: int | None = None, require_clauses: bool = True
) -> list[GenevalPrompt]:
    """Reads and checks a JSON-lines file, or its first `limit` prompts.

    Lines of white space are skipped. `require_clauses=False` is for rewards that judge a picture
    by its prompt alone: see `parse_line`. Raises ValueError for a file that cannot be read or holds
    no prompt, and for the first bad line, with its number.
    """
    if limit is not None and (not _is_int(limit) or limit < 1):
        raise ValueError(f"limit of prompts is {limit!r}, expected a positive integer or None")
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path} is not a file (--train_data_path, --val_data_path)")
    prompts = [
        parse_line(text, path, line_number, require_clauses)
        for line_number, text in islice(_lines(path), limit)
    ]
    if not prompts:
        raise ValueError(f"{path} holds no prompts (--train_data_path, --val_data_path)")
    return prompts


def parse_line(
    text: str, path: str | Path, line_number: int, require_clauses: bool = True
) -> GenevalPrompt:
    """Checks one line of a prompt file; `path` and `line_number` only serve the error message.

    With `require_clauses=False` the tag may be any text, and include and exclude, whose vocabulary
    then belongs to another reward, are only kept in `raw`.
    """
    where = f"{path}, line {line_number}"
    try:
        raw = safe_json.loads(text)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON: {error}") from error
    return parse_prompt(raw, where, require_clauses)


def parse_prompt(raw: object, where: str, require_clauses: bool = True) -> GenevalPrompt:
    """Checks one decoded JSON object, as `parse_line` does; `where` begins every error message."""
    if not isinstance(raw, dict):
        raise ValueError(f"{where}: expected a JSON object, got {type(raw).__name__}")
    prompt, tag = _text(raw, "prompt", where), _text(raw, "tag", where)
    if not require_clauses:
        return GenevalPrompt(prompt, tag, (), (), raw)
    if tag not in TAGS:
        raise ValueError(f"{where}: unknown tag {tag!r}, expected one of {', '.join(TAGS)}")
    places = _items(raw, "include", where)
    if not places:
        raise ValueError(f"{where}: include is missing or empty")
    include = tuple(_include_clause(item, i, at) for i, (item, at) in enumerate(places))
    exclude = tuple(_count_clause(item, at) for item, at in _items(raw, "exclude", where))
    return GenevalPrompt(prompt, tag, include, exclude, _with_canonical_classes(raw))


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    with path.open("rb") as file:  # bytes: a text file would also break lines at a bare "\r"
        for line_number, line in enumerate(file, start=1):
            try:
                text = line.decode("utf-8-sig" if line_number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}, line {line_number}: not UTF-8: {error}") from error
            if text.strip():
                yield line_number, text


def _items(raw: dict, key: str, where: str) -> list[tuple[object, str]]:
    """The clauses under `key`, each with its place in words; null counts as absent."""
    items = raw.get(key)
    if items is None:
        return []
    if not isinstance(items, list):
        raise ValueError(f"{where}: {key} is {items!r}, expected a list of clauses")
    return [(item, f"{where}: {key}[{index}]") for index, item in enumerate(items)]


def _count_clause(item: object, where: str) -> GenevalClause:
    if not isinstance(item, dict):
        raise ValueError(f"{where} is {item!r}, expected an object with class and count")
    name = _text(item, "class", where)
    try:
        class_name = canonical_class(name)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    count = item.get("count")
    if not _is_int(count) or count < 1:
        raise ValueError(f"{where}: count is {count!r}, expected a positive integer")
    return GenevalClause(class_name, count)


def _include_clause(item: object, index: int, where: str) -> GenevalClause:
    """A null color or position counts as absent: table exports fill gaps with nulls."""
    plain = _count_clause(item, where)
    color = item.get("color")
    if color is not None and color not in COLORS:
        raise ValueError(f"{where}: unknown color {color!r}, expected one of {', '.join(COLORS)}")
    return replace(plain, color=color, position=_position(item.get("position"), index, where))


def _position(value: object, index: int, where: str) -> tuple[str, int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError(f"{where}: position is {value!r}, expected [relation, include index]")
    relation, target = value
    if relation not in RELATIONS:
        allowed = ", ".join(RELATIONS)
        raise ValueError(f"{where}: unknown relation {relation!r}, expected one of {allowed}")
    if not _is_int(target) or not 0 <= target < index:
        raise ValueError(f"{where}: position points to {target!r}, expected an earlier include")
    return relation, target


def _with_canonical_classes(raw: dict) -> dict:
    """A copy in GenEval's class names: a service that knows only those would score 0 silently."""
    renamed = {
        key: [{**item, "class": canonical_class(item["class"])} for item in raw[key]]
        for key in ("include", "exclude")
        if raw.get(key) is not None
    }
    return {**raw, **renamed}


def _text(raw: dict, key: str, where: str) -> str:
    value = raw.get(key)
    if not isinstance(value, str) or not value.strip():
        problem = f"is {value!r}, expected non-empty text" if key in raw else "is missing"
        raise ValueError(f"{where}: {key} {problem}")
    return value


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
