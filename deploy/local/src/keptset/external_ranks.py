"""`trainer.ranks = "external"`: the command that starts them, for whoever started the run."""

import math
import shlex
import sys
from pathlib import Path

from keptset_settings import RunSettings


def command(run: RunSettings, gpus: list[str] | None = None) -> str:
    """For a shell on this machine; each further node needs its part in `--nnodes` and `--rdzv-endpoint`.

    `gpus`: those that the ranks see here; None: all.
    """
    assert run.trainer.output_dir, "resolving a run fills it in"
    each = "1" if run.trainer.device == "cpu" else "gpu"
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={each}"]
    loop = ["-m", "keptset_trainer.loop", str(run.trainer.output_dir.absolute() / "settings.json")]
    # whom torchrun starts is told to stop by torchrun, which waits 30 s if nobody says otherwise
    wait = f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT={math.ceil(run.trainer.shutdown_timeout)}"
    seen = f"CUDA_VISIBLE_DEVICES={','.join(gpus)} " if gpus else ""
    # a model that is named from here is looked for from where the ranks are
    return f"cd {shlex.quote(str(Path.cwd()))} && {seen}{wait} {shlex.join([*torchrun, *loop])}"
