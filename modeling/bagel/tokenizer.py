"""The tokenizer of a BAGEL folder: plain encode and decode, and the four markers by name."""

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BOS_MARKER = "<|im_start|>"
EOS_MARKER = "<|im_end|>"
VISION_START_MARKER = "<|vision_start|>"
VISION_END_MARKER = "<|vision_end|>"
MARKERS = (BOS_MARKER, EOS_MARKER, VISION_START_MARKER, VISION_END_MARKER)

# Everything a tokenizer is read from. config.json is left out on purpose: see `load_tokenizer`.
TOKENIZER_FILES = (
    "vocab.json",
    "merges.txt",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)


@dataclass(frozen=True)
class BagelTokenizer:
    """Text to ids and back. `bos`, `eos`, `vision_start`, `vision_end` are the markers' ids."""

    backend: Any
    bos: int
    eos: int
    vision_start: int
    vision_end: int

    def encode(self, text: str) -> list[int]:
        """Ids of `text` with nothing added around it. A marker spelled out in it is one id."""
        return self.backend.encode(text, add_special_tokens=False)

    def decode(self, ids: Iterable[int]) -> str:
        """Raw text of `ids`: markers kept, no clean-up, ids beyond the vocabulary left out.

        Bytes that are no UTF-8 become U+FFFD.
        """
        return self.backend.decode(
            [int(token) for token in ids],
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
        )

    def extract_generated_text(self, ids: Iterable[int]) -> str:
        """Text between the first bos marker and the next eos or bos marker.

        Without a bos it starts at the beginning, without an end marker it runs to the end.
        """
        text = self.decode(ids)
        _, found_bos, after = text.partition(BOS_MARKER)
        if found_bos:
            text = after
        return text.partition(EOS_MARKER)[0].partition(BOS_MARKER)[0]


def load_tokenizer(folder: str | Path, vocab_size: int | None = None) -> BagelTokenizer:
    """Loads the tokenizer files of `folder`, offline, and adds the markers that it lacks.

    Newer transformers releases parse the `config.json` that lies beside a large vocabulary, and
    BAGEL's is not valid JSON. So the tokenizer's own files are shown to it alone, in a folder of
    links.

    Raises ValueError if files are missing or unreadable, or if a marker's id is not below
    `vocab_size`, the rows of the embedding (not checked if None).
    """
    folder = Path(folder)
    present = [name for name in TOKENIZER_FILES if (folder / name).is_file()]
    if "tokenizer.json" not in present and not {"vocab.json", "merges.txt"} <= set(present):
        raise ValueError(
            f"--model_path {folder}: no tokenizer, expected vocab.json and merges.txt, "
            "or tokenizer.json"
        )
    backend = _read_backend(folder, present)
    known = backend.get_vocab()
    lacking = [marker for marker in MARKERS if marker not in known]
    if lacking:
        backend.add_tokens(lacking, special_tokens=True)
    ids = [backend.convert_tokens_to_ids(marker) for marker in MARKERS]
    if vocab_size is not None and max(ids) >= vocab_size:
        raise ValueError(
            f"--model_path {folder}: marker ids {dict(zip(MARKERS, ids, strict=True))} do not fit "
            f"vocab_size {vocab_size} of llm_config.json"
        )
    return BagelTokenizer(backend, *ids)


def _read_backend(folder: Path, names: list[str]) -> Any:
    from transformers import Qwen2TokenizerFast  # seconds to import, and not needed by all users

    with tempfile.TemporaryDirectory(prefix="bagel_tokenizer_") as links:
        for name in names:
            (Path(links) / name).symlink_to((folder / name).resolve())
        try:
            return Qwen2TokenizerFast.from_pretrained(links, local_files_only=True)
        except Exception as error:  # the Rust side raises plain Exception
            raise ValueError(
                f"--model_path {folder}: unreadable tokenizer files {names}: {error}"
            ) from error
