#!/bin/sh
# In an image's build stage: byte code, since the file system of a running container is read-only. Without it each
# process of a start compiles what it imports anew: some 20 s of CPU where torch and vllm are among it.
set -eu
site=$(/opt/keptset/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
# Left out: what starts do not import, and most architectures, of which a server runs one.
# unchecked: nothing in an image changes, and copying between stages may change times.
# A few files are templates that are no Python; they stay as they are.
/opt/keptset/bin/python -m compileall -q -q -j 0 --invalidation-mode unchecked-hash \
  -x '/(transformers/models/(?!auto|qwen|llama)|torch/(testing|_inductor)|tests?)/' "$site" || true
