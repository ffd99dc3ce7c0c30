"""Rollouts on the tiny model: what each stage puts into its contexts and makes of its text."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from data.geneval import GenevalPrompt, parse_prompt
from modeling.autoencoder import load_autoencoder
from modeling.bagel import execution
from modeling.bagel.bagel import EagerStack
from modeling.bagel.context import Contexts, Stacks
from modeling.bagel.execution import Execution
from modeling.bagel.flow import StochasticDraw
from modeling.bagel.graph_capture import GraphCapture
from modeling.bagel.images import patchify
from modeling.bagel.static_encoder_graph import EncoderGraphs
from modeling.bagel.static_prefix_graph import PrefixGraphs
from modeling.bagel.text_decode import DecodedText
from modeling.bagel.weights import read_bagel_config
from tests.fake_graph import FakeBackend
from tests.tiny import CHECKPOINT, CPU, tiny_config, tiny_model, tiny_tokenizer
from train import rollout_controller
from train.assembly import rollout_config
from train.interface_strings import GENERATE_SYSTEM, REFLECT_SYSTEM, reflect_request
from train.metrics import PhaseTimer
from train.recipe import recipe_named
from train.rollout_controller import RolloutController, StepDraws, edit_operation, flow_trace


def controller(
    recipe: str = "consistent", execution: Execution | None = None, **flags: object
) -> RolloutController:
    config = tiny_config("trace_consistent", num_timesteps_gen=3, num_timesteps_edit=3, **flags)
    recipe = recipe_named(recipe)
    return RolloutController(
        tiny_model(),
        load_autoencoder(CHECKPOINT, CPU),
        tiny_tokenizer(),
        rollout_config(config, read_bagel_config(CHECKPOINT), recipe),
        recipe,
        PhaseTimer(),
        execution=execution,
    )


def draws(sde_index: int | None = 1, tokens: int = 16) -> StepDraws:
    text, flow, noise = (torch.Generator().manual_seed(seed) for seed in (1, 2, 3))
    stochastic = None if sde_index is None else StochasticDraw(sde_index, flow)
    return StepDraws(torch.randn(tokens, 64, generator=noise), text, stochastic)


def prompt(words: str) -> GenevalPrompt:
    include = [{"class": "cat", "count": 1}]
    return parse_prompt({"tag": "colors", "include": include, "prompt": words}, "test")


def picture(seed: int = 0, width: int = 64, height: int = 64) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def pixels(image: Image.Image) -> np.ndarray:
    return np.asarray(image)


@pytest.fixture
def added(monkeypatch) -> list[list]:
    """What was appended to every Contexts, in order of creation."""
    log: list[list] = []
    init, text, vit, image = (
        getattr(Contexts, name) for name in ("__init__", "add_text", "add_vit", "add_image")
    )

    def start(self, *args):
        init(self, *args)
        self.log = []
        log.append(self.log)

    def add_text(self, segments):
        self.log.append([tiny_tokenizer().decode(tokens) for tokens in segments])
        text(self, segments)

    def add_vit(self, images):
        self.log.append("vit")
        vit(self, images)

    def add_image(self, images, overlay):
        self.log.append(f"image, overlay {overlay}")
        image(self, images, overlay)
        if not overlay:
            self.log.remove("vit")  # it is made of add_vit

    for name, replacement in (
        ("__init__", start),
        ("add_text", add_text),
        ("add_vit", add_vit),
        ("add_image", add_image),
    ):
        monkeypatch.setattr(Contexts, name, replacement)
    return log


@pytest.fixture
def thoughts(monkeypatch):
    """Makes decoding return given texts."""

    def say(*texts: str) -> None:
        def decode(contexts, sampling, max_tokens, generator):
            tokenizer = tiny_tokenizer()
            ids = [(tokenizer.bos, *tokenizer.encode(t), tokenizer.eos) for t in texts]
            return [DecodedText(i, (0.5,) * (len(i) - 1)) for i in ids]

        monkeypatch.setattr(execution, "decode_text", decode)

    return say


@pytest.mark.parametrize(
    ("text", "operation"),
    [
        ("<think>a</think> make it red ", "make it red"),
        ("<think>a</think> b </think>\nmake it red", "make it red"),
        ("make it red", "No further edit needed"),
        ("<think> make it red", "No further edit needed"),
        ("", "No further edit needed"),
        ("<think>a</think>  ", ""),
    ],
)
def test_edit_operation(text, operation):
    assert edit_operation(text) == operation


@torch.no_grad()
def test_generate(added, thoughts):
    thoughts("<think> red </think>", "<think> red </think> more")
    samples, flow = controller().generate([prompt("a red cat"), prompt("two dogs")], draws())
    assert added == [
        [["a red cat", "two dogs"]],
        [[GENERATE_SYSTEM]],  # the others start as copies of it
        [],
    ]
    assert [s.text for s in samples] == ["<think> red </think>", "<think> red </think> more"]
    assert [s.format_reward for s in samples] == [1.0, 0.0]
    assert [s.operation for s in samples] == ["", ""]
    assert not any(s.declines_edit for s in samples)
    assert flow.latents.shape == (2, 16, 64)
    assert [s.picture.size for s in samples] == [(64, 64)] * 2
    assert not np.array_equal(*(pixels(s.picture) for s in samples))


@torch.no_grad()
def test_generate_really_thinks():
    samples, _ = controller().generate([prompt("a red cat")] * 2, draws())
    for sample in samples:
        assert sample.thought.ids[0] == tiny_tokenizer().bos
        assert sample.thought.ids[-1] == tiny_tokenizer().eos
        assert sample.text == tiny_tokenizer().extract_generated_text(sample.thought.ids) != ""
        assert len(sample.thought.ids) <= 25


@torch.no_grad()
def test_generate_without_thinking(added):
    rolled = controller(think_mode=False)
    samples, flow = rolled.generate([prompt("a red cat")] * 2, draws())
    assert added == [[], [["a red cat"]], []]  # cond copies the prompt, cfg_text nothing
    assert [s.thought for s in samples] == [DecodedText((), ())] * 2
    assert [s.text for s in samples] == ["", ""]
    assert flow.stochastic is not None
    assert torch.isfinite(flow.latents).all()


@torch.no_grad()
def test_generate_without_guidance_has_no_context_for_it(added):
    controller(cfg_text_scale=1.0).generate([prompt("a red cat")], draws())
    assert added == [[], [[GENERATE_SYSTEM], ["a red cat"]]]


@torch.no_grad()
@pytest.mark.parametrize("recipe", ["upstream", "consistent"])
def test_refine(added, thoughts, recipe):
    thoughts("<think> a </think> edit red", "<think> a </think> edit blue")
    images = [picture(), picture()]
    samples, flow, conditions = controller(recipe).refine(
        [prompt("a red cat")] * 2, images, draws()
    )
    image = f"image, overlay {recipe == 'upstream'}"
    operations = ["edit red", "edit blue"]
    assert added == [
        [[REFLECT_SYSTEM] * 2, "vit", [reflect_request("a red cat")] * 2],
        [image, operations],
        [],  # starts as a copy of the image before the operations came
        [operations],
    ]
    assert [s.operation for s in samples] == operations
    assert [s.format_reward for s in samples] == [1.0, 1.0]
    assert len(conditions) == 2
    assert flow.latents.shape == (2, 16, 64)
    assert not np.array_equal(*(pixels(s.picture) for s in samples))


@torch.no_grad()
@pytest.mark.parametrize("recipe", ["upstream", "consistent"])
def test_shared_prefixes_change_nothing_but_the_work(monkeypatch, recipe):
    shared_picture, results = picture(), []
    for from_tokens in (1, 10**6):
        monkeypatch.setattr(rollout_controller, "INVARIANT_ROWS", from_tokens)
        rolled = controller(recipe)
        images = [shared_picture] * 3
        results.append(rolled.refine([prompt("a red cat")] * 3, images, draws())[:2])
    (samples, flow), (others, reference) = results
    assert [s.thought.ids for s in samples] == [s.thought.ids for s in others]
    torch.testing.assert_close(flow.latents, reference.latents, rtol=1e-4, atol=1e-4)


def prefix_execution(backend: FakeBackend, is_image_fused: bool = True) -> Execution:
    stack, capture = EagerStack(), GraphCapture(backend)
    stacks = Stacks(stack, stack if is_image_fused else EagerStack())
    prefix, encoders = PrefixGraphs(stack, capture), EncoderGraphs(capture)
    return Execution(stacks, capture=capture, prefix_graphs=prefix, encoder_graphs=encoders)


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("recipe", ["upstream", "consistent"])
def test_prefixes_through_graphs_give_the_same_samples(monkeypatch, recipe, rows):
    monkeypatch.setattr(rollout_controller, "INVARIANT_ROWS", 1)
    backend = FakeBackend()
    eager, captured = controller(recipe), controller(recipe, prefix_execution(backend))
    prompts = [prompt("a red cat"), prompt("a red dog"), prompt("a photo of two cats")]
    for step in range(6):
        shared_picture, before = picture(step), backend.replays
        results = []
        for each in (eager, captured):
            generated = each.generate([prompts[step % 3]] * rows, draws())
            images = [shared_picture] * rows
            refined = each.refine([prompts[step % 3]] * rows, images, draws())[:2]
            results.append((generated, refined))
        for (samples, flow), (others, reference) in zip(*results, strict=True):
            assert [s.thought for s in samples] == [s.thought for s in others]
            assert torch.equal(flow.latents, reference.latents)
    # System text and prompt; both encoders; system text, encoder segment and request; the picture.
    num_segments = 1 if recipe == "upstream" else 2
    assert backend.replays - before == 2 + 2 + 3 + num_segments
    counters = captured.execution.counters()
    assert (counters["graphs/fallen_back"], counters["graphs/recaptured"]) == (0, 0)
    assert captured.execution.prefix_graphs.memory.lent is None


@torch.no_grad()
def test_only_what_is_shared_and_fused_goes_through_prefix_graphs():
    backend = FakeBackend()
    rolled = controller(execution=prefix_execution(backend, is_image_fused=False))
    words = ("a red cat", "two dogs and a cat", "a car")
    for _ in range(3):
        rolled.generate([prompt(each) for each in words], draws())
    assert backend.replays == 2  # the system text
    images = [picture()] * 2
    for _ in range(3):
        rolled.refine([prompt("a red cat")] * 2, images, draws())
    # The encoders, and texts around the picture.
    assert backend.captures == 5 and backend.replays == 2 + 2 * 4
    rolled.execution.release()
    assert rolled.execution.prefix_graphs.memory.spec is None


@torch.no_grad()
def test_declining_to_edit_returns_the_input_picture(thoughts):
    thoughts("<think> a </think> No FURTHER edit needed.", "no thought at all", "<think></think> x")
    original = picture()
    samples, flow, _ = controller().refine([prompt("a cat")] * 3, [original] * 3, draws())
    assert samples[0].picture is original
    assert samples[1].picture is original
    assert samples[1].operation == "No further edit needed"
    assert samples[1].format_reward == 0.0
    assert not np.array_equal(pixels(samples[2].picture), pixels(original))
    assert [s.declines_edit for s in samples] == [True, True, False]
    assert flow.stochastic.log_prob.shape == (3, 16)  # they are still drawn and scored


@torch.no_grad()
def test_nothing_is_decoded_where_all_decline(thoughts, monkeypatch):
    thoughts("<think> a </think> No further edit needed.", "no thought at all")
    original, rolled = picture(), controller()
    monkeypatch.setattr(rolled.autoencoder, "decode", None)  # a call would raise
    samples, flow, _ = rolled.refine([prompt("a cat")] * 2, [original] * 2, draws())
    assert [s.picture for s in samples] == [original] * 2
    assert flow.stochastic is not None


@torch.no_grad()
def test_refine_follows_the_size_of_its_picture(thoughts):
    thoughts("<think> a </think> edit red")
    wide = picture(width=64, height=32)
    rolled = controller()
    samples, flow, conditions = rolled.refine([prompt("a cat")], [wide], draws(tokens=8))
    assert samples[0].picture.size == (64, 32)
    assert flow.latents.shape == (1, 8, 64)
    assert tuple(conditions[0].latent_grid) == (2, 4)
    assert conditions[0].latents.shape == (8, 64)
    assert tuple(conditions[0].vit_grid) == (4, 8)  # the shortest side is brought to 56 pixels


@torch.no_grad()
def test_conditions_are_the_encoded_pictures():
    rolled, image = controller(), picture()
    condition = rolled.conditions([image, picture(1)])[0]
    vae, vit = rolled.config.vae_transform(image), rolled.config.vit_transform(image)
    latent = rolled.autoencoder.encode(vae[None])[0]
    torch.testing.assert_close(condition.latents, patchify(latent, 2), rtol=1e-4, atol=1e-4)
    assert torch.equal(condition.vit_patches, patchify(vit, 14))
    features = tiny_model().encode_vit(patchify(vit, 14), condition.vit_grid)
    torch.testing.assert_close(condition.vit_features, features)


@pytest.mark.parametrize(("is_once", "num_encoded"), [(False, 3), (True, 2)])
@torch.no_grad()
def test_a_picture_of_several_samples_may_be_encoded_once(monkeypatch, is_once, num_encoded):
    rolled, (first, second) = controller(), (picture(), picture(1))
    rolled.execution.encodes_once = is_once
    encode, batches = rolled.autoencoder.encode, []

    def counted(pixels):
        batches.append(pixels.shape[0])
        return encode(pixels)

    monkeypatch.setattr(rolled.autoencoder, "encode", counted)
    conditions = rolled.conditions([first, second, first])
    assert batches == [num_encoded]
    assert conditions[0] is conditions[2]
    alone = [rolled.conditions([image])[0].latents for image in (first, second)]
    for condition, latents in zip(conditions, alone, strict=False):
        torch.testing.assert_close(condition.latents, latents, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("is_once", "encoded"), [(False, [0, 1, 0, 0]), (True, [0, 1])])
@torch.no_grad()
def test_a_picture_of_several_samples_is_transformed_and_moved_once(monkeypatch, is_once, encoded):
    rolled, pictures = controller(), [picture(), picture(1)]
    rolled.execution.encodes_once = is_once
    plain, log, batches = rolled.config, [], []
    encode, move = rolled.autoencoder.encode, rollout_controller.to_device

    def logged(name, function):
        def call(*args):
            log.append(name)
            return function(*args)

        return call

    def keep_batch(pixels):
        batches.append(pixels)
        return encode(pixels)

    rolled.config = replace(
        plain,
        vae_transform=logged("vae transform", plain.vae_transform),
        vit_transform=logged("vit transform", plain.vit_transform),
    )
    monkeypatch.setattr(rolled.autoencoder, "encode", logged("encode", keep_batch))
    monkeypatch.setattr(rollout_controller, "to_device", logged("move", move))
    rolled.conditions([pictures[i] for i in (0, 1, 0, 0)])
    vae, vit = ["vae transform", "move"] * 2, ["vit transform", "move"] * 2
    assert log == [*vae, "encode", *vit]  # a GPU encodes while the host transforms for the other
    (batch,) = batches
    assert torch.equal(batch, torch.stack([plain.vae_transform(pictures[i]) for i in encoded]))
    assert batch.is_contiguous()


@torch.no_grad()
def test_transparent_pictures_are_seen_on_white():
    rolled = controller()
    clear = Image.new("RGBA", (64, 64), (255, 0, 0, 0))
    white = Image.new("RGB", (64, 64), (255, 255, 255))
    mine, theirs = rolled.conditions([clear])[0], rolled.conditions([white])[0]
    assert torch.equal(mine.vit_patches, theirs.vit_patches)
    assert torch.equal(mine.latents, theirs.latents)


@torch.no_grad()
def test_flow_without_a_stochastic_step_leaves_no_trace():
    rolled = controller(think_mode=False)
    _, flow = rolled.generate([prompt("a red cat")], draws(sde_index=None))
    grid = rolled.latent_grid(rolled.config.image_size)
    assert flow_trace(flow, grid) is None
    _, flow = rolled.generate([prompt("a red cat")], draws())
    trace = flow_trace(flow, grid)
    assert trace.before is flow.stochastic.before
    assert trace.grid == (4, 4)
