"""The look of a report: page frame, style sheet, number formats and the reward chart."""

import html
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Nothing may load or run: pictures are data URIs and the one style sheet is inline.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"

STAGES = ("generate", "refine")
_CHART_WIDTH, _CHART_HEIGHT = 960, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 16, 16, 44
_SMOOTH_FROM = 40  # points of one stage; from there a trailing mean is drawn over them
_SMOOTH_WINDOW = 10

_CSS = """
:root { color-scheme: light dark; --bg: #f5f6f8; --surface: #ffffff; --sunken: #f0f2f5;
  --ink: #1a1f27; --muted: #5b6573; --line: #e0e4ea; --accent: #2f5fd0; --generate: #2f5fd0;
  --refine: #c2570c; --good: #17703f; --good-bg: #e2f4e9; --bad: #b0302a; --warn-bg: #fdf1dc;
  --warn: #7a4b00; --shadow: 0 1px 2px rgb(20 30 50 / 6%), 0 4px 16px rgb(20 30 50 / 5%); }
@media (prefers-color-scheme: dark) { :root { --bg: #111418; --surface: #1a1f26;
  --sunken: #232932; --ink: #e7eaef; --muted: #9aa5b4; --line: #2d3540; --accent: #86abff;
  --generate: #86abff; --refine: #ffab6b; --good: #7ddba3; --good-bg: #173626; --bad: #ff8f87;
  --warn-bg: #3a2d14; --warn: #f3cd8a; --shadow: none; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--ink);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 1280px; margin: 0 auto; padding: 28px clamp(16px, 4vw, 40px) 64px; }
a { color: var(--accent); text-decoration: none; }
a:hover { text-decoration: underline; }
a:focus-visible, .thought:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
nav { display: flex; gap: 20px; font-size: 14px; margin-bottom: 12px; }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 18px; letter-spacing: -0.01em;
  display: flex; flex-wrap: wrap; align-items: center; gap: 12px; }
h2 { font-size: 18px; line-height: 1.4; margin: 0; overflow-wrap: anywhere; }
h3 { font-size: 12px; font-weight: 600; color: var(--muted); margin: 16px 0 4px; }
.badge { font-size: 13px; font-weight: 600; line-height: 1; padding: 6px 10px; letter-spacing: 0;
  border-radius: 999px; background: var(--sunken); color: var(--muted); white-space: nowrap; }
.badge.generate { color: var(--generate); } .badge.refine { color: var(--refine); }
.figures { display: flex; flex-wrap: wrap; gap: 1px; background: var(--line); margin: 0 0 32px;
  border: 1px solid var(--line); border-radius: 12px; overflow: hidden; }
.figures div { flex: 1 1 120px; background: var(--surface); padding: 12px 16px; }
dt { font-size: 12px; color: var(--muted); white-space: nowrap; }
dd { margin: 0; font-variant-numeric: tabular-nums; font-weight: 600; }
.figures dd { font-size: 19px; }
.prompt { display: flex; flex-wrap: wrap; align-items: baseline; gap: 8px 12px;
  margin: 36px 0 14px; }
.cards { display: grid; gap: 20px; align-items: start;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 270px), 1fr)); }
.cards.wide { grid-template-columns: repeat(auto-fill, minmax(min(100%, 440px), 1fr)); }
.card, .panel { background: var(--surface); border: 1px solid var(--line); border-radius: 14px;
  box-shadow: var(--shadow); }
.card { padding: 16px; overflow: hidden; }
.panel { padding: 20px; margin-bottom: 28px; }
.panel h2 { margin-bottom: 8px; }
.pictures { display: grid; gap: 10px; align-items: center; }
.pictures.pair { grid-template-columns: 1fr auto 1fr; }
.arrow { color: var(--muted); font-size: 20px; padding-top: 22px; }
figure { margin: 0; }
figcaption { font-size: 12px; color: var(--muted); margin-bottom: 4px; }
img { display: block; width: 100%; height: auto; border-radius: 8px; background: var(--sunken); }
img.small { image-rendering: pixelated; }
.rewards { display: flex; flex-wrap: wrap; gap: 8px; margin: 14px 0 0; }
.rewards div { flex: 1 1 66px; background: var(--sunken); border-radius: 8px; padding: 7px 10px; }
.rewards div.perfect { background: var(--good-bg); }
.perfect dd, .up { color: var(--good); } .down { color: var(--bad); }
p { margin: 0; }
.operation { font-weight: 500; overflow-wrap: anywhere; white-space: pre-wrap; }
.thought { color: var(--ink); white-space: pre-wrap; overflow-wrap: anywhere; max-height: 17em;
  overflow-y: auto; font-size: 14px; border-left: 3px solid var(--line); padding-left: 12px; }
.note { margin-top: 14px; padding: 8px 12px; border-radius: 8px; background: var(--warn-bg);
  color: var(--warn); font-size: 14px; overflow-wrap: anywhere; }
.empty { color: var(--muted); padding: 28px; text-align: center; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { font-size: 12px; font-weight: 600; color: var(--muted); white-space: nowrap; }
th, td { text-align: right; padding: 8px 12px; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child, .left { text-align: left; }
tbody tr:last-child td { border-bottom: 0; } tbody tr:hover { background: var(--sunken); }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--muted); font-size: 13px; font-variant-numeric: tabular-nums; }
.grid { stroke: var(--line); stroke-width: 1; }
.series { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
.series.faint { stroke-width: 1; opacity: 0.35; }
.series.generate { stroke: var(--generate); } .series.refine { stroke: var(--refine); }
.dot.generate, .key.generate { fill: var(--generate); background: var(--generate); }
.dot.refine, .key.refine { fill: var(--refine); background: var(--refine); }
.legend { display: flex; flex-wrap: wrap; gap: 6px 20px; font-size: 14px; margin-bottom: 10px; }
.legend span { display: inline-flex; align-items: center; gap: 8px; }
.key { width: 14px; height: 4px; border-radius: 2px; }
.hint { color: var(--muted); }
"""


@dataclass(frozen=True)
class _Axes:
    """Maps steps and rewards to the chart's pixels."""

    first_step: int
    last_step: int
    ticks: tuple[float, ...]  # rewards with a grid line; the first and last are the ends

    def x(self, step: float) -> float:
        share = (step - self.first_step) / max(1, self.last_step - self.first_step)
        return _LEFT + share * (_CHART_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        share = (value - self.ticks[0]) / (self.ticks[-1] - self.ticks[0])
        return _CHART_HEIGHT - _BOTTOM - share * (_CHART_HEIGHT - _TOP - _BOTTOM)


def escape(text: str) -> str:
    """Make any text safe inside an element or a quoted attribute, and writable as UTF-8."""
    text = text.replace("\0", "\N{REPLACEMENT CHARACTER}")
    return html.escape(text.encode("utf-8", "replace").decode("utf-8"), quote=True)


def page(title: str, body: str) -> str:
    """A whole HTML page around `body` (HTML); `title` is plain text."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_CSS}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def stage_badge(stage: object) -> str:
    """The stage as a coloured pill; stages that are not known stay grey."""
    name = "" if stage is None else str(stage)
    style = f" {name}" if name in STAGES else ""
    return f'<span class="badge{style}">{escape(name)}</span>' if name else ""


def number(value: object, spec: str = ".3f") -> str:
    """Format a number with `spec`; "n/a" for what is missing or not finite."""
    is_number = isinstance(value, numbers.Real) and math.isfinite(value)
    return format(float(value), spec) if is_number else "n/a"


def reward_chart(rows: Sequence[Mapping[str, object]]) -> str:
    """Reward over steps as inline SVG with its legend, one line for each stage in `rows`."""
    series = {stage: points for stage in STAGES if (points := _points(rows, stage))}
    if not series:
        return '<p class="empty">No reward has been recorded yet.</p>'
    every = [point for points in series.values() for point in points]
    axes = _axes(every)
    smooth = any(len(points) >= _SMOOTH_FROM for points in series.values())
    keys = "".join(
        f'<span><i class="key {stage}"></i>{stage.capitalize()}</span>' for stage in series
    )
    hint = f"mean of the last {_SMOOTH_WINDOW} steps of a stage, single steps faint"
    keys += f'<span class="hint">{hint}</span>' if smooth else ""
    lines = "".join(_series(axes, stage, points) for stage, points in series.items())
    return (
        f'<div class="legend">{keys}</div>\n'
        f'<svg viewBox="0 0 {_CHART_WIDTH} {_CHART_HEIGHT}" role="img" '
        f'aria-label="Mean reward, steps {axes.first_step} to {axes.last_step}">'
        f"{_grid(axes)}{lines}</svg>"
    )


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers whose ends enclose low..high (equal ends are widened)."""
    if not low < high:
        low, high = low - 0.5, low + 0.5
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, last + 1)]


def _points(rows: Sequence[Mapping[str, object]], stage: str) -> list[tuple[int, float]]:
    return [
        (row["step"], float(row["reward/mean"]))
        for row in rows
        if row.get("stage") == stage and number(row.get("reward/mean")) != "n/a"
    ]


def _axes(points: Sequence[tuple[int, float]]) -> _Axes:
    steps = [step for step, _ in points]
    values = [value for _, value in points]
    return _Axes(min(steps), max(steps), tuple(nice_ticks(min(values), max(values))))


def _grid(axes: _Axes) -> str:
    parts = []
    right, bottom = _CHART_WIDTH - _RIGHT, _CHART_HEIGHT - _BOTTOM
    for value in axes.ticks:
        y = axes.y(value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        label = f"{value:.3f}".rstrip("0").rstrip(".")
        parts.append(f'<text x="{_LEFT - 10}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    for step in _step_ticks(axes):
        x = axes.x(step)
        parts.append(f'<text x="{x:.1f}" y="{bottom + 20}" text-anchor="middle">{step}</text>')
    middle = (_LEFT + right) / 2
    parts.append(f'<text x="{middle}" y="{_CHART_HEIGHT - 4}" text-anchor="middle">step</text>')
    return "".join(parts)


def _step_ticks(axes: _Axes) -> list[int]:
    if axes.first_step == axes.last_step:
        return [axes.first_step]
    ticks = nice_ticks(axes.first_step, axes.last_step, 8)
    return [
        round(tick)
        for tick in ticks
        if tick == round(tick) and axes.first_step <= tick <= axes.last_step
    ]


def _series(axes: _Axes, stage: str, points: list[tuple[int, float]]) -> str:
    if len(points) >= _SMOOTH_FROM:
        values = [value for _, value in points]
        means = [
            math.fsum(window) / len(window)
            for end in range(1, len(values) + 1)
            if (window := values[max(0, end - _SMOOTH_WINDOW) : end])
        ]
        smooth = [(step, mean) for (step, _), mean in zip(points, means, strict=True)]
        return _line(axes, f"{stage} faint", points) + _line(axes, stage, smooth)
    dots = "".join(
        f'<circle class="dot {stage}" cx="{axes.x(step):.1f}" cy="{axes.y(value):.1f}" r="3.5">'
        f"<title>step {step}: {value:.3f}</title></circle>"
        for step, value in points
    )
    return _line(axes, stage, points) + dots


def _line(axes: _Axes, style: str, points: Sequence[tuple[int, float]]) -> str:
    path = " ".join(f"{axes.x(step):.1f},{axes.y(value):.1f}" for step, value in points)
    return f'<polyline class="series {style}" points="{path}"/>'
