"""Chooses how a rollout runs from the switches: eagerly, or with fused operators and graphs."""

from dataclasses import dataclass, field

import torch

from modeling.bagel.config import LlmConfig
from modeling.bagel.context import EAGER, Contexts, Stacks
from modeling.bagel.flow import MakeVelocity, eager_velocity
from modeling.bagel.graph_capture import CudaBackend, GraphCapture
from modeling.bagel.sampling import SamplingConfig
from modeling.bagel.static_flow_graph import static_velocity
from modeling.bagel.static_text_graph import decode_text_static
from modeling.bagel.switches import Switches
from modeling.bagel.text_decode import DecodedText, decode_text


@dataclass
class Execution:
    """How text and image passes of a rollout run. The default is the eager path throughout."""

    stacks: Stacks = EAGER
    text_graphs: bool = False
    flow_graphs: bool = False
    capture: GraphCapture = field(default_factory=lambda: GraphCapture(None))

    def decode(
        self,
        contexts: Contexts,
        sampling: SamplingConfig,
        max_tokens: int,
        generator: torch.Generator,
    ) -> list[DecodedText]:
        """Decodes a text in every context."""
        if not self.text_graphs:
            return decode_text(contexts, sampling, max_tokens, generator)
        return decode_text_static(contexts, sampling, max_tokens, generator, self.capture)

    def counters(self) -> dict[str, float]:
        """Graph counters under their metric names; nothing where no graphs are used."""
        if not (self.text_graphs or self.flow_graphs):
            return {}
        return self.capture.metrics()

    @property
    def make_velocity(self) -> MakeVelocity:
        """What makes the flow's forwards."""
        return static_velocity(self.capture) if self.flow_graphs else eager_velocity


def build_execution(
    switches: Switches, config: LlmConfig, device: torch.device, dtype: torch.dtype
) -> Execution:
    """The execution that the switches ask for on this device, for weights of this type."""
    text = switches.is_active("R3_FUSED_DECODE", device.type)
    flow = switches.is_active("R3_FUSE_FLOW", device.type)
    if not (text or flow):
        return Execution()
    # Imported late: Triton comes with PyTorch's GPU builds only.
    from modeling.bagel.fused_flow import FusedStack, unsupported

    capture = GraphCapture(CudaBackend())
    reason = unsupported(config, dtype)
    if reason is not None:
        capture.fall_back(reason)
    streams = switches.is_active("R3_FUSED_DECODE_STREAMS", device.type)
    stack = None if reason is not None else FusedStack(side_by_side=streams)
    return Execution(
        stacks=Stacks(stack if text else None, stack if flow else None),
        text_graphs=text,
        flow_graphs=flow,
        capture=capture,
    )
