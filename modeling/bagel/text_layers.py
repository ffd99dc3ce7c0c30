"""All layers of a text turn in one launch: one token of each of up to four sequences.

The kernel (cuda/text_layers.cu) gives the bits of the kernels one by one. It is compiled for a
model's sizes and a number of rows at first use, and compared once with them; where it cannot be
compiled or has other bits it stays unused, with a warning. Shape letters: A rows, D hidden.
"""

import ctypes
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from modeling.bagel.bagel import LayerPass, Wanted
from modeling.bagel.config import LlmConfig
from modeling.bagel.cuda_source import CudaKernel, CudaSourceError, build_kernel
from modeling.bagel.few_rows import split_size
from modeling.bagel.fused_attention import FEW_BLOCK, LOG2_E, SPLIT_KEYS
from modeling.bagel.fused_ops import (
    is_hopper,
    num_blocks,
    num_multiprocessors,
    reduce_width,
    rms_norm,
)
from modeling.bagel.layers import FoundByTrying
from modeling.bagel.qwen2_navit import Decoder, DecoderLayer

SOURCE = Path(__file__).parent / "cuda" / "text_layers.cu"
MAX_ROWS = 4
WARPS = 12
"""Of a block."""
# As in the source: bytes of a slot of weights, outputs of a tile, queries of an attention part.
SLOT_BYTES, TILE, PART_QUERIES = 2048, 8, 8
SHARED_BYTES = 232448
"""What a block of compute capability 9 can have."""
KEPT_BYTES = 6144
"""Of them for all that is neither a slot nor a row nor of a norm."""
MIN_SLOTS, MAX_SLOTS = 4, 7
COUNTERS_BEFORE_TILES = 32
MAX_UNITS = 2**16 - 1
"""Units of the last product that 16 bits can count."""
SECOND_SPLIT_UNITS = 5
"""As many units of the last product take as long as the rows of a second split."""
ALIGNMENT = 16
NUM_MATRICES, NUM_BIASES = 7, 3
logger = logging.getLogger("faster_r3")


@dataclass(frozen=True)
class TextSizes:
    """What a kernel is compiled for."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    layers: int
    rows: int
    down_splits: int
    blocks: int
    rounds_early: bool

    @staticmethod
    def of(
        config: LlmConfig, rows: int, down_splits: int, blocks: int, rounds_early: bool
    ) -> "TextSizes":
        """Sizes for that many rows of a model, whose last product is cut into splits.

        There is a block for each of the GPU's multiprocessors. With `rounds_early` q and k are
        rounded as `QkRounding.und` says.
        """
        return TextSizes(
            config.hidden_size,
            config.intermediate_size,
            config.num_heads,
            config.num_kv_heads,
            config.num_layers,
            rows,
            down_splits,
            blocks,
            rounds_early,
        )

    @property
    def down_split(self) -> int:
        """Inner numbers of a split of down."""
        return split_size(self.inner, self.down_splits)

    @property
    def row_bytes(self) -> int:
        """Shared memory of the rows of a product: all of them, or two splits of each."""
        return self.rows * max(2 * self.hidden + 16, 2 * (2 * self.down_split + 16))

    @property
    def slots(self) -> int:
        """Slots of weights that a warp can have."""
        norm_bytes = 2 * self.hidden + 4 * self.rows * reduce_width(self.rows, self.hidden)
        free = SHARED_BYTES - KEPT_BYTES - self.row_bytes - norm_bytes
        return min(MAX_SLOTS, free // (WARPS * SLOT_BYTES))

    def macros(self) -> dict[str, int]:
        """The macros of the source."""
        return {
            "HIDDEN": self.hidden,
            "INNER": self.inner,
            "HEADS": self.heads,
            "KV_HEADS": self.kv_heads,
            "LAYERS": self.layers,
            "ROWS": self.rows,
            "NORM_WIDTH": reduce_width(self.rows, self.hidden),
            "ROWS_BYTES": self.row_bytes,
            "SLOTS": self.slots,
            "DOWN_SPLITS": self.down_splits,
            "DOWN_SPLIT": self.down_split,
            "BLOCKS": self.blocks,
            "ROUNDS_EARLY": int(self.rounds_early),
            "WARPS": WARPS,
            "SPLIT_KEYS": SPLIT_KEYS,
            "BLOCK_KEYS": FEW_BLOCK,
            "DOWN_COUNTERS": COUNTERS_BEFORE_TILES,
            "SHARED_BYTES": SHARED_BYTES,
            "WORK_BYTES": ctypes.sizeof(_work_type(self.layers, self.blocks)),
        }

    def unsupported(self) -> str | None:
        """Why there is no kernel for these sizes; None if there is."""
        if self.rows > MAX_ROWS:
            return f"{self.rows} rows, expected up to {MAX_ROWS}"
        if self.hidden != self.heads * 128 or self.heads >= 8 * self.kv_heads:
            return f"{self.heads} heads of which {self.kv_heads} have keys, hidden {self.hidden}"
        if self.hidden % 128 or self.inner % 64 or self.down_split > self.hidden:
            return f"hidden {self.hidden}, inner {self.inner} in {self.down_splits} splits"
        firsts = down_firsts(self.hidden // TILE, self.down_splits, self.blocks)
        if firsts is None or firsts[-1] > MAX_UNITS:
            return f"{self.down_splits} splits for {self.blocks} multiprocessors"
        if self.slots < MIN_SLOTS:
            return f"room for {self.slots} slots of weights, expected {MIN_SLOTS}"
        return None


@cache
def down_firsts(tiles: int, splits: int, blocks: int) -> list[int] | None:
    """Which units, split by split a unit for each tile, a block has in the last product.

    A block with units of two splits brings the rows of both, and has fewer units for it. No block
    has units of three.

    Returns:
        The first unit of each block, and the number of units behind them; None if there are too
        many splits for the blocks.
    """
    for most in range(num_blocks(tiles * splits, blocks), 2 * tiles + 1):
        firsts = [0]
        for _ in range(blocks):
            left = tiles - firsts[-1] % tiles
            share = most if most <= left else max(left, most - SECOND_SPLIT_UNITS)
            firsts.append(min(firsts[-1] + min(share, left + tiles), tiles * splits))
        if firsts[-1] == tiles * splits:
            return firsts
    return None


@cache
def _work_type(num_layers: int, num_blocks: int) -> type[ctypes.Structure]:
    """The kernel's argument; the source checks its size."""
    pointer = ctypes.c_void_p

    class Layer(ctypes.Structure):
        _fields_ = [
            ("weights", pointer * NUM_MATRICES),
            ("biases", pointer * NUM_BIASES),
            *((name, pointer) for name in ("norm", "mlp_norm", "q_norm", "k_norm")),
            *((name, pointer) for name in ("keys", "values")),
        ]

    class Work(ctypes.Structure):
        _fields_ = [
            *((name, pointer) for name in ("x", "heads", "attended", "inner")),
            *((name, pointer) for name in ("down_parts", "item_parts", "item_stats", "counters")),
            *((name, pointer) for name in ("cosines", "sines", "places", "used", "starts")),
            *((name, ctypes.c_float) for name in ("eps", "inverse_size", "scale")),
            ("max_splits", ctypes.c_int),
            ("down_firsts", ctypes.c_uint16 * (num_blocks + 1)),
            ("layers", Layer * num_layers),
        ]

    return Work


ByParts = Callable[[LayerPass], Tensor]
"""A pass kernel by kernel: [A, D], final-normed."""


class TextLayers:
    """Runs text turns in one launch where that is possible and keeps the bits."""

    def __init__(self) -> None:
        self._kernels: FoundByTrying[CudaKernel | None] = FoundByTrying()

    def run(self, turn: LayerPass, down_splits: int, by_parts: ByParts) -> Tensor | None:
        """Runs all layers and the final norm of a text turn: [A, D].

        `down_splits` is how cuBLAS cuts the product of the last projection; q, k, v and o it cuts
        in two. None where there is no kernel; then `turn.x` is as it was. The first pass of a
        number of rows is compared with `by_parts`, outside of graph captures.
        """
        if not _is_aligned(turn.decoder):
            return None
        sizes = TextSizes.of(
            turn.decoder.config,
            turn.x.shape[0],
            down_splits,
            num_multiprocessors(turn.x.device),
            turn.rotary.rounding.und,
        )
        device = turn.x.device
        find = partial(_find, sizes, turn, by_parts)
        kernel = self._kernels.get((sizes, device), device, find)
        return None if kernel is None else run_layers(kernel, sizes, turn)


def _find(sizes: TextSizes, turn: LayerPass, by_parts: ByParts) -> CudaKernel | None:
    """The kernel, if it can be had and has the bits of `by_parts`."""
    if not is_hopper(turn.x.device) or sizes.unsupported():
        return None
    try:
        kernel = compile_kernel(sizes)
        expected, found = (
            run(replace(turn, x=turn.x.clone(), wanted=Wanted.ALL))
            for run in (by_parts, partial(run_layers, kernel, sizes))
        )
    except CudaSourceError as error:
        logger.warning("text turns run kernel by kernel: %s", error)
        return None
    if not torch.equal(found, expected):
        text = "text turns of %d rows run kernel by kernel: in one launch they have other bits"
        logger.warning(text, sizes.rows)
        return None
    return kernel


def is_text_turn(layer_pass: LayerPass) -> bool:
    """Whether a pass is one text token of each of some sequences, of few enough for a kernel."""
    experts, runs = layer_pass.experts, layer_pass.append.runs
    if experts.num_gen or len(runs) != 1 or experts.num_und > MAX_ROWS:
        return False
    (run,) = runs
    lengths = run.read.query_lengths
    return run.eager_tokens == len(lengths) and set(lengths) == {1}


def compile_kernel(sizes: TextSizes) -> CudaKernel:
    """Compiles and loads the kernel for the current device.

    Raises:
        CudaSourceError: that is not possible.
    """
    return build_kernel(SOURCE, sizes.macros(), sizes.blocks, WARPS * 32, SHARED_BYTES)


def run_layers(kernel: CudaKernel, sizes: TextSizes, turn: LayerPass) -> Tensor:
    """All layers, which overwrite `turn.x`, and the final norm; writes keys and values."""
    decoder, x, rotary, (run,) = turn.decoder, turn.x.contiguous(), turn.rotary, turn.append.runs
    read, config = run.read, decoder.config
    max_splits = num_blocks(run.cache.capacity, SPLIT_KEYS)
    parts = sizes.rows * sizes.kv_heads * max_splits * PART_QUERIES
    qkv = sizes.rows * (sizes.hidden + 2 * sizes.kv_heads * config.head_size)
    counters = COUNTERS_BEFORE_TILES + sizes.hidden // TILE + sizes.rows * sizes.kv_heads
    memory = {
        "x": x,
        "heads": x.new_empty(qkv),
        "attended": torch.empty_like(x),
        "inner": x.new_empty(sizes.rows, sizes.inner),
        "down_parts": x.new_empty(sizes.down_splits, *x.shape, dtype=torch.float32),
        "item_parts": x.new_empty(parts, config.head_size, dtype=torch.float32),
        "item_stats": x.new_empty(parts, 2, dtype=torch.float32),
        "counters": x.new_zeros(counters, dtype=torch.int32),
        "cosines": rotary.cos,
        "sines": rotary.sin,
        "places": run.places,
        "used": read.keys_used.long(),
        "starts": read.key_starts,
    }
    work = _work_type(sizes.layers, sizes.blocks)()
    for name, tensor in memory.items():
        setattr(work, name, tensor.data_ptr())
    work.eps = config.rms_norm_eps
    work.inverse_size = 1 / sizes.hidden
    work.scale = config.head_size**-0.5 * LOG2_E
    work.max_splits = max_splits
    work.down_firsts[:] = down_firsts(sizes.hidden // TILE, sizes.down_splits, sizes.blocks)
    for index, layer in enumerate(decoder.layers):
        _pack_layer(work.layers[index], layer, run.memory(index))
    kernel.launch(work)
    normed = torch.empty_like(x)
    rms_norm(x, decoder.norm.weight, config.rms_norm_eps, normed)
    return normed


def _pack_layer(
    packed: ctypes.Structure, layer: DecoderLayer, memory: tuple[Tensor, Tensor]
) -> None:
    """Fills the kernel's structure of one layer: addresses of its weights, and of its cache."""
    linears, attention = layer.linears(), layer.self_attn
    packed.weights[:] = [linear.weight.data_ptr() for linear in linears]
    packed.biases[:] = [linear.bias.data_ptr() for linear in linears[:NUM_BIASES]]
    packed.norm = layer.input_layernorm.weight.data_ptr()
    packed.mlp_norm = layer.post_attention_layernorm.weight.data_ptr()
    packed.q_norm = attention.q_norm.weight.data_ptr()
    packed.k_norm = attention.k_norm.weight.data_ptr()
    packed.keys, packed.values = (part.data_ptr() for part in memory)


def _is_aligned(decoder: Decoder) -> bool:
    """Whether all weights lie where copies of 16 bytes can read them."""
    return all(
        linear.weight.data_ptr() % ALIGNMENT == 0
        for layer in decoder.layers
        for linear in layer.linears()
    )
