"""Where everything is under `trainer.output_dir` and `trainer.weights_dir`.

The ingest process writes `spool/`, `settings.json` and `errand.json`, the training loop the rest:

    spool/step-000001.msgpack     an accepted batch, as it came; of trained ones the last `keep_batches` and
                                  those that came after the older checkpoint
    results/step-000001.json      what the step gave; kept for ever
    scores/step-000001.msgpack    its full-vocabulary logprobs, if they are wanted; of the last two steps
    checkpoints/step-000001/      model, training state and result after every n-th step; the last two
    errand.json, errand-done.json what ingest asks of the loop between steps, and the answer
    loop.json                     what the living loop is doing
    recipe.json                   the settings that the last steps were trained with (see `recipe`)
    heartbeat.json                renewed by its first rank (see `heartbeat`)
    loop.lock                     held by its first rank, so that there is one loop only (see `claim`)
    rendezvous                    where the loop's ranks meet, if there are several
    lock                          held by ingest and the ranks it starts, so that two trainers never share a
                                  directory
"""

from dataclasses import dataclass
from pathlib import Path

from keptset_settings import TrainerSettings


@dataclass(frozen=True)
class Folders:
    """Paths of one trainer's files."""

    output: Path
    weights: Path

    @property
    def spool(self) -> Path:
        return self.output / "spool"

    @property
    def results(self) -> Path:
        return self.output / "results"

    @property
    def scores(self) -> Path:
        return self.output / "scores"

    @property
    def checkpoints(self) -> Path:
        return self.output / "checkpoints"

    @property
    def settings(self) -> Path:
        return self.output / "settings.json"

    @property
    def recipe(self) -> Path:
        return self.output / "recipe.json"

    @property
    def loop_state(self) -> Path:
        return self.output / "loop.json"

    @property
    def heartbeat(self) -> Path:
        return self.output / "heartbeat.json"

    @property
    def loop_lock(self) -> Path:
        return self.output / "loop.lock"

    @property
    def errand(self) -> Path:
        return self.output / "errand.json"

    @property
    def errand_done(self) -> Path:
        return self.output / "errand-done.json"

    @property
    def rendezvous(self) -> Path:
        return self.output / "rendezvous"

    @property
    def lock(self) -> Path:
        return self.output / "lock"

    def batch(self, step: int) -> Path:
        return self.spool / f"step-{step:06d}.msgpack"

    def score(self, step: int) -> Path:
        return self.scores / f"step-{step:06d}.msgpack"

    def result(self, step: int) -> Path:
        return self.results / f"step-{step:06d}.json"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:06d}"

    def version(self, version: int) -> Path:
        return self.weights / f"v{version:06d}"

    def create(self) -> None:
        for folder in (self.spool, self.results, self.scores, self.checkpoints, self.weights):
            folder.mkdir(parents=True, exist_ok=True)


def folders_of(settings: TrainerSettings) -> Folders:
    """Of a trainer whose settings are resolved."""
    assert settings.output_dir
    assert settings.weights_dir
    return Folders(settings.output_dir, settings.weights_dir)


def numbered(folder: Path, prefix: str) -> dict[int, Path]:
    """Number -> path of the entries of `folder` called `<prefix><number>[.suffix]`, ascending."""
    entries = {}
    for path in folder.glob(f"{prefix}*"):
        digits = path.name.removeprefix(prefix).split(".")[0]
        if digits.isdecimal():
            entries[int(digits)] = path
    return dict(sorted(entries.items()))
