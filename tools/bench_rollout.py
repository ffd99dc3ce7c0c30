"""Times rollouts of a random model of the real widths: eager, exact and fast.

    python -m tools.bench_rollout --layers 6 --json OUT.json

4 samples (--samples), 512 x 512, the recipe's schedule, thoughts forced to full length, edits to do
in every reflection. Before it times the exact mode it compares ids, probabilities, latents and
pictures with the eager path, bit for bit, also with samples that finish at different turns and with
samples that decline to edit; of the fast mode it says how far it is off.
"""

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from data.geneval import GenevalPrompt, parse_prompt
from modeling.autoencoder import AutoEncoder
from modeling.bagel.bagel import Bagel
from modeling.bagel.config import BagelConfig, LlmConfig, VitConfig
from modeling.bagel.context import Contexts
from modeling.bagel.execution import Execution, build_execution
from modeling.bagel.flow import FlowResult, StochasticDraw
from modeling.bagel.switches import read_switches
from modeling.bagel.text_decode import DecodedText
from modeling.bagel.tokenizer import load_tokenizer
from tools.make_random_checkpoint import (
    LLM,
    MAX_LATENT_SIZE,
    VAE,
    VIT,
    draw_tensors,
    write_tokenizer,
)
from train.assembly import rollout_config
from train.config import from_flags
from train.metrics import PhaseTimer
from train.recipe import UPSTREAM
from train.records import NO_EDIT, Sample
from train.rollout_controller import RolloutController, StepDraws

SAMPLES, TOKENS = 4, 1024
WARM_UP = 3
"""Rollouts of a stage until all graphs that are kept between rollouts have been captured."""
THREADS = 4
"""On the CPU at most, as the launcher gives each rank: with one for every core they sometimes wait
for each other, and the transforms of a picture then take 40 ms instead of 7."""
# Least figures wanted, for some depths: of one mode, or of both.
TARGETS = {
    6: {
        ("exact", "decode_ms_per_token"): 1.4,
        ("fast", "decode_ms_per_token"): 1.2,
        ("", "flow_ms_per_forward"): 20.0,
        ("", "generate/rollout_s"): 1.0,
        ("", "refine/rollout_s"): 2.2,
        ("", "gib_over_eager"): 6.0,
    },
    28: {
        ("exact", "decode_ms_per_token"): 5.0,
        ("fast", "decode_ms_per_token"): 4.2,
        ("", "generate/rollout_s"): 3.3,
        ("", "refine/rollout_s"): 6.6,
    },
}
COPY_TB_S, GEMM_TFLOP_S = 4.3, 808.0
PROMPT = {
    "tag": "color_attr",
    "include": [
        {"class": "oven", "count": 1, "color": "black"},
        {"class": "umbrella", "count": 1, "color": "green"},
    ],
    "prompt": "a photo of a black oven and a green umbrella",
}


EDITS = (
    "Change the color of the oven to black.",
    "Add a green umbrella to the right of the oven.",
    "Remove the second umbrella and make the remaining one green.",
    "Make the oven black and the umbrella green, and keep everything else as it is.",
)


class EditingController(RolloutController):
    """Reflections of random weights ask for nothing: here each has its edit, or declines."""

    declined: tuple[int, ...] = ()

    def edit_operations(self, thoughts: list[DecodedText]) -> list[str]:
        edits = [EDITS[i % len(EDITS)] for i in range(len(thoughts))]
        return [NO_EDIT if i in self.declined else edit for i, edit in enumerate(edits)]


@dataclass
class Bench:
    """A model, one controller for each mode, and how many samples roll together."""

    samples: int
    model: Bagel
    controllers: dict[str, EditingController]
    prompt: GenevalPrompt
    picture: Image.Image


def sizes(num_layers: int) -> BagelConfig:
    """Real widths, any depth."""
    llm = LlmConfig(
        hidden_size=LLM["hidden_size"],
        intermediate_size=LLM["intermediate_size"],
        num_layers=num_layers,
        num_heads=LLM["num_attention_heads"],
        num_kv_heads=LLM["num_key_value_heads"],
        vocab_size=LLM["vocab_size"],
    )
    vit = VitConfig(
        hidden_size=VIT["hidden_size"],
        intermediate_size=VIT["intermediate_size"],
        num_layers=26,
        num_heads=VIT["num_attention_heads"],
        image_size=VIT["image_size"],
        patch_size=VIT["patch_size"],
    )
    return BagelConfig(llm, vit, MAX_LATENT_SIZE)


def materialise(module: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """Random weights on the GPU for a module on the meta device."""
    module.to(dtype).to_empty(device="cuda")
    module.requires_grad_(False)
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    generator = torch.Generator(device="cuda").manual_seed(0)
    for param, value in zip(
        module.parameters(), draw_tensors(shapes, generator), strict=True
    ):
        param.copy_(value)
    return module


def build(num_layers: int, modes: list[str], samples: int = SAMPLES) -> Bench:
    config = sizes(num_layers)
    with torch.device("meta"):
        model, autoencoder = Bagel(config), AutoEncoder(VAE)
    materialise(model, torch.bfloat16)
    materialise(autoencoder, torch.float32)
    for name, table in model.position_tables().items():
        model.get_parameter(name).copy_(table)
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        tokenizer = load_tokenizer(folder)
    rolls = rollout_config(from_flags({}), config, UPSTREAM)
    device = torch.device("cuda")
    controllers = {}
    for mode in modes:
        switches = read_switches({"R3_EXECUTION": mode})
        execution = build_execution(switches, config.llm, device, torch.bfloat16)
        timer = PhaseTimer(on_device=True)
        controllers[mode] = EditingController(
            model, autoencoder, tokenizer, rolls, UPSTREAM, timer, execution=execution
        )
    pixels = np.random.default_rng(0).integers(0, 256, (512, 512, 3), dtype=np.uint8)
    prompt = parse_prompt(PROMPT, "bench")
    return Bench(samples, model, controllers, prompt, Image.fromarray(pixels))


def draws(seed: int, sde_index: int) -> StepDraws:
    text, flow, noise = (
        torch.Generator(device="cuda").manual_seed(seed * 3 + i) for i in range(3)
    )
    start = torch.randn(TOKENS, 64, generator=noise, device="cuda", dtype=torch.bfloat16)
    return StepDraws(start, text, StochasticDraw(sde_index, flow))


class EndingExecution:
    """An execution whose decoding takes another token for eos; the contexts' segments do not."""

    def __init__(self, execution: Execution, ending: int):
        self._execution = execution
        self._ending = ending

    def __getattr__(self, name: str) -> object:
        return getattr(self._execution, name)

    def decode(self, contexts: Contexts, *args: object) -> list[DecodedText]:
        special = contexts.special
        contexts.special = replace(special, eos=self._ending)
        try:
            return self._execution.decode(contexts, *args)
        finally:
            contexts.special = special


@torch.no_grad()
def roll(
    bench: Bench,
    mode: str,
    stage: str,
    seed: int,
    ending: int | None = None,
    declined: tuple[int, ...] = (),
) -> tuple[list[Sample], FlowResult]:
    """One rollout of a stage; samples that draw the token `ending` end there."""
    controller, prompts = bench.controllers[mode], [bench.prompt] * bench.samples
    execution = controller.execution
    controller.declined = declined
    if ending is not None:
        controller.execution = EndingExecution(execution, ending)
    try:
        if stage == "generate":
            return controller.generate(prompts, draws(seed, 3))
        pictures = [bench.picture] * bench.samples
        return controller.refine(prompts, pictures, draws(seed, 1))[:2]
    finally:
        controller.execution = execution
        controller.declined = ()


def differences(a: tuple, b: tuple) -> list[str]:
    """What two rollouts do not have in common, by name; empty if they are bit-identical.

    Final latents are compared where they become pictures.
    """
    (samples, flow), (others, reference) = a, b
    drawn = [i for i, sample in enumerate(others) if not sample.declines_edit]
    found = []
    for i, (sample, other) in enumerate(zip(samples, others, strict=True)):
        if sample.thought.ids != other.thought.ids:
            found.append(f"ids of sample {i}")
        elif sample.thought.probs != other.thought.probs:
            found.append(f"probabilities of sample {i}")
        if sample.picture.tobytes() != other.picture.tobytes():
            found.append(f"picture of sample {i}")
    pairs = {"latents": (flow.latents[drawn], reference.latents[drawn])}
    for name in ("before", "after", "log_prob"):
        pairs[name] = (getattr(flow.stochastic, name), getattr(reference.stochastic, name))
    return found + [name for name, (x, y) in pairs.items() if not torch.equal(x, y)]


def compare(bench: Bench, mode: str, num_steps: int) -> dict[str, list[str]]:
    """Differences from the eager path, by step; every other step ends samples early."""
    found = {}
    for stage in ("generate", "refine"):
        for step in range(num_steps):
            full = roll(bench, "eager", stage, step)
            name = f"{stage} {step}"
            if step % 2 == 0:
                found[name] = differences(roll(bench, mode, stage, step), full)
                continue
            # A token that was drawn midway takes the part of eos: its sample ends there.
            ids = full[0][step % bench.samples].thought.ids
            eager, other = (
                roll(bench, name_of_mode, stage, step, ending=ids[len(ids) // 2])
                for name_of_mode in ("eager", mode)
            )
            found[name + " early"] = differences(other, eager)
            lengths = sorted(len(sample.thought.ids) for sample in eager[0])
            print(f"{name}: thoughts of {lengths} ids")
            if lengths[0] == lengths[-1] and bench.samples > 1:
                found[name + " early"].append("no sample ended before the others")
    everyone = tuple(range(bench.samples))
    for declined in dict.fromkeys((everyone[:1], everyone[1:], everyone)):
        pair = (roll(bench, name, "refine", 0, declined=declined) for name in (mode, "eager"))
        found[f"refine 0, {len(declined)} of {bench.samples} decline"] = differences(*pair)
    return found


def prefix(bench: Bench, mode: str, rows: int, room: int) -> Contexts:
    """Contexts with a prompt of usual length and space for `room` more tokens."""
    controller = bench.controllers[mode]
    tokens = controller.tokenizer.encode(PROMPT["prompt"] * 8)
    contexts = controller.empty_contexts(rows, len(tokens) + 2 + room)
    contexts.add_text([tokens] * rows)
    return contexts


@torch.no_grad()
def drift(bench: Bench) -> dict[str, float]:
    """How far logits of the fast mode are from eager ones, as ||difference|| / ||eager||.

    Beside it what the eager mode itself moves by when a sample decodes alone.
    """

    def logits(mode: str, rows: int) -> torch.Tensor:
        contexts = prefix(bench, mode, rows, room=1)
        hidden = contexts.feed_text(contexts.rows, [[contexts.special.bos]] * rows)
        return contexts.text_logits(hidden)[0].float()

    eager = logits("eager", bench.samples)
    others = {"fast": logits("fast", bench.samples), "eager alone": logits("eager", 1)}
    return {name: ((x - eager).norm() / eager.norm()).item() for name, x in others.items()}


def measure(
    bench: Bench, mode: str, repeats: int
) -> tuple[dict[str, float], dict[str, list[dict[str, float]]]]:
    """Medians of the figures of one mode, seconds or milliseconds as named.

    Beside them the seconds of every repeat, by stage.
    """
    controller, figures, every = bench.controllers[mode], {}, {}
    torch.cuda.reset_peak_memory_stats()
    for stage in ("generate", "refine"):
        config = getattr(controller.config, stage)
        for step in range(WARM_UP):
            roll(bench, mode, stage, step)
        rows = every[stage] = []
        for repeat in range(repeats):
            controller.timer.reset()
            roll(bench, mode, stage, repeat)
            seconds = controller.timer.seconds()
            rows.append({**seconds, "rollout": sum(seconds.values())})
        for name in rows[0]:
            figures[f"{stage}/{name}_s"] = statistics.median(row[name] for row in rows)
        figures[f"{stage}/decode_ms_per_token"] = (
            figures[f"{stage}/decode_s"] / (config.max_tokens + 1) * 1e3
        )
        forwards = count_forwards(controller, stage)
        figures[f"{stage}/flow_ms_per_forward"] = figures[f"{stage}/flow_s"] / forwards * 1e3
        figures[f"{stage}/flow_forwards"] = float(forwards)
    figures["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    figures |= controller.execution.counters()
    return figures, every


def count_forwards(controller: RolloutController, stage: str) -> int:
    """Forwards of all branches in one flow of a stage."""
    from modeling.diffusion.sde_sampler import flow_schedule

    flow = getattr(controller.config, stage).flow
    copies = 1 + (flow.guidance.text_scale > 1) + (flow.guidance.image_scale > 1)
    times, _ = flow_schedule(flow.num_timesteps, flow.shift)
    return sum(copies if flow.guidance.is_active(t) else 1 for t in times.tolist())


def floors(config: BagelConfig, samples: int) -> dict[str, float]:
    """Least times by the card's measured rates: weights read once; matrix products at full rate."""
    llm = config.llm
    attention = llm.hidden_size * (2 * llm.hidden_size + 2 * llm.num_kv_heads * llm.head_size)
    layer = attention + 3 * llm.hidden_size * llm.intermediate_size
    read = 2 * (llm.num_layers * layer + llm.vocab_size * llm.hidden_size)
    products = 2 * layer * llm.num_layers * samples * (TOKENS + 2)
    return {
        "decode_ms_per_token": read / (COPY_TB_S * 1e12) * 1e3,
        "flow_ms_per_forward": products / (GEMM_TFLOP_S * 1e12) * 1e3,
    }


def verdicts(
    results: dict[str, dict], targets: dict[tuple[str, str], float]
) -> dict[str, dict[str, float]]:
    """Each figure that has a target: by mode, the share by which it is above (missed) or below."""
    found = {}
    for (only, name), target in targets.items():
        for mode, figures in results.items():
            if mode == "eager" or only not in ("", mode):
                continue
            for figure in figures:
                if figure.endswith(name):
                    found.setdefault(figure, {})[mode] = figures[figure] / target - 1
    return found


def print_table(
    results: dict[str, dict], floor: dict[str, float], found: dict[str, dict[str, float]]
) -> None:
    names = list(dict.fromkeys(name for figures in results.values() for name in figures))
    print(f"{'figure':<34}" + "".join(f"{mode:>12}" for mode in results) + f"{'floor':>12}  target")
    for name in names:
        cells = "".join(f"{figures.get(name, float('nan')):>12.4g}" for figures in results.values())
        bound = floor.get(name.partition("/")[2])
        marks = [
            f"{mode} {'missed by ' if share > 0 else 'met, '}{share:+.0%}"
            for mode, share in found.get(name, {}).items()
        ]
        print(f"{name:<34}{cells}" + (f"{bound:>12.4g}" if bound else " " * 12), *marks)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--samples", type=int, default=SAMPLES, help="that roll together")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--compare-steps", type=int, default=4)
    parser.add_argument("--modes", default="eager,exact,fast", help="commas between several")
    parser.add_argument("--json", type=Path, help="where the figures go")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("error: no GPU: this command times real widths", file=sys.stderr)
        return 2
    torch.set_num_threads(min(THREADS, torch.get_num_threads()))
    modes = args.modes.split(",")
    with torch.no_grad():
        bench = build(args.layers, modes, args.samples)
    compared, results, repeats = {}, {}, {}
    record = {"layers": args.layers, "samples": args.samples}
    record |= {"compared": compared, "figures": results, "repeats": repeats}
    for mode in modes:
        if mode == "fast" and "eager" in modes:
            record["drift"] = drift(bench)
            print(f"logits against eager: {record['drift']}")
        elif mode == "exact" and "eager" in modes and args.compare_steps:
            compared.update(compare(bench, mode, args.compare_steps))
            for name, found in compared.items():
                print(f"{mode} {name}: {found if found else 'bit-identical'}")
        results[mode], repeats[mode] = measure(bench, mode, args.repeats)
        if "eager" in results and mode != "eager":
            # What graphs alone hold is not counted among the allocations.
            held = results[mode]["peak_gib"] + results[mode]["graphs/pool_gib"]
            results[mode]["gib_over_eager"] = held - results["eager"]["peak_gib"]
        bench.controllers[mode].execution.release()
        torch.cuda.empty_cache()
    floor = floors(bench.model.config, args.samples)
    targets = TARGETS.get(args.layers, {}) if args.samples == SAMPLES else {}
    found = verdicts(results, targets)
    print_table(results, floor, found)
    if args.json:
        record |= {"floors": floor, "against_targets": found}
        args.json.write_text(json.dumps(record, indent=1))
    return 1 if any(compared.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
