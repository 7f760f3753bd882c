"""`keptset-trainer warm-start`: makes the model, or finds it made already."""

import argparse
import fcntl
import json
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers
from rich.progress import Progress

from ..durable import finish_directory, new_directory, remove_directory, write_json
from .recipe import first_steps, recipe, train
from .reverse_text import mean_reward, strings
from .tokenizer import byte_tokenizer

LINE_EVERY = 50
"""Steps between two lines of progress in a log."""
EVALUATED = 128
"""Strings that the made model is tried on."""
OTHERS_SECONDS = 600.0
"""How long another warm start of the same directory is waited for."""


def warm_start(argv: list[str]) -> int:
    """Entry point of the command; its exit code."""
    parser = argparse.ArgumentParser(
        prog="keptset-trainer warm-start",
        description="Make a tiny model that reverses strings, on one thread.",
    )
    parser.add_argument("--directory", type=Path, required=True, help="where the model goes")
    parser.add_argument("--min-letters", type=int, default=4, help="fewest letters of a string")
    parser.add_argument("--max-letters", type=int, default=12, help="most letters of a string")
    parser.add_argument("--seed", type=int, default=0, help="seed of the model and of the data")
    parser.add_argument("--dry-run", action="store_true", help="say what would be made, and exit")
    parser.add_argument("--force", action="store_true", help="make it again, whatever is there")
    chosen = parser.parse_args(argv)
    if not 1 <= chosen.min_letters <= chosen.max_letters <= 240:
        parser.error(
            f"--min-letters {chosen.min_letters}, --max-letters {chosen.max_letters}: "
            "there must be at least 1, at most 240 (of 512 positions), and the minimum first"
        )
    wanted = recipe(chosen.min_letters, chosen.max_letters, chosen.seed)
    try:
        if chosen.dry_run:
            there = not chosen.force and is_made(chosen.directory, wanted)
            print(f"{chosen.directory} {'is there already' if there else 'would be made'}: {wanted}")
            return 0
        with alone(chosen.directory):
            if not chosen.force and is_made(chosen.directory, wanted):
                print(f"{chosen.directory} is there already")
            else:
                make(chosen.directory, wanted)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


@contextmanager
def alone(directory: Path, seconds: float = OTHERS_SECONDS) -> Iterator[None]:
    """Only one process makes a model at a time: the others wait, and find it made.

    Raises:
        TimeoutError: another one was still at it after so many seconds.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    path = directory.with_name(f".{directory.name}.lock")
    with path.open("a") as lock:
        deadline, waits = time.monotonic() + seconds, False
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"waited {seconds:.0f} s for another warm start of {directory}, which holds {path}"
                    ) from None
                if not waits:
                    print(f"warm start: another process makes {directory}; waiting for it", flush=True)
                waits = True
                time.sleep(0.1)
        yield


def is_made(directory: Path, wanted: dict[str, object]) -> bool:
    """Whether `directory` holds the model of this recipe.

    Raises:
        ValueError: it holds something else.
    """
    if not directory.exists():
        return False
    try:
        there = json.loads((directory / "recipe.json").read_bytes())["recipe"]
    except FileNotFoundError:
        if directory.is_dir() and not any(directory.iterdir()):
            return False
        raise ValueError(
            f"{directory} is there, but was not made by warm-start; choose another --directory"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{directory / 'recipe.json'} is none of warm-start's ({error!r}); choose another --directory, "
            "or make it again with --force"
        ) from error
    if there != wanted:
        raise ValueError(
            f"{directory} was made by another recipe: {there}, wanted {wanted}; "
            "choose another --directory, or make it again with --force"
        )
    return True


def make(directory: Path, wanted: dict[str, object]) -> None:
    """Train, try and write the model, atomically."""
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)  # so that every machine adds up in the same order
    low, high, seed = int(wanted["min_letters"]), int(wanted["max_letters"]), int(wanted["seed"])
    tokenizer = byte_tokenizer()
    began = time.monotonic()
    first = first_steps(high)
    with Progress(transient=True) as bar:
        task = bar.add_task("warm start", total=None)

        def show(step: int, steps: int, loss: float) -> None:
            told = f"loss {loss:.2f}" + (", higher as its labels are smoothed now" if step > first else "")
            bar.update(task, completed=step, total=steps, description=f"warm start, {told}")
            if not bar.console.is_terminal and step % LINE_EVERY == 0:  # a log shows no bar
                print(f"warm start: step {step} of {steps}, {told}", flush=True)

        model = train(tokenizer, low, high, seed, show)
    texts = strings(random.Random(f"evaluation {seed}"), EVALUATED, low, high)
    greedy = mean_reward(model, tokenizer, texts, sample=False, seed=seed)
    sampled = mean_reward(model, tokenizer, texts, sample=True, seed=seed)

    temporary = new_directory(directory)
    tokenizer.save_pretrained(temporary, save_jinja_files=False)
    model.save_pretrained(temporary)
    (temporary / "generation_config.json").unlink(missing_ok=True)  # sampling is the caller's to choose
    write_json(
        temporary / "recipe.json", {"recipe": wanted, "greedy_reward": greedy, "sampled_reward": sampled}
    )
    if directory.exists():
        remove_directory(directory) if any(directory.iterdir()) else directory.rmdir()
    finish_directory(temporary, directory)
    print(
        f"{directory}: {sum(p.numel() for p in model.parameters()):,} parameters in "
        f"{time.monotonic() - began:.0f} s; mean reward {greedy:.2f} greedy, {sampled:.2f} sampled"
    )


__all__ = ["is_made", "make", "warm_start"]
