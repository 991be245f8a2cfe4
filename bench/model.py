"""Predicted time and memory of the loss on a GPU, term by term, beside what was measured.

    python -m bench.model                                     # the shapes that are measured
    python -m bench.model --shape 8192,4096,128256 --device H200      # every term of one of them
    python -m bench.model --measured bench/results/loss-cuda.json     # measured beside it

The model is `bench/lib/gpu_model.py`. Results of GPUs under `bench/results` are found by
themselves. The range in brackets comes from the least certain assumption of each method: the rate
of our own main loops, what of a tile stays in L2, or a pass's share of the copy's bandwidth.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))  # run as a module, too

from lib.gpu_model import (  # noqa: E402
    DEVICES,
    METHODS,
    PLANS,
    SHAPES,
    Device,
    MiB,
    bare_gemms,
    predict,
)
from lib.tables import markdown  # noqa: E402

Row = dict[str, str]


def terms_of(shape: tuple[int, int, int], device: Device, *, training: bool) -> list[Row]:
    """One row for each term of each method."""
    floor = bare_gemms(*shape, device, training=training).seconds
    rows = []
    for method in [*METHODS, *PLANS]:
        found = predict(method, *shape, device, training=training)
        for name, seconds in [*found.terms.items(), ("sum", found.seconds)]:
            rows.append({
                "method": method, "term": name, "ms": f"{1e3 * seconds:.3f}",
                "/ bare GEMMs": f"{seconds / floor:.3f}", "MiB": "",
            })  # fmt: skip
        for name, count in [*found.memory.items(), ("memory", found.bytes)]:
            rows.append({
                "method": method, "term": name, "ms": "", "/ bare GEMMs": "",
                "MiB": f"{count / MiB:.0f}",
            })  # fmt: skip
    return rows


def overview(device: Device, *, training: bool) -> list[Row]:
    """The measured shapes: milliseconds of the floor, and every method over it."""
    rows = []
    for shape in SHAPES:
        floor = bare_gemms(*shape, device, training=training)
        row = {
            "N, H, V": ", ".join(map(str, shape)),
            "bare GEMMs, ms": f"{1e3 * floor.seconds:.1f}",
        }
        for method in [*METHODS, *PLANS][1:]:
            found = predict(method, *shape, device, training=training)
            ratios = (x / floor.seconds for x in (found.seconds, found.low, found.high))
            row[f"{method} / bare"] = "{:.2f} ({:.2f} to {:.2f})".format(*ratios)
            row[f"{method}, MiB"] = f"{found.bytes / MiB:.0f}"
        rows.append(row)
    return rows


def beside(data: Mapping[str, Any], device: Device) -> list[Row]:
    """Rows of `bench/loss.py` with the prediction of each beside the measurement."""
    rows = []
    for row in data["rows"]:
        known = row["name"] in PLANS or row["name"] in METHODS
        if not known or row["mode"] == "frozen" or row["dtype"] != "bfloat16" or row["ignored"]:
            continue
        if row.get("budget") or not (row.get("seconds") or row.get("extra_peak_bytes")):
            continue
        shape = row["N"], row["H"], row["V"]
        found = predict(row["name"], *shape, device, training=row["mode"] == "train")
        seconds, peak = sorted(row.get("seconds") or []), row.get("extra_peak_bytes")
        median = seconds[len(seconds) // 2] if seconds else None
        rows.append({
            "suite": row["suite"],
            "N, H, V": ", ".join(map(str, shape)),
            "": row["name"],
            "predicted ms": f"{1e3 * found.seconds:.2f}",
            "range": f"{1e3 * found.low:.2f} to {1e3 * found.high:.2f}",
            "measured ms": f"{1e3 * median:.2f}" if median else "",
            "measured / predicted": f"{median / found.seconds:.2f}" if median else "",
            "predicted MiB": f"{found.bytes / MiB:.0f}",
            "measured MiB": "" if peak is None else f"{peak / MiB:.0f}",
        })  # fmt: skip
    return rows


def device_of(name: str) -> Device | None:
    """The device whose name occurs in what a driver calls it, as in "NVIDIA H200"."""
    return next((d for d in DEVICES.values() if d.name in name), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", help="N,H,V: every term of this one")
    parser.add_argument("--device", choices=list(DEVICES), default="H200")
    parser.add_argument("--forward", action="store_true", help="predict a call without gradients")
    parser.add_argument("--measured", type=Path, nargs="*", help="default: results of GPUs, if any")
    args = parser.parse_args()
    device, training = DEVICES[args.device], not args.forward
    print(f"Predicted, not measured. {device.name}: {device.flops / 1e12:.0f} TFLOP/s, "
          f"{device.bandwidth / 1e12:.2f} TB/s; {device.source}.\n")  # fmt: skip
    if args.shape:
        N, H, V = (int(x) for x in args.shape.split(","))
        print(markdown(terms_of((N, H, V), device, training=training)))
        return
    print(markdown(overview(device, training=training)))
    files = (
        args.measured if args.measured is not None else sorted((HERE / "results").glob("*.json"))
    )
    for file in files:
        data = json.loads(file.read_text())
        of = device_of(data.get("device", "")) if isinstance(data, dict) else None
        if of is not None and "rows" in data and "versions" in data:
            print(f"\nPrediction beside measurement, {data['device']}, {file.name}:\n")
            print(markdown(beside(data, of)))


if __name__ == "__main__":
    main()
