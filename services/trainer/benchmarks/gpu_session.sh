#!/usr/bin/env bash
# Everything of the trainer that only GPUs can show, in about eight minutes on one or two H200:
#
#   gpu_session.sh OUTPUT_FOLDER [PYTHON] [extra arguments of step.py, such as --prime-rl FILE]
#
# Runs in a checkout, over its sources; the packages they import must be there (torch, transformers, msgspec,
# pydantic-settings ...). Each part is bounded and leaves its results as soon as they are there; the last lines
# are the table.
set -uo pipefail
cd "$(dirname "$0")/../../.."
out=$(mkdir -p "$1" && cd "$1" && pwd); python=${2:-python3}; shift; [ $# -gt 0 ] && shift
for source in libs/kept_tokens libs/kept_loss libs/settings services/trainer; do
  PYTHONPATH=$PWD/$source/src:${PYTHONPATH:-}
done
export PYTHONPATH PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export GLOO_SOCKET_IFNAME=lo NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 CUBLAS_WORKSPACE_CONFIG=:4096:8
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-/tmp/keptset-inductor}
# a source tree has no metadata to read the version from
if ! "$python" -c 'import importlib.metadata as m; m.version("keptset-trainer")' 2>/dev/null; then
  metadata=$(mktemp -d); mkdir "$metadata/keptset_trainer-0.1.0.dist-info"
  printf 'Metadata-Version: 2.1\nName: keptset-trainer\nVersion: 0.1.0\n' > "$metadata/keptset_trainer-0.1.0.dist-info/METADATA"
  export PYTHONPATH=$PYTHONPATH:$metadata
fi
bench=services/trainer/benchmarks
options=${BENCH_OPTIONS:-}  # "--device cpu --tiny" tries this script without a GPU
gpus=${GPUS:-$("$python" -c 'import torch; print(torch.cuda.device_count())')}
many=("$python" -m torch.distributed.run --standalone --nproc-per-node "$gpus")
part() { echo "== $1 ($SECONDS s)"; shift; timeout "$@" 2>&1 | grep -v -e 'Writing model shards' -e 'Loading weights'; }

part "attention kernels" 45 "$python" $bench/attention.py --output "$out/attention.json" $options
part "one GPU" 215 "$python" $bench/step.py --output "$out/step.json" \
  --kernels "$out/attention.json" --budget-seconds "${STEP_SECONDS:-190}" $options "$@"
part "parity, one GPU" 60 "$python" $bench/parity.py --folder "$out/parity" $options
part "tests that need a GPU" 120 "$python" -m pytest -q -c /dev/null --rootdir=. -p no:cacheprovider \
  --import-mode=importlib services/trainer/tests/test_cuda.py services/trainer/tests/test_many_tensors.py
if [ "$gpus" -gt 1 ]; then
  part "$gpus GPUs" 170 "${many[@]}" $bench/step.py --output "$out/step.json" --append --budget-seconds 150 \
    --kernels "$out/attention.json" $options
  part "parity, $gpus GPUs" 75 "${many[@]}" $bench/parity.py --folder "$out/parity" $options
fi
cp "$out/parity/parity.json" "$out/" 2>/dev/null; rm -rf "$out/parity"  # the rest is checkpoints
"$python" - "$out/parity.json" <<'PYTHON'
import json, pathlib, sys
path = pathlib.Path(sys.argv[1])
rows = json.loads(path.read_bytes()) if path.exists() else []
print("parity:", sum(row["good"] for row in rows), "of", len(rows), "good", *[row for row in rows if not row["good"]])
PYTHON
"$python" $bench/step.py --report "$out/step.json"
echo "== $SECONDS s in all"
