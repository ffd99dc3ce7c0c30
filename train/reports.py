"""HTML reports of rollouts: what was asked, thought, drawn and edited, and how it was rewarded."""

import base64
import io
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from train.files import write_text_atomic
from train.report_layout import escape, number, page, reward_chart, stage_badge
from train.reward_wire import encode_jpeg

REPORT_FOLDER = "report"
INDEX_FILE = "index.html"
_STEP_FILE = re.compile(r"step_(\d{6,})\.html")
_SMALL_SIDE = 128  # pixels; smaller pictures are enlarged without blur
_JPEG_QUALITY = 90  # of larger ones: as PNG a page of eight would take some MB
# Table column or figure: heading, metric, format.
_FIGURES = (
    ("Reward", "reward/mean", ".3f"),
    ("Format", "reward/format", ".2f"),
    ("Loss", "loss/total", ".4f"),
    ("Gradient norm", "optim/grad_norm", ".3g"),
    ("Text ratio", "ratio/text_mean", ".4f"),
    ("Image ratio", "ratio/image_mean", ".4f"),
    ("Step time (s)", "time/step", ".2f"),
)


@dataclass(frozen=True)
class RolloutCard:
    """One sample as the report shows it.

    `operation` is "" and `input_image` None in a generate step. Numbers may be NaN (shown as
    "n/a"). `note` is "" or a remark, such as why a reward is missing.
    """

    prompt: str
    tag: str
    thought: str
    operation: str
    input_image: Image.Image | None
    image: Image.Image
    score: float
    format_reward: float
    total: float
    text_advantage: float
    image_advantage: float
    note: str = ""


def write_report(
    run_dir: Path,
    step: int,
    stage: str,
    cards: Sequence[RolloutCard],
    metrics_rows: Sequence[Mapping[str, object]],
) -> Path:
    """Write the page of `step` and the index into `run_dir/report`; return the step's page.

    Cards of one prompt should be neighbours: they share a heading. `metrics_rows` are the rows
    of metrics.jsonl (`train.metrics.read_metrics`); log the step first, so that its own are
    shown. Each page is one file that needs no other one, no script and no network. Pages of later
    steps, which a resumed run will do again, are not listed.
    """
    folder = Path(run_dir) / REPORT_FOLDER
    run_name = Path(run_dir).resolve().name
    rows = {row["step"]: row for row in metrics_rows if row["step"] <= step}
    rows.setdefault(step, {"step": step, "stage": stage})
    earlier = [written for written in _written_steps(folder) if written < step]
    path = folder / _file_name(step)
    title = f"Step {step} - {run_name}"
    body = _step_body(step, stage, cards, rows[step], earlier)
    write_text_atomic(path, page(title, body))
    index = _index_body(run_name, [*earlier, step], rows)
    write_text_atomic(folder / INDEX_FILE, page(f"Rollouts - {run_name}", index))
    return path


def write_index(
    run_dir: Path, metrics_rows: Sequence[Mapping[str, object]], plot: bytes, caption: str
) -> Path:
    """Write the index of a finished run again, with a plot (PNG) under its caption; return it."""
    folder = Path(run_dir) / REPORT_FOLDER
    run_name = Path(run_dir).resolve().name
    rows = {row["step"]: row for row in metrics_rows}
    title = escape(caption)
    figure = (
        f'<section class="panel"><h2>{title}</h2>\n'
        f'<img alt="{title}" src="{_data_uri("png", plot)}"></section>\n'
    )
    path = folder / INDEX_FILE
    body = _index_body(run_name, _written_steps(folder), rows, figure)
    write_text_atomic(path, page(f"Rollouts - {run_name}", body))
    return path


def _file_name(step: int) -> str:
    return f"step_{step:06d}.html"


def _written_steps(folder: Path) -> list[int]:
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(match.group(1)) for name in names if (match := _STEP_FILE.fullmatch(name)))


def _step_body(
    step: int,
    stage: str,
    cards: Sequence[RolloutCard],
    row: Mapping[str, object],
    earlier: Sequence[int],
) -> str:
    links = ['<a href="index.html">All steps</a>']
    if earlier:
        links.append(f'<a href="{_file_name(earlier[-1])}">&larr; Step {earlier[-1]}</a>')
    parts = [
        f"<nav>{''.join(links)}</nav>",
        f"<h1>Step {step} {stage_badge(stage)}</h1>",
        _figures(row),
    ]
    encode = _PictureEncoder()
    for (prompt, tag), group in itertools.groupby(cards, lambda card: (card.prompt, card.tag)):
        group_cards = list(group)
        wide = " wide" if any(card.input_image is not None for card in group_cards) else ""
        parts.append(
            f'<section>\n<div class="prompt"><h2>{escape(prompt)}</h2>'
            f'<span class="badge">{escape(tag)}</span></div>\n<div class="cards{wide}">'
        )
        parts += [_card(card, encode) for card in group_cards]
        parts.append("</div>\n</section>")
    if not cards:
        parts.append('<p class="panel empty">No rollouts were recorded at this step.</p>')
    return "\n".join(parts)


def _figures(row: Mapping[str, object]) -> str:
    cells = "".join(
        f"<div><dt>{heading}</dt><dd>{number(row[metric], spec)}</dd></div>"
        for heading, metric, spec in _FIGURES
        if metric in row
    )
    return f'<dl class="figures">{cells}</dl>' if cells else ""


def _card(card: RolloutCard, encode: "_PictureEncoder") -> str:
    parts = ['<article class="card">', _pictures(card, encode), _rewards(card)]
    if card.operation:
        parts.append(f'<h3>Operation</h3><p class="operation">{escape(card.operation)}</p>')
    thought = escape(card.thought) or "(empty)"
    heading = "Thought" if card.input_image is None else "Reflection"
    parts.append(f'<h3>{heading}</h3><div class="thought" tabindex="0">{thought}</div>')
    if card.note:
        parts.append(f'<p class="note">{escape(card.note)}</p>')
    parts.append("</article>")
    return "\n".join(parts)


def _pictures(card: RolloutCard, encode: "_PictureEncoder") -> str:
    if card.input_image is None:
        picture = encode.tag(card.image, f"Drawn for: {card.prompt}")
        return f'<div class="pictures"><figure>{picture}</figure></div>'
    before = encode.tag(card.input_image, f"Input picture for: {card.prompt}")
    after = encode.tag(card.image, f"Edited picture for: {card.prompt}")
    return (
        '<div class="pictures pair">'
        f"<figure><figcaption>Input</figcaption>{before}</figure>"
        '<span class="arrow" aria-hidden="true">&rarr;</span>'
        f"<figure><figcaption>Edited</figcaption>{after}</figure></div>"
    )


def _rewards(card: RolloutCard) -> str:
    perfect = ' class="perfect"' if card.score == 1 else ""
    cells = [
        f"<div{perfect}><dt>Score</dt><dd>{number(card.score)}</dd></div>",
        f"<div><dt>Format</dt><dd>{number(card.format_reward, 'g')}</dd></div>",
        f"<div><dt>Total</dt><dd>{number(card.total)}</dd></div>",
        _advantage("Text adv.", card.text_advantage),
        _advantage("Image adv.", card.image_advantage),
    ]
    return f'<dl class="rewards">{"".join(cells)}</dl>'


def _advantage(heading: str, value: float) -> str:
    text = number(value, "+.3f")
    style = "" if not math.isfinite(value) or value == 0 else "up" if value > 0 else "down"
    return f'<div><dt>{heading}</dt><dd class="{style}">{text}</dd></div>'


def _index_body(
    run_name: str,
    steps: Sequence[int],
    rows: Mapping[int, Mapping[str, object]],
    figure: str = "",
) -> str:
    headings = "".join(f"<th>{heading}</th>" for heading, _, _ in _FIGURES)
    lines = []
    for step in reversed(steps):
        row = rows.get(step, {})
        cells = "".join(f"<td>{number(row.get(metric), spec)}</td>" for _, metric, spec in _FIGURES)
        link = f'<a href="{_file_name(step)}">Step {step}</a>'
        lines.append(
            f'<tr><td>{link}</td><td class="left">{stage_badge(row.get("stage"))}</td>{cells}</tr>'
        )
    table_rows = "\n".join(lines)
    return (
        f"<h1>Rollouts <span class='badge'>{escape(run_name)}</span></h1>\n"
        f'<section class="panel"><h2>Reward over steps</h2>\n'
        f"{reward_chart([rows[step] for step in sorted(rows)])}</section>\n{figure}"
        '<section class="panel"><h2>Steps with pictures</h2>\n<div class="scroll"><table>'
        f'<thead><tr><th>Step</th><th class="left">Stage</th>{headings}</tr></thead>\n'
        f"<tbody>\n{table_rows}\n</tbody></table></div></section>"
    )


class _PictureEncoder:
    """Turns pictures into `<img>` tags; one that several cards share is compressed once."""

    def __init__(self) -> None:
        self._uris: dict[int, str] = {}

    def tag(self, image: Image.Image, description: str) -> str:
        if id(image) not in self._uris:
            self._uris[id(image)] = _picture_uri(image)
        small = ' class="small"' if max(image.size) <= _SMALL_SIDE else ""
        return (
            f'<img{small} width="{image.width}" height="{image.height}" '
            f'alt="{escape(description)}" src="{self._uris[id(image)]}">'
        )


def _picture_uri(image: Image.Image) -> str:
    if max(image.size) > _SMALL_SIDE:
        return _data_uri("jpeg", encode_jpeg(image, _JPEG_QUALITY))
    buffer = io.BytesIO()
    picture = image if image.mode in ("RGB", "RGBA", "L") else image.convert("RGB")
    picture.save(buffer, format="PNG")
    return _data_uri("png", buffer.getvalue())


def _data_uri(kind: str, data: bytes) -> str:
    return f"data:image/{kind};base64," + base64.b64encode(data).decode("ascii")
