"""Throughput of large products, copies and launches on a device, for the model's figures.

    python bench/device.py --device cuda     # bench/results/device-cuda.json

Products and copies run in bf16 on random data; figures are medians of calls between events. The
time of a launch is that between two small kernels in a row.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from lib.engine import Call, Engine, median
from lib.results import FOLDER, device_name, versions, write
from lib.tables import markdown

LAUNCHES = 200


def product(size: int, device: str) -> Callable[[], object]:
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def copy(elements: int, device: str) -> Callable[[], object]:
    source = torch.randn(elements, device=device, dtype=torch.bfloat16)
    out = torch.empty_like(source)
    return lambda: out.copy_(source)


def launch(device: str) -> Callable[[], object]:
    x = torch.zeros(16, device=device)

    def many() -> None:
        for _ in range(LAUNCHES):
            x.add_(1.0)

    return many


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dry", action="store_true", help="tiny sizes, to test the script")
    parser.add_argument("--out", type=Path, help="default: results/device-DEVICE.json")
    args = parser.parse_args()
    size, elements = (256, 2**20) if args.dry else (8192, 2**31)
    calls = {
        "product": Call("device:product", {"size": size, "device": args.device}, "device"),
        "copy": Call("device:copy", {"elements": elements, "device": args.device}, "device"),
        "launch": Call("device:launch", {"device": args.device}, "device"),
    }
    with Engine(args.device) as engine:
        rows = engine.measure(calls)
    seconds = {name: median(row) for name, row in rows.items()}
    work = {"product": 2.0 * size**3, "copy": 4.0 * elements, "launch": float(LAUNCHES)}
    figures = {name: work[name] / s for name, s in seconds.items() if s}
    kind = torch.device(args.device).type
    data = {
        "device": device_name(args.device), "versions": versions(),
        "date": datetime.date.today().isoformat(), "sizes": {"product": size, "copy": elements},
        "flops": figures.get("product"), "bandwidth": figures.get("copy"),
        "launches_per_second": figures.get("launch"), "rows": rows,
    }  # fmt: skip
    write(args.out or FOLDER / f"device-{kind}.json", data)
    print(data["device"])
    said = {
        f"product of {size}": f"{figures.get('product', 0) / 1e12:.4g} TFLOP/s",
        f"copy of {elements} bf16": f"{figures.get('copy', 0) / 1e12:.3g} TB/s",
        "launch": f"{1e6 / figures.get('launch', float('inf')):.2f} us",
    }
    print(markdown([{"": name, "reached": value} for name, value in said.items()]))
    failed = [f"{name}: {row['failed']}" for name, row in rows.items() if "failed" in row]
    print("\n".join(failed), end="")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
