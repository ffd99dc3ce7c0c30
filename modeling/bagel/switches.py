"""The one table of R3_* environment switches, and the reader that refuses what is not in it."""

import difflib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass

logger = logging.getLogger("faster_r3")

PREFIX = "R3_"
RECIPES = ("upstream", "consistent")
ATTENTION_BACKENDS = ("auto", "dense", "flex", "flash")
EXECUTION_MODES = ("auto", "eager", "exact", "fast")
TRUE_WORDS = ("1", "true", "yes", "on")
FALSE_WORDS = ("0", "false", "no", "off")


@dataclass(frozen=True)
class Switch:
    """One environment variable. `kind` is choice, bool, count or path; `default` is its text.

    `attribute` names the field of `Switches` that receives it; None marks a variable that another
    program reads (the reward server), which is known here only so that it is not refused.
    """

    name: str
    kind: str
    default: str
    attribute: str | None
    help: str
    choices: tuple[str, ...] = ()

    @property
    def allowed(self) -> str:
        """The allowed values in words, as error messages and help texts print them."""
        words = {"bool": "0 or 1", "count": "an integer of at least 1", "path": "a path or empty"}
        return words[self.kind] if self.kind in words else ", ".join(self.choices)


SWITCH_TABLE: tuple[Switch, ...] = (
    Switch(
        "R3_RECIPE",
        "choice",
        "upstream",
        "recipe",
        "upstream reproduces the original's numbers, consistent removes its rollout/learner gaps",
        RECIPES,
    ),
    Switch(
        "R3_LOAD_CONCURRENCY",
        "count",
        "8",
        "load_concurrency",
        "ranks that read the checkpoint at the same time",
    ),
    Switch(
        "R3_SOURCE_TREE",
        "path",
        "",
        "source_tree",
        "run the trainer of this other source tree (for baselines); empty runs this one",
    ),
    Switch(
        "R3_ATTENTION",
        "choice",
        "auto",
        "attention",
        "attention backend of the learner; auto takes dense masks on a CPU and flex on a GPU",
        ATTENTION_BACKENDS,
    ),
    Switch(
        "R3_EXECUTION",
        "choice",
        "auto",
        "execution",
        "eager turns all fusion off; exact keeps every bit of the eager path; fast may round "
        "differently; auto is exact on a GPU and eager on a CPU",
        EXECUTION_MODES,
    ),
    Switch("R3_FUSED_DECODE", "bool", "1", "fused_decode", "fused text decode and prefill"),
    Switch(
        "R3_FUSED_DECODE_STREAMS",
        "bool",
        "1",
        "fused_decode_streams",
        "few rows beside many, and small projections, on streams of their own",
    ),
    Switch("R3_FUSE_FLOW", "bool", "1", "fuse_flow", "fused image flow"),
    Switch("R3_FUSED_TRAIN_OPS", "bool", "1", "fused_train_ops", "fused training operators"),
    Switch(
        "R3_FUSE_TRAIN_SPLIT",
        "bool",
        "1",
        "fuse_train_split",
        "residual stream of the learner split by expert",
    ),
    Switch(
        "R3_FUSED_SWIGLU_CONTRACT",
        "bool",
        "1",
        "fused_swiglu_contract",
        "SwiGLU backward in one contraction",
    ),
    Switch("R3_REWARD_GPUS", "count", "8", None, "GPUs of the reward server (one worker each)"),
    Switch("R3_REWARD_BIND", "path", "127.0.0.1:18085", None, "address of the reward server"),
)

TRAINER_SWITCHES = tuple(switch for switch in SWITCH_TABLE if switch.attribute is not None)
FUSION_SWITCHES = (
    "R3_FUSED_DECODE",
    "R3_FUSED_DECODE_STREAMS",
    "R3_FUSE_FLOW",
    "R3_FUSED_TRAIN_OPS",
    "R3_FUSE_TRAIN_SPLIT",
    "R3_FUSED_SWIGLU_CONTRACT",
)
# Names move in here when the path behind them exists; until then the eager path runs.
BUILT_FUSIONS: frozenset[str] = frozenset(
    {"R3_FUSED_DECODE", "R3_FUSED_DECODE_STREAMS", "R3_FUSE_FLOW"}
)
BUILT_ATTENTION: frozenset[str] = frozenset({"auto", "dense", "flex"})


@dataclass(frozen=True)
class Switches:
    """The switches of one run, parsed. Fields and defaults are those of `SWITCH_TABLE`."""

    recipe: str = "upstream"
    load_concurrency: int = 8
    source_tree: str = ""
    attention: str = "auto"
    execution: str = "auto"
    fused_decode: bool = True
    fused_decode_streams: bool = True
    fuse_flow: bool = True
    fused_train_ops: bool = True
    fuse_train_split: bool = True
    fused_swiglu_contract: bool = True

    def execution_on(self, device_type: str) -> str:
        """The grade that runs on `device_type`: eager, or on a GPU also exact and fast."""
        if device_type != "cuda":
            return "eager"
        return "exact" if self.execution == "auto" else self.execution

    def attention_on(self, device_type: str) -> str:
        """The learner's attention backend that runs on `device_type`: dense or flex."""
        if device_type != "cuda":
            return "dense"
        return self.attention if self.attention in ("dense", "flex") else "flex"

    def is_active(self, name: str, device_type: str) -> bool:
        """Whether the fusion switch `name` takes effect on `device_type`."""
        if name not in FUSION_SWITCHES:
            raise ValueError(f"{name} is no fusion switch, expected one of {FUSION_SWITCHES}")
        on = getattr(self, _find(name).attribute)
        return on and name in BUILT_FUSIONS and self.execution_on(device_type) != "eager"


def process_environment() -> Mapping[str, str]:
    """The environment of this process, for readers that take theirs as an argument."""
    return os.environ


def read_switches(environ: Mapping[str, str] | None = None) -> Switches:
    """Parses the R3_* variables of `environ` (the process's own environment by default).

    An empty value counts as unset. Raises ValueError for a name that is not in the table and for a
    value that is not allowed, naming what is.
    """
    environ = process_environment() if environ is None else environ
    names = [switch.name for switch in SWITCH_TABLE]
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in names:
            raise ValueError(f"{name} is no switch of this trainer{did_you_mean(name, names)}")
    values = {}
    for switch in TRAINER_SWITCHES:
        text = environ.get(switch.name, "") or switch.default
        values[switch.attribute] = _parse(switch, text)
    return Switches(**values)


def explain_inactive(switches: Switches, device_type: str) -> list[str]:
    """One line for each reason why a switch that is on has no effect on `device_type`.

    Nothing is said about fusion switches when R3_EXECUTION=eager asked for the eager path.
    """
    lines = []
    on = [name for name in FUSION_SWITCHES if getattr(switches, _find(name).attribute)]
    if device_type != "cuda":
        if switches.execution in ("exact", "fast"):
            on.insert(0, f"R3_EXECUTION={switches.execution}")
        if on and switches.execution != "eager":
            lines.append(_inactive(on, f"it needs a GPU and this run is on {device_type}"))
        if switches.attention in ("flex", "flash"):
            lines.append(
                f"R3_ATTENTION={switches.attention} has no effect: it needs a GPU and this run is "
                f"on {device_type}; dense masks are used"
            )
        return lines
    missing = [name for name in on if name not in BUILT_FUSIONS]
    if missing and switches.execution != "eager":
        lines.append(_inactive(missing, "it is not built yet"))
    if switches.attention not in BUILT_ATTENTION:
        lines.append(
            f"R3_ATTENTION={switches.attention} has no effect: it is not built yet; "
            f"auto is used (set one of {', '.join(sorted(BUILT_ATTENTION))})"
        )
    return lines


_already_said: set[str] = set()


def log_inactive_once(switches: Switches, device_type: str) -> None:
    """Logs every line of `explain_inactive` that this process has not logged before."""
    for line in explain_inactive(switches, device_type):
        if line not in _already_said:
            _already_said.add(line)
            logger.info(line)


def did_you_mean(word: str, known: list[str]) -> str:
    """A closing phrase for an error about the unknown `word`: the closest known one, or all."""
    close = difflib.get_close_matches(word, known, n=1)
    if close:
        return f", did you mean {close[0]}?"
    return f"; known: {', '.join(known)}" if len(known) <= 20 else "; --help lists all"


def parse_bool(text: str) -> bool | None:
    """True or False for 1/0, true/false, yes/no, on/off in any case; None for anything else."""
    word = text.strip().lower()
    if word in TRUE_WORDS:
        return True
    return False if word in FALSE_WORDS else None


def _find(name: str) -> Switch:
    return next(switch for switch in SWITCH_TABLE if switch.name == name)


def _inactive(names: list[str], reason: str) -> str:
    return f"{', '.join(names)}: on but without effect, {reason}; the eager path runs"


def _parse(switch: Switch, text: str) -> str | int | bool:
    value: str | int | bool | None = text
    if switch.kind == "choice":
        value = text if text in switch.choices else None
    elif switch.kind == "bool":
        value = parse_bool(text)
    elif switch.kind == "count":
        value = int(text) if text.isdecimal() and text.isascii() and int(text) >= 1 else None
    if value is None:
        flag = f"--{switch.name.lower()}"
        raise ValueError(f"{switch.name} ({flag}) is {text!r}, expected {_expected(switch)}")
    return value


def _expected(switch: Switch) -> str:
    return f"one of {switch.allowed}" if switch.kind == "choice" else switch.allowed
