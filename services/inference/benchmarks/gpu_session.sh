#!/usr/bin/env bash
# What only GPUs can show of inference, in parts that end by themselves:
#
#   gpu_session.sh PART OUTPUT_FOLDER MODELS_FOLDER [PYTHON]
#
#   models    (2 minutes)  MODELS_FOLDER/{tiny,qwen3-0.6b,smollm2}
#   check     (4 minutes)  sets of both captures, packed ones too, wide sets, drafts, preemptions, a float32 head;
#                          two GPUs, or one and NCCL_MULTI_RANK_GPU_ENABLE=1 with NCCL 2.30 or newer: tensor parallel
#   measure   (8 minutes)  what the cut costs, engines offline, servers; two GPUs: engines on one, servers on the other
#   stock     (5 minutes)  servers beside stock vLLM with logprobs=512, with its defaults, and with FlashInfer (WITH_FLASHINFER=1);
#                          32 requests of 16 tokens, as 256 of 64 took the one with logprobs=512 150 s
#
# Runs in a checkout, over its sources; what they import must be there (README.md). SECONDS_ALL=n sets the deadline.
# Results and logs lie in OUTPUT_FOLDER, each as soon as it is there; the last lines are the exit codes.
set -uo pipefail
cd "$(dirname "$0")/../../.."
part=$1 out=$(mkdir -p "$2" && cd "$2" && pwd) models=$(mkdir -p "$3" && cd "$3" && pwd) python=${4:-python3}
for source in libs/kept_tokens libs/kept_loss libs/settings libs/guards services/inference; do
  PYTHONPATH=$PWD/$source/src:${PYTHONPATH:-}
done
# a source tree has no metadata to read the version from
if ! "$python" -c 'import importlib.metadata as m; m.version("keptset-inference")' 2>/dev/null; then
  metadata=$(mktemp -d); mkdir "$metadata/keptset_inference-0.1.0.dist-info"
  printf 'Metadata-Version: 2.1\nName: keptset-inference\nVersion: 0.1.0\n' > "$metadata/keptset_inference-0.1.0.dist-info/METADATA"
  PYTHONPATH=$PYTHONPATH:$metadata
fi
export PYTHONPATH PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 TOKENIZERS_PARALLELISM=false VLLM_NO_USAGE_STATS=1
# Its sampler is compiled at its first request, with nvcc: not to be had because the package is there.
flashinfer=; [ "${WITH_FLASHINFER:-0}" = 0 ] || flashinfer=',stock FlashInfer'
export VLLM_USE_FLASHINFER_SAMPLER=0 # but where an arm asks for it
bench=services/inference/benchmarks
gpus=$(nvidia-smi -L | wc -l); second=$((gpus > 1 ? 1 : 0))
case $part in check) limit=240 ;; measure) limit=$((gpus > 1 ? 440 : 880)) ;; *) limit=300 ;; esac
limit=${SECONDS_ALL:-$limit}
left() { echo $((limit - SECONDS - $1)); }
rm -f "$out/codes"
# Where a machine's memory grows as it is touched, no batch of a measurement should wait for it.
"$python" -c 'import numpy; numpy.ones(4 << 30)' &

go() { # NAME GPUS SCRIPT ARGUMENTS...
  local name=$1 visible=$2 script=$3; shift 3
  local began=$SECONDS
  CUDA_VISIBLE_DEVICES=$visible timeout -k 5 "$(left 4)" "$python" "$bench/$script" "$@" >"$out/$name.log" 2>&1
  echo "$name: exit code $?, $((SECONDS - began)) s" | tee -a "$out/codes"
}
few='{"compilation_config": {"cudagraph_capture_sizes": [1, 8, 16, 32, 48, 64]}}'
many='{"compilation_config": {"cudagraph_capture_sizes": [1, 8, 32, 64, 96, 128, 160, 192, 224, 256]}}'
drafts='{"enforce_eager": true, "speculative_config": {"method": "draft_model", "model": "'$models'/tiny", "num_speculative_tokens": 3}}'

# 36 requests of 80 to 112 tokens want some 200 blocks of 16; one of max_model_len alone wants 32
crowded='{"enforce_eager": true, "num_gpu_blocks_override": 96}'

# vLLM refuses a GPU that is named twice, and takes one that has two names
once() { nvidia-smi -i 0 --query-gpu=uuid --format=csv,noheader; }
parallel='{"disable_custom_all_reduce": true}' both=0,1
if [ "$gpus" = 1 ]; then
  parallel='{"disable_custom_all_reduce": true, "distributed_executor_backend": "mp", "device_ids": ["0", "'$(once)'"]}' both=0
fi

engines() { # GPU, deadline in seconds before the end
  go capture-kernel "$1" capture_kernel.py --output "$out/capture-kernel.json"
  go offline "$1" offline.py --model "$models/qwen3-0.6b" --arms "off V1,capture v1,off V2,capture native" \
    --budget-seconds "$(left "$2")" --engine "$many" --output "$out/offline.json"
}
servers() {
  go http "$1" servers.py --model "$models/qwen3-0.6b" --sets "about 8" --budget-seconds "$(left 50)" --engine "$many" \
    --arms "capture native,capture native MessagePack,stock masks,off V2,capture v1,capture v1 MessagePack" --output "$out/http.json"
}

case $part in
  models)
    for model in tiny qwen3-0.6b smollm2; do
      [ -e "$models/$model" ] || go "$model" 0 make_model.py "$model" "$models/$model"
    done ;;
  check)
    go wide $second exactness.py --model "$models/tiny" --capture native --tokens 4000 --length 64 --at-once 36 \
      --budget-seconds 40 --engine '{"enforce_eager": true}' --output "$out/exactness-wide.json" &
    go drafts $second exactness.py --model "$models/tiny" --capture native --tokens 10000 --length 64 --at-once 24 \
      --budget-seconds 60 --engine "$drafts" --output "$out/exactness-drafts.json" &
    go preempted $second exactness.py --model "$models/tiny" --tokens 4000 --length 64 --at-once 36 --preempted \
      --budget-seconds 40 --engine "$crowded" --output "$out/exactness-preempted.json" &
    go head $second head.py --model "$models/smollm2" --engine '{"enforce_eager": true}' --output "$out/head.json" &
    if [ $second = 1 ] || [ "${NCCL_MULTI_RANK_GPU_ENABLE:-0}" = 1 ]; then
      # products of float32 in Triton are TF32 otherwise, which two ranks round in other places
      TRITON_F32_DEFAULT=ieee go tensor-parallel $both tensor_parallel.py --model "$models/qwen3-0.6b" --engine "$parallel" \
        --output "$out/tensor-parallel.json" &
      go exactness-parallel $both exactness.py --model "$models/tiny" --tokens 4000 --length 64 --at-once 36 --budget-seconds 60 \
        --engine "${parallel%?}, \"tensor_parallel_size\": 2, \"enforce_eager\": true}" --output "$out/exactness-parallel.json" &
    fi
    go exactness 0 exactness.py --model "$models/smollm2" --budget-seconds "$(left 30)" --engine "$few" --output "$out/exactness.json" &
    wait ;;
  measure)
    if [ $second = 1 ]; then engines 0 40 & servers 1 & wait; else engines 0 $((limit / 2 + 20)); servers 0; fi ;;
  stock)
    go http-stock 0 servers.py --model "$models/qwen3-0.6b" --sets "about 8" --requests 32 --tokens 16 --rounds 10 --budget-seconds "$(left 45)" \
      --engine "$many" --arms "capture native,stock logprobs=512,stock defaults,off V2$flashinfer" --output "$out/http-stock.json" ;;
  *) echo "gpu_session.sh: no part '$part'; there are models, check, measure and stock" >&2; exit 2 ;;
esac
for log in $(grep -v "exit code 0," "$out/codes" | cut -d: -f1); do
  echo "== $log: the end of its log"; grep -v '^\s*$' "$out/$log.log" | tail -8 | cut -c1-220
done
echo "== $SECONDS s"; cat "$out/codes"
