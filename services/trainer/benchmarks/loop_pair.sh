#!/usr/bin/env bash
# Is a loop with truncation and replay slower than the same one without? On one GPU:
#
#   loop_pair.sh MODEL_DIRECTORY FOLDER [STEPS] [further options of `keptset run`]
#
# MODEL_DIRECTORY has a tokenizer. Two runs, one after the other, that differ in top_p and top_k alone; then the
# table of loop_time.py. Engine and trainer share the GPU. KEPTSET is the command, if it is not `keptset`.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
model=$1; folder=$2; steps=${3:-12}; shift 2; [ $# -gt 0 ] && shift
mkdir -p "$folder"
for arm in plain replay; do
  sampling=(--orchestrator.train.sampling.top_p 0.97 --orchestrator.train.sampling.top_k 512)
  [ $arm = plain ] && sampling=(--orchestrator.train.sampling.top_p 1.0 --orchestrator.train.sampling.top_k -1)
  ${KEPTSET:-keptset} run "$here/loop.toml" --runs-dir "$folder" --name $arm --overwrite \
    --inference.model "$model" --orchestrator.steps "$steps" "${sampling[@]}" "$@"
done
"${PYTHON:-python3}" "$here/loop_time.py" "$folder/plain" "$folder/replay" --skip 4
