#!/usr/bin/env bash
# Runs all tests on a CPU: bash scripts/test.sh [pytest arguments]
#
# Sets up .venv from requirements.txt and requirements-dev.txt if no suitable Python is there;
# FASTER_R3_VENV names another environment to use or make.
set -euo pipefail

REPO_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=scripts/python_environment.sh
source "$REPO_ROOT/scripts/python_environment.sh"
PYTHON=""
prepare_python "$REPO_ROOT" "$REPO_ROOT/requirements.txt" "$REPO_ROOT/requirements-dev.txt"

cd "$REPO_ROOT"
export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES-}" # the tests are written for the CPU
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export WANDB_MODE=disabled
# Switches of the caller's shell would change what the tests see.
for name in ${!R3_@}; do
  unset "$name"
done
exec "$PYTHON" -m pytest "$@"
