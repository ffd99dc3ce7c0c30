"""Fused operators at the text decode's and prefill's shapes, against their twins, then timed."""

import sys
from collections.abc import Iterator
from itertools import chain

from tools.draw_cases import draw_cases
from tools.operator_cases import Case
from tools.operator_check import main
from tools.top_cases import top_cases
from tools.turn_cases import turn_cases

ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 63, 197, 228)
TIMED_ROWS = (1, 4, 228)


def more_cases() -> Iterator[Case]:
    """Whole turns, what their draws begin with, and the draws."""
    return chain(turn_cases(), top_cases(), draw_cases())


if __name__ == "__main__":
    sys.exit(main(__doc__, ROWS, TIMED_ROWS, more_cases))
