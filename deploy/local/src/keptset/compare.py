"""`keptset compare`: the same training without truncation, with replay, and without replay."""

import io
import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.table import Table

from keptset.display import Display
from keptset.metrics import MetricsTail, Row
from keptset.resolve import prepare, relative
from keptset.sampling import describe, sampling_of
from keptset.summary import number, values
from keptset.training import train
from keptset_settings import RunSettings, is_truncating, load_run

LAST = 5
"""Steps that final numbers are averaged over."""


@dataclass(frozen=True)
class Arm:
    """One of the three trainings."""

    name: str
    label: str
    color: str
    width: float
    options: tuple[str, ...]


def arms(sampling: str) -> list[Arm]:
    """The three, in order of the table; `sampling` says in words what the given run cuts."""
    # Grey, and blue and vermilion of Okabe and Ito's palette, which everybody can tell apart.
    shared = "--orchestrator.train.sampling"
    neutral = (f"{shared}.top_p", "1.0", f"{shared}.top_k", "-1", f"{shared}.min_p", "0.0")
    ignore = ("--trainer.unsafe_ignore_kept_tokens", "true")
    return [
        Arm("no-truncation", "no truncation", "#6e7781", 2.0, neutral),
        Arm("replay", f"{sampling},\nkept sets replayed", "#0072b2", 2.6, ()),
        Arm("no-replay", f"{sampling},\nnot replayed", "#d55e00", 2.0, ignore),
    ]


def compare(argv: list[str], output: Path, console: Console, names: str = "", drawn: bool = False) -> None:
    """Runs the arms one after the other and draws them; raises what `run` raises.

    Args:
        argv: a configuration and settings.
        output: the picture; the numbers go beside it.
        console: to say what happens.
        names: of the arms, with commas; empty for all three.
        drawn: run nothing, draw what has run: arms that ran apart, at the same time on several GPUs.
    """
    base = load_run(argv)
    known = arms(describe(sampling_of(base)[0]))
    with redirect_stderr(io.StringIO()):
        _require_comparable(base, load_run([*argv, *known[0].options]))
    chosen = _chosen(known, names)
    _require_writable(output)
    folder = base.runs_dir / "compare"
    rows = _rows_of(chosen, folder) if drawn else _train(chosen, argv, base, folder, console)
    from keptset.plots import Curve, draw_comparison  # matplotlib takes seconds to import

    curves = [Curve(arm.label, rows[arm.name], arm.color, arm.width) for arm in chosen]
    draw_comparison(curves, "Same loss, same seeds, other rollouts", output)
    finals = {arm.name: final_numbers(rows[arm.name]) for arm in chosen}
    numbers = output.with_suffix(".json")
    numbers.write_text(json.dumps(finals, indent=2) + "\n")
    console.print()
    console.print(comparison_table(finals))
    console.print(f"\n  {output}\n  {numbers}\n  {folder}/*.jsonl", highlight=False, soft_wrap=True)


def _chosen(known: list[Arm], names: str) -> list[Arm]:
    """The arms of these names, in the order of the table."""
    wanted = names.split(",") if names else [arm.name for arm in known]
    if unknown := [name for name in wanted if name not in [arm.name for arm in known]]:
        raise ValueError(
            f"--arms: {unknown[0]!r} is no arm; there are {', '.join(arm.name for arm in known)}"
        )
    return [arm for arm in known if arm.name in wanted]


def _rows_of(chosen: list[Arm], folder: Path) -> dict[str, list[Row]]:
    """The rows of arms that have run."""
    for arm in chosen:
        if not (folder / f"{arm.name}.jsonl").is_file():
            raise ValueError(f"--drawn: {arm.name} has not run, there is no {folder / arm.name}.jsonl")
    return {arm.name: MetricsTail(folder / f"{arm.name}.jsonl").new_rows() for arm in chosen}


def _train(
    chosen: list[Arm], argv: list[str], base: RunSettings, folder: Path, console: Console
) -> dict[str, list[Row]]:
    """Their rows, after running them one after the other; also as folder/<arm>.jsonl."""
    shared = ["--runs-dir", str(folder)]
    if base.warm_start is not None:
        shared += [
            "--warm_start.directory",
            str(base.warm_start.directory),
        ]  # one model for the three of them
    rows: dict[str, list[Row]] = {}
    for position, arm in enumerate(chosen, start=1):
        prepared = prepare([*argv, *shared, "--name", arm.name, *arm.options], overwrite=True)
        with prepared.directory as directory:
            title = arm.label.replace("\n", " ")
            console.print(f"[bold]{position}/{len(chosen)} {title}[/] in {relative(directory.path)}")
            rows[arm.name] = train(prepared, Display(console)).rows
        shutil.copyfile(directory.metrics, folder / f"{arm.name}.jsonl")
    return rows


def final_numbers(rows: Sequence[Row]) -> dict[str, float | None]:
    """The end of a training in numbers, to six digits."""

    def of(name: str, how: Callable[[list[float]], float]) -> float | None:
        found = values(rows, name)
        return float(f"{how(found):.6g}") if found else None

    def last(name: str) -> float | None:
        return of(name, lambda found: fmean(found[-LAST:]))

    return {
        "steps": len(rows),
        "reward_first_step": of("reward/mean", lambda found: found[0]),
        f"reward_last_{LAST}": last("reward/mean"),
        f"rejected_sequences_last_{LAST}": last("rejected/sequences"),
        f"mismatch_kl_last_{LAST}": last("mismatch_kl/mean"),
        "max_abs_log_ratio": of("ratio/max_abs_log", max),
        "coverage": of("kept/coverage", min),
    }


def comparison_table(finals: dict[str, dict[str, float | None]]) -> Table:
    """A row for each arm, by its name."""
    table = Table(box=None, pad_edge=True, header_style="bold")
    table.add_column("")
    for heading in (f"reward, last {LAST}", "rejected", "mismatch KL", "|log ratio| max"):
        table.add_column(heading, justify="right")
    for name, final in finals.items():
        rejected = final[f"rejected_sequences_last_{LAST}"]
        table.add_row(
            name,
            number(final[f"reward_last_{LAST}"]),
            "-" if rejected is None else f"{100 * rejected:.1f} %",
            number(final[f"mismatch_kl_last_{LAST}"]),
            number(final["max_abs_log_ratio"]),
        )
    return table


def _require_writable(output: Path) -> None:
    """Before three trainings are run for a picture that cannot be written."""
    if output.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"--output {output}: must end in .png, .svg or .pdf")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with output.open("ab"):
            pass
        if not output.stat().st_size:
            output.unlink()
    except OSError as error:
        raise ValueError(f"--output {output}: cannot be written: {error.strerror}") from error


def _require_comparable(run: RunSettings, untruncated: RunSettings) -> None:
    """The given run is the arm with replay; the other two must differ from it in one thing each."""
    if run.trainer.unsafe_ignore_kept_tokens:
        raise ValueError("trainer.unsafe_ignore_kept_tokens is set by compare itself: leave it out")
    if not all(map(is_truncating, sampling_of(run))):
        raise ValueError(
            "nothing to compare: not every source truncates; "
            "set [orchestrator.train.sampling] top_p, top_k or min_p"
        )
    for source in untruncated.orchestrator.train.source:
        if is_truncating(source.sampling):
            raise ValueError(
                f"source {source.name!r} truncates by its own sampling, which compare does not switch off: "
                f"move that to [orchestrator.train.sampling]"
            )
