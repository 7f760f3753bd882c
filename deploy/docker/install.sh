#!/bin/sh
# In an image's build stage. Makes the virtual environment /opt/keptset, without pip and without a compiler:
#   install.sh third-party PROFILE PINS      what a service needs, at the pinned versions
#   install.sh ours PINS DIRECTORY ...       distributions of this repository
set -eu
venv=/opt/keptset
pip() { python3 -m pip --disable-pip-version-check --no-cache-dir --quiet "$@"; }

case $1 in
third-party)
  profile=$2 pins=$3
  python3 -m venv --without-pip "$venv"
  # hatchling builds our wheels, editables is for working trees: neither runs in an image.
  grep -vE '^(hatchling|editables)==' "$pins" > /tmp/wanted.txt
  torch=$(grep -E '^torch==' "$pins" || true)
  # As setup.sh does it: torch's CPU build is on PyTorch's own index unless pip's settings have it elsewhere.
  if [ -n "$torch" ] && ! pip --python "$venv/bin/python" install --no-deps --no-compile "$torch"; then
    [ "$profile" = cpu ] || { echo "install: no $torch on the package index" >&2; exit 1; }
    pip --python "$venv/bin/python" install --no-deps --no-compile --index-url "$TORCH_INDEX_URL" "$torch"
  fi
  pip --python "$venv/bin/python" install --no-deps --no-compile -r /tmp/wanted.txt
  # vLLM has torch compile a few functions also where everything runs eagerly, which on a CPU takes a C++ compiler.
  # Lines of .pth files are run as Python starts, in every process of a service.
  if [ "$profile" = cpu ]; then
    echo 'import os; os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")' > "$("$venv/bin/python" -c \
      'import sysconfig; print(sysconfig.get_path("purelib"))')/no_compiler_here.pth"
  fi
  ;;
ours)
  pins=$2; shift 2
  python3 -m venv --without-pip /opt/build
  grep -E '^(hatchling|pathspec|pluggy|packaging|trove-classifiers|tomlkit)==' "$pins" > /tmp/build.txt
  pip --python /opt/build/bin/python install --no-deps -r /tmp/build.txt
  for directory in "$@"; do
    pip --python /opt/build/bin/python wheel --no-deps --no-build-isolation -w /tmp/wheels "$directory"
  done
  pip --python "$venv/bin/python" install --no-deps --no-compile /tmp/wheels/*.whl
  ;;
*) echo "install.sh: unknown command $1" >&2; exit 2 ;;
esac
