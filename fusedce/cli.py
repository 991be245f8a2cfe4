"""The command line: `fusedce doctor` (what would run here, and is it right) and `fusedce demo`."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

import fusedce
from fusedce.backends.choose import (
    INTERPRETED,
    TRITON_INSTALLED,
    resolve_backend,
    why_not_triton,
)
from fusedce.backends.torch.products import fast_bf16
from fusedce.contract.results import LossSum

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_DEMO_NEEDS = ("transformers", "tokenizers", "matplotlib", "rich")
_TOLERANCE = 1e-5  # float32 rounds at 6e-8; a wrong kernel is wrong by far more than this


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit status."""
    parser = argparse.ArgumentParser(prog="fusedce", description="Fused linear + cross-entropy.")
    parser.add_argument("--version", action="version", version=f"fusedce {fusedce.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="say what would run on this machine, and check it")
    demo = commands.add_parser("demo", help="train a small model three ways and compare (2 min)")
    demo.add_argument("--steps", type=_positive, default=28, help="optimizer steps (default 28)")
    demo.add_argument("--out", type=Path, default=Path("out"), help="folder for PNG and JSON")
    demo.add_argument("--seed", type=int, default=0)
    demo.add_argument("--device", type=_device, help="default: cuda if available, else cpu")
    options = parser.parse_args(argv)
    if options.command == "doctor":
        return doctor()
    return _demo(options)


def doctor() -> int:
    """Print versions, devices and backends; check the op on each device. 0 if all is right."""
    print(f"fusedce {fusedce.__version__}, Python {platform.python_version()}, {sys.platform}")
    for name in ("torch", "triton", "transformers"):
        print(f"  {name:13} {_version(name)}")
    if TRITON_INSTALLED:
        mode = (
            "interpreted (TRITON_INTERPRET is set)" if INTERPRETED else "compiled, not interpreted"
        )
        print(f"  Triton kernels are {mode}")
    fast = "fast" if fast_bf16(torch.device("cpu")) else "slow, computed in float32 instead"
    print(f"  bfloat16 products on this CPU are {fast}")

    wrong = []
    for device in _devices():
        print(f"\n{device}: {_device_name(device)}")
        for line in _backend_lines(device):
            print(f"  {line}")
        try:
            error = _self_check(device)
        except Exception as problem:  # a doctor reports what is broken, and goes on
            print(f"  self-check FAILED: {type(problem).__name__}: {problem}")
            wrong.append(str(device))
            continue
        verdict = "ok" if error <= _TOLERANCE else f"FAILED, more than {_TOLERANCE:g}"
        print(f"  self-check against reference_ce (loss and gradients, float32): {verdict}")
        print(f"    largest relative error {error:.1e}")
        if not error <= _TOLERANCE:
            wrong.append(str(device))
    if wrong:
        print(f"\nfused_ce is not right on: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


def _demo(options: argparse.Namespace) -> int:
    missing = [name for name in _DEMO_NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"fusedce demo also needs {', '.join(missing)}: pip install 'fusedce[demo]'",
            file=sys.stderr,
        )
        return 2
    try:  # before two minutes of training, not after
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        print(f"fusedce demo cannot write to --out {options.out}: {problem}", file=sys.stderr)
        return 2
    from fusedce.demo.run import run

    device = options.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return run(steps=options.steps, out=options.out, seed=options.seed, device=device)


def _backend_lines(device: torch.device) -> list[str]:
    """What ``backend=None`` means for each dtype; dtypes with the same answer share a line."""
    groups: dict[tuple[str, str], list[str]] = {}
    for dtype in _DTYPES:
        # A tensor without memory is enough to ask, also for dtypes that the device lacks.
        backend = resolve_backend(None, _Probe(device, dtype))  # type: ignore[arg-type]
        reason = why_not_triton(device, dtype)
        if backend == "triton":
            why = ""
        elif reason is None:
            why = "Triton runs on request, backend='triton'"
        else:
            why = f"not Triton: {reason}"
        groups.setdefault((backend, why), []).append(str(dtype).removeprefix("torch."))
    return [
        f"{', '.join(dtypes)}: {backend} backend" + (f"\n    {why}" if why else "")
        for (backend, why), dtypes in groups.items()
    ]


class _Probe:
    """What `resolve_backend` looks at in a tensor."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype


def _self_check(device: torch.device) -> float:
    """Largest relative error of loss, d_hidden and d_weight, each in the maximum norm."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(37, 64, generator=generator)
    weight = torch.randn(301, 64, generator=generator) / 8
    labels = torch.randint(301, (37,), generator=generator)
    labels[::7] = -100

    def run(fn: Callable[..., LossSum], where: torch.device) -> list[torch.Tensor]:
        h, w = (x.to(where).requires_grad_() for x in (hidden, weight))
        loss = fn(h, w, labels.to(where)).mean()
        results = (loss.detach(), *torch.autograd.grad(loss, (h, w)))
        return [x.cpu().double() for x in results]

    ours = run(fusedce.fused_ce, device)
    truth = run(fusedce.reference_ce, torch.device("cpu"))  # some devices lack float64
    errors = [(a - b).abs().max() / b.abs().max() for a, b in zip(ours, truth, strict=True)]
    return float(torch.stack(errors).max())


def _devices() -> list[torch.device]:
    devices = [torch.device("cpu")]
    if torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is not None
        devices += [
            torch.device(accelerator.type, i) for i in range(torch.accelerator.device_count())
        ]
    return devices


def _device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return f"{platform.machine()}, {torch.get_num_threads()} threads"
    get_name = getattr(torch.get_device_module(device), "get_device_name", None)
    return get_name(device) if get_name is not None else device.type


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _device(text: str) -> torch.device:
    try:
        device = torch.device(text)
        torch.zeros(1, device=device)
    except Exception as problem:
        reason = str(problem).splitlines()[0]
        raise argparse.ArgumentTypeError(f"cannot use {text!r} here: {reason}") from None
    return device


if __name__ == "__main__":
    sys.exit(main())
