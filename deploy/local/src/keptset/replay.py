"""`keptset replay`: hands a run's settings to `keptset-trainer replay`, which scores a stored step again."""

import subprocess
import sys
from pathlib import Path

from keptset.training import service_variables


def replay(argv: list[str], runs_dir: Path = Path("runs")) -> int:
    """Runs it; its exit code: 0 healthy, 1 not, 2 it could not be scored.

    Raises:
        ValueError: the first argument is no run.
    """
    if not argv or argv[0].startswith("-"):
        raise ValueError("replay: name a run: keptset replay RUN [--step N]")
    run, *options = argv
    path = next((path for path in (Path(run), runs_dir / run) if _config(path).is_file()), None)
    if path is None:
        raise ValueError(
            f"{run}: no run; neither {_config(Path(run))} nor {_config(runs_dir / run)} is there. Name the "
            "directory that keptset run made"
        )
    # the run may have been started somewhere else, or moved: what lies in its directory is its own
    own = (("--output-dir", path / "trainer"), ("--weights-dir", path / "weights"))
    places = [text for option, folder in own if folder.is_dir() for text in (option, str(folder))]
    command = [sys.executable, "-m", "keptset_trainer", "replay", "--config", str(_config(path))]
    done = subprocess.run([*command, *places, *options], env=service_variables({}), check=False)
    return done.returncode if done.returncode >= 0 else 128 - done.returncode


def _config(run: Path) -> Path:
    return run / "configs" / "trainer.toml"
