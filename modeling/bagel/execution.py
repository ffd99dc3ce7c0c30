"""Chooses how a rollout runs from the switches: eagerly, or with fused operators and graphs."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from modeling.autoencoder import AutoEncoder
from modeling.bagel.bagel import Bagel, EagerStack
from modeling.bagel.cache import CacheSpec, KvCache
from modeling.bagel.config import ImageSize, LlmConfig
from modeling.bagel.context import EAGER, Contexts, Draw, Stacks
from modeling.bagel.flow import MakeForwards, eager_forwards
from modeling.bagel.graph_capture import CudaBackend, GraphCapture
from modeling.bagel.sampling import SamplingConfig, sample_tokens
from modeling.bagel.static_encoder_graph import Encode, EncoderGraphs
from modeling.bagel.static_flow_graph import static_forwards
from modeling.bagel.static_prefix_graph import PrefixGraphs
from modeling.bagel.static_text_graph import TextGraphs, decode_text_static
from modeling.bagel.switches import Switches
from modeling.bagel.text_decode import DecodedText, decode_text


@dataclass
class Execution:
    """How text and image passes of a rollout run. The default is the eager path throughout."""

    stacks: Stacks = EAGER
    text_graphs: TextGraphs | None = None
    flow_graphs: bool = False
    capture: GraphCapture = field(default_factory=lambda: GraphCapture(None))
    prefix_graphs: PrefixGraphs | None = None
    encoder_graphs: EncoderGraphs | None = None
    encodes_once: bool = False
    """Whether a picture of several samples goes through the autoencoder once. In a batch it is
    rounded otherwise."""

    def decode_cache(self, spec: CacheSpec) -> AbstractContextManager[KvCache]:
        """The cache of contexts that decode text, until the block ends.

        New for every rollout, or over the memory of text graphs: then one at a time, and with at
        least the capacity asked for.
        """
        if self.text_graphs is None:
            return nullcontext(KvCache.zeros(spec))
        return self.text_graphs.memory.lend(spec)

    def prefix_cache(self, spec: CacheSpec) -> AbstractContextManager[KvCache]:
        """A cache of zeros for a prefix, which is copied to its samples before the block ends.

        New for every prefix, or over the memory of prefix graphs: then one at a time, and with at
        least the capacity asked for.
        """
        if self.prefix_graphs is None:
            return nullcontext(KvCache.zeros(spec))
        return self.prefix_graphs.lend(spec)

    @property
    def prefix_stacks(self) -> Stacks:
        """The stacks of contexts over a `prefix_cache`: with graphs for the stack that has them."""
        graphs, stacks = self.prefix_graphs, self.stacks
        if graphs is None:
            return stacks
        text, image = (
            graphs if stack is graphs.stack else stack for stack in (stacks.text, stacks.image)
        )
        return Stacks(text, image, stacks.draw)

    def encode_vit(self, model: Bagel, patches: Tensor, grid: ImageSize) -> Tensor:
        """`Bagel.encode_vit`, through graphs if there are any."""
        return self._encode(partial(model.encode_vit, grid=grid), patches, model.vit_model, grid)

    def encode_pictures(self, autoencoder: AutoEncoder, pixels: Tensor) -> Tensor:
        """`AutoEncoder.encode`, through graphs if there are any."""
        return self._encode(autoencoder.encode, pixels, autoencoder.encoder)

    def _encode(
        self, encode: Encode, x: Tensor, module: nn.Module, *settings: object
    ) -> Tensor:
        if self.encoder_graphs is None:
            return encode(x)
        return self.encoder_graphs.run(encode, x, module, *settings)

    def decode(
        self,
        contexts: Contexts,
        sampling: SamplingConfig,
        max_tokens: int,
        generator: torch.Generator,
    ) -> list[DecodedText]:
        """Decodes a text in every context, which stand on a `decode_cache`."""
        if self.text_graphs is None:
            return decode_text(contexts, sampling, max_tokens, generator)
        return decode_text_static(contexts, sampling, max_tokens, generator, self.text_graphs)

    def counters(self) -> dict[str, float]:
        """Graph counters under their metric names; nothing where no graphs are used."""
        if not self.flow_graphs and not self._kept_graphs():
            return {}
        return self.capture.metrics()

    def release(self) -> None:
        """Drops what is kept between rollouts: graphs, and the memory they stand on."""
        for graphs in self._kept_graphs():
            graphs.release()

    def _kept_graphs(self) -> list[TextGraphs | PrefixGraphs | EncoderGraphs]:
        every = (self.text_graphs, self.prefix_graphs, self.encoder_graphs)
        return [graphs for graphs in every if graphs is not None]

    @property
    def make_forwards(self) -> MakeForwards:
        """What makes the flow's forwards."""
        return static_forwards(self.capture) if self.flow_graphs else eager_forwards


def build_execution(
    switches: Switches, config: LlmConfig, device: torch.device, dtype: torch.dtype
) -> Execution:
    """The execution that the switches ask for on this device, for weights of this type."""
    text = switches.is_active("R3_FUSED_DECODE", device.type)
    flow = switches.is_active("R3_FUSE_FLOW", device.type)
    if not (text or flow):
        return Execution()
    # Imported late: Triton comes with PyTorch's GPU builds only.
    from modeling.bagel.exact_sampling import ExactSampler
    from modeling.bagel.fused_flow import FusedStack, unsupported
    from modeling.bagel.fused_sampling import draw_tokens
    from modeling.bagel.top_tokens import TopTokens

    capture = GraphCapture(CudaBackend())
    reason = unsupported(config, dtype)
    if reason is not None:
        capture.fall_back(reason)
    streams = switches.is_active("R3_FUSED_DECODE_STREAMS", device.type)
    is_fast = switches.execution_on(device.type) == "fast"
    eager = EagerStack()
    fused = eager if reason is not None else FusedStack(streams, is_fast)
    draw: Draw = sample_tokens
    if text:
        draw = partial(draw_tokens if is_fast else ExactSampler().draw, topk=TopTokens().take)
    return Execution(
        stacks=Stacks(fused if text else eager, fused if flow else eager, draw),
        text_graphs=TextGraphs(capture) if text else None,
        flow_graphs=flow,
        capture=capture,
        prefix_graphs=PrefixGraphs(fused, capture) if text and reason is None else None,
        encoder_graphs=EncoderGraphs(capture) if text else None,
        encodes_once=is_fast,
    )
