"""Pictures of runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import floor, isfinite, log10
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from keptset.metrics import Row

INK, FAINT = "#24292f", "#d0d7de"
BLUE = "#0072b2"
SIZE = 10
REWARD, ENTROPY, MISMATCH = "reward/mean", "entropy/full", "mismatch_kl/mean"
LINE = 0.085
"""Height of a line of a label, where the panel's is 1."""


@dataclass(frozen=True)
class Curve:
    """One run in a picture."""

    label: str
    rows: Sequence[Row]
    color: str
    width: float = 2.0


def draw_run(rows: Sequence[Row], title: str, path: Path) -> None:
    """reward.png: reward, entropy and mismatch KL of one run."""
    _draw([Curve("", rows, BLUE)], title, path)


def draw_comparison(curves: Sequence[Curve], title: str, path: Path) -> None:
    """Reward, entropy and mismatch KL of several runs, labelled on the curves."""
    _draw(curves, title, path)


def _draw(curves: Sequence[Curve], title: str, path: Path) -> None:
    labelled = any(curve.label for curve in curves)
    with_entropy = any(_points(curve.rows, ENTROPY)[0] for curve in curves)
    panels = 3 if with_entropy else 2
    width = (0.7 + 3.9 * panels) + (2.0 if labelled else 0.0)
    figure = Figure(figsize=(width, 3.7), dpi=170, facecolor="white")
    axes = list(figure.subplots(1, panels))
    figure.subplots_adjust(
        left=0.5 / width, right=1 - (1.5 if labelled else 0.2) / width, top=0.8, bottom=0.13, wspace=0.3
    )
    figure.suptitle(title, x=0.012, y=0.97, ha="left", fontsize=SIZE + 2, color=INK, fontweight="bold")
    reward, mismatch = axes[0], axes[-1]
    evaluated = _evaluations(reward, curves)
    _panel(reward, curves, REWARD, "Mean reward of a step" + (" (dots: evaluation)" if evaluated else ""))
    reward.set_ylim(0, 1)
    reward.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", ".25", ".5", ".75", "1"])
    if with_entropy:
        _panel(axes[1], curves, ENTROPY, "Entropy over the vocabulary, nats")
        axes[1].set_ylim(bottom=0)
    _panel(mismatch, curves, MISMATCH, "Mismatch KL, trainer against rollout")
    _log_scale(mismatch, curves, MISMATCH)
    if labelled:
        _label_ends(mismatch, curves, MISMATCH)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})


def _evaluations(axes: Axes, curves: Sequence[Curve]) -> bool:
    """A dot for the mean reward of each evaluation; whether there is any."""
    found = False
    for curve in curves:
        names = {name for row in curve.rows for name in row if name.startswith("eval/") and "/avg@" in name}
        for name in sorted(names):
            steps, values = _points(curve.rows, name)
            axes.plot(steps, values, "o", color=curve.color, markersize=6, markeredgecolor="white", zorder=5)
            found |= bool(steps)
    return found


def _points(rows: Sequence[Row], name: str) -> tuple[list[int], list[float]]:
    pairs = [(row["step"], row[name]) for row in rows if row.get(name) is not None and isfinite(row[name])]
    return [step for step, _ in pairs], [value for _, value in pairs]


def _panel(axes: Axes, curves: Sequence[Curve], name: str, title: str) -> None:
    for curve in curves:
        steps, values = _points(curve.rows, name)
        marker = "o" if len(steps) == 1 else ""  # a line of one point is invisible
        axes.plot(steps, values, marker=marker, color=curve.color, linewidth=curve.width)
    axes.set_title(title, loc="left", fontsize=SIZE, color=INK)
    axes.set_xlabel("step", fontsize=SIZE, color=INK, loc="left")
    last = max((row["step"] for curve in curves for row in curve.rows), default=1)
    axes.set_xlim(1 if last > 1 else 0, max(last, 2))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    axes.grid(axis="y", color=FAINT, linewidth=0.6)
    axes.tick_params(length=0, labelsize=SIZE - 1, colors=INK)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)


def _log_scale(axes: Axes, curves: Sequence[Curve], name: str) -> None:
    """A log scale on which an exact 0, if there is one, has its place: the bottom line."""
    values = [value for curve in curves for value in _points(curve.rows, name)[1]]
    positive = [value for value in values if value > 0]
    # Below that it is rounding, of whatever size: drawn between the lowest decade and 0.
    lowest = max(-16, floor(log10(min(positive)))) if positive else -16
    highest = max(lowest + 2, floor(log10(max(positive))) + 1) if positive else lowest + 2
    decades = list(range(lowest, highest + 1, 1 + (highest - lowest) // 6))
    ticks: Mapping[float, str] = {10.0**d: f"$10^{{{d}}}$" for d in decades}
    if values and min(values) >= 10.0**lowest:
        axes.set_yscale("log")
        axes.set_ylim(10.0**lowest, 10.0**highest)
    else:
        axes.set_yscale("symlog", linthresh=10.0**lowest, linscale=0.5)
        axes.set_ylim(0, 10.0**highest)
        ticks = {0.0: "0"} | ticks
    axes.set_yticks(list(ticks), list(ticks.values()))
    axes.minorticks_off()


def _label_ends(axes: Axes, curves: Sequence[Curve], name: str) -> None:
    """Writes each label right of where its curve ends, shifted up or down so that none covers another."""
    ends: list[tuple[float, Curve]] = []
    for curve in curves:
        values = _points(curve.rows, name)[1]
        if values:
            # Where the end lies in the panel, 0 at its bottom and 1 at its top.
            x_y = axes.transData.transform((axes.get_xlim()[1], values[-1]))
            ends.append((float(axes.transAxes.inverted().transform(x_y)[1]), curve))
    ends.sort(key=lambda end: end[0])
    sizes = [LINE * (curve.label.count("\n") + 1) for _, curve in ends]
    heights = spread([height for height, _ in ends], sizes)
    for height, (_, curve) in zip(heights, ends, strict=True):
        axes.annotate(
            curve.label,
            (1.0, height),
            xycoords="axes fraction",
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            ha="left",
            fontsize=SIZE - 1,
            color=curve.color,
            annotation_clip=False,
        )


def spread(centers: Sequence[float], sizes: Sequence[float]) -> list[float]:
    """Moves labels a little, so that none covers its neighbour and all lie within 0..1.

    `centers` ascend; `sizes` are the labels' heights. Returns the new centers, in the same order.
    """
    moved = list(centers)
    gaps = [(below + above) / 2 for below, above in pairwise(sizes)]
    for i, gap in enumerate(gaps):
        short = gap - (moved[i + 1] - moved[i])
        if short > 0:  # both give way
            moved[i] -= short / 2
            moved[i + 1] += short / 2
    # From the bottom up, then from the top down: repairs what giving way has broken elsewhere.
    for i in range(len(moved)):
        moved[i] = max(moved[i], moved[i - 1] + gaps[i - 1] if i else sizes[i] / 2)
    last = len(moved) - 1
    for i in reversed(range(len(moved))):
        moved[i] = min(moved[i], moved[i + 1] - gaps[i] if i < last else 1 - sizes[i] / 2)
    return moved
