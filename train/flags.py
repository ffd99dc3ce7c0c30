"""Command-line flags built from documented dataclass fields: collect, parse, check, suggest."""

import argparse
import dataclasses
import math
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from modeling.bagel.switches import TRAINER_SWITCHES, did_you_mean, parse_bool

_TYPE_WORDS = {int: "an integer", float: "a number", bool: "True or False", str: "text"}
_SWITCH_TYPES = {"choice": str, "path": str, "bool": bool, "count": int}


class ConfigError(ValueError):
    """A setting that cannot work. One line that names the flag and what is allowed."""


@dataclass(frozen=True)
class FlagInfo:
    """What is known of a flag beside its type and default: help, allowed values, bounds."""

    help: str
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    below: float | None = None

    @property
    def bounds(self) -> str:
        """The allowed range in words, empty when there is none."""
        parts = []
        for word, bound in (
            ("at least", self.minimum),
            ("above", self.above),
            ("at most", self.maximum),
            ("below", self.below),
        ):
            if bound is not None:
                parts.append(f"{word} {bound}")
        return " and ".join(parts)

    def admits(self, number: float) -> bool:
        """Whether a finite number lies inside all bounds."""
        return (
            (self.minimum is None or number >= self.minimum)
            and (self.above is None or number > self.above)
            and (self.maximum is None or number <= self.maximum)
            and (self.below is None or number < self.below)
        )


@dataclass(frozen=True)
class Flag:
    """One command-line flag and the config field behind it (`config.<group>.<attribute>`)."""

    name: str
    group: str
    attribute: str
    type: type
    optional: bool
    default: object
    info: FlagInfo


def flag(default: object, help: str, **limits: object) -> typing.Any:
    """A dataclass field that becomes a flag. `limits` are the other fields of `FlagInfo`."""
    return field(default=default, metadata={"flag": FlagInfo(help, **limits)})


def collect_flags(config_class: type) -> dict[str, Flag]:
    """All flags of a config class whose fields are groups (dataclasses of `flag` fields).

    The group `switches` comes from the switch table: R3_RECIPE is --r3_recipe.
    """
    flags: list[Flag] = []
    for group in dataclasses.fields(config_class):
        group_class = typing.get_type_hints(config_class)[group.name]
        if group.name == "switches":
            flags += _switch_flags(group_class)
            continue
        hints = typing.get_type_hints(group_class)
        for entry in dataclasses.fields(group_class):
            kind, optional = _strip_optional(hints[entry.name])
            info = entry.metadata["flag"]
            flags.append(
                Flag(entry.name, group.name, entry.name, kind, optional, entry.default, info)
            )
    named = {entry.name: entry for entry in flags}
    if len(named) != len(flags):
        raise TypeError(f"{config_class.__name__} has two flags of one name")
    return named


def parse_flags(argv: Sequence[str], flags: Mapping[str, Flag], description: str) -> dict[str, str]:
    """The flags that `argv` gives, as text; the last one wins. --help prints and exits.

    Raises ConfigError for an unknown flag (with the closest known one) and for a missing value.
    """
    parser = _Parser(description=description, allow_abbrev=False)
    sections = {}
    for entry in flags.values():
        if entry.group not in sections:
            sections[entry.group] = parser.add_argument_group(entry.group)
        sections[entry.group].add_argument(
            f"--{entry.name}",
            help=_help_text(entry),
            metavar="VALUE",
            default=argparse.SUPPRESS,
        )
    known, unknown = parser.parse_known_args(list(argv))
    if unknown:
        word = unknown[0].split("=")[0]
        if not word.startswith("--"):
            raise ConfigError(f"{word!r} is no flag; flags look like --group_size 16")
        raise ConfigError(f"{word} is no flag{did_you_mean(word, [f'--{name}' for name in flags])}")
    return vars(known)


def convert(entry: Flag, value: object) -> object:
    """`value` (text, or already a Python value) as the type of the flag.

    An empty text is None for an optional flag. Raises ConfigError naming the flag.
    """
    if entry.optional and (value is None or value == ""):
        return None
    converted = _from_text(entry.type, value) if isinstance(value, str) else value
    if entry.type is float and isinstance(converted, int) and not isinstance(converted, bool):
        converted = float(converted)
    is_bool_as_number = isinstance(converted, bool) and entry.type is not bool
    if not isinstance(converted, entry.type) or is_bool_as_number:
        raise ConfigError(f"--{entry.name} {value!r}: expected {_TYPE_WORDS[entry.type]}")
    return converted


def check_value(entry: Flag, value: object) -> None:
    """Raises ConfigError when a converted value is not among the allowed ones."""
    info = entry.info
    if value is None:
        return
    if info.choices and value not in info.choices:
        allowed = ", ".join(info.choices)
        raise ConfigError(f"--{entry.name} {value!r}: expected one of {allowed}")
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if not math.isfinite(value):
            raise ConfigError(f"--{entry.name} {value}: expected a finite number")
        if not info.admits(value):
            word = _TYPE_WORDS[entry.type]
            raise ConfigError(f"--{entry.name} {value}: expected {word} {info.bounds}")


class _Parser(argparse.ArgumentParser):
    """An argument parser that raises instead of printing its usage and exiting."""

    def error(self, message: str) -> typing.NoReturn:
        raise ConfigError(message)


def _from_text(kind: type, text: str) -> object:
    """The parsed text, or the text itself when it does not parse (the caller then refuses it)."""
    if kind is bool:
        parsed = parse_bool(text)
        return text if parsed is None else parsed
    try:
        return kind(text)
    except ValueError:
        return text


def _strip_optional(hint: object) -> tuple[type, bool]:
    if isinstance(hint, types.UnionType):
        (kind,) = (part for part in typing.get_args(hint) if part is not type(None))
        return kind, True
    return hint, False


def _switch_flags(group_class: type) -> list[Flag]:
    defaults = {entry.name: entry.default for entry in dataclasses.fields(group_class)}
    return [
        Flag(
            switch.name.lower(),
            "switches",
            switch.attribute,
            _SWITCH_TYPES[switch.kind],
            False,
            defaults[switch.attribute],
            FlagInfo(f"{switch.help} (or the variable {switch.name})", switch.choices),
        )
        for switch in TRAINER_SWITCHES
    ]


def _help_text(entry: Flag) -> str:
    text = entry.info.help
    if entry.info.choices:
        text += f"; one of {', '.join(entry.info.choices)}"
    elif entry.info.bounds:
        text += f"; {entry.info.bounds}"
    default = "empty" if entry.default in ("", None) else entry.default
    return f"{text} [{default}]".replace("%", "%%")
