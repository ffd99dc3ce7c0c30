#!/usr/bin/env bash
# The whole trainer on two CPU cores, with nothing but this repository: bash scripts/quickstart.sh
#
# Makes .venv, writes a tiny BAGEL checkpoint, starts the embedded reward service, runs the launcher
# on two ranks (8 RL steps, one evaluation, one checkpoint) and prints the run as a table. Launcher
# variables (TOTAL_STEPS=20, R3_RECIPE=upstream, ...) and trainer flags after the script's name win.
#
# With --learn [--seed N] the run is long enough to learn (about 6 minutes): it ends with a plot and
# the mean reward of the first and of the last tenth, and with status 1 if that has not risen by
# 0.15. LR=0 makes it the control, which must not rise. All seeds follow from N [0].
set -euo pipefail

REPO_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=scripts/python_environment.sh
source "$REPO_ROOT/scripts/python_environment.sh"

SERVICE_PID=""
SCRATCH=""
clean_up() {
  if [[ -n "$SERVICE_PID" ]]; then
    kill "$SERVICE_PID" 2>/dev/null || true
    wait "$SERVICE_PID" 2>/dev/null || true
  fi
  [[ -z "$SCRATCH" ]] || rm -rf "$SCRATCH"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

LEARN="" SEED=""
trainer_flags=()
while (($#)); do
  case "$1" in
    --learn) LEARN=1 ;;
    --seed)
      SEED="${2:-nothing}"
      shift $(($# > 1))
      ;;
    *) trainer_flags+=("$1") ;;
  esac
  shift
done
if [[ -n "$SEED" && ! ("$LEARN" && "$SEED" =~ ^[0-9]{1,6}$) ]]; then
  say "--seed $SEED: expected --learn --seed N, with N from 0 to 999999"
  exit 2
fi

# What makes a run learn in minutes: a prompt for each rank, many steps on few samples (twice the
# samples take almost three times as long), and thoughts drawn from the model's own distribution,
# since what TOP_P cuts off is never tried again. A tenth of the steps holds as many generate as
# refine steps if TOTAL_STEPS is a multiple of 20.
use_learning_settings() {
  SEED="$((10#${SEED:-0}))"
  CHECKPOINT_NAME="tiny_bagel_seed$SEED"
  GLOBAL_SEED="${GLOBAL_SEED:-$SEED}"
  DATA_SEED="${DATA_SEED:-$((1000 * SEED))}" # step n draws with DATA_SEED + n
  EXP_NAME="${EXP_NAME:-learn_seed${SEED}_$(date +%Y%m%d_%H%M%S)}"
  TOTAL_STEPS="${TOTAL_STEPS:-320}" EVAL_FREQ="${EVAL_FREQ:-0}" LR="${LR:-2e-4}"
  POLICY_GROUP_SIZE="${POLICY_GROUP_SIZE:-1}"
  export TOP_P="${TOP_P:-1}" TEXT_TEMPERATURE="${TEXT_TEMPERATURE:-1}"
  REPORT_EVERY=15 # odd, so that both stages are shown
}

CHECKPOINT_NAME=tiny_bagel SEED="${SEED:-0}" REPORT_EVERY=2
[[ -z "$LEARN" ]] || use_learning_settings
export GLOBAL_SEED DATA_SEED

PYTHON=""
prepare_python "$REPO_ROOT" "$REPO_ROOT/requirements.txt"
SCRATCH="$(mktemp -d)"
export LOG_DIR="${LOG_DIR:-$PWD/output}"
export PYTHONPATH="$REPO_ROOT${PYTHONPATH:+:$PYTHONPATH}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# The reward service is on this machine: no proxy may stand between.
export no_proxy="127.0.0.1,localhost${no_proxy:+,$no_proxy}"
mkdir -p "$LOG_DIR"

# A checkpoint of another run of this script is taken again; half a one never has the final name.
if [[ -z "${MODEL_PATH:-}" ]]; then
  export MODEL_PATH="$LOG_DIR/$CHECKPOINT_NAME"
  if [[ ! -d "$MODEL_PATH" ]]; then
    say "writing a tiny BAGEL checkpoint to $MODEL_PATH"
    "$PYTHON" -m tools.make_tiny_checkpoint "$SCRATCH/tiny_bagel" --seed "$SEED"
    mv "$SCRATCH/tiny_bagel" "$MODEL_PATH"
  fi
fi

# The embedded service judges colours, so the run gets the colour prompts.
select_prompts() {
  grep '"tag": *"colors"' "$REPO_ROOT/data/$1" >"$LOG_DIR/$2"
}
if [[ -z "${TRAIN_DATA_PATH:-}" ]]; then
  export TRAIN_DATA_PATH="$LOG_DIR/quickstart_train.jsonl"
  select_prompts rl_train/train_geneval.jsonl quickstart_train.jsonl
fi
if [[ -z "${VAL_DATA_PATH:-}" ]]; then
  export VAL_DATA_PATH="$LOG_DIR/quickstart_test.jsonl"
  select_prompts rl_test/test_geneval.jsonl quickstart_test.jsonl
fi

if [[ -z "${REWARD_URL:-}" ]]; then
  port_file="$SCRATCH/port"
  "$PYTHON" -m tools.reward_service --port 0 --port-file "$port_file" >"$SCRATCH/service.log" 2>&1 &
  SERVICE_PID=$!
  for ((tries = 0; tries < 300; tries++)); do
    [[ -f "$port_file" ]] && break
    kill -0 "$SERVICE_PID" 2>/dev/null || break
    sleep 0.2
  done
  if [[ ! -f "$port_file" ]]; then
    say "the reward service did not start:"
    cat "$SCRATCH/service.log" >&2
    exit 1
  fi
  REWARD_URL="http://127.0.0.1:$(<"$port_file")"
  export REWARD_URL
fi

free_port() {
  "$PYTHON" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}
if [[ -z "${TORCHRUN:-}" ]]; then
  # This interpreter's torchrun, wherever pip put the command.
  export TORCHRUN="$SCRATCH/torchrun"
  printf '#!/usr/bin/env bash\nexec %q -m torch.distributed.run "$@"\n' "$PYTHON" >"$TORCHRUN"
  chmod +x "$TORCHRUN"
fi
export EXP_NAME="${EXP_NAME:-quickstart_$(date +%Y%m%d_%H%M%S)}"
export WANDB_PROJECT="${WANDB_PROJECT:-R3}"
MASTER_PORT="${MASTER_PORT:-$(free_port)}"
export MASTER_PORT
export NPROC_PER_NODE="${NPROC_PER_NODE:-2}" POLICY_GROUP_SIZE="${POLICY_GROUP_SIZE:-2}"
export GROUP_SIZE="${GROUP_SIZE:-4}" R3_RECIPE="${R3_RECIPE:-consistent}"
export TOTAL_STEPS="${TOTAL_STEPS:-8}"
export SAVE_EVERY="${SAVE_EVERY:-$TOTAL_STEPS}" EVAL_FREQ="${EVAL_FREQ:-$TOTAL_STEPS}"
export LR="${LR:-1e-4}" WARMUP_STEPS="${WARMUP_STEPS:-2}"
export NUM_TIMESTEPS_GEN="${NUM_TIMESTEPS_GEN:-6}" NUM_TIMESTEPS_EDIT="${NUM_TIMESTEPS_EDIT:-6}"
export MAX_OUTPUT_TOKEN_N_GEN="${MAX_OUTPUT_TOKEN_N_GEN:-32}"
export MAX_OUTPUT_TOKEN_N_EDIT="${MAX_OUTPUT_TOKEN_N_EDIT:-48}"

status=0
bash "$REPO_ROOT/scripts/train_faster_r3_geneval.sh" --device cpu \
  --image_size 64 --vae_max_image_size 64 --vae_min_image_size 32 \
  --vit_max_image_size 112 --vit_min_image_size 56 \
  --eval_num_rounds 2 --eval_num_timesteps 6 --eval_prompts 8 --eval_batch_size 4 \
  --rollout_vis_step "$REPORT_EVERY" "${trainer_flags[@]}" || status=$?
RUN_DIR="$LOG_DIR/$WANDB_PROJECT/$EXP_NAME"
if ((status != 0)); then
  say "the trainer ended with status $status, see $RUN_DIR/console.log"
  exit "$status"
fi
echo
"$PYTHON" -m tools.summarize_run "$RUN_DIR"
if [[ -n "$LEARN" ]]; then
  echo
  "$PYTHON" -m tools.learning_curve "$RUN_DIR"
fi
