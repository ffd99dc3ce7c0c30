"""The tiny tokenizer: byte-level BPE trained on the texts that the model will meet."""

import json
import tempfile
from collections.abc import Iterable
from pathlib import Path

from modeling.bagel.tokenizer import MARKERS, load_tokenizer

NUM_MERGES = 344  # with 256 bytes and the markers this leaves some rows of the embedding unused
END_OF_TEXT = "<|endoftext|>"
MERGES_HEADER = "#version: 0.2\n"


def write_tokenizer(folder: Path, texts: Iterable[str]) -> None:
    """Trains on `texts` and writes `vocab.json`, `merges.txt` and `tokenizer_config.json`.

    Raises ValueError if the texts are too few for the number of merges.
    """
    merges = _train_merges(texts)
    tokens = dict.fromkeys(_byte_alphabet() + ["".join(pair) for pair in merges])
    specials = (END_OF_TEXT, *MARKERS)
    _write_files(folder, list(tokens), merges)
    added = {
        str(len(tokens) + index): {
            "content": content,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for index, content in enumerate(specials)
    }
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "added_tokens_decoder": added,
        "additional_special_tokens": list(MARKERS),
        "add_prefix_space": False,
        "bos_token": None,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "errors": "replace",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 32768,
        "split_special_tokens": False,
    }
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def _train_merges(texts: Iterable[str]) -> list[tuple[str, str]]:
    # A tokenizer of bytes alone brings Qwen2's own rule of where words are cut.
    with tempfile.TemporaryDirectory(prefix="tiny_bagel_") as scratch:
        _write_files(Path(scratch), _byte_alphabet(), [])
        backend = load_tokenizer(scratch).backend
    # Special tokens count there, so more is asked for than is kept.
    room = 256 + NUM_MERGES + 2 * len(MARKERS)
    trained = backend.train_new_from_iterator(texts, room, show_progress=False)
    found = json.loads(trained.backend_tokenizer.to_str())["model"]["merges"]
    # Older versions of the library write a merge as one string.
    merges = [tuple(m.split(" ") if isinstance(m, str) else m) for m in found]
    if len(merges) < NUM_MERGES:
        raise ValueError(f"the texts yield {len(merges)} merges, expected {NUM_MERGES}")
    return merges[:NUM_MERGES]


def _write_files(folder: Path, tokens: list[str], merges: list[tuple[str, str]]) -> None:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    lines = "".join(f"{first} {second}\n" for first, second in merges)
    (folder / "vocab.json").write_text(
        json.dumps(vocabulary, ensure_ascii=False), encoding="utf-8"
    )
    (folder / "merges.txt").write_text(MERGES_HEADER + lines, encoding="utf-8")


def _byte_alphabet() -> list[str]:
    """The characters that stand for the 256 bytes in byte-level BPE (Radford et al. 2019).

    Visible Latin-1 characters stand for themselves, the others for U+0100 and upwards.
    """
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return [chr(byte) for byte in sorted(visible)] + [chr(256 + i) for i in range(len(hidden))]
