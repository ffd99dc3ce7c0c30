"""The flag machinery: collecting, parsing and checking, on a small config of its own."""

from dataclasses import dataclass

import pytest

from train.flags import ConfigError, check_value, collect_flags, convert, flag, parse_flags


@dataclass(frozen=True)
class Numbers:
    """A group for these tests."""

    count: int = flag(3, "how many", minimum=1, maximum=9)
    rate: float = flag(0.5, "how fast", above=0, below=1)
    port: int | None = flag(None, "where")


@dataclass(frozen=True)
class Words:
    """Another group for these tests."""

    colour: str = flag("red", "100% colour", choices=("red", "blue"))
    is_on: bool = flag(True, "on or off")


@dataclass(frozen=True)
class Config:
    """A config for these tests."""

    numbers: Numbers = Numbers()
    words: Words = Words()


FLAGS = collect_flags(Config)


def test_flags_carry_group_type_and_default():
    assert list(FLAGS) == ["count", "rate", "port", "colour", "is_on"]
    assert (FLAGS["port"].type, FLAGS["port"].optional) == (int, True)
    assert (FLAGS["colour"].group, FLAGS["colour"].default) == ("words", "red")


def test_two_flags_of_one_name_are_a_programming_error():
    @dataclass(frozen=True)
    class Twice:
        first: Numbers = Numbers()
        second: Numbers = Numbers()

    with pytest.raises(TypeError, match="two flags of one name"):
        collect_flags(Twice)


def test_last_flag_wins_and_both_forms_parse():
    argv = ["--count", "4", "--is_on=False", "--count", "5"]
    assert parse_flags(argv, FLAGS, "x") == {"count": "5", "is_on": "False"}


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--cuont", "4"], "--cuont is no flag, did you mean --count?"),
        (["--col", "red"], "--col is no flag"),
        (["--colours=red"], "--colours is no flag, did you mean --colour?"),
        (["4"], "'4' is no flag; flags look like"),
        (["--count"], "expected one argument"),
    ],
)
def test_bad_command_lines_are_refused(argv, message):
    with pytest.raises(ConfigError) as error:
        parse_flags(argv, FLAGS, "x")
    assert message in str(error.value) and "\n" not in str(error.value)


def test_help_shows_bounds_choices_and_defaults(capsys):
    with pytest.raises(SystemExit) as stop:
        parse_flags(["--help"], FLAGS, "x")
    text = " ".join(capsys.readouterr().out.split())
    assert stop.value.code == 0
    assert "how many; at least 1 and at most 9 [3]" in text
    assert "100% colour; one of red, blue [red]" in text and "where [empty]" in text


@pytest.mark.parametrize(
    "name, value, expected",
    [
        ("count", "7", 7),
        ("rate", "1e-3", 0.001),
        ("rate", 0, 0.0),
        ("port", "", None),
        ("port", None, None),
        ("port", "80", 80),
        ("is_on", "False", False),
        ("is_on", "1", True),
        ("colour", "", ""),
    ],
)
def test_values_convert(name, value, expected):
    converted = convert(FLAGS[name], value)
    assert converted == expected and type(converted) is type(expected)


@pytest.mark.parametrize(
    "name, value, word",
    [
        ("count", "2.5", "an integer"),
        ("count", "", "an integer"),
        ("count", True, "an integer"),
        ("count", 2.0, "an integer"),
        ("rate", "fast", "a number"),
        ("rate", True, "a number"),
        ("is_on", "maybe", "True or False"),
        ("is_on", 1, "True or False"),
        ("colour", 3, "text"),
    ],
)
def test_values_of_another_type_are_refused(name, value, word):
    with pytest.raises(ConfigError) as error:
        convert(FLAGS[name], value)
    assert str(error.value) == f"--{name} {value!r}: expected {word}"


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("count", 0, "--count 0: expected an integer at least 1 and at most 9"),
        ("count", 10, "--count 10: expected an integer at least 1 and at most 9"),
        ("rate", 0.0, "--rate 0.0: expected a number above 0 and below 1"),
        ("rate", 1.0, "--rate 1.0: expected a number above 0 and below 1"),
        ("rate", float("nan"), "--rate nan: expected a finite number"),
        ("rate", float("inf"), "--rate inf: expected a finite number"),
        ("colour", "green", "--colour 'green': expected one of red, blue"),
    ],
)
def test_values_out_of_range_are_refused(name, value, message):
    with pytest.raises(ConfigError) as error:
        check_value(FLAGS[name], value)
    assert str(error.value) == message


def test_values_in_range_pass():
    for name, value in [("count", 1), ("count", 9), ("rate", 0.999), ("port", None)]:
        check_value(FLAGS[name], value)
