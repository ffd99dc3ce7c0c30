"""The verdict about learning: the right steps are averaged, and a control is judged as one."""

import io
import json

import pytest
from PIL import Image

from tools.learning_curve import Tenths, draw_plot, judge, main, measure


def make_rows(rewards, rate=1e-4):
    """Rows of a run, generate and refine in turn; the first step runs at a rate of 0."""
    return [
        {
            "step": step,
            "stage": ("generate", "refine")[step % 2],
            "reward/mean": reward,
            "reward/format": 0.5,
            "optim/lr": rate if step else 0.0,
        }
        for step, reward in enumerate(rewards)
    ]


def write_run(folder, rows):
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


# 40 steps, so a tenth is 4: outside of them are values that would spoil every mean.
RISING = [0.1, 0.3, 0.2, 0.4, *[9.0] * 32, 0.5, 0.6, 0.7, 1.0]


def test_tenths_of_all_steps_and_of_a_stage():
    rows = make_rows(RISING)
    every = measure(rows, "reward/mean", None)
    assert (every.first, every.last) == (pytest.approx(0.25), pytest.approx(0.7))
    generate = measure(rows, "reward/mean", "generate")
    assert (generate.first, generate.last) == (pytest.approx(0.15), pytest.approx(0.6))
    refine = measure(rows, "reward/mean", "refine")
    assert (refine.first, refine.last) == (pytest.approx(0.35), pytest.approx(0.8))
    assert refine.rise == pytest.approx(0.45)


def test_a_tenth_is_rounded_down_and_missing_rewards_stay_out():
    rows = make_rows([0.2, None, *[9.0] * 25, 0.6, 0.4])  # 29 steps: two in a tenth
    tenths = measure(rows, "reward/mean", None)
    assert (tenths.first, tenths.last) == (pytest.approx(0.2), pytest.approx(0.5))


@pytest.mark.parametrize(
    "rewards, words",
    [
        ([0.5] * 9, "9 steps"),
        ([], "0 steps"),
        ([None] * 20, "first tenth"),
        ([*[0.5] * 18, None, None], "last tenth"),
        ([0.5] * 10, "no reward/mean in the generate steps of the last tenth"),
    ],
)
def test_too_little_to_judge_is_named(tmp_path, capsys, rewards, words):
    assert main([write_run(tmp_path, make_rows(rewards))]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "learning_curve.png").exists()


@pytest.mark.parametrize(
    "rise, is_control, passed, words",
    [
        (0.15, False, True, "learned: the reward rose by +0.150"),
        (0.149, False, False, "did not learn"),
        (-0.3, False, False, "rose by -0.300"),
        (0.149, True, True, "did not rise"),
        (0.15, True, False, "rose without learning"),
    ],
)
def test_verdict(rise, is_control, passed, words):
    verdict, result = judge(rise, 0.15, is_control)
    assert result is passed and words in verdict


@pytest.mark.parametrize(
    "rewards, rate, status",
    [
        (RISING, 1e-4, 0),
        (RISING, 0.0, 1),  # the control may not rise
        ([0.5] * 40, 1e-4, 1),
        ([0.5] * 40, 0.0, 0),
    ],
)
def test_status_of_runs_and_controls(tmp_path, capsys, rewards, rate, status):
    assert main([write_run(tmp_path, make_rows(rewards, rate))]) == status
    assert capsys.readouterr().out.count("control") == (rate == 0)


def test_the_rise_that_is_asked_for_can_be_set(tmp_path):
    run = write_run(tmp_path, make_rows(RISING))
    assert main([run, "--min-rise", "0.44"]) == 0
    assert main([run, "--min-rise", "0.46"]) == 1


def test_figures_are_printed_and_the_plot_is_written_and_embedded(tmp_path, capsys):
    main([write_run(tmp_path, make_rows(RISING))])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["reward", "0.250", "0.700", "+0.450"] in lines
    assert ["reward,", "refine", "steps", "0.350", "0.800", "+0.450"] in lines
    assert ["format", "0.500", "0.500", "+0.000"] in lines
    with Image.open(tmp_path / "learning_curve.png") as plot:
        assert plot.format == "PNG" and len(plot.convert("RGB").getcolors(10**6)) > 3
    index = (tmp_path / "report" / "index.html").read_text()
    assert index.count("data:image/png;base64,") == 1


def test_the_plot_shows_the_rewards_and_does_without_a_stage():
    rows = make_rows([0.2] * 20)
    low = draw_plot(rows, Tenths(0.2, 0.2))
    high = draw_plot(make_rows([0.8] * 20), Tenths(0.8, 0.8))
    assert dark_row(high) < dark_row(low)
    assert draw_plot(rows[::2], Tenths(0.2, 0.2)) != low


def dark_row(plot: bytes) -> float:
    """Mean height, in pixels from the top, of the generate line's blue in the upper panel."""
    image = Image.open(io.BytesIO(plot)).convert("RGB")
    heights = [
        y
        for y in range(image.height // 2)
        for x in range(0, image.width * 2 // 3, 4)
        if image.getpixel((x, y)) == (0x2F, 0x5F, 0xD0)
    ]
    return sum(heights) / len(heights)
