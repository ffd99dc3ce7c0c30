# Sourced by quickstart.sh, test.sh and .ci/run: finds or makes a Python that runs the project.
# shellcheck shell=bash
#
#   prepare_python REPO_ROOT REQUIREMENTS_FILE...    sets PYTHON to the interpreter's path
#
# In this order: the environment of FASTER_R3_VENV, REPO_ROOT/.venv, a Python on the PATH that
# imports everything already, a new environment (in FASTER_R3_VENV if set, else in .venv).

REQUIRED_MODULES=(torch torchvision transformers safetensors numpy requests wandb PIL tqdm matplotlib)

say() {
  echo "faster-r3: $*" >&2
}

# Whether the interpreter $1 is Python 3.10 or newer and finds the modules after it. It looks for
# them without importing: that takes seconds for each of the large ones.
python_has() {
  local python="$1"
  shift
  "$python" - "$@" >/dev/null 2>&1 <<'PYTHON'
import importlib.metadata
import importlib.util
import sys

ok = sys.version_info >= (3, 10) and all(importlib.util.find_spec(name) for name in sys.argv[1:])
if ok and "torch" in sys.argv:
    version = importlib.metadata.version("torch").split("+")[0].split(".")
    ok = (2, 9) <= (int(version[0]), int(version[1])) < (2, 15)
sys.exit(0 if ok else 1)
PYTHON
}

# The interpreters to try, newest supported first; 3.13 and later only when there is no other.
list_pythons() {
  local name
  for name in python3.12 python3.11 python3.10 python3 python; do
    # Asked for its own path: version managers put wrappers on the PATH that may not start.
    "$name" -c 'import sys; print(sys.executable)' 2>/dev/null || true
  done
}

requirements_stamp() {
  cat "$@" | sha256sum | cut -d ' ' -f 1
}

# Installs into a new environment in $1 from the requirement files after it.
make_environment() {
  local folder="$1" base="" python
  shift
  while IFS= read -r python; do
    if python_has "$python"; then
      base="$python"
      break
    fi
  done < <(list_pythons)
  if [[ -z "$base" ]]; then
    say "no Python 3.10 or newer found: install one (Debian or Ubuntu: apt install python3 python3-venv)"
    return 1
  fi
  if [[ ! -x "$folder/bin/python" ]]; then
    if ! python_has "$base" venv ensurepip; then
      say "$base cannot make virtual environments: apt install python3-venv (Debian or Ubuntu), then run this again"
      return 1
    fi
    say "making $folder with $("$base" --version)"
    if "$base" -c 'import sys; sys.exit(sys.version_info < (3, 13))'; then
      say "note: the project is tested with Python 3.10 to 3.12"
    fi
    "$base" -m venv "$folder" || return 1
  fi
  say "installing ${*##*/} into $folder (torch is large, this takes minutes the first time)"
  local arguments=() file
  for file in "$@"; do
    arguments+=(-r "$file")
  done
  "$folder/bin/python" -m pip install --quiet --disable-pip-version-check "${arguments[@]}" || {
    say "pip failed, see above; remove $folder to start afresh"
    return 1
  }
  requirements_stamp "$@" >"$folder/.faster_r3_requirements"
}

prepare_python() {
  local root="$1" folder modules=("${REQUIRED_MODULES[@]}")
  shift
  local files=("$@") file python
  for file in "${files[@]}"; do
    [[ "${file##*/}" == requirements-dev.txt ]] && modules+=(pytest ruff flask gunicorn)
  done
  folder="${FASTER_R3_VENV:-$root/.venv}"
  PYTHON="$folder/bin/python"
  if [[ -x "$PYTHON" ]]; then
    local stamp="$folder/.faster_r3_requirements"
    if [[ -f "$stamp" && "$(<"$stamp")" == "$(requirements_stamp "${files[@]}")" ]]; then
      return 0
    fi
    python_has "$PYTHON" "${modules[@]}" && return 0
  elif [[ -z "${FASTER_R3_VENV:-}" ]]; then
    while IFS= read -r python; do
      if python_has "$python" "${modules[@]}"; then
        PYTHON="$python"
        return 0
      fi
    done < <(list_pythons)
  fi
  make_environment "$folder" "${files[@]}"
}
