"""Scored tokens in words: quantiles and histogram of the log ratio, and the tokens that are worst."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kept_tokens.messages import TrainingSample

from .rescore import ScoredTokens

QUANTILES = (0.0, 0.01, 0.1, 0.5, 0.9, 0.99, 1.0)
DECADES = range(-8, 1)
BAR = 40
"""Characters of the longest bar of the histogram."""


def findings(
    tokens: ScoredTokens,
    samples: Sequence[TrainingSample],
    text_of: Callable[[int], str],
    bound: float,
    allowed: float,
    worst: int,
) -> dict[str, Any]:
    """What there is to say, as JSON has it.

    Args:
        tokens: scored.
        samples: of the batch.
        text_of: an id's text.
        bound: tokens with a larger |log ratio|, or one that is no number, are counted.
        allowed: the share of them that is still healthy.
        worst: how many tokens are listed.
    """
    log_ratio = tokens.log_ratio
    size = np.where(np.isfinite(log_ratio), np.abs(log_ratio), np.inf)
    above = size > bound
    finite = log_ratio[np.isfinite(log_ratio)]
    order = np.argsort(-size, kind="stable")[:worst]
    sources = np.array([samples[index].source for index in tokens.sample.tolist()])
    return {
        "tokens": len(tokens),
        "sampled_by": {str(v): int((tokens.version == v).sum()) for v in np.unique(tokens.version)},
        "bound": bound,
        "above": int(above.sum()),
        "above_share": float(above.mean()),
        "allowed_share": allowed,
        "not_finite": int(len(log_ratio) - len(finite)),
        "quantiles": {f"{q:g}": float(np.quantile(finite, q)) for q in QUANTILES} if len(finite) else {},
        "mismatch_kl": float((np.expm1(finite) - finite).mean()) if len(finite) else None,
        "ratio_mean": float(np.exp(finite).mean()) if len(finite) else None,
        "histogram": histogram(size),
        "by_source": {
            str(name): {"tokens": int((sources == name).sum()), "above": int(above[sources == name].sum())}
            for name in np.unique(sources)
        },
        "by_mask": {
            name: {"tokens": int(where.sum()), "above": int(above[where].sum())}
            for name, where in (("kept set", tokens.kept > 0), ("whole vocabulary", tokens.kept == 0))
            if where.any()
        },
        "worst": [
            {
                "sample": int(tokens.sample[i]),
                "sample_id": samples[int(tokens.sample[i])].sample_id,
                "position": int(tokens.position[i]),
                "token_id": int(tokens.token_id[i]),
                "text": text_of(int(tokens.token_id[i])),
                "kept": int(tokens.kept[i]),
                "rollout_logprob": number(tokens.rollout[i]),
                "trainer_logprob": number(tokens.trainer[i]),
                "log_ratio": number(log_ratio[i]),
                "version": int(tokens.version[i]),
            }
            for i in order.tolist()
        ],
    }


def number(value: float) -> float | str:
    """JSON has no infinity: what is no number is its name."""
    return float(value) if np.isfinite(value) else str(value)


def histogram(size: np.ndarray) -> dict[str, int]:
    """|log ratio| by decade; "0" are exactly 0."""
    edges = [10.0**decade for decade in DECADES]
    counts = {"0": int((size == 0).sum()), f"< {edges[0]:g}": int(((size > 0) & (size < edges[0])).sum())}
    for low, high in zip(edges, [*edges[1:], np.inf], strict=True):
        name = f"{low:g} to {high:g}" if np.isfinite(high) else f">= {low:g}"
        counts[name] = int(
            ((size >= low) & (size < high)).sum() + (np.isinf(size).sum() if high == np.inf else 0)
        )
    return counts


def text(found: dict[str, Any], heading: str) -> str:
    """For people."""
    versions = ", ".join(f"v{int(v):06d} ({n} tokens)" for v, n in found["sampled_by"].items())
    lines = [heading, f"sampled by {versions}", ""]
    if found["quantiles"]:
        lines += ["log ratio = trainer logprob - rollout logprob"]
        lines += [f"  {_name(q):<7} {value: .3g}" for q, value in found["quantiles"].items()]
        lines += [f"  mean ratio {found['ratio_mean']:.9g}, mismatch KL {found['mismatch_kl']:.3g}", ""]
    lines += ["|log ratio|"]
    most = max(found["histogram"].values())
    lines += [
        f"  {name:<16} {count:>9} {'#' * -(-BAR * count // most)}"
        for name, count in found["histogram"].items()
    ]
    lines += ["", f"above {found['bound']:g}: {found['above']} of {found['tokens']} tokens"]
    if found["not_finite"]:
        lines += [f"  {found['not_finite']} of them are no numbers"]
    if found["above"]:
        for kind in ("by_source", "by_mask"):
            lines += [f"  {name}: {n['above']} of {n['tokens']}" for name, n in found[kind].items()]
    lines += ["", "worst tokens"]
    columns = ("log ratio", "rollout", "trainer", "set", "version", "position", "token", "sample")
    table = [columns]
    for one in found["worst"]:
        size = str(one["kept"]) if one["kept"] else "all"
        logprobs = [_short(one[name]) for name in ("log_ratio", "rollout_logprob", "trainer_logprob")]
        token = f"{one['token_id']} {json.dumps(one['text'], ensure_ascii=False)}"
        name = f"{one['sample']} ({one['sample_id']})"
        table.append((*logprobs, size, str(one["version"]), str(one["position"]), token, name))
    widths = [max(len(row[i]) for row in table) for i in range(len(columns))]
    lines += [
        "  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in table
    ]
    return "\n".join(lines)


def _name(quantile: str) -> str:
    return {"0": "min", "0.5": "median", "1": "max"}.get(quantile, f"{100 * float(quantile):g} %")


def _short(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.6g}"
