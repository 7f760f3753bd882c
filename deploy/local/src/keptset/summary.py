"""What a run came to: numbers, a table of them, and whether the run held what replay promises."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from rich.table import Table
from rich.text import Text

from keptset.metrics import Row

MISMATCH_BOUND = 1e-7
"""Mean mismatch KL of a step whose ratios are 1 up to float32 noise."""
LOG_RATIO_BOUND = 1e-4
"""|log ratio| of a token, likewise."""


@dataclass(frozen=True)
class Promise:
    """Something that holds on every step of a sound run."""

    text: str
    held: bool
    worst: str
    """The worst value and its step."""


def values(rows: Sequence[Row], name: str) -> list[float]:
    """The finite values of a metric, in order of the steps; rows without it are left out."""
    found = (row.get(name) for row in rows)
    return [float(value) for value in found if value is not None and math.isfinite(value)]


def summarise(rows: Sequence[Row], startup: dict[str, float], total: float) -> dict[str, float | int | None]:
    """The numbers of the table by name. `startup` holds seconds by service, `total` is the whole run's."""

    def over(name: str, how: Callable[[list[float]], float]) -> float | None:
        found = values(rows, name)
        return how(found) if found else None

    return {
        "steps": len(rows),
        "reward/first": over("reward/mean", lambda v: v[0]),
        "reward/last": over("reward/mean", lambda v: v[-1]),
        "reward/last_five": over("reward/mean", lambda v: fmean(v[-5:])),
        "mismatch_kl/mean": over("mismatch_kl/mean", fmean),
        "mismatch_kl/worst_step": over("mismatch_kl/mean", max),
        "mismatch_kl/max": over("mismatch_kl/max", max),
        "ratio/max_abs_log": over("ratio/max_abs_log", max),
        "on_policy/share": over("on_policy/share", fmean),
        "on_policy/ratio_max_abs_log": over("on_policy/ratio_max_abs_log", max),
        "kept/size_mean": over("kept/size_mean", fmean),
        "kept/size_p50": over("kept/size_p50", fmean),
        "kept/size_p99": over("kept/size_p99", fmean),
        "kept/singleton_share": over("kept/singleton_share", fmean),
        "kept/coverage": over("kept/coverage", min),
        "rejected/last_five": over("rejected/sequences", lambda v: fmean(v[-5:])),
        "rollout/error_rate": over("rollout/error_rate", max),
        "staleness/mean": over("staleness/mean", fmean),
        "staleness/max": over("staleness/max", max),
        "staleness/dropped_groups": over("staleness/dropped_groups", sum),
        "seconds/rollout": over("seconds/rollout", sum),
        "seconds/train": over("seconds/train", sum),
        "seconds/weights": over("seconds/weights", sum),
        "seconds/startup": max(startup.values(), default=0.0),
        "seconds/total": total,
    }


def promises(
    rows: Sequence[Row],
    *,
    truncating: bool,
    exact: bool,
    undisturbed: bool = True,
    max_async_level: int = 0,
) -> list[Promise]:
    """Checks every step.

    `truncating`: all sources cut their support. `exact`: engine and trainer compute in float32 and kept sets
    are replayed, so that ratios are 1 up to noise wherever the weights that are trained have sampled: at
    `max_async_level` 0 everywhere, above it at the tokens on-policy, if a step has any.
    `undisturbed`: no service died and was started again, which costs the requests that it had.
    """
    made = []
    if exact and max_async_level:
        name, on_policy = "on_policy/ratio_max_abs_log", f"|log ratio| on-policy below {LOG_RATIO_BOUND:g}"
        if some := [row for row in rows if name in row]:
            made.append(_every(some, name, on_policy, lambda v: v < LOG_RATIO_BOUND))
    elif exact:
        made += [
            _every(
                rows,
                "mismatch_kl/mean",
                f"mismatch KL at most {MISMATCH_BOUND:g}",
                lambda v: v <= MISMATCH_BOUND,
            ),
            _every(
                rows,
                "ratio/max_abs_log",
                f"|log ratio| below {LOG_RATIO_BOUND:g}",
                lambda v: v < LOG_RATIO_BOUND,
            ),
        ]
    if truncating:
        made.append(_every(rows, "kept/coverage", "coverage exactly 1", lambda v: v == 1, worst=min))
    if undisturbed:
        made.append(_every(rows, "rollout/error_rate", "no rollout errors", lambda v: v == 0))
    return made


def reward_promise(rows: Sequence[Row], least: float) -> Promise:
    """That a run whose reward is known beforehand, such as a demo, has learnt what it should."""
    found = values(rows, "reward/mean")[-5:]
    reached = fmean(found) if found else math.nan
    text = f"mean reward of the last five steps at least {least:g}"
    return Promise(text, reached >= least, f"it is {number(reached)}")


def _every(
    rows: Sequence[Row],
    name: str,
    text: str,
    holds: Callable[[float], bool],
    worst: Callable[..., float] = max,
) -> Promise:
    found = {row["step"]: row[name] for row in rows if row.get(name) is not None}
    if not rows or len(found) < len(rows):
        return Promise(text, False, f"{name} is missing from {len(rows) - len(found)} of {len(rows)} rows")
    # NaN compares false with everything, so max and min may pass it over.
    broken = [step for step, value in found.items() if not holds(value)]
    step = broken[0] if broken and math.isnan(found[broken[0]]) else worst(found, key=found.__getitem__)
    return Promise(text, not broken, f"worst {number(found[step])} at step {step}")


def number(value: float | None) -> str:
    """A number as people read it."""
    if value is None:
        return "-"
    if value == 0 or 0.001 <= abs(value) < 1000:
        return f"{value:.4g}"
    return f"{value:.1e}" if abs(value) < 1 else f"{value:,.0f}"


def _coverage(share: float | None) -> str:
    if share is None:
        return "-"
    if share == 1:
        return "every token trained on has its set"
    return f"{100 * share:.4g} % of the tokens trained on have their set, on the worst step"


def table(
    summary: dict[str, float | int | None], kept_promises: Sequence[Promise], max_async_level: int = 0
) -> Table:
    """The table that ends a run."""

    def of(name: str) -> str:
        return number(summary[name])

    def seconds(name: str) -> str:
        value = summary[name]
        return "-" if value is None else f"{value:.1f} s"

    lines = Table.grid(padding=(0, 3))
    lines.add_column(style="bold")
    lines.add_column()
    first, last, five = of("reward/first"), of("reward/last"), of("reward/last_five")
    lines.add_row("reward", f"{first} at the first step, {last} at the last; mean of the last five {five}")
    lines.add_row("mismatch KL", f"mean {of('mismatch_kl/mean')}, largest of a token {of('mismatch_kl/max')}")
    lines.add_row("|log ratio|", f"largest {of('ratio/max_abs_log')}")
    if summary["kept/size_mean"] is not None:
        sizes = [of(f"kept/size_{which}") for which in ("mean", "p50", "p99")]
        lines.add_row(
            "kept set", f"mean {sizes[0]} ids, p50 {sizes[1]}, p99 {sizes[2]} (averages of the steps)"
        )
        lines.add_row("singletons", f"{100 * (summary['kept/singleton_share'] or 0):.1f} % of the sets")
    lines.add_row("coverage", _coverage(summary["kept/coverage"]))
    phases = ", ".join(
        f"{name} {seconds(f'seconds/{name}')}" for name in ("startup", "rollout", "train", "weights")
    )
    lines.add_row("time", f"{phases}; {seconds('seconds/total')} in all, {summary['steps']} steps")
    if max_async_level:
        stale = f"mean {of('staleness/mean')}, at most {of('staleness/max')} versions"
        dropped = f"{of('staleness/dropped_groups')} groups dropped and sampled again"
        lines.add_row("staleness", f"{stale} of {max_async_level} (max_async_level); {dropped}")
        lines.add_row("", "ratios and mismatch KL have the policy's change since the rollout in them")
        fresh = f"{100 * (summary['on_policy/share'] or 0):.1f} % of the tokens"
        lines.add_row("on-policy", f"{fresh}, |log ratio| largest {of('on_policy/ratio_max_abs_log')}")
    died = {name.removeprefix("restarts/"): n for name, n in summary.items() if name.startswith("restarts/")}
    if died:
        lines.add_row("started again", ", ".join(f"{name} {times}" for name, times in died.items()))
    for promise in kept_promises:
        mark = Text("✓ ", "green") if promise.held else Text("✗ ", "bold red")
        lines.add_row(
            "" if promise is not kept_promises[0] else "on every step",
            mark + f"{promise.text} ({promise.worst})",
        )
    return lines
