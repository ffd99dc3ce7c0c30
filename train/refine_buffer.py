"""Drawings of the last generate step, from which refine steps take their input picture."""

import io
import json

import torch
from PIL import Image

from data.geneval import parse_prompt
from train.records import BufferEntry

PERFECT_SCORE = 1


class RefineBuffer:
    """Scored drawings of all ranks in rank order, split into perfect ones and the rest."""

    def __init__(self, perfect_probability: float):
        self.perfect_probability = perfect_probability
        self.perfect: list[BufferEntry] = []
        self.rest: list[BufferEntry] = []

    def __len__(self) -> int:
        return len(self.perfect) + len(self.rest)

    def replace(self, entries: list[BufferEntry]) -> None:
        """Forgets what it held and takes `entries`."""
        self.perfect = [entry for entry in entries if entry.score == PERFECT_SCORE]
        self.rest = [entry for entry in entries if entry.score != PERFECT_SCORE]

    def draw(self, generator: torch.Generator) -> BufferEntry:
        """Draws a perfect entry with the set probability, else one of the rest, uniformly.

        An empty list yields the other.

        Raises:
            ValueError: both are empty.
        """
        if not len(self):
            raise ValueError("the refine buffer is empty: no generate step has filled it")
        chance = torch.tensor([self.perfect_probability], device=generator.device)
        wants_perfect = bool(torch.bernoulli(chance, generator=generator).item())
        first, second = self.perfect, self.rest
        entries = (first or second) if wants_perfect else (second or first)
        index = torch.randint(
            0, len(entries), (1,), generator=generator, device=generator.device
        )
        return entries[int(index.item())]

    def entries(self) -> list[BufferEntry]:
        """All entries; `replace` with them gives the same buffer."""
        return [*self.perfect, *self.rest]


def entry_to_record(entry: BufferEntry) -> dict:
    """A buffer entry as builtin types, for a checkpoint or another rank.

    Raises:
        ValueError: the picture is not RGB.
    """
    if entry.picture.mode != "RGB":
        raise ValueError(f"a buffered picture is of mode {entry.picture.mode}, expected RGB")
    png = io.BytesIO()
    entry.picture.save(png, format="PNG", compress_level=1)
    prompt = {"raw": entry.prompt.raw, "has_clauses": bool(entry.prompt.include)}
    return {"prompt": json.dumps(prompt), "score": float(entry.score), "png": png.getvalue()}


def entry_from_record(record: dict) -> BufferEntry:
    """Undoes `entry_to_record`."""
    picture = Image.open(io.BytesIO(record["png"])).convert("RGB")
    stored = json.loads(record["prompt"])
    prompt = parse_prompt(stored["raw"], "refine buffer", stored["has_clauses"])
    return BufferEntry(prompt, record["score"], picture)
