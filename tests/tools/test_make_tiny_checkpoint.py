"""The tiny checkpoint: complete, strict to load, a function of its seed, and taught as intended."""

import hashlib
import random
from pathlib import Path

import pytest
import torch

from data.geneval import GenevalPrompt, parse_line
from data.vocabulary import COLORS
from modeling.autoencoder import load_autoencoder
from modeling.bagel.attention import forest_attention
from modeling.bagel.context import SpecialTokens
from modeling.bagel.tokenizer import load_tokenizer
from modeling.bagel.weights import (
    POSITION_TABLES,
    check_header,
    find_weight_file,
    parameter_shapes,
    read_bagel_config,
    read_header,
)
from tools.make_tiny_checkpoint.__main__ import main
from tools.make_tiny_checkpoint.lesson_rows import Teacher
from tools.make_tiny_checkpoint.lessons import (
    SwatchBook,
    asked_color,
    draw_prompts,
    write_reflection,
    write_thought,
)
from tools.make_tiny_checkpoint.linear_autoencoder import build_autoencoder
from tools.make_tiny_checkpoint.maker import make_checkpoint
from tools.make_tiny_checkpoint.preview import load_controller, play, summary
from tools.make_tiny_checkpoint.sizes import CONFIG, VAE_CONFIG
from tools.make_tiny_checkpoint.training import build_model, losses, train, tree_attention
from tools.reward_service.scoring import PALETTE
from train.engine import meta_model
from train.interface_strings import format_reward
from train.packing import PackLayout
from train.records import says_no_edit
from train.rollout_controller import edit_operation

FEW_STEPS = 2
PALETTE_LEVELS = torch.tensor(list(PALETTE.values())) / 127.5 - 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("tiny") / "checkpoint"
    make_checkpoint(out, seed=3, num_steps=FEW_STEPS)
    return out


@pytest.fixture(scope="module")
def teacher(folder) -> Teacher:
    tokenizer = load_tokenizer(folder)
    special = SpecialTokens(
        tokenizer.bos, tokenizer.eos, tokenizer.vision_start, tokenizer.vision_end
    )
    layout = PackLayout(special, CONFIG.max_latent_size, CONFIG.vit.side)
    autoencoder, model = load_autoencoder(folder, "cpu"), build_model(CONFIG, 3)
    swatches = SwatchBook(model, autoencoder, random.Random(0))
    return Teacher(tokenizer, layout, swatches, draw_prompts(), seed=5)


def digests(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


def test_the_folder_is_complete_and_loads_strictly(folder):
    assert {path.name for path in folder.iterdir()} == {
        "llm_config.json",
        "vit_config.json",
        "vocab.json",
        "merges.txt",
        "tokenizer_config.json",
        "ema.safetensors",
        "ae.safetensors",
    }
    assert read_bagel_config(folder) == CONFIG
    header = read_header(find_weight_file(folder))
    report = check_header(header, parameter_shapes(meta_model(CONFIG)))
    assert report.missing == report.unexpected == ()
    assert set(header) >= POSITION_TABLES
    assert {info.dtype for info in header.values()} == {"BF16"}
    assert load_autoencoder(folder, "cpu").config == VAE_CONFIG
    assert load_tokenizer(folder, CONFIG.llm.vocab_size).bos < CONFIG.llm.vocab_size


def test_the_same_seed_gives_the_same_bytes_and_another_seed_does_not(folder, tmp_path):
    assert main([str(tmp_path / "same"), "--seed", "3", "--steps", str(FEW_STEPS)]) == 0
    assert digests(tmp_path / "same") == digests(folder)
    make_checkpoint(tmp_path / "other", seed=4, num_steps=FEW_STEPS)
    assert digests(tmp_path / "other")["ema.safetensors"] != digests(folder)["ema.safetensors"]


def test_the_callers_random_stream_and_threads_stay_as_they_are(tmp_path):
    threads = torch.get_num_threads()
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    make_checkpoint(tmp_path / "out", num_steps=1)
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_num_threads() == threads


def test_a_folder_that_holds_something_is_refused(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    assert main([str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err
    with pytest.raises(ValueError, match="not an empty folder"):
        make_checkpoint(tmp_path / "notes.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_colors_are_single_tokens_and_texts_come_back(teacher):
    for color in COLORS:
        assert len(teacher.tokenizer.encode(f" {color}")) == 1
    text = "<think> A snowman, \u00fcber 3 h\u00e4user \u2603. </think>"
    assert teacher.tokenizer.decode(teacher.tokenizer.encode(text)) == text


def test_the_autoencoder_is_exact_for_flat_pictures_and_for_halves():
    autoencoder = build_autoencoder(VAE_CONFIG)
    pictures = PALETTE_LEVELS[:, :, None, None].repeat(1, 1, 64, 64)
    latents = autoencoder.encode(pictures)
    assert latents.var() == pytest.approx(1, abs=0.01)
    assert latents.mean() == pytest.approx(0, abs=0.01)
    assert (autoencoder.decode(latents) - pictures).abs().max() < 1e-3
    pictures[..., 32:] = PALETTE_LEVELS.flip(0)[:, :, None, None]
    assert (autoencoder.decode(autoencoder.encode(pictures)) - pictures).abs().max() < 1e-3


def test_an_autoencoder_that_cannot_be_linear_is_refused():
    narrow = VAE_CONFIG.__class__(32, (1, 1, 2, 2), 1, 16, 3)
    with pytest.raises(ValueError, match="64 channels or more"):
        build_autoencoder(narrow)


def test_swatches_hold_what_the_autoencoder_makes_of_a_whole_picture(teacher, folder):
    condition = teacher.swatches.swatches["green"][0].condition
    autoencoder = load_autoencoder(folder, "cpu")
    token = condition.latents[0].view(2, 2, 16).permute(2, 0, 1)
    picture = autoencoder.decode(token.repeat(1, 4, 4)[None])
    again = autoencoder.encode(picture)[0]
    assert (again - token.repeat(1, 4, 4)).abs().max() < 1e-3
    assert condition.latents.shape == (16, 64) and condition.latent_grid == (4, 4)


def test_lesson_texts_are_mostly_well_formed_and_name_the_asked_color_in_part():
    rng = random.Random(0)
    thoughts = [write_thought("red", rng) for _ in range(2000)]
    form = sum(format_reward(t.text, False) for t in thoughts) / 2000
    named = sum(t.color == "red" for t in thoughts) / 2000
    assert 0.8 < form < 0.9 and 0.35 < named < 0.5
    reflections = [write_reflection("blue", "red", rng) for _ in range(2000)]
    form = sum(format_reward(t.text, True) for t in reflections) / 2000
    assert 0.8 < form < 0.9
    for reflection in reflections:
        declines = says_no_edit(edit_operation(reflection.text))
        is_whole = format_reward(reflection.text, True) == 1
        assert not is_whole or declines == (reflection.color == "blue")


def test_the_asked_color_is_the_first_one_of_the_prompt():
    rng = random.Random(0)
    prompt = {"include": [{"class": "cat", "count": 1}, {"class": "cup", "color": "pink"}]}
    assert asked_color(prompt, rng) == "pink"
    assert asked_color({"include": [{"class": "cat", "count": 1}]}, rng) in COLORS


def test_a_lesson_labels_every_token_of_its_texts_and_their_ends(teacher):
    lesson = teacher.lesson()
    batch = lesson.batch
    assert lesson.velocities.shape == (batch.noise_index.numel(), 64)
    ids = torch.zeros(batch.plan.num_tokens, dtype=torch.int64)
    ids[batch.text_index] = batch.text_ids
    assert torch.equal(ids[batch.label_index + 1], lesson.label_ids)
    num_texts = int((lesson.label_ids == teacher.tokenizer.eos).sum())
    assert num_texts == 6  # four thoughts, two reflections


def test_attention_by_tree_is_attention_over_the_forest(teacher):
    plan = teacher.lesson().batch.plan
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(plan.num_tokens, n, 8, generator=generator) for n in (4, 2, 2))
    expected = forest_attention(plan, torch.device("cpu"), "dense")(q, k, v)
    torch.testing.assert_close(tree_attention(plan)(q, k, v), expected)


def test_a_few_steps_lower_both_losses(teacher):
    model = build_model(CONFIG, 0)
    lesson = teacher.lesson()
    with torch.no_grad():
        before = losses(model, lesson)
    vit = model.vit_model.vision_model.embeddings.patch_embedding.weight.clone()
    train(model, teacher, 15)
    with torch.no_grad():
        after = losses(model, lesson)
    assert after[0] < 0.75 * before[0] and after[1] < before[1]
    assert torch.equal(vit, model.vit_model.vision_model.embeddings.patch_embedding.weight)


def test_it_runs_through_the_rollout(folder):
    line = '{"tag": "colors", "include": [{"class": "cup", "count": 1, "color": "red"}], '
    prompt: GenevalPrompt = parse_line(line + '"prompt": "a photo of a red cup"}', "here", 1)
    drawn, refined = play(load_controller(folder), prompt, num_samples=2, seed=0)
    assert [sample.picture.size for sample in (*drawn.samples, *refined.samples)] == [(64, 64)] * 4
    assert all(0 <= score <= 1 for score in (*drawn.scores, *refined.scores))
    assert summary("generate", [drawn]).startswith("generate: format 0")
