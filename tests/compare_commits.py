"""Compare the numbers of two commits: random calls of every loss on both backends.

    python tests/compare_commits.py c3618d0               # 300 calls a function, there and here
    python tests/compare_commits.py c3618d0 --calls 50 --only fused_kl --seed 1

Each commit runs in a process of its own, from its own files, on the same inputs. A result (loss or
gradient) agrees if it differs by at most `ROUNDINGS` roundings of its dtype, relative to its
largest entry; otherwise both are compared with the same call in float64 on the torch backend, and
the result is "as exact" unless it errs more now than before. What errs more, and what is an error
on one side alone, is listed.
"""

from __future__ import annotations

import argparse
import os
import pickle
import random
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
ROUNDINGS = 4
FUNCTIONS = (
    "fused_ce", "fused_cross_entropy", "class probabilities", "fused_logprobs", "labels (..., K)",
    "fused_argmax", "fused_kl", "fused_kl_tokens",
)  # fmt: skip


def draw(name: str, backend: str, seed: int) -> dict[str, Any]:
    """Sizes, dtype and options of one call, as plain values."""
    rng = random.Random(f"{name} {backend} {seed}")
    sizes = {"N": rng.choice((1, 3, 17, 40)), "H": 16 * rng.randint(1, 3), "V": rng.randint(2, 300)}
    if name == "class probabilities":  # have no kernels
        backend = "torch"
    dtypes = ["float32", "bfloat16", "float16"] + ["float64"] * (backend == "torch")
    call = sizes | {"name": name, "backend": backend, "seed": seed, "dtype": rng.choice(dtypes)}
    call |= {"ignored": rng.choice((0.0, 0.3, 1.0)), "spread": rng.choice((1.0, 4.0, 30.0))}
    options: dict[str, Any] = {}
    if rng.random() < 0.5:
        options["logit_scale"] = rng.choice((0.5, -1.3, 2.0))
    if rng.random() < 0.4:
        options["softcap"] = rng.choice((2.0, 30.0))
    if name in ("fused_ce", "fused_cross_entropy") and rng.random() < 0.5:
        options["label_smoothing"] = rng.choice((0.1, 0.7))
    if name in ("fused_ce", "fused_cross_entropy") and rng.random() < 0.4:
        options["z_loss"] = rng.choice((1e-4, 0.1))
    if name in ("fused_ce", "fused_logprobs") and rng.random() < 0.3:
        options["chunk_tokens" if name == "fused_ce" else "temperature"] = rng.choice((2, 8))
    if name in ("fused_cross_entropy", "class probabilities"):
        options["reduction"] = rng.choice(("mean", "sum", "none"))
    if name.startswith("fused_kl"):
        options = {"divergence": rng.choice(("forward", "reverse", "jsd"))}
    return call | {"options": options, "bias": rng.random() < 0.4 and name != "fused_argmax"}


def answer(call: dict[str, Any], wide: bool = False) -> Any:
    """Losses and gradients as float64 tensors by name, or the class of the error."""
    import torch

    import fusedce

    N, H, V, name = call["N"], call["H"], call["V"], call["name"]
    rng = torch.Generator().manual_seed(call["seed"])

    def normal(*shape: int) -> Any:
        made = torch.randn(*shape, generator=rng).to(getattr(torch, call["dtype"]))
        return made.double() if wide else made

    hidden, weight = normal(N, H), normal(V, H) * (call["spread"] / H**0.5)
    teacher, bias = normal(N, H), normal(V) if call["bias"] else None
    labels = torch.randint(V, (N,), generator=rng)
    several = torch.randint(V, (N, min(V, 3)), generator=rng)
    given = torch.softmax(torch.randn(N, V, generator=rng), -1)
    labels[torch.rand(N, generator=rng) < call["ignored"]] = -100
    leaves = [x.requires_grad_() for x in (hidden, weight, bias) if x is not None]
    options = call["options"] | {"backend": "torch" if wide else call["backend"]}
    try:
        if name.startswith("fused_kl"):
            other = weight.detach().flip(0)
            out = getattr(fusedce, name)(hidden, weight, teacher, other, labels, **options)
        elif name == "fused_argmax":
            return {"argmax": fusedce.fused_argmax(hidden, weight, backend=options["backend"])}
        elif name == "class probabilities":
            options["bias"] = bias
            out = fusedce.fused_cross_entropy(
                hidden, weight, given.to(torch.float64 if wide else torch.float32), **options
            )
        elif name == "labels (..., K)":
            out = fusedce.fused_logprobs(hidden, weight, several, bias=bias, **options)
        else:
            out = getattr(fusedce, name)(hidden, weight, labels, bias=bias, **options)
        parts = dict(zip(out._fields, out, strict=False)) if hasattr(out, "_fields") else {"": out}
        parts = {k: v for k, v in parts.items() if torch.is_tensor(v)}
        loss = sum(v.double().sum() for v in parts.values() if v.requires_grad)
        grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
        return type(error).__name__
    found = parts | {f"gradient {i}": g for i, g in enumerate(grads) if g is not None}
    return {k: v.detach().double() for k, v in found.items()}


def side(root: str, calls: list[dict[str, Any]]) -> list[Any]:
    """The answers of the package in ``root``, in a new process."""
    with tempfile.TemporaryDirectory() as folder:
        asked, told = Path(folder, "asked"), Path(folder, "told")
        asked.write_bytes(pickle.dumps(calls))
        environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": root}
        command = [sys.executable, "-W", "ignore", __file__, "--serve", str(asked), str(told)]
        subprocess.run(command, env=environment, check=True, cwd=folder)
        return pickle.loads(told.read_bytes())


def gap(a: Any, b: Any, eps: float) -> float:
    """Largest difference, in roundings of the largest entry; equal non-finite entries agree."""
    import torch

    if a.shape != b.shape or not torch.equal(a.isfinite(), b.isfinite()):
        return float("inf")
    if not a.isfinite().any():
        return 0.0
    a, b = a[a.isfinite()], b[b.isfinite()]
    return float((a - b).abs().max() / (eps * max(float(b.abs().max()), 1e-30)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commit", nargs="?")
    parser.add_argument("--calls", type=int, default=300, help="of each function, on both backends")
    parser.add_argument("--only", nargs="+", choices=FUNCTIONS, default=FUNCTIONS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        calls = pickle.loads(Path(args.serve[0]).read_bytes())
        Path(args.serve[1]).write_bytes(pickle.dumps([answer(call) for call in calls]))
        return 0
    import torch

    calls = [
        draw(name, backend, args.seed + i // 2)
        for name in args.only for i, backend in enumerate(("torch", "triton") * (args.calls // 2))
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(
            ["git", "archive", args.commit, "fusedce", "kernels"], cwd=ROOT, check=True,
            capture_output=True,
        ).stdout  # fmt: skip
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        before, now = side(folder, calls), side(str(ROOT), calls)
    verdicts: Counter[tuple[str, str]] = Counter()
    for call, a, b in zip(calls, before, now, strict=True):
        eps = torch.finfo(getattr(torch, call["dtype"])).eps
        verdict = "agree"
        if isinstance(a, str) or isinstance(b, str) or a.keys() != b.keys():
            if a != b:
                verdict = "differ"
                print(f"{call}\n    before {str(a)[:60]}, now {str(b)[:60]}")
        elif all(a[k].equal(b[k]) for k in a):
            verdict = "same bits"
        elif any(gap(a[k], b[k], eps) > ROUNDINGS for k in a):
            verdict, exact = "as exact", answer(call, wide=True)
            for k in a:
                old, new = (gap(side[k], exact[k], eps) for side in (a, b))
                if not new <= 1.5 * old + 1:
                    verdict = "differ"
                    print(f"{call}\n    {k}: roundings before {old:.3g}, now {new:.3g}")
        verdicts[call["name"], verdict] += 1
    for name in args.only:
        counts = {v: verdicts[name, v] for v in ("same bits", "agree", "as exact", "differ")}
        print(f"{name}: " + ", ".join(f"{n} {v}" for v, n in counts.items()))
    return 0 if not any(v == "differ" for _, v in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
