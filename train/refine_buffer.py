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

    def to_records(self) -> list[dict]:
        """Plain data for a checkpoint or another rank: prompt JSON, score, PNG bytes."""
        return [entry_to_record(entry) for entry in (*self.perfect, *self.rest)]

    def load_records(self, records: list[dict]) -> None:
        self.replace([entry_from_record(record) for record in records])


def entry_to_record(entry: BufferEntry) -> dict:
    """A buffer entry as builtin types."""
    png = io.BytesIO()
    entry.picture.save(png, format="PNG", compress_level=1)
    return {"prompt": json.dumps(entry.prompt.raw), "score": entry.score, "png": png.getvalue()}


def entry_from_record(record: dict) -> BufferEntry:
    """Undoes `entry_to_record`."""
    picture = Image.open(io.BytesIO(record["png"]))
    picture.load()
    prompt = parse_prompt(json.loads(record["prompt"]), "refine buffer", False)
    return BufferEntry(prompt, record["score"], picture)
