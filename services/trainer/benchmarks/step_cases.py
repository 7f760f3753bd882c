"""What `step.py` measures, and in which order."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from step_heads import heads


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    shape: str
    head: str = "kept"
    compiled: bool = True
    checkpointing: str = "off"
    graphs: bool = True
    sharding: str = "none"
    ranks: int = 1
    deterministic: bool = False
    batch_kernel: str = "cuDNN"
    varied: bool = False
    """Every step has sequences of other lengths."""
    gather_in_place: bool = False
    backward_groups: int = 1


def cases_of_one(prime: Path | None) -> list[Case]:
    """What one GPU measures; what matters most first, prepared alike side by side."""
    kept = Case("16x")
    return [
        *(replace(kept, head=name) for name in ("none", "kept", "kept + entropy", *list(heads(prime))[3:])),
        replace(kept, head="none"),  # these two again: how much two measurements of the same differ
        kept,
        Case("4x"),
        Case("1x"),
        Case("1x", checkpointing="full"),
        replace(kept, graphs=False),
        Case("1x", varied=True),
        Case("1x", graphs=False),
        Case("1x", checkpointing="selective"),
        replace(kept, deterministic=True),
        Case("4x", head="none"),
        replace(kept, sharding="full", graphs=False),
        replace(kept, sharding="optimizer"),
        replace(kept, batch_kernel="flash"),
        replace(kept, batch_kernel="varlen"),
        replace(kept, compiled=False),
        Case("4x", compiled=False),
        Case("1x", compiled=False, checkpointing="full"),
    ]


def cases_of_many(ranks: int) -> list[Case]:
    """What several GPUs measure: ways to exchange gradients and weights, and one GPU before and after."""
    alone, together = Case("16x"), Case("16x", ranks=ranks, sharding="optimizer")
    return [
        alone,
        replace(together, gather_in_place=True),
        together,
        *(replace(together, backward_groups=groups) for groups in (2, 4, 8)),
        together,  # again: how much two measurements of the same differ
        alone,
        replace(together, head="none"),
        replace(together, shape="4x"),
        replace(together, sharding="full", graphs=False),
    ]


def owned_bytes(case: Case) -> float:
    """A parameter's own: weights, gradients and two moments in float32, and what is kept in bfloat16."""
    part = 18 / case.ranks + 2 * (not case.gather_in_place)
    return {"none": 18.0, "full": 16 / case.ranks, "optimizer": 2 + 4 + part}[case.sharding]


def said(row: dict[str, Any]) -> str:
    name = f"{row['shape']:3} {row['head']:30} "
    name += " ".join(
        f"{key}={row[key]}"
        for key in (
            "compiled",
            "checkpointing",
            "graphs",
            "sharding",
            "ranks",
            "deterministic",
            "batch_kernel",
            "varied",
            "gather_in_place",
            "backward_groups",
        )
        if row[key] != getattr(Case("16x"), key)
    )
    if "ms" not in row:
        return f"{name} {row.get('error') or row.get('skipped')}"
    memory = f" {row['beside_gib']:.1f} GiB beside" if "beside_gib" in row else ""
    return f"{name} {row['ms']:.1f} ms, {row['tokens_a_second']:,.0f} tokens/s, MFU {row['mfu']:.3f}{memory}"
