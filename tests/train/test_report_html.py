"""The HTML report: everything escaped, self-contained, listed rightly, with a correct chart."""

import base64
import io
import math
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from train.report_layout import escape, nice_ticks, number, reward_chart
from train.reports import RolloutCard, write_index, write_report

HOSTILE = "<script>alert('x')</script> & \"quoted\""
VOID_TAGS = {"meta", "img"}


def make_card(**changes):
    values = {
        "prompt": "a photo of a red bench",
        "tag": "colors",
        "thought": "<think>red bench</think>",
        "operation": "",
        "input_image": None,
        "image": Image.new("RGB", (32, 16), (255, 0, 0)),
        "score": 1.0,
        "format_reward": 1.0,
        "total": 2.0,
        "text_advantage": 0.25,
        "image_advantage": -0.5,
    }
    return RolloutCard(**{**values, **changes})


class Page(HTMLParser):
    """Collects tags and text, and checks that tags close in the order they opened."""

    def __init__(self, source):
        super().__init__()
        self.tags, self.text, self.open = [], "", []
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID_TAGS:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data

    def all(self, name):
        return [attrs for tag, attrs in self.tags if tag == name]


def read_page(path):
    return Page(path.read_text(encoding="utf-8"))


def test_every_text_of_a_card_is_escaped(tmp_path):
    card = make_card(
        prompt=HOSTILE,
        tag=HOSTILE,
        thought=HOSTILE,
        operation=HOSTILE,
        note=HOSTILE,
        input_image=Image.new("RGB", (8, 8)),
    )
    path = write_report(tmp_path / "<b>run&", 10, "<i>", [card], [])
    for file in (path, path.parent / "index.html"):
        page = read_page(file)
        assert not {"script", "b"} & {tag for tag, _ in page.tags}
    page = read_page(path)
    assert page.text.count(HOSTILE) == 5
    # The only <i> of the layout is the legend's, which a step page does not have.
    assert page.all("i") == [] and "<i>" in page.text
    assert page.all("img")[0]["alt"].endswith(HOSTILE)


def test_unwritable_text_does_not_break_the_page(tmp_path):
    path = write_report(tmp_path, 0, "generate", [make_card(thought="a\ud800b\0c")], [])
    assert "a?b\N{REPLACEMENT CHARACTER}c" in read_page(path).text


def test_page_loads_nothing_and_pictures_survive(tmp_path):
    before = Image.new("RGB", (16, 16), (0, 0, 255))
    after = Image.new("RGB", (16, 16), (0, 255, 0))
    card = make_card(input_image=before, image=after, operation="make it green")
    path = write_report(tmp_path, 11, "refine", [card], [])
    page = read_page(path)
    colours = []
    for attrs in page.all("img"):
        head, data = attrs["src"].split(",", 1)
        assert head == "data:image/png;base64"
        colours.append(Image.open(io.BytesIO(base64.b64decode(data))).getpixel((3, 3)))
    assert colours == [(0, 0, 255), (0, 255, 0)]
    source = path.read_text(encoding="utf-8")
    assert not re.search(r"https?://|@import|url\(|<link|<script", source)
    assert "make it green" in page.text and "Reflection" in page.text


def test_large_pictures_do_not_make_pages_of_megabytes(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    picture = Image.fromarray(noise).resize((512, 512))
    path = write_report(tmp_path, 0, "generate", [make_card(image=picture)], [])
    head, data = read_page(path).all("img")[0]["src"].split(",", 1)
    shown = Image.open(io.BytesIO(base64.b64decode(data)))
    assert (head, shown.size) == ("data:image/jpeg;base64", (512, 512))
    assert np.abs(np.asarray(shown, float) - np.asarray(picture, float)).mean() < 4
    png = io.BytesIO()
    picture.save(png, format="PNG")
    assert path.stat().st_size < len(png.getvalue()) / 4


@pytest.mark.parametrize("mode", ["RGBA", "P", "L", "CMYK", "I;16", "F"])
def test_any_picture_mode_becomes_png(tmp_path, mode):
    path = write_report(tmp_path, 0, "generate", [make_card(image=Image.new(mode, (4, 4)))], [])
    data = read_page(path).all("img")[0]["src"].split(",", 1)[1]
    assert Image.open(io.BytesIO(base64.b64decode(data))).size == (4, 4)


def test_rewards_and_advantages_are_shown_with_their_sign(tmp_path):
    missing = make_card(score=math.nan, total=math.inf, text_advantage=math.nan, note="no answer")
    path = write_report(tmp_path, 0, "generate", [make_card(), missing], [])
    text = read_page(path).text
    assert "Score1.000Format1Total2.000Text adv.+0.250Image adv.-0.500" in text
    assert "Scoren/aFormat1Totaln/aText adv.n/aImage adv.-0.500" in text
    assert "no answer" in text
    assert not re.search(r"\b(nan|inf)\b", text)


def test_cards_of_one_prompt_share_a_heading(tmp_path):
    cards = [make_card(), make_card(), make_card(prompt="another")]
    page = read_page(write_report(tmp_path, 0, "generate", cards, []))
    assert len(page.all("h2")) == 2 and len(page.all("article")) == 3


def test_no_cards_still_gives_a_page(tmp_path):
    path = write_report(tmp_path, 0, "generate", [], [])
    assert path == tmp_path / "report" / "step_000000.html"
    assert "No rollouts were recorded" in read_page(path).text
    assert "No reward has been recorded" in read_page(path.parent / "index.html").text


def test_index_links_existing_steps_newest_first_with_their_metrics(tmp_path):
    rows = [
        {"step": 0, "stage": "generate", "reward/mean": 0.125, "time/step": 3.5},
        {"step": 1, "stage": "refine", "reward/mean": None},
        {"step": 9, "stage": "refine", "reward/mean": 0.75},
    ]
    write_report(tmp_path, 0, "generate", [make_card()], rows[:1])
    path = write_report(tmp_path, 9, "refine", [make_card()], rows)
    page = read_page(path.parent / "index.html")
    assert [attrs["href"] for attrs in page.all("a")] == ["step_000009.html", "step_000000.html"]
    assert "0.125" in page.text and "3.50" in page.text
    assert "Step 0" in read_page(path).text  # the way back


def test_index_of_a_resumed_run_leaves_out_later_steps(tmp_path):
    for step in (0, 10, 20):
        write_report(tmp_path, step, "generate", [], [])
    rows = [{"step": step, "stage": "generate", "reward/mean": 0.5} for step in (0, 10, 20)]
    path = write_report(tmp_path, 10, "generate", [], rows)
    page = read_page(path.parent / "index.html")
    assert [attrs["href"] for attrs in page.all("a")] == ["step_000010.html", "step_000000.html"]
    assert len(page.all("circle")) == 2


def test_index_with_a_plot_lists_the_written_steps_and_shows_all_rewards(tmp_path):
    rows = [{"step": step, "stage": "generate", "reward/mean": 0.5} for step in range(12)]
    for step in (0, 10):
        write_report(tmp_path, step, "generate", [], rows)
    page = read_page(write_index(tmp_path, rows, b"plot", "Reward & <format>"))
    assert "Reward & <format>" in page.text
    assert [attrs["href"] for attrs in page.all("a")] == ["step_000010.html", "step_000000.html"]
    assert len(page.all("circle")) == 12
    (image,) = page.all("img")
    assert image["src"] == "data:image/png;base64," + base64.b64encode(b"plot").decode()


def test_writing_leaves_no_temporary_files(tmp_path):
    write_report(tmp_path, 0, "generate", [make_card()], [])
    names = sorted(path.name for path in (tmp_path / "report").iterdir())
    assert names == ["index.html", "step_000000.html"]


def test_chart_places_points_in_order_and_inside(tmp_path):
    rows = [{"step": s, "stage": "generate", "reward/mean": s / 10} for s in range(0, 12, 2)]
    # The rows are told apart by stage; a row without a usable reward is no point.
    rows += [{"step": 3, "stage": "refine", "reward/mean": 0.3}]
    rows += [{"step": 5, "stage": "refine", "reward/mean": None}]
    page = Page(reward_chart(rows))
    lines = {attrs["class"]: attrs["points"] for attrs in page.all("polyline")}
    assert set(lines) == {"series generate", "series refine"}
    points = [tuple(map(float, p.split(","))) for p in lines["series generate"].split()]
    assert len(points) == 6 and len(page.all("circle")) == 7
    assert points == sorted(points) and [y for _, y in points] == sorted(
        (y for _, y in points), reverse=True
    )
    width, height = map(float, page.all("svg")[0]["viewbox"].split()[2:])
    ys = [float(attrs["y1"]) for attrs in page.all("line")]
    assert all(0 < y < height for y in ys + [y for _, y in points])
    assert all(0 < x < width for x, _ in points)
    assert max(ys) >= points[0][1] and min(ys) <= points[-1][1]


def test_long_chart_is_smoothed_with_a_trailing_mean():
    rows = [{"step": s, "stage": "refine", "reward/mean": float(s % 2)} for s in range(100)]
    page = Page(reward_chart(rows))
    styles = [attrs["class"] for attrs in page.all("polyline")]
    assert styles == ["series refine faint", "series refine"]
    heights = [p.split(",")[1] for p in page.all("polyline")[1]["points"].split()]
    assert len(set(heights[10:])) == 1  # every ten steps of 0, 1, 0, 1 ... have mean 0.5
    assert "single steps faint" in page.text


@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 1.0), (0.31, 0.94), (0.5, 0.5), (-2.0, 0.1), (0.0, 1.4), (0, 999)]
)
def test_ticks_enclose_the_values_evenly(low, high):
    ticks = nice_ticks(low, high)
    assert ticks[0] <= low + 1e-9 and ticks[-1] >= high - 1e-9 and 3 <= len(ticks) <= 8
    gaps = [b - a for a, b in zip(ticks, ticks[1:], strict=False)]
    assert max(gaps) == pytest.approx(min(gaps))


def test_number_and_escape():
    assert number(0.12345, ".2f") == "0.12" and number(3) == "3.000"
    assert [number(v) for v in (None, math.nan, -math.inf, "1")] == ["n/a"] * 4
    assert escape("<a href='x'>") == "&lt;a href=&#x27;x&#x27;&gt;"
