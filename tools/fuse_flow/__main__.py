"""Fused operators at the image flow's and the pictures' shapes and at odd ones, then timed."""

import sys

from tools.operator_cases import picture_cases
from tools.operator_check import main

ROWS = (0, 1, 3, 63, 64, 100, 512, 1023, 1024, 4096, 4104, 8192, 12288)
TIMED_ROWS = (1024, 4096, 12288)

if __name__ == "__main__":
    sys.exit(main(__doc__, ROWS, TIMED_ROWS, picture_cases))
