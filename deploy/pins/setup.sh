#!/usr/bin/env bash
# Makes .venv with everything of one profile: setup.sh [cpu|cuda] [PYTHON]. Does nothing if it is up to date.
set -euo pipefail
cd "$(dirname "$0")/../.."
profile=${1:-cpu} python=${2:-python3}
pins=deploy/pins/$profile/local.txt

missing() { echo "setup: $1 is missing; install it: $2" >&2; exit 1; }
[ -f "$pins" ] || { echo "setup: unknown profile '$profile', known: $(ls -d deploy/pins/*/ | xargs -n1 basename | xargs)" >&2; exit 1; }
command -v "$python" >/dev/null || missing "$python" "apt-get install python3 python3-venv"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  missing "Python >= 3.11 ($("$python" --version) found)" "apt-get install python3.11 python3.11-venv, then make setup PYTHON=python3.11"
"$python" -c 'import ensurepip' 2>/dev/null || missing "the venv module of $python" "apt-get install python3-venv"
command -v cc >/dev/null || command -v gcc >/dev/null || missing "a C compiler" "apt-get install build-essential"
[ "$(uname -s)/$(uname -m)" = Linux/x86_64 ] || { echo "setup: the pins are for Linux on x86-64, this is $(uname -s)/$(uname -m)" >&2; exit 1; }

# The distributions of this repository are installed editable: only their metadata can go stale.
distributions=(libs/kept_tokens libs/kept_loss libs/guards libs/settings services/inference services/orchestrator services/trainer deploy/local)
stamp=.venv/installed
state=$({ echo "$profile $PWD"; "$python" --version; cat "$pins" "${distributions[@]/%//pyproject.toml}"; } | sha256sum)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$state" ]; then exit 0; fi

echo "setup: profile $profile into .venv"
rm -rf .venv
"$python" -m venv .venv
pip() { .venv/bin/python -m pip --disable-pip-version-check --quiet "$@"; }
# The pins are complete, so nothing is resolved here; --no-compile: most of what comes is never imported.
torch=$(grep -E '^torch==' "$pins")
if ! pip install --no-deps --no-compile "$torch" 2>/dev/null; then
  [ "$profile" = cpu ] || { echo "setup: no $torch for $("$python" --version) on your package index" >&2; exit 1; }
  echo "setup: $torch is not where pip looks, taking it from PyTorch's CPU index"
  pip install --no-deps --no-compile --index-url https://download.pytorch.org/whl/cpu "$torch"
fi
pip install --no-deps --no-compile -r "$pins"
pip install --no-deps --no-build-isolation "${distributions[@]/#/-e}"
echo "$state" > "$stamp"
echo "setup: done"
