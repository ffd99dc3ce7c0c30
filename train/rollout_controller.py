"""Samples one step: contexts, thoughts, flows and pictures, on resident policy weights."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor

from data.geneval import GenevalPrompt
from modeling.autoencoder import AutoEncoder
from modeling.bagel.bagel import Bagel
from modeling.bagel.cache import CacheSpec, KvCache
from modeling.bagel.config import LATENT_PATCH, ImageSize
from modeling.bagel.context import (
    INVARIANT_ROWS,
    NUM_MARKERS,
    ConditionImage,
    Contexts,
    SpecialTokens,
    Stacks,
)
from modeling.bagel.execution import Execution
from modeling.bagel.flow import (
    FlowBranches,
    FlowConfig,
    FlowResult,
    StochasticDraw,
    run_flow,
)
from modeling.bagel.images import ImageTransform, patchify, to_rgb, to_uint8, unpatchify
from modeling.bagel.layers import to_device
from modeling.bagel.probe import Probe, no_probe
from modeling.bagel.sampling import SamplingConfig
from modeling.bagel.text_decode import DecodedText
from modeling.bagel.tokenizer import BagelTokenizer
from train.interface_strings import (
    GENERATE_SYSTEM,
    NO_EDIT_OPERATION,
    REFLECT_SYSTEM,
    THINK_END,
    format_reward,
    reflect_request,
)
from train.metrics import PhaseTimer
from train.recipe import Recipe
from train.records import FlowTrace, Sample, says_no_edit


@dataclass(frozen=True)
class StageConfig:
    """How one stage samples. `max_tokens` bounds the thought, `think` switches it off."""

    sampling: SamplingConfig
    max_tokens: int
    flow: FlowConfig
    think: bool = True


@dataclass(frozen=True)
class RolloutConfig:
    """Both stages and the pictures' sizes."""

    generate: StageConfig
    refine: StageConfig
    image_size: ImageSize
    vae_transform: ImageTransform
    vit_transform: ImageTransform


@dataclass(frozen=True)
class StepDraws:
    """Random inputs of one step, drawn by the caller from its explicit streams.

    `noise` is [n, P] in the latents' type and starts every sample; `stochastic` is None for a
    flow without a stochastic step.
    """

    noise: Tensor
    text: torch.Generator
    stochastic: StochasticDraw | None = None


class RolloutController:
    """Runs generate and refine turns. Use under no_grad while the model's weights are resident."""

    def __init__(
        self,
        model: Bagel,
        autoencoder: AutoEncoder,
        tokenizer: BagelTokenizer,
        config: RolloutConfig,
        recipe: Recipe,
        timer: PhaseTimer,
        probe: Probe = no_probe,
        execution: Execution | None = None,
    ):
        self.model = model
        self.autoencoder = autoencoder
        self.tokenizer = tokenizer
        self.config = config
        self.recipe = recipe
        self.timer = timer
        self.probe = probe
        self.execution = execution or Execution()
        self.special = SpecialTokens.of(tokenizer)

    @property
    def num_image_tokens(self) -> int:
        height, width = self.latent_grid(self.config.image_size)
        return height * width

    def latent_grid(self, size: ImageSize) -> ImageSize:
        """Rows and columns of latent tokens of a picture of `size` pixels."""
        stride = self.autoencoder.downsample * LATENT_PATCH
        return ImageSize(size.height // stride, size.width // stride)

    def generate(self, prompts: list[GenevalPrompt], draws: StepDraws) -> tuple[list, FlowResult]:
        """Thinks and draws once for each prompt: samples and the flow behind them."""
        stage, grid = self.config.generate, self.latent_grid(self.config.image_size)
        system = self.tokenizer.encode(GENERATE_SYSTEM)
        requests = [self.tokenizer.encode(prompt.prompt) for prompt in prompts]
        room = [len(system) + 2, max(map(len, requests)) + 2, stage.max_tokens + 1]
        rows, noise, is_shared = len(prompts), self._room_for_noise(grid), _all_equal(requests)
        with self._thinking_contexts(rows, sum(room) + noise) as cond:
            prefill = self.timer.phase("prefill")
            with prefill, self._prefix_contexts(sum(room[:2])) as prefix:
                text = None
                if stage.think:
                    prefix.add_text([system])
                if stage.flow.guidance.text_scale > 1:
                    text = self.empty_contexts(rows, room[0] + noise)
                    text.cache.copy_rows(prefix.cache)
                if is_shared:
                    prefix.add_text(requests[:1])
                cond.cache.copy_rows(prefix.cache)
                if not is_shared:
                    cond.add_text(requests)
            thoughts = self._think(cond, stage, draws)
            flow = self._flow(FlowBranches(cond, text), stage, draws, grid)
        pictures = self.decode_pictures(flow.latents, grid)
        samples = [
            self._sample(thought, picture, is_answer_due=False)
            for thought, picture in zip(thoughts, pictures, strict=True)
        ]
        return samples, flow

    def refine(
        self, prompts: list[GenevalPrompt], images: list[Image.Image], draws: StepDraws
    ) -> tuple[list[Sample], FlowResult, list[ConditionImage]]:
        """Reflects on each picture and edits it. All pictures have one size."""
        stage, size = self.config.refine, ImageSize(images[0].height, images[0].width)
        conditions = self.conditions(images)
        thoughts = self._reflect(prompts, conditions, stage, draws)
        operations = self.edit_operations(thoughts)
        grid = self.latent_grid(size)
        branches = self._edit_contexts(conditions, operations, grid)
        declined = [i for i, operation in enumerate(operations) if says_no_edit(operation)]
        flow = self._flow(branches, stage, draws, grid, declined)
        # As one batch if at all: convolutions of fewer pictures may round differently.
        is_any_edited = len(declined) < len(images)
        pictures = self.decode_pictures(flow.latents, grid) if is_any_edited else images
        samples = []
        parts = zip(thoughts, operations, pictures, images, strict=True)
        for i, (thought, operation, picture, original) in enumerate(parts):
            picture = original if i in declined else picture
            samples.append(self._sample(thought, picture, True, operation))
        return samples, flow, conditions

    def edit_operations(self, thoughts: list[DecodedText]) -> list[str]:
        """What each reflection asks for."""
        texts = [self.tokenizer.extract_generated_text(thought.ids) for thought in thoughts]
        return [edit_operation(text) for text in texts]

    def decode_pictures(self, latents: Tensor, grid: ImageSize) -> list[Image.Image]:
        """Latent tokens [B, n, P] to pictures."""
        with self.timer.phase("vae"), self._vae_precision(latents.device):
            maps = torch.stack([unpatchify(x.float(), grid, LATENT_PATCH) for x in latents])
            decoded = self.autoencoder.decode(maps)
        return [Image.fromarray(picture) for picture in to_uint8(decoded)]

    def conditions(self, images: list[Image.Image]) -> list[ConditionImage]:
        """Encodes pictures of one size for every context and for the learner.

        The same picture object gives the same record.
        """
        with self.timer.phase("encode"):
            device, dtype = self.model.llm2vae.weight.device, self.model.dtype
            # Else as one batch even where pictures repeat: convolutions of a batch and of a single
            # picture may round differently, and the recorded runs encode a batch.
            is_once = self.execution.encodes_once
            batch = list({id(image): image for image in images}.values()) if is_once else images
            latents = self._latent_maps(batch, device)
            side = ImageSize(*(n // LATENT_PATCH for n in latents.shape[-2:]))
            encoded: dict[int, ConditionImage] = {}
            for image, latent in zip(batch, latents, strict=True):
                if id(image) not in encoded:
                    tokens = patchify(latent.to(dtype), LATENT_PATCH)
                    vit = self._vit_features(image, device, dtype)
                    encoded[id(image)] = ConditionImage(*vit, tokens, side)
            return [encoded[id(image)] for image in images]

    def _latent_maps(self, images: list[Image.Image], device: torch.device) -> Tensor:
        """Pictures of one size through the autoencoder as one batch: [B, C, h, w]."""
        # A picture takes the host long to transform and to pin, and several samples may share it.
        moved: dict[int, Tensor] = {}
        for image in images:
            if id(image) not in moved:
                pixels = self.config.vae_transform(to_rgb(image))
                moved[id(image)] = to_device(pixels, device)
        batch = torch.stack([moved[id(image)] for image in images])
        with self._vae_precision(device):
            return self.execution.encode_pictures(self.autoencoder, batch)

    def _vit_features(self, image: Image.Image, device: torch.device, dtype: torch.dtype) -> tuple:
        patch = self.model.config.vit.patch_size
        pixels = self.config.vit_transform(to_rgb(image))
        patches = patchify(pixels, patch)
        grid = ImageSize(pixels.shape[1] // patch, pixels.shape[2] // patch)
        on_device = to_device(patches, device).to(dtype)
        features = self.execution.encode_vit(self.model, on_device, grid)
        return patches, features, grid

    def _reflect(
        self,
        prompts: list[GenevalPrompt],
        conditions: list[ConditionImage],
        stage: StageConfig,
        draws: StepDraws,
    ) -> list[DecodedText]:
        system = self.tokenizer.encode(REFLECT_SYSTEM)
        requests = [self.tokenizer.encode(reflect_request(p.prompt)) for p in prompts]
        room = len(system) + 2 + _vit_length(conditions) + max(map(len, requests)) + 2

        def add_all(contexts: Contexts) -> None:
            rows = contexts.cache.num_rows
            contexts.add_text([system] * rows)
            contexts.add_vit(conditions[:rows])
            contexts.add_text(requests[:rows])

        is_shared = _all_equal(requests) and _all_same(conditions)
        with self._thinking_contexts(len(prompts), room + stage.max_tokens + 1) as contexts:
            with self.timer.phase("prefill"):
                self._fill(contexts, add_all, is_shared, room)
            return self._think(contexts, stage, draws)

    def _edit_contexts(
        self, conditions: list[ConditionImage], operations: list[str], grid: ImageSize
    ) -> FlowBranches:
        texts = [self.tokenizer.encode(operation) for operation in operations]
        room = self._room_for_noise(grid) + max(map(len, texts)) + 2
        image_room = _vit_length(conditions) + max(c.latent_length for c in conditions)
        overlay = self.recipe.overlay_edit_images

        def add_image(contexts: Contexts) -> None:
            contexts.add_image(conditions[: contexts.cache.num_rows], overlay)

        with self.timer.phase("prefill"):
            rows, capacity = len(texts), room + image_room
            # Of fewer rows, products of one picture and of several may round differently.
            is_large = conditions[0].latents.shape[0] >= INVARIANT_ROWS
            is_shared = is_large and _all_same(conditions)
            cond = self.empty_contexts(rows, capacity)
            self._fill(cond, add_image, is_shared, image_room)
            guidance, text, image = self.config.refine.flow.guidance, None, None
            if guidance.text_scale > 1:
                text = self.empty_contexts(rows, capacity)
                text.cache.copy_rows(cond.cache)
            cond.add_text(texts)
            if guidance.image_scale > 1:
                image = self.empty_contexts(len(texts), room)
                image.add_text(texts)
        return FlowBranches(cond, text, image)

    def _think(self, contexts: Contexts, stage: StageConfig, draws: StepDraws) -> list[DecodedText]:
        if not stage.think:
            return [DecodedText((), ())] * contexts.cache.num_rows
        with self.timer.phase("decode"):
            return self.execution.decode(
                contexts, stage.sampling, stage.max_tokens, draws.text
            )

    def _flow(
        self,
        branches: FlowBranches,
        stage: StageConfig,
        draws: StepDraws,
        grid: ImageSize,
        discarded: Sequence[int] = (),
    ) -> FlowResult:
        with self.timer.phase("flow"):
            return run_flow(
                branches,
                draws.noise,
                grid,
                stage.flow,
                draws.stochastic,
                self.probe,
                self.execution.make_forwards,
                discarded,
            )

    def _sample(
        self, thought: DecodedText, picture: Image.Image, is_answer_due: bool, operation: str = ""
    ) -> Sample:
        text = self.tokenizer.extract_generated_text(thought.ids) if thought.ids else ""
        return Sample(thought, text, format_reward(text, is_answer_due), operation, picture)

    def _fill(
        self, contexts: Contexts, fill: Callable[[Contexts], None], is_shared: bool, room: int
    ) -> None:
        """Does `fill`, for which `room` is enough, to empty contexts: once if rows begin alike."""
        if not is_shared:
            fill(contexts)
            return
        with self._prefix_contexts(room) as prefix:
            fill(prefix)
            contexts.cache.copy_rows(prefix.cache)

    @contextmanager
    def _prefix_contexts(self, capacity: int) -> Iterator[Contexts]:
        """An empty context for what samples share, to be copied to theirs before the block ends."""
        with self.execution.prefix_cache(self._cache_spec(1, capacity)) as cache:
            yield self._contexts(cache, self.execution.prefix_stacks)

    @contextmanager
    def _thinking_contexts(self, rows: int, capacity: int) -> Iterator[Contexts]:
        """Empty contexts that may decode text; after the block the next ones get their memory."""
        with self.execution.decode_cache(self._cache_spec(rows, capacity)) as cache:
            yield self._contexts(cache, self.execution.stacks)

    def empty_contexts(self, rows: int, capacity: int) -> Contexts:
        """`rows` contexts without a token, with room for `capacity` tokens each."""
        cache = KvCache.zeros(self._cache_spec(rows, capacity))
        return self._contexts(cache, self.execution.stacks)

    def _contexts(self, cache: KvCache, stacks: Stacks) -> Contexts:
        return Contexts(self.model, cache, self.special, self.recipe.rollout_rounding, stacks)

    def _cache_spec(self, rows: int, capacity: int) -> CacheSpec:
        weight = self.model.llm2vae.weight
        return CacheSpec(self.model.config.llm, rows, capacity, weight.device, weight.dtype)

    def _room_for_noise(self, grid: ImageSize) -> int:
        return grid.height * grid.width + NUM_MARKERS

    def _vae_precision(self, device: torch.device):
        enabled = self.model.dtype == torch.bfloat16
        return torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled)


def edit_operation(text: str) -> str:
    """What follows the last `</think>`, stripped; without one no edit is asked for."""
    _, found, operation = text.rpartition(THINK_END)
    return operation.strip() if found else NO_EDIT_OPERATION


def flow_trace(flow: FlowResult, grid: ImageSize) -> FlowTrace | None:
    """What the learner needs of a flow; None if it had no stochastic step."""
    step = flow.stochastic
    if step is None:
        return None
    return FlowTrace(step.before, step.after, step.log_prob, step.t, step.dt, grid)


def _all_equal(values: list) -> bool:
    return all(value == values[0] for value in values)


def _all_same(values: list) -> bool:
    return all(value is values[0] for value in values)


def _vit_length(conditions: list[ConditionImage]) -> int:
    return max(c.vit_length for c in conditions)
