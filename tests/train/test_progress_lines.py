"""The progress bar, its plain form and the summary of a step."""

import io
import logging
import math

from train.progress import Progress, leaf_phases, step_summary

VALUES = {
    "reward/mean": 0.6123,
    "reward/format": 1.0,
    "loss/total": -0.00312,
    "optim/grad_norm": 0.834,
    "ratio/text_mean": 1.0,
    "ratio/image_mean": 1.0012,
    "time/step": 11.87,
    "time/rollout": 5.2,
    "time/rollout/decode": 3.12,
    "time/rollout/flow": 2.04,
    "time/pack": 0.2,
}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_summary_in_full():
    place = {"step": 12, "total_steps": 1000, "stage": "refine"}
    assert step_summary({**place, **VALUES}) == (
        "step 12/1000 refine  reward 0.612  format 1.00  loss -0.0031  grad 0.834  "
        "ratio 1.000/1.001  11.9 s (decode 3.1 flow 2.0 pack 0.2)"
    )


def test_summary_of_little_and_of_bad_numbers():
    assert step_summary({}) == "step ?"
    assert step_summary({"step": 3, "stage": "generate"}) == "step 3 generate"
    values = {"step": 3, "loss/total": math.nan, "reward/mean": None, "ratio/text_mean": 1.0}
    assert step_summary(values) == "step 3  reward -  loss nan  ratio 1.000/-"
    assert step_summary({"step": 3, "time/step": 2.0}) == "step 3  2.0 s"


def test_summary_names_only_the_longest_phases():
    times = {f"time/p{i}": float(i) for i in range(9)}
    text = step_summary({"step": 0, "time/step": 40.0, **times})
    assert text.endswith("40.0 s (p3 3.0 p4 4.0 p5 5.0 p6 6.0 p7 7.0 p8 8.0 ...)")


def test_leaf_phases_keep_paths_where_names_clash():
    times = {"time/step": 9.0, "time/a": 3.0, "time/a/flow": 1.0, "time/b/flow": 2.0}
    times |= {"time/abc": 1.5, "time/x": math.nan, "time/ab": 0.5}
    assert leaf_phases(times) == [("a/flow", 1.0), ("b/flow", 2.0), ("abc", 1.5), ("ab", 0.5)]


def test_plain_lines_when_it_is_no_terminal():
    stream = io.StringIO()
    with Progress(8, stream=stream) as progress:
        progress.begin_step(3, "refine")
        progress.phase("rollout/decode")
        progress.finish_step(VALUES)
    assert stream.getvalue().startswith("step 3/8 refine  reward 0.612")
    assert stream.getvalue().count("\n") == 1


def test_slow_phases_get_a_line():
    stream = io.StringIO()
    with Progress(8, stream=stream, quiet_s=0.0) as progress:
        progress.begin_step(3, "refine")
        progress.phase("rollout/decode")
        progress.finish_step(VALUES)
        progress.begin_step(4, "generate")
    written = stream.getvalue().splitlines()
    assert written[:2] == ["step 3 refine ...", "step 3 refine rollout/decode ..."]
    assert written[3] == "step 4 generate ... (last reward 0.612)"


def test_bar_on_a_terminal_shows_step_phase_and_reward():
    stream = Terminal()
    with Progress(8, start_step=3, stream=stream) as progress:
        progress.begin_step(3, "refine")
        progress.phase("decode")
        progress.finish_step(VALUES)
        progress.begin_step(4, "generate")
    text = stream.getvalue()
    assert "step 3 refine decode" in text and "3/8" in text
    assert "step 3/8 refine  reward 0.612" in text
    assert "step 4 generate" in text and "4/8" in text and "reward 0.612]" in text


def test_log_lines_pass_through_the_bar_and_handlers_come_back():
    stream = Terminal()
    logger = logging.getLogger("faster_r3")
    handler = logging.StreamHandler(stream)
    logger.addHandler(handler)
    try:
        progress = Progress(8, stream=stream)
        logger.warning("careful")
        progress.close()
        progress.close()
        assert "careful\n" in stream.getvalue()
        assert logger.handlers == [handler]
    finally:
        logger.removeHandler(handler)


def test_other_ranks_show_nothing():
    stream = Terminal()
    with Progress(8, is_main=False, stream=stream) as progress:
        progress.begin_step(0, "generate")
        progress.phase("decode")
        progress.finish_step(VALUES)
    assert stream.getvalue() == ""
