#!/usr/bin/env bash
# Trains BAGEL with R3 on GenEval prompts: torchrun over train/online_rl.py.
#
#   MODEL_PATH=/path/to/BAGEL-7B-MoT bash scripts/train_faster_r3_geneval.sh [--flag value ...]
#
# Every setting below is an environment variable with a default; only MODEL_PATH is required. Flags
# after the script's name reach the trainer as they are and win over the variables; `--help` lists
# them all. Output goes to the terminal and to LOG_DIR/WANDB_PROJECT/EXP_NAME/.
set -euo pipefail

REPO_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

fail() {
  echo "train_faster_r3_geneval.sh: $*" >&2
  exit 2
}

# paths
LOG_DIR="${LOG_DIR:-./output}"
TRAIN_DATA_PATH="${TRAIN_DATA_PATH:-$REPO_ROOT/data/rl_train/train_geneval.jsonl}"
VAL_DATA_PATH="${VAL_DATA_PATH:-}" # default: the first 8 test prompts, written below
DATASET_NAME="${DATASET_NAME:-geneval}"
EXP_NAME="${EXP_NAME:-}" # default: faster_r3_ and the date, set below
WANDB_PROJECT="${WANDB_PROJECT:-R3}"
WANDB_NAME="${WANDB_NAME:-}"
RESUME_FROM="${RESUME_FROM:-}"
AUTO_RESUME="${AUTO_RESUME:-False}"
# processes
NNODES="${NNODES:-1}"
NODE_RANK="${NODE_RANK:-0}"
NPROC_PER_NODE="${NPROC_PER_NODE:-8}"
MASTER_ADDR="${MASTER_ADDR:-localhost}"
MASTER_PORT="${MASTER_PORT:-29509}"
NUM_SHARD="${NUM_SHARD:-8}"
# rewards; REWARD_API_KEY stays in the environment, since `ps` shows flags to everyone
REWARD_URL="${REWARD_URL:-http://127.0.0.1:18085}"
REWARD_FN="${REWARD_FN:-geneval}"
REWARD_MODEL_NAME="${REWARD_MODEL_NAME:-}"
FORMAT_REWARD_WEIGHT="${FORMAT_REWARD_WEIGHT:-1.0}"
export REWARD_API_KEY="${REWARD_API_KEY:-}"
# schedule
TOTAL_STEPS="${TOTAL_STEPS:-1000}"
SAVE_EVERY="${SAVE_EVERY:-50}"
EVAL_FREQ="${EVAL_FREQ:-50}"
LR="${LR:-5e-6}"
WARMUP_STEPS="${WARMUP_STEPS:-10}"
# RL
ROUNDS="${ROUNDS:-2}"
GROUP_SIZE="${GROUP_SIZE:-16}"
POLICY_GROUP_SIZE="${POLICY_GROUP_SIZE:-4}"
CE_WEIGHT="${CE_WEIGHT:-1}"
MSE_WEIGHT="${MSE_WEIGHT:-2}"
KL_WEIGHT_TEXT="${KL_WEIGHT_TEXT:-0.001}"
KL_WEIGHT_IMAGE="${KL_WEIGHT_IMAGE:-0.001}"
TUNE_TEXT_COT="${TUNE_TEXT_COT:-True}"
TUNE_IMAGE_COT="${TUNE_IMAGE_COT:-True}"
FREEZE_VIT="${FREEZE_VIT:-True}"
FREEZE_UND="${FREEZE_UND:-False}"
# sampling
THINK_MODE="${THINK_MODE:-True}"
MAX_OUTPUT_TOKEN_N_GEN="${MAX_OUTPUT_TOKEN_N_GEN:-196}"
MAX_OUTPUT_TOKEN_N_EDIT="${MAX_OUTPUT_TOKEN_N_EDIT:-384}"
TEXT_TEMPERATURE="${TEXT_TEMPERATURE:-0.9}"
TOP_K="${TOP_K:-50}"
TOP_P="${TOP_P:-0.9}"
NUM_TIMESTEPS_GEN="${NUM_TIMESTEPS_GEN:-16}"
NUM_TIMESTEPS_EDIT="${NUM_TIMESTEPS_EDIT:-21}"
ETA_MODE="${ETA_MODE:-monotonic}"
CONSTANT_ETA_GEN="${CONSTANT_ETA_GEN:-0.7}"
CONSTANT_ETA_EDIT="${CONSTANT_ETA_EDIT:-1.0}"
CFG_TEXT_SCALE="${CFG_TEXT_SCALE:-4.0}"
CFG_IMG_SCALE="${CFG_IMG_SCALE:-1.5}"
CFG_RENORM_TYPE_GEN="${CFG_RENORM_TYPE_GEN:-global}"
CFG_RENORM_TYPE_EDIT="${CFG_RENORM_TYPE_EDIT:-text_channel}"
ENABLE_SDE_GEN="${ENABLE_SDE_GEN:-True}"
ENABLE_SDE_EDIT="${ENABLE_SDE_EDIT:-True}"
# seeds
GLOBAL_SEED="${GLOBAL_SEED:-4396}"
DATA_SEED="${DATA_SEED:-42}"
# behaviour and fusion
R3_RECIPE="${R3_RECIPE:-upstream}"
R3_LOAD_CONCURRENCY="${R3_LOAD_CONCURRENCY:-8}"
R3_SOURCE_TREE="${R3_SOURCE_TREE:-}"
R3_ATTENTION="${R3_ATTENTION:-auto}"
R3_EXECUTION="${R3_EXECUTION:-auto}"
R3_FUSED_DECODE="${R3_FUSED_DECODE:-1}"
R3_FUSED_DECODE_STREAMS="${R3_FUSED_DECODE_STREAMS:-1}"
R3_FUSE_FLOW="${R3_FUSE_FLOW:-1}"
R3_FUSED_TRAIN_OPS="${R3_FUSED_TRAIN_OPS:-1}"
R3_FUSE_TRAIN_SPLIT="${R3_FUSE_TRAIN_SPLIT:-1}"
R3_FUSED_SWIGLU_CONTRACT="${R3_FUSED_SWIGLU_CONTRACT:-1}"

# The program that runs the ranks: on the PATH, else in the project's own environment.
find_torchrun() {
  if [[ -n "${TORCHRUN:-}" ]]; then
    command -v "$TORCHRUN" || fail "TORCHRUN=$TORCHRUN is no program"
  elif command -v torchrun; then
    return
  elif [[ -x "$REPO_ROOT/.venv/bin/torchrun" ]]; then
    echo "$REPO_ROOT/.venv/bin/torchrun"
  else
    fail "torchrun not found: activate the environment, or set TORCHRUN (see training.md)"
  fi
}

# The command in a form that can be pasted, an API key in it blotted out.
print_command() {
  local argument hide_next=0
  printf 'Running'
  for argument in "$@"; do
    if ((hide_next)); then
      argument='<redacted>'
    fi
    hide_next=0
    case "$argument" in
      --reward_api_key) hide_next=1 ;;
      --reward_api_key=*) argument='--reward_api_key=<redacted>' ;;
    esac
    printf ' %q' "$argument"
  done
  printf '\n'
}

# The processes that torchrun has started on this machine.
rank_pids() {
  cat "/proc/$TORCHRUN_PID"/task/*/children 2>/dev/null || true
}

# Hands a SIGTERM to the ranks, which finish their step, save and end. torchrun would be in a hurry:
# it kills them 30 s after its own SIGTERM. Before it has started any, it gets the signal itself.
on_term() {
  local ranks
  ranks="$(rank_pids)"
  was_signalled=1
  # shellcheck disable=SC2086 # several numbers
  kill -TERM ${ranks:-$TORCHRUN_PID} 2>/dev/null || true
}

# A Ctrl-C reaches torchrun and the ranks by itself; only a torchrun that has just been started in
# the background does not listen to it yet.
on_int() {
  was_signalled=1
  [[ -n "$(rank_pids)" ]] || kill -TERM "$TORCHRUN_PID" 2>/dev/null || true
}

# One evaluation prompt for each of 8 ranks. Written beside and moved, nodes may share LOG_DIR.
write_validation_prompts() {
  local source="$REPO_ROOT/data/rl_test/test_geneval.jsonl"
  [[ -f "$source" ]] || fail "$source is missing: set VAL_DATA_PATH, or write it with data/make_geneval.py"
  VAL_DATA_PATH="$LOG_DIR/val_geneval_first8.jsonl"
  head -n 8 "$source" >"$VAL_DATA_PATH.$$"
  mv -f "$VAL_DATA_PATH.$$" "$VAL_DATA_PATH"
}

# Threads of one rank's CPU work: the cores divided among the ranks, 4 at most.
default_threads() {
  local cores threads
  cores="$(nproc 2>/dev/null || echo 4)"
  threads=$((cores / NPROC_PER_NODE))
  ((threads < 1)) && threads=1
  ((threads > 4)) && threads=4
  echo "$threads"
}

[[ -n "${MODEL_PATH:-}" ]] ||
  fail "MODEL_PATH is required: the folder of a BAGEL checkpoint (MODEL_PATH=/path/to/BAGEL-7B-MoT)"
for name in NNODES NODE_RANK NPROC_PER_NODE MASTER_PORT; do
  [[ "${!name}" =~ ^[0-9]+$ ]] || fail "$name is '${!name}', expected a whole number"
done
((NNODES >= 1 && NPROC_PER_NODE >= 1)) || fail "NNODES and NPROC_PER_NODE must be at least 1"
((NODE_RANK < NNODES)) || fail "NODE_RANK is $NODE_RANK, expected less than NNODES ($NNODES)"
if [[ -z "$EXP_NAME" ]]; then
  ((NNODES == 1)) || fail "EXP_NAME is required with NNODES=$NNODES, so that all nodes share a run folder"
  EXP_NAME="faster_r3_$(date +%Y%m%d_%H%M%S)"
fi
TREE="${R3_SOURCE_TREE:-$REPO_ROOT}"
[[ -f "$TREE/train/online_rl.py" ]] || fail "$TREE/train/online_rl.py is missing (R3_SOURCE_TREE)"
TORCHRUN_PATH="$(find_torchrun)"

RUN_DIR="$LOG_DIR/$WANDB_PROJECT/$EXP_NAME"
mkdir -p "$RUN_DIR" || fail "LOG_DIR: cannot create $RUN_DIR"
[[ -n "$VAL_DATA_PATH" ]] || write_validation_prompts

command=(
  "$TORCHRUN_PATH"
  --nnodes "$NNODES" --node_rank "$NODE_RANK" --nproc_per_node "$NPROC_PER_NODE"
  --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT"
  "$TREE/train/online_rl.py"
)
variables=(
  MODEL_PATH LOG_DIR TRAIN_DATA_PATH VAL_DATA_PATH DATASET_NAME EXP_NAME WANDB_PROJECT WANDB_NAME
  RESUME_FROM AUTO_RESUME
  NNODES NODE_RANK NPROC_PER_NODE MASTER_ADDR MASTER_PORT NUM_SHARD
  REWARD_URL REWARD_FN REWARD_MODEL_NAME FORMAT_REWARD_WEIGHT
  TOTAL_STEPS SAVE_EVERY EVAL_FREQ LR WARMUP_STEPS
  ROUNDS GROUP_SIZE POLICY_GROUP_SIZE CE_WEIGHT MSE_WEIGHT KL_WEIGHT_TEXT KL_WEIGHT_IMAGE
  TUNE_TEXT_COT TUNE_IMAGE_COT FREEZE_VIT FREEZE_UND
  THINK_MODE MAX_OUTPUT_TOKEN_N_GEN MAX_OUTPUT_TOKEN_N_EDIT TEXT_TEMPERATURE TOP_K TOP_P
  NUM_TIMESTEPS_GEN NUM_TIMESTEPS_EDIT ETA_MODE CONSTANT_ETA_GEN CONSTANT_ETA_EDIT
  CFG_TEXT_SCALE CFG_IMG_SCALE CFG_RENORM_TYPE_GEN CFG_RENORM_TYPE_EDIT
  ENABLE_SDE_GEN ENABLE_SDE_EDIT
  GLOBAL_SEED DATA_SEED
  R3_RECIPE R3_LOAD_CONCURRENCY R3_SOURCE_TREE R3_ATTENTION R3_EXECUTION
  R3_FUSED_DECODE R3_FUSED_DECODE_STREAMS R3_FUSE_FLOW
  R3_FUSED_TRAIN_OPS R3_FUSE_TRAIN_SPLIT R3_FUSED_SWIGLU_CONTRACT
)
for name in "${variables[@]}"; do
  # `--name=value`, so that an empty or negative value is not taken for a missing one.
  command+=("--${name,,}=${!name}")
done
command+=("$@")

export PYTHONPATH="$TREE${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1
export WANDB_MODE="${WANDB_MODE:-offline}"
OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(default_threads)}"
export OMP_NUM_THREADS

CONSOLE_LOG="$RUN_DIR/console.log"
((NODE_RANK == 0)) || CONSOLE_LOG="$RUN_DIR/console_node$NODE_RANK.log"
touch "$CONSOLE_LOG" # a resumed run appends
old_bytes="$(stat -c %s "$CONSOLE_LOG")"
# In the background, since bash handles a signal only when a foreground command has ended. `tee -i`
# outlives a Ctrl-C, which reaches all of them by itself, so the last lines are kept.
exec 3> >(exec tee -i -a "$CONSOLE_LOG")
TEE_PID=$!
print_command "${command[@]}" >&3
"${command[@]}" >&3 2>&1 3>&- &
TORCHRUN_PID=$!
trap on_term TERM
trap on_int INT
was_signalled=1
while ((was_signalled)); do # a signal ends `wait` early
  was_signalled=0
  status=0
  wait "$TORCHRUN_PID" || status=$?
done
exec 3>&-
wait "$TEE_PID" || true
if ((status != 0)); then
  # torchrun ends with a traceback of its own; the trainer's first error is what matters.
  error="$(tail -c "+$((old_bytes + 1))" "$CONSOLE_LOG" | grep -m 1 '^error: ' || true)"
  echo "${error:-error: torchrun ended with status $status}" | tee -a "$CONSOLE_LOG" >&2
fi
exit "$status"
