"""A trainer that is called in this process, over batches that lie in its spool, and what it leaves."""

import json
import os
from pathlib import Path

import torch

from kept_tokens.messages import encode
from keptset_trainer import train
from keptset_trainer.folders import Folders
from keptset_trainer.ranks import Ranks


def folders_of(settings) -> Folders:
    folders = Folders(settings.output_dir, settings.weights_dir)
    folders.create()
    return folders


def spool(folders: Folders, *batches) -> None:
    for batch in batches:
        folders.batch(batch.step).write_bytes(encode(batch))


def run(settings) -> None:
    train.train(settings, Ranks(torch.device("cpu")), os.getppid())


def bytes_under(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def results_of(folders: Folders) -> dict[str, dict]:
    results = {p.name: json.loads(p.read_bytes()) for p in sorted(folders.results.iterdir())}
    for result in results.values():
        del result["metrics"]["seconds/train"]
        for name in ("publish", "offload", "reload"):  # not known of what was made up after a kill
            result["metrics"].pop(f"seconds/{name}", None)
    return results
