"""The table of `step.py`: what was asked for and what was reached."""

import statistics
from collections.abc import Callable
from typing import Any

Row = dict[str, Any]


def print_table(results: dict[str, Any]) -> None:
    """Every row, then the figures that are held to a bound."""
    rows = results["rows"]
    print(f"\n{results['machine']}, torch {results['torch']}, matmul {results['matmul_tflops']:.0f} TFLOP/s")
    print("| shape | head | prepared | ms | of it kernels | tokens/s | MFU | GiB beside |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        how = [
            "compiled" if row["compiled"] else "eager",
            *(f"{row['checkpointing']} checkpointing" for _ in range(row["checkpointing"] != "off")),
            *([] if row["graphs"] else ["no graphs"]),
            *([f"sharded: {row['sharding']}"] if row["sharding"] != "none" else []),
            *([f"{row['ranks']} GPUs"] if row["ranks"] > 1 else []),
            *(["deterministic"] if row["deterministic"] else []),
            *([f"attention {row['batch_kernel']}"] if row["batch_kernel"] != "cuDNN" else []),
            *(["rows differ"] if row["varied"] else []),
            *exchanged(row),
            *(["the others idle"] if row["ranks"] < run_of(row) else []),
        ]
        figures = f"{row.get('error') or row.get('skipped')} | | | |"
        if "ms" in row:
            kernels = f"{row['kernels_ms']:.1f}" if "kernels_ms" in row else ""
            figures = f"{row['ms']:.1f} | {kernels} | {row['tokens_a_second']:,.0f} | {row['mfu']:.3f} | "
            figures += f"{row.get('beside_gib', 0):.1f}"
        print(f"| {row['shape']} | {row['head']} | {', '.join(how)} | {figures} |")
    print("\n| whole step | must | reached |\n|---|---|---|")
    for what, must, reached in bounds(rows, results["batch_kernel"]):
        print(f"| {what} | {must} | {reached} |")


def exchanged(row: Row) -> list[str]:
    """How ranks exchange gradients and weights, where it is not as usual."""
    groups = row.get("backward_groups", 1)
    return [
        *(["weights gathered in place"] if row.get("gather_in_place") else []),
        *([f"backward in {groups} groups"] if groups > 1 else []),
    ]


def run_of(row: Row) -> int:
    """How many ranks its run had."""
    return int(row.get("run_of", row["ranks"]))


def mean(rows: list[Row]) -> Row:
    """Of measurements of the same. Not the best: what is measured twice would beat what is measured once."""
    ratio = statistics.fmean(row["ms"] for row in rows) / rows[0]["ms"]
    faster = {key: rows[0][key] / ratio for key in ("tokens_a_second", "mfu")}
    return rows[0] | faster | {"ms": rows[0]["ms"] * ratio}


def bounds(rows: list[Row], kernel: str) -> list[tuple[str, str, str]]:
    """(what, must, reached)."""

    def find(shape: str, head: str = "kept", **wanted: Any) -> Row | None:
        usual = {
            "compiled": True, "checkpointing": "off", "graphs": True, "sharding": "none", "ranks": 1,
            "deterministic": False, "batch_kernel": kernel, "varied": False,
        }  # fmt: skip
        wanted = {"shape": shape, "head": head, **usual, **wanted}
        own = [row for row in rows if run_of(row) == row["ranks"] and not exchanged(row)]
        found = [row for row in own if "ms" in row and all(row[key] == wanted[key] for key in wanted)]
        return mean(found) if found else None

    def shown(value: Callable[..., str], *needed: Row | None) -> str:
        return "not measured" if None in needed else value(*needed)

    def times(faster: Row, slower: Row) -> str:
        return f"{faster['tokens_a_second'] / slower['tokens_a_second']:.2f}"

    def slower_by(one: Row, other: Row) -> str:
        return f"{one['ms'] / other['ms'] - 1:+.1%}"

    def mfu(row: Row) -> str:
        return f"{row['mfu']:.1%}"

    kept, bare, entropy = find("16x"), find("16x", "none"), find("16x", "kept + entropy")
    peers = [head for head in dict.fromkeys(row["head"] for row in rows) if head.startswith("prime-rl")]
    two = [row for row in rows if row["ranks"] > 1 and "ms" in row]
    alone = [row for row in rows if row["ranks"] < run_of(row) and "ms" in row]
    arms = [
        row for row in two if (row["shape"], row["head"], row["sharding"]) == ("16x", "kept", "optimizer")
    ]
    ranks = max((row["ranks"] for row in two), default=2)
    checkpointed = find("1x", checkpointing="full")
    return [
        ("kept head against no head, 16 x 1024", "within 2 %", shown(slower_by, kept, bare)),
        *(
            (f"kept head + entropy against {name}", must, shown(times, entropy, find("16x", name)))
            for name, must in (
                ("whole vocabulary + entropy", ">= 1.7"),
                *((peer, ">= 1.7") for peer in peers),
                ("cut-cross-entropy", ">= 1.2"),
            )
        ),
        (
            "the same against cut-cross-entropy, logits spread as in trained models",
            ">= 1.2",
            shown(times, find("16x", "kept + entropy, spread"), find("16x", "cut-cross-entropy, spread")),
        ),
        ("MFU, kept head, 16 x 1024", ">= 58 %", shown(mfu, kept)),
        ("MFU, kept head, 4 x 4096", ">= 62 %", shown(mfu, find("4x"))),
        ("MFU, kept head, 1 x 16,384 of many", ">= 60 %", shown(mfu, find("1x"))),
        (
            f"{ranks} GPUs against 1 of another run, 16 x 1024 each",
            ">= 1.85",
            shown(times, find("16x", ranks=ranks, sharding="optimizer"), kept),
        ),
        *(
            (
                ", ".join([f"{arm['ranks']} GPUs against 1 of the same run", *exchanged(arm)]),
                ">= 1.85",
                times(arm, min(alone, key=lambda row: row["ms"])),
            )
            for arm in arms
            if alone
        ),
        (
            "memory beside weights, gradients, optimiser; full checkpointing, 1 x 16,384",
            "<= 4 GiB",
            shown(lambda row: f"{row.get('beside_gib', float('nan')):.1f} GiB", checkpointed),
        ),
    ]
