"""Packed batches: as the recorded runs packed theirs, and small cases by hand."""

from functools import cache

import pytest
import torch
from PIL import Image

from data.geneval import parse_prompt
from modeling.bagel.config import ImageSize
from modeling.bagel.context import ConditionImage, SpecialTokens
from modeling.bagel.layout import SegmentKind
from modeling.bagel.text_decode import DecodedText
from modeling.bagel.weights import read_bagel_config
from tests.tiny import CHECKPOINT, tiny_config, tiny_tokenizer, trace
from train.assembly import learner_config, pack_layout
from train.learner import Learner
from train.packing import (
    NoisePart,
    Packed,
    PackLayout,
    Row,
    TextPart,
    VaePart,
    VitPart,
    pack_rows,
)
from train.recipe import recipe_named
from train.records import BufferEntry, FlowTrace, Rollout, Sample, Stage

SPECIAL = SpecialTokens(bos=1, eos=2, vision_start=3, vision_end=4)
LAYOUT = PackLayout(SPECIAL, latent_table_side=8, vit_table_side=10)
PICTURE = Image.new("RGB", (64, 64))


def text(length: int, is_trained: bool = False) -> TextPart:
    return TextPart((1, *range(10, 8 + length), 2), is_trained)


def noise(tokens: int = 6, value: float = 0.5) -> NoisePart:
    return NoisePart(torch.full((tokens, 64), value), 0.9, ImageSize(2, tokens // 2))


def picture() -> ConditionImage:
    """3 x 5 encoder patches and 2 x 2 latent tokens."""
    return ConditionImage(
        vit_patches=torch.zeros(15, 588),
        vit_features=torch.arange(15.0)[:, None].expand(15, 8),
        vit_grid=ImageSize(3, 5),
        latents=torch.arange(4.0)[:, None].expand(4, 64),
        latent_grid=ImageSize(2, 2),
    )


def pack(*rows: tuple, dtype: torch.dtype = torch.float32) -> Packed:
    """Rows of parts, all of sample 0 and branch `cond`."""
    return pack_rows([Row(0, "cond", parts) for parts in rows], LAYOUT, dtype)


@pytest.mark.parametrize(
    ("length", "padding"), [(119, 1), (120, 0), (121, 127), (248, 0), (2, 118)]
)
def test_rows_are_padded_to_multiples_of_128(length, padding):
    packed = pack((text(length), noise()), (noise(),))
    plan = packed.batch.plan
    lengths = [s.length for s in plan.segments]
    assert lengths == [length, 8, *([padding] if padding else []), 8, 120]
    end = length + 8 + padding
    assert end % 128 == 0
    assert plan.tree_ranges == ((0, end), (end, end + 128))
    if padding:
        pad = plan.segments[2]
        assert pad.kind is SegmentKind.TEXT
        assert pad.rope_start == length  # goes on from the noise's id
        positions = packed.batch.text_index >= pad.start
        positions &= packed.batch.text_index < pad.end
        assert packed.batch.text_ids[positions].tolist() == [2] * padding


def test_labels_are_the_ids_between_bos_and_eos():
    packed = pack((text(4), text(6, is_trained=True), noise()))
    assert packed.label_ids.tolist() == [10, 11, 12, 13]
    assert packed.batch.label_index.tolist() == [4, 5, 6, 7]  # position i predicts id i + 1
    document = dict(
        zip(packed.batch.text_index.tolist(), packed.batch.text_ids.tolist(), strict=True)
    )
    following = [document[i + 1] for i in packed.batch.label_index.tolist()]
    assert following == packed.label_ids.tolist()


def test_a_trained_text_without_content_has_no_labels():
    packed = pack((text(2, is_trained=True), noise()))
    assert packed.label_ids.numel() == packed.batch.label_index.numel() == 0
    assert packed.label_ids.dtype == torch.int64


def test_labels_know_their_sample():
    rows = [Row(i, "cond", (text(3 + i, is_trained=True), noise())) for i in range(3)]
    packed = pack_rows(rows, LAYOUT, torch.float32)
    assert packed.label_samples.tolist() == [0, 1, 1, 2, 2, 2]


def test_image_segments():
    image = picture()
    batch = pack((VaePart(image), VitPart(image), text(3), noise())).batch
    assert batch.plan.rope_ids()[: 6 + 17 + 3 + 8] == [0] * 6 + [1] * 17 + [2, 3, 4] + [5] * 8
    assert batch.text_index.tolist()[:9] == [0, 5, 6, 22, 23, 24, 25, 26, 33]
    assert batch.text_ids.tolist()[:9] == [3, 4, 3, 4, 1, 10, 2, 3, 4]
    assert batch.vit_index.tolist() == list(range(7, 22))
    assert batch.vit_position_ids.tolist() == [r * 10 + c for r in range(3) for c in range(5)]
    assert torch.equal(batch.vit_features, image.vit_features)
    assert batch.latent_index.tolist() == [1, 2, 3, 4, *range(27, 33)]
    assert batch.latent_position_ids.tolist() == [0, 1, 8, 9, 0, 1, 2, 8, 9, 10]
    assert batch.noise_index.tolist() == list(range(27, 33))
    assert torch.equal(batch.timesteps, torch.tensor([0.0] * 4 + [0.9] * 6))
    assert torch.equal(batch.latents, torch.cat((image.latents, noise().latents)))


def test_every_token_is_text_or_encoder_or_latent():
    image = picture()
    batch = pack((VaePart(image), VitPart(image), text(3), noise()), (text(5), noise())).batch
    positions = torch.cat((batch.text_index, batch.vit_index, batch.latent_index))
    assert sorted(positions.tolist()) == list(range(batch.plan.num_tokens))
    assert batch.rope_ids.tolist() == batch.plan.rope_ids()


def test_timesteps_are_rounded_where_the_recipe_says_so():
    timesteps = pack((noise(),), dtype=torch.bfloat16).batch.timesteps
    assert timesteps.dtype == torch.float32
    assert timesteps.tolist() == [torch.tensor(0.9).bfloat16().item()] * 6
    assert timesteps[0].item() != pytest.approx(0.9, abs=1e-4)


def test_noise_rows_name_the_copies_of_each_sample():
    rows = []
    for sample in range(2):
        rows.append(Row(sample, "cond", (text(4, is_trained=True),)))  # no noise of its own
        rows += [Row(sample, b, (text(4), noise())) for b in ("cond", "cfg_text", "cfg_img")]
    copies = pack_rows(rows, LAYOUT, torch.float32).noise_rows
    assert (copies.cond, copies.text, copies.image) == ([0, 3], [1, 4], [2, 5])
    copies = pack((noise(),), (noise(),)).noise_rows
    assert (copies.cond, copies.text, copies.image) == ([0, 1], [], [])


def test_text_alone_packs_without_latents():
    batch = pack((text(6, is_trained=True),)).batch
    assert batch.latents.shape == (0, 64)
    assert batch.latent_index.numel() == batch.noise_index.numel() == batch.timesteps.numel() == 0


def test_grids_beyond_the_position_table_are_refused():
    with pytest.raises(ValueError, match="exceeds the position table of side 8"):
        pack((NoisePart(torch.zeros(18, 64), 0.5, ImageSize(2, 9)),))


# As the recorded runs packed theirs.


def recorded_rollout(name: str, rank: int, step: int) -> Rollout:
    """The rollout of a recorded step. Its clean latents are the recorded ones."""

    def tensor(key: str) -> torch.Tensor:
        return trace(name).tensor(rank, step, key)

    record = trace(name).ranks[rank][step]
    thoughts = [row for row in record["samples"] if row["generated_ids"]]
    operations = record["edit_operations"] or [""] * len(thoughts)
    samples = [
        Sample(thought(row), "", 1.0, operation, PICTURE)
        for row, operation in zip(thoughts, operations, strict=True)
    ]
    shape = (len(samples), 16, 64)
    flow = FlowTrace(
        before=tensor("loss_info.packed_noisy_latent_for_loss").view(shape),
        after=tensor("loss_info.packed_prev_latents").view(shape),
        log_prob=tensor("loss_info.log_probs").view(shape[:2]),
        t=record["sde"][0]["t"],
        dt=record["sde"][0]["dt"],
        grid=ImageSize(4, 4),
    )
    texts = thoughts[0]["text"]
    if step % 2 == 0:
        return Rollout(Stage.GENERATE, prompt(texts[1]), samples, flow, 0)
    words = texts[2].split("\n")[0].removeprefix("The description of the target image is: ")
    entry = BufferEntry(prompt(words), 0.5, PICTURE)
    condition = ConditionImage(
        vit_patches=torch.zeros(25, 588),
        vit_features=torch.zeros(25, 48),
        vit_grid=ImageSize(5, 5),
        latents=tensor("packed.packed_noisy_latent")[:16],
        latent_grid=ImageSize(4, 4),
    )
    return Rollout(Stage.REFINE, entry.prompt, samples, flow, 0, entry, condition)


def thought(row: dict) -> DecodedText:
    return DecodedText(tuple(row["generated_ids"]), tuple(row["generated_probs"]))


def prompt(words: str):
    include = [{"class": "cat", "count": 1}]
    return parse_prompt({"tag": "colors", "include": include, "prompt": words}, "test")


@cache
def tiny_learner(name: str, **flags: object) -> Learner:
    config = tiny_config(name, **flags)
    return Learner(
        tiny_tokenizer(),
        pack_layout(tiny_tokenizer(), read_bagel_config(CHECKPOINT)),
        learner_config(config, torch.float32, "cpu"),
        recipe_named(config.switches.recipe),
    )


@pytest.mark.parametrize("name", ["trace_upstream", "trace_consistent"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("step", [0, 1])
def test_recorded_steps(name, rank, step):
    packed = tiny_learner(name).pack(recorded_rollout(name, rank, step))
    record = trace(name).ranks[rank][step]
    batch, plan = packed.batch, packed.batch.plan
    assert plan.num_tokens == record["packed"]["sequence_length"]
    assert [end - start for start, end in plan.tree_ranges] == record["packed"]["sample_lens"]
    assert [s.length for s in plan.segments] == record["packed"]["split_lens"]
    assert [s.kind.value for s in plan.segments] == record["packed"]["attn_modes"]
    names = {
        "packed.packed_text_ids": batch.text_ids,
        "packed.packed_text_indexes": batch.text_index,
        "packed.packed_position_ids": batch.rope_ids,
        "packed.packed_vae_token_indexes": batch.latent_index,
        "packed.packed_latent_position_ids": batch.latent_position_ids,
        "packed.packed_vit_token_indexes": batch.vit_index,
        "packed.packed_vit_position_ids": batch.vit_position_ids,
        "packed.ce_loss_indexes": batch.label_index,
        "packed.mse_loss_indexes": batch.noise_index,
        "packed.packed_timesteps": batch.timesteps,
        "packed.packed_noisy_latent": batch.latents,
        "loss_info.packed_label_ids": packed.label_ids,
    }
    absent = {key for key in names if trace(name).tensor(rank, step, key) is None}
    assert absent <= {"packed.packed_vit_token_indexes", "packed.packed_vit_position_ids"}
    assert bool(absent) == (step == 0)
    for key, mine in names.items():
        if key in absent:
            assert mine.numel() == 0, key
        else:
            assert torch.equal(mine, trace(name).tensor(rank, step, key)), key
    copies = packed.noise_rows
    used = [rows for rows in (copies.cond, copies.text, copies.image) if rows]
    ranges = [[[i * 16, i * 16 + 16] for i in sample] for sample in zip(*used, strict=True)]
    assert ranges == record["loss_info"]["mse_condition_token_indexes"]


def at_time(t: float, name: str, step: int, **flags: object) -> Packed:
    rollout = recorded_rollout(name, 0, step)
    flow = FlowTrace(**{**vars(rollout.flow), "t": t})
    return tiny_learner(name, **flags).pack(Rollout(**{**vars(rollout), "flow": flow}))


@pytest.mark.parametrize(
    ("name", "t", "is_guided"),
    [
        ("trace_upstream", 0.4, True),  # the original counts the lower end in
        ("trace_consistent", 0.4, False),
        ("trace_upstream", 0.39, False),
        ("trace_consistent", 0.41, True),
    ],
)
def test_guidance_copies_exist_inside_the_interval(name, t, is_guided):
    copies = at_time(t, name, 1).noise_rows
    if is_guided:
        assert (copies.cond, copies.text, copies.image) == ([0, 3], [1, 4], [2, 5])
    else:
        assert (copies.cond, copies.text, copies.image) == ([0, 1], [], [])


def test_a_scale_of_one_needs_no_copy():
    copies = at_time(0.9, "trace_consistent", 1, cfg_img_scale=1.0).noise_rows
    assert (copies.cond, copies.text, copies.image) == ([0, 2], [1, 3], [])
    copies = at_time(0.9, "trace_consistent", 0, cfg_text_scale=1.0).noise_rows
    assert (copies.cond, copies.text, copies.image) == ([0, 1], [], [])


@pytest.mark.parametrize("step", [0, 1])
def test_untrained_thoughts_have_no_labels(step):
    rollout = recorded_rollout("trace_consistent", 0, step)
    learner = tiny_learner("trace_consistent", tune_text_cot=False)
    packed = learner.pack(rollout)
    assert packed.label_ids.numel() == 0
    targets = learner.targets(rollout, packed, torch.device("cpu"))
    assert targets.behaviour_probs.numel() == 0
    trained = tiny_learner("trace_consistent").pack(rollout)
    assert torch.equal(packed.batch.text_ids, trained.batch.text_ids)


@pytest.mark.parametrize("step", [0, 1])
def test_targets_line_up_with_the_labels(step):
    rollout = recorded_rollout("trace_consistent", 0, step)
    learner = tiny_learner("trace_consistent")
    packed = learner.pack(rollout)
    targets = learner.targets(rollout, packed, torch.device("cpu"))
    golden = trace("trace_consistent").tensor(0, step, "loss_info.inference_probs")
    torch.testing.assert_close(targets.behaviour_probs, golden, rtol=0, atol=1e-7)
    assert targets.behaviour_probs.shape == targets.label_ids.shape == targets.label_samples.shape
    assert targets.t.item() == pytest.approx(rollout.flow.t)
    assert targets.dt.item() == pytest.approx(rollout.flow.dt)


@pytest.mark.parametrize("step", [0, 1])
def test_untrained_pictures_have_no_rows(step):
    rollout = recorded_rollout("trace_consistent", 0, step)
    learner = tiny_learner("trace_consistent", tune_image_cot=False)
    packed = learner.pack(rollout)
    assert packed.batch.noise_index.numel() == 0
    assert len(packed.batch.plan.tree_ranges) == 2
    targets = learner.targets(rollout, packed, torch.device("cpu"))
    assert targets.before.shape == targets.after.shape == (0, 1, 64)
    expected = tiny_learner("trace_consistent").pack(rollout).label_ids
    assert torch.equal(packed.label_ids, expected)
