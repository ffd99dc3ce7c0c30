"""Geometry of a packed batch: a forest of segments, its RoPE ids and who attends to whom.

Plain integers on the host; nothing here touches a device. A row (one attention document) is a
path from a root segment to a leaf. Flat packing gives every row a tree of its own; rows that
share a prefix can share its segments, because the mask only asks for ancestors.
"""

from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor

ROOT = -1


class SegmentKind(Enum):
    """What a segment holds; decides its attention rule and how RoPE ids move past it."""

    TEXT = "causal"
    IMAGE = "full"
    NOISE = "noise"

    @property
    def is_causal(self) -> bool:
        return self is SegmentKind.TEXT


@dataclass(frozen=True)
class Segment:
    """A run of `length` tokens of one kind, from packed position `start`, under `parent`."""

    kind: SegmentKind
    start: int
    length: int
    parent: int
    rope_start: int

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def next_rope(self) -> int:
        """RoPE id of what follows: text counts up, an image takes one id, noise takes none."""
        if self.kind is SegmentKind.TEXT:
            return self.rope_start + self.length
        return self.rope_start + (1 if self.kind is SegmentKind.IMAGE else 0)

    def rope_ids(self) -> list[int]:
        if self.kind is SegmentKind.TEXT:
            return list(range(self.rope_start, self.rope_start + self.length))
        return [self.rope_start] * self.length


@dataclass(frozen=True)
class SegmentPlan:
    """A packed batch as a forest. Trees are contiguous; a parent stands before its children."""

    segments: tuple[Segment, ...]
    tree_ranges: tuple[tuple[int, int], ...]

    @property
    def num_tokens(self) -> int:
        return self.segments[-1].end if self.segments else 0

    def rope_ids(self) -> list[int]:
        return [i for segment in self.segments for i in segment.rope_ids()]

    def segment_ids(self) -> Tensor:
        """int64 [S]: index of the segment that holds each token."""
        lengths = torch.tensor([s.length for s in self.segments], dtype=torch.int64)
        return torch.repeat_interleave(torch.arange(len(self.segments)), lengths)

    def causal(self) -> Tensor:
        """bool [segments]: whether a segment is causal inside."""
        return torch.tensor([s.kind.is_causal for s in self.segments], dtype=torch.bool)

    def ancestors(self) -> Tensor:
        """bool [segments, segments]: entry (a, b) is true where b is a visible ancestor of a.

        Noise is invisible to every other segment. A segment is not its own ancestor.
        """
        visible = torch.zeros(len(self.segments), len(self.segments), dtype=torch.bool)
        for index, segment in enumerate(self.segments):
            if segment.parent == ROOT:
                continue
            visible[index] = visible[segment.parent]
            if self.segments[segment.parent].kind is not SegmentKind.NOISE:
                visible[index, segment.parent] = True
        return visible


@dataclass
class ForestBuilder:
    """Collects segments in packed order and closes them into a SegmentPlan."""

    _segments: list[Segment] = field(default_factory=list)
    _tree_starts: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return self._segments[-1].end if self._segments else 0

    def add(self, kind: SegmentKind, length: int, parent: int = ROOT) -> int:
        """Appends a segment and returns its index.

        Raises:
            ValueError: `length` is not positive, or `parent` is not in the tree being built.
        """
        if length <= 0:
            raise ValueError(f"segment of {length} tokens: a segment holds at least one")
        start = self.num_tokens
        if parent == ROOT:
            self._tree_starts.append(start)
            rope_start = 0
        else:
            if not 0 <= parent < len(self._segments):
                raise ValueError(f"parent {parent} of a segment does not exist yet")
            if self._segments[parent].start < self._tree_starts[-1]:
                raise ValueError(f"parent {parent} lies in a tree that is already closed")
            rope_start = self._segments[parent].next_rope
        self._segments.append(Segment(kind, start, length, parent, rope_start))
        return len(self._segments) - 1

    def segment(self, index: int) -> Segment:
        return self._segments[index]

    def finish(self) -> SegmentPlan:
        ends = [*self._tree_starts[1:], self.num_tokens]
        return SegmentPlan(tuple(self._segments), tuple(zip(self._tree_starts, ends, strict=True)))
