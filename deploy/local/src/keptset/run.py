"""`keptset run`: one training, its progress, and what it came to."""

import json
from dataclasses import asdict

from rich.console import Console

from keptset import sampling, summary
from keptset.display import Display
from keptset.resolve import Prepared, prepare, prepare_again, relative
from keptset.training import Outcome, train
from keptset_settings import RunSettings, is_frozen, is_truncating


class BrokenPromise(RuntimeError):
    """The run came to its end, but something that replay promises of every step did not hold."""


def run(argv: list[str], overwrite: bool, console: Console) -> None:
    """Resolves, trains, reports. Raises what prepare and train raise, and BrokenPromise."""
    _go(prepare(argv, overwrite), console)


def resume(argv: list[str], steps: int | None, console: Console) -> None:
    """Goes on with a run that was stopped or killed, or is to have more steps; then like `run`."""
    _go(prepare_again(argv, steps), console)


def _go(prepared: Prepared, console: Console) -> None:
    with prepared.directory as directory:
        console.print(f"[bold]{relative(directory.path)}[/]: {describe(prepared.run)}", highlight=False)
        try:
            outcome = train(prepared, Display(console))
        except BaseException as error:
            error.add_note(f"`keptset resume {relative(directory.path)}` goes on with it")
            raise
        broken = [promise for promise in report(prepared, outcome, console) if not promise.held]
        if broken:
            raise BrokenPromise(
                "; ".join(f"{promise.text}: broken, {promise.worst}" for promise in broken)
                + f". Do not trust this run before you know why: {directory.metrics} has all steps"
            )


def is_exact(run: RunSettings) -> bool:
    """Engine and trainer compute in float32 and kept sets are replayed, so that ratios are 1 up to noise."""
    trainer = run.trainer
    both = run.inference.vllm.get("dtype") == "float32" and trainer.dtype != "bfloat16"
    return both and not trainer.unsafe_ignore_kept_tokens


def describe(run: RunSettings) -> str:
    """The run in a line."""
    train_settings = run.orchestrator.train
    samplings = ", ".join(dict.fromkeys(sampling.describe(s) for s in sampling.sampling_of(run)))
    return (
        f"{run.orchestrator.steps} steps of {train_settings.prompts_per_step} x {train_settings.group_size} "
        f"rollouts, {samplings}, loss {run.trainer.loss.kind}"
    )


def report(prepared: Prepared, outcome: Outcome, console: Console) -> list[summary.Promise]:
    """Writes summary.json and reward.png, and prints the table."""
    run, path = prepared.run, prepared.directory.path
    numbers = summary.summarise(outcome.rows, outcome.startup, outcome.seconds)
    sources = run.orchestrator.train.source
    truncating = all(is_truncating(one.sampling) and not is_frozen(one) for one in sources)
    promises = summary.promises(
        outcome.rows,
        truncating=truncating,
        exact=is_exact(run),
        max_async_level=run.orchestrator.max_async_level,
        undisturbed=not outcome.restarts,
    )
    if run.expect_reward is not None:
        promises.append(summary.reward_promise(outcome.rows, run.expect_reward))
    numbers |= {f"restarts/{name}": times for name, times in outcome.restarts.items()}
    from keptset import (
        plots,  # matplotlib takes seconds to import, and nobody should wait for that at the start
    )

    plots.draw_run(outcome.rows, f"{path.name}: {describe(run)}", path / "reward.png")
    prepared.directory.summary.write_text(
        json.dumps(numbers | {"promises": [asdict(p) for p in promises]}, indent=2) + "\n"
    )
    console.print()
    console.print(summary.table(numbers, promises, run.orchestrator.max_async_level))
    console.print()
    for name in ("metrics.jsonl", "reward.png", "summary.json", "configs/", "logs/"):
        console.print(f"  {relative(path)}/{name}", highlight=False, soft_wrap=True)
    return promises
