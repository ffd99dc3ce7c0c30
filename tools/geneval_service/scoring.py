"""GenEval's rules: detections of one picture in, reward, strict reward and score out.

The rules and thresholds are those of the GenEval benchmark (Ghosh et al., 2023, arXiv 2310.11513).
The graded score is that of the public GenEval reward service, so that it can stand in for ours.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from data.geneval import GenevalClause, GenevalPrompt
from data.vocabulary import COLORS, TAGS, canonical_class

MIN_CONFIDENCE = 0.3
MIN_CONFIDENCE_COUNTING = 0.9
MAX_OBJECTS_PER_CLASS = 16
SIZE_MARGIN = 0.1
MIN_DIRECTION = 0.5
OTHER_TAG = -10.0  # the public service's filler in a list that belongs to another tag

Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class Detection:
    """One detected object: box as x0, y0, x1, y1 in pixels, y downwards; score in 0..1.

    `color` is None where it was not looked at. Raises ValueError for a class or color that GenEval
    does not know and for a box that is not one.
    """

    class_name: str
    box: Box
    score: float
    color: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "class_name", canonical_class(self.class_name))
        if self.color is not None and self.color not in COLORS:
            raise ValueError(f"unknown color {self.color!r}, expected one of {', '.join(COLORS)}")
        if len(self.box) != 4 or not all(math.isfinite(x) for x in (*self.box, self.score)):
            raise ValueError(f"box {self.box}, score {self.score}: expected five finite numbers")
        if self.box[0] > self.box[2] or self.box[1] > self.box[3]:
            raise ValueError(f"box {self.box} is not ordered as x0, y0, x1, y1")


@dataclass(frozen=True)
class ImageScore:
    """The verdict on one picture.

    `reward` and `strict_reward` are 0 or 1. `score` is at most 1, and below 0 with many surplus
    objects. `reasons` says what broke the strict reward; it is empty exactly where that is 1.
    """

    reward: float
    strict_reward: float
    score: float
    reasons: tuple[str, ...]


@dataclass
class _Verdict:
    parts: list[float] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)


Found = Mapping[str, Sequence[Detection]]


def keep_detections(tag: str, detections: Iterable[Detection]) -> dict[str, list[Detection]]:
    """The detections that count, by class, the most confident first.

    At most 16 of a class, with a score over 0.3, or over 0.9 where the tag is counting.
    """
    threshold = MIN_CONFIDENCE_COUNTING if tag == "counting" else MIN_CONFIDENCE
    kept: dict[str, list[Detection]] = {}
    for detection in sorted(detections, key=lambda d: -d.score):
        same_class = kept.setdefault(detection.class_name, [])
        if detection.score > threshold and len(same_class) < MAX_OBJECTS_PER_CLASS:
            same_class.append(detection)
    return kept


def detections_to_color(prompt: GenevalPrompt, detections: Iterable[Detection]) -> list[Detection]:
    """The detections whose color `score_image` will look at, so that no other needs one."""
    found = keep_detections(prompt.tag, detections)
    needed: dict[int, Detection] = {}
    for clause in prompt.include:
        objects = found.get(clause.class_name, [])
        if clause.color is not None and len(objects) >= clause.count:
            needed.update((id(d), d) for d in objects[: clause.count])
    return list(needed.values())


def score_image(prompt: GenevalPrompt, detections: Iterable[Detection]) -> ImageScore:
    """Judges one picture.

    * reward: every include finds at least `count` objects, the most confident `count` of them have
      the color and the relation, and no exclude count is reached.
    * strict_reward: the same with exactly `count` objects.
    * score: the mean of parts. Each include gives 1 - |count - found| / count. One whose count is
      not met exactly adds a 0 if it asks for a color or a position. Else a color adds the same
      measure over the objects of that color, and a position (looked at only if the color held)
      adds a 1 and an extra 0 for each object out of place, or just a 0 if the objects that it
      refers to did not hold themselves. Excludes do not enter.

    Raises ValueError where an object that is judged by its color has none.
    """
    found = keep_detections(prompt.tag, detections)
    lenient = _judge(prompt, found, strict=False)
    strict = _judge(prompt, found, strict=True)
    return ImageScore(
        reward=float(not lenient.reasons),
        strict_reward=float(not strict.reasons),
        score=sum(strict.parts) / len(strict.parts),
        reasons=tuple(strict.reasons),
    )


def group_rewards(tags: Sequence[str], rewards: Sequence[float]) -> dict[str, list[float]]:
    """Rewards by tag, in the public service's form.

    Every list is as long as the batch, with -10 where a picture's tag is another.
    """
    if len(tags) != len(rewards):
        raise ValueError(f"{len(tags)} tags for {len(rewards)} rewards")
    unknown = set(tags).difference(TAGS)
    if unknown:
        raise ValueError(f"unknown tags {sorted(unknown)}, expected some of {', '.join(TAGS)}")
    pairs = list(zip(tags, rewards, strict=True))
    return {key: [r if tag == key else OTHER_TAG for tag, r in pairs] for key in TAGS}


def relations_of(box: Box, target: Box) -> frozenset[str]:
    """How `box` lies to `target`: none, one or two of GenEval's relations.

    The offset of the centers is shrunk on each axis by a tenth of both boxes' extents and divided
    by the length of the unshrunk offset; a component beyond 0.5 is a relation.
    """
    offsets, shrunk = [], []
    for low, high in ((0, 2), (1, 3)):
        offset = (box[low] + box[high] - target[low] - target[high]) / 2
        margin = SIZE_MARGIN * (box[high] - box[low] + target[high] - target[low])
        offsets.append(offset)
        shrunk.append(math.copysign(max(abs(offset) - margin, 0.0), offset))
    length = math.hypot(*offsets)
    if length == 0:
        return frozenset()
    right, down = (component / length for component in shrunk)
    holds = {
        "left of": right < -MIN_DIRECTION,
        "right of": right > MIN_DIRECTION,
        "above": down < -MIN_DIRECTION,
        "below": down > MIN_DIRECTION,
    }
    return frozenset(relation for relation, is_true in holds.items() if is_true)


def _judge(prompt: GenevalPrompt, found: Found, strict: bool) -> _Verdict:
    verdict = _Verdict()
    groups: list[Sequence[Detection] | None] = []  # of each include, its objects if it holds
    for clause in prompt.include:
        num_reasons = len(verdict.reasons)
        objects = _count_part(clause, found.get(clause.class_name, ()), strict, verdict)
        if objects is not None and clause.color is not None:
            _color_part(clause, objects, verdict)
        if clause.position is not None and len(verdict.reasons) == num_reasons:
            relation, target = clause.position
            _position_part(clause.class_name, relation, objects, groups[target], verdict)
        groups.append(objects if len(verdict.reasons) == num_reasons else None)
    for clause in prompt.exclude:
        num_found = len(found.get(clause.class_name, ()))
        if num_found >= clause.count:
            verdict.reasons.append(
                f"expected fewer than {clause.count} {clause.class_name}, found {num_found}"
            )
    return verdict


def _count_part(
    clause: GenevalClause, objects: Sequence[Detection], strict: bool, verdict: _Verdict
) -> Sequence[Detection] | None:
    """The objects to judge further, or None where their number is wrong."""
    verdict.parts.append(_closeness(len(objects), clause.count))
    if len(objects) < clause.count or (strict and len(objects) > clause.count):
        wanted = "exactly" if strict else "at least"
        verdict.reasons.append(
            f"expected {wanted} {clause.count} {clause.class_name}, found {len(objects)}"
        )
        if clause.color is not None or clause.position is not None:
            verdict.parts.append(0.0)
        return None
    return objects[: clause.count]


def _color_part(clause: GenevalClause, objects: Sequence[Detection], verdict: _Verdict) -> None:
    colors = [d.color for d in objects]
    if None in colors:
        raise ValueError(
            f"a {clause.class_name} is judged by its color but has none: give a color to all of "
            "detections_to_color()"
        )
    num_matching = colors.count(clause.color)
    verdict.parts.append(_closeness(num_matching, clause.count))
    if num_matching != clause.count:
        verdict.reasons.append(
            f"expected {clause.count} {clause.color} {clause.class_name}, found {', '.join(colors)}"
        )


def _position_part(
    class_name: str,
    relation: str,
    objects: Sequence[Detection],
    targets: Sequence[Detection] | None,
    verdict: _Verdict,
) -> None:
    if targets is None:
        verdict.parts.append(0.0)
        verdict.reasons.append(f"no target for {class_name} to be {relation}")
        return
    verdict.parts.append(1.0)
    for placed in objects:
        if not all(relation in relations_of(placed.box, target.box) for target in targets):
            verdict.parts.append(0.0)
            verdict.reasons.append(f"{class_name} at {placed.box} is not {relation} its target")


def _closeness(found: int, count: int) -> float:
    return 1 - abs(count - found) / count
