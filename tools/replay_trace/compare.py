"""Deviations from a trace: the worst of each kind, and the limits they must keep."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

EXACT = "exact"


@dataclass(frozen=True)
class Limits:
    """Largest allowed deviation by kind of number."""

    by_kind: dict[str, float]


def limits_for(pictures: str, is_thresholded: bool) -> Limits:
    """Limits of a replay fed with the trace's pictures, or free-running on its own."""
    if pictures == "trace":
        tensors, advantages, losses, params = 2e-5, 1e-6, 1e-4, 1e-4
    elif is_thresholded:
        tensors, advantages, losses, params = 1e-4, 1e-4, 1e-4, 1e-4
    else:
        tensors, advantages, losses, params = 1e-2, 1e-2, 1e-2, 1e-4
    return Limits(
        {
            EXACT: 0.0,
            "pictures (grey levels)": 1.0,
            "probabilities": tensors,
            "velocities": tensors,
            "latents": tensors,
            "log-probs": tensors,
            "rewards": advantages,
            "advantages": advantages,
            "losses": losses,
            "ratios": losses,
            "gradient norms": losses,
            "parameter norms": params,
        }
    )


@dataclass
class Deviations:
    """The worst deviation of each kind seen so far, with where it was and how many were held."""

    worst: dict[str, float] = field(default_factory=dict)
    where: dict[str, str] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, kind: str, value: float, where: str) -> None:
        self.counts[kind] = self.counts.get(kind, 0) + 1
        value = float("inf") if value != value else value
        if value > self.worst.get(kind, -1.0):
            self.worst[kind], self.where[kind] = value, where

    def exact(self, where: str, mine: object, theirs: object) -> None:
        """Values that must be equal; a miss names both, shortened."""
        is_equal = mine == theirs
        note = where if is_equal else f"{where}: {str(mine)[:60]} instead of {str(theirs)[:60]}"
        self.add(EXACT, 0.0 if is_equal else 1.0, note)

    def exact_tensor(self, where: str, mine: torch.Tensor, theirs: torch.Tensor) -> None:
        is_equal = mine.shape == theirs.shape and torch.equal(mine.long(), theirs.long())
        self.add(EXACT, 0.0 if is_equal else 1.0, where)

    def absolute(self, kind: str, where: str, mine: torch.Tensor, theirs: torch.Tensor) -> None:
        """Largest absolute difference of two tensors of one shape."""
        if mine.shape != theirs.shape:
            shapes = f"{tuple(mine.shape)} instead of {tuple(theirs.shape)}"
            self.add(kind, float("inf"), f"{where}: shape {shapes}")
        elif mine.numel():
            difference = (mine.double() - theirs.double()).abs().max().item()
            self.add(kind, difference, where)

    def numbers(self, kind: str, where: str, mine: Sequence, theirs: Sequence) -> None:
        """Largest absolute difference of two lists of numbers."""
        self.absolute(kind, where, torch.tensor(mine).double(), torch.tensor(theirs).double())

    def relative(self, kind: str, where: str, mine: float, theirs: float, scale: float) -> None:
        """Difference relative to the recorded value, but to no less than `scale`."""
        self.add(kind, abs(mine - theirs) / max(abs(theirs), scale), where)

    def merge(self, other: "Deviations") -> None:
        for kind, value in other.worst.items():
            count = self.counts.get(kind, 0) + other.counts[kind]
            self.add(kind, value, other.where[kind])
            self.counts[kind] = count


def table(deviations: Deviations, limits: Limits) -> tuple[str, bool]:
    """A printed table, and whether every kind that was compared keeps its limit."""
    lines = [f"{'kind':<24}{'compared':>9}{'worst':>12}{'limit':>10}  "]
    passed = deviations.counts.get(EXACT, 0) > 0
    for kind, limit in limits.by_kind.items():
        if kind not in deviations.worst:
            continue
        worst, is_kept = deviations.worst[kind], deviations.worst[kind] <= limit
        passed = passed and is_kept
        mark = "ok" if is_kept else "MISSED"
        lines.append(
            f"{kind:<24}{deviations.counts[kind]:>9}{worst:>12.3g}{limit:>10.3g}  {mark:<6}  "
            f"{deviations.where[kind] if worst > 0 else ''}"
        )
    return "\n".join(lines), passed
