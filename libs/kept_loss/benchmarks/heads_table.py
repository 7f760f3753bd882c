"""The tables of `heads.py`."""

from typing import Any


def report(data: dict[str, Any]) -> None:
    """Print one table a shape, and the sweeps."""
    print(f"{data['device']}, {data['versions']}, copy {data['copy_bytes_a_second'] / 1e12:.2f} TB/s")
    for shape in data["shapes"]:
        print(
            f"\n{shape['positions']} x {shape['hidden']} x {shape['vocabulary']}: "
            f"sets mean {shape['mean']:.1f}, p99 {shape['p99']:.0f}, singletons {shape['singletons']:.2f}, "
            f"gather floor {shape['floor_ms']:.2f} ms"
        )
        own = shape["heads"][0].get("ms", float("nan"))
        for row in shape["heads"]:
            if "error" in row:
                print(f"  {row['head']:34} {row['error']}")
                continue
            extra = f"{row['extra_mib']:8.1f} MiB" if "extra_mib" in row else ""
            print(f"  {row['head']:34} {row['ms']:9.3f} ms {row['ms'] / own:8.1f} x  {extra}")
    print("\nbitwise repeatable:", data["bitwise_repeatable"])
    for row in data["accuracy"]:
        print("  error", {k: v if isinstance(v, str) else f"{v:.1e}" for k, v in row.items()})
    sweep = data["vocabulary_sweep"]
    for key in ("ms_apart", "kernels_ms_apart"):
        apart = [row[key] for row in sweep if key in row]
        if apart:
            each = {row["vocabulary"]: round(row[key], 3) for row in sweep}
            print(f"V sweep, {key}: {each}, spread {max(apart) / min(apart) - 1:.1%}")
    for name, key in (("widths:", "width"), ("positions:", "positions")):
        print(name, {row[key]: round(row.get("ms", -1), 3) for row in data[f"{key}_sweep"]})
