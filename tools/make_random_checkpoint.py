"""Writes a BAGEL folder of the real widths with random weights: for timings, not for pictures.

    python -m tools.make_random_checkpoint OUT --layers 4
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from modeling.autoencoder import AutoEncoder, VaeConfig
from modeling.bagel.bagel import Bagel
from modeling.bagel.config import BagelConfig, read_llm_config, read_vit_config
from modeling.bagel.export import write_bf16
from modeling.bagel.tokenizer import MARKERS
from modeling.bagel.weights import POSITION_TABLES, parameter_shapes

LLM = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
VIT = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_attention_heads": 16,
    "image_size": 980,
    "patch_size": 14,
}
VAE = VaeConfig(
    channels=128, channel_mults=(1, 2, 4, 4), num_blocks=2, z_channels=16, image_channels=3
)
MAX_LATENT_SIZE = 64
FIRST_MARKER = 151644
LINEAR_STD = 0.02


def write_checkpoint(out: Path, num_layers: int, num_vit_layers: int, seed: int) -> None:
    """Writes all files of the folder; tensors are drawn and written one at a time."""
    if out.exists():
        raise ValueError(f"{out} exists already, name another folder")
    out.mkdir(parents=True)
    llm = {**LLM, "num_hidden_layers": num_layers}
    vit = {**VIT, "num_hidden_layers": num_vit_layers + 1}  # the last one is never used
    (out / "llm_config.json").write_text(json.dumps(llm, indent=1), encoding="utf-8")
    (out / "vit_config.json").write_text(json.dumps(vit, indent=1), encoding="utf-8")
    write_tokenizer(out)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device=device).manual_seed(seed)
    config = BagelConfig(read_llm_config(out), read_vit_config(out), MAX_LATENT_SIZE)
    with torch.device("meta"):
        shapes = parameter_shapes(Bagel(config))
        vae_shapes = parameter_shapes(AutoEncoder(VAE))
    write_bf16(out / "ema.safetensors", shapes, draw_tensors(shapes, generator))
    vae = dict(zip(vae_shapes, (t.cpu() for t in draw_tensors(vae_shapes, generator)), strict=True))
    save_file(vae, out / "ae.safetensors")


def draw_tensors(shapes: Mapping[str, tuple], generator: torch.Generator) -> Iterator[Tensor]:
    """Norm weights 1, biases 0, position tables 0 (they are rebuilt), the rest normal."""
    device = generator.device
    for name, shape in shapes.items():
        if name in POSITION_TABLES or name.endswith("bias"):
            yield torch.zeros(shape, device=device)
        elif len(shape) == 1:
            yield torch.ones(shape, device=device)
        else:
            # Convolutions keep their input's scale, so that pictures stay finite.
            std = LINEAR_STD if len(shape) == 2 else 1 / math.sqrt(math.prod(shape[1:]))
            yield torch.randn(shape, generator=generator, device=device) * std


def write_tokenizer(out: Path) -> None:
    """A byte-level vocabulary without merges, and the markers under their real ids."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    symbols = [chr(byte) for byte in printable] + [chr(256 + i) for i in range(len(others))]
    vocabulary = {symbol: i for i, symbol in enumerate(symbols)}
    (out / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    (out / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    ids = {MARKERS[0]: FIRST_MARKER, MARKERS[1]: FIRST_MARKER + 1}
    ids |= {MARKERS[2]: FIRST_MARKER + 8, MARKERS[3]: FIRST_MARKER + 9}
    flags = {key: False for key in ("lstrip", "rstrip", "normalized", "single_word")}
    settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "add_prefix_space": False,
        "errors": "replace",
        "added_tokens_decoder": {
            str(i): {"content": content, "special": True, **flags} for content, i in ids.items()
        },
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=28, help="decoder layers")
    parser.add_argument("--vit-layers", type=int, default=26, help="image-encoder layers in use")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    try:
        write_checkpoint(args.out, args.layers, args.vit_layers, args.seed)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    size = (args.out / "ema.safetensors").stat().st_size
    print(f"{args.out}: {args.layers} layers, ema.safetensors {size / 2**30:.2f} GiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
