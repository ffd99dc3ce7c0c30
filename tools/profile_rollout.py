"""Where a captured text turn and captured flow forwards spend their time, kernel by kernel.

    python -m tools.profile_rollout --layers 28 --json OUT.json

Times replays with events first, then traces a few of them: the kernels' own time by name, the
time in which any kernel ran, and the gaps between them.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from modeling.bagel import fused_flow
from modeling.bagel.flow import FlowBranches, FlowStep
from modeling.bagel.text_turn import TurnProgram, TurnSource
from tools.bench_rollout import SAMPLES, TOKENS, Bench, build, floors, prefix

TURNS, FORWARDS, TRACED = 100, 20, 4


def text_turn(bench: Bench, mode: str) -> Callable[[], None]:
    """A replay of one captured turn of all samples; the state moves on as in a decode."""
    controller = bench.controllers[mode]
    contexts = prefix(bench, mode, bench.samples, room=TURNS * 3)
    generator = torch.Generator(device=contexts.device).manual_seed(0)
    program = TurnProgram(bench.samples, controller.config.generate.sampling, contexts.device)
    program.load(TurnSource(contexts, contexts.weights(), generator), contexts.rows)
    program.state.tokens.fill_(contexts.special.bos)
    program.run()
    captured = controller.execution.capture.capture(program.run, program.watched, [generator])
    return captured.replay


def flow_step(bench: Bench, mode: str, is_guided: bool) -> Callable[[], None]:
    """A replay of a step's forward: of one branch, or of two."""
    controller = bench.controllers[mode]
    count = 2 if is_guided else 1
    branches = (prefix(bench, mode, bench.samples, room=TOKENS + 2) for _ in range(count))
    grid = controller.latent_grid(controller.config.image_size)
    forwards = controller.execution.make_forwards(FlowBranches(*branches), grid)
    x = torch.randn(bench.samples, TOKENS, 64, device="cuda", dtype=torch.bfloat16)
    t, step = torch.tensor(0.7, device="cuda"), FlowStep(is_guided)
    for _ in range(2):
        forwards(x, t, step)
    return lambda: forwards(x, t, step)


def milliseconds(work: Callable[[], None], count: int) -> float:
    """Mean time of `count` runs by events, after as many as warm up."""
    for _ in range(3):
        work()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / count


def trace(work: Callable[[], None], count: int) -> dict:
    """Kernels of one run: by name, and how much of the time none was running."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(count):
            work()
        torch.cuda.synchronize()
    names, timeline = {}, []
    for event in profiler.events():
        if event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        first, last, name = event.time_range.start, event.time_range.end, short_name(event.name)
        timeline.append((first, last, name))
        entry = names.setdefault(name, [0, 0.0])
        entry[0] += 1
        entry[1] += last - first
    timeline.sort()
    busy, end = 0.0, timeline[0][0]
    for first, last, _ in timeline:
        busy += max(0.0, last - max(first, end))
        end = max(end, last)
    rows = sorted(names.items(), key=lambda item: -item[1][1])
    return {
        "span_us": (end - timeline[0][0]) / count,
        "busy_us": busy / count,
        "kernels": [
            {"name": name, "calls": calls / count, "us": us / count} for name, (calls, us) in rows
        ],
    }


def short_name(name: str) -> str:
    """A kernel's name without what does not tell it from others."""
    name = re.sub(r"void |at::native::|\(anonymous namespace\)::", "", name)
    return re.sub(r"\(.*", "", name)[:100]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--modes", default="exact", help="commas between several, none eager")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="that roll together")
    parser.add_argument(
        "--part-rows",
        type=int,
        default=fused_flow.PART_ROWS,
        help="gen tokens of several branches that go through products together",
    )
    parser.add_argument("--rows", type=int, default=24, help="kernels to list")
    parser.add_argument("--json", type=Path, help="where the figures go")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("error: no GPU: this command times real widths", file=sys.stderr)
        return 2
    fused_flow.PART_ROWS = args.part_rows
    modes, record = args.modes.split(","), {"layers": args.layers, "samples": args.samples}
    with torch.no_grad():
        bench = build(args.layers, modes, args.samples)
        record["floors"] = floors(bench.model.config, args.samples)
        for mode in modes:
            for name, make, count in (
                ("text turn", text_turn, TURNS),
                ("flow forward", partial(flow_step, is_guided=False), FORWARDS),
                ("guided step", partial(flow_step, is_guided=True), FORWARDS),
            ):
                work = make(bench, mode)
                ms = milliseconds(work, count)
                traced = trace(work, TRACED)
                record[f"{mode} {name}"] = {"ms": ms, **traced}
                print(
                    f"{mode} {name}: {ms:.3f} ms; traced {traced['span_us']:.0f} us, "
                    f"of which {traced['busy_us']:.0f} us busy"
                )
                for row in traced["kernels"][: args.rows]:
                    print(f"{row['us']:>10.1f} us {row['calls']:>7.1f} x  {row['name']}")
    if args.json:
        args.json.write_text(json.dumps(record, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
