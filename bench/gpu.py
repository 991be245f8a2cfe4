"""Fifteen minutes on a GPU, the most informative first: tests, then times in three parts.

    python bench/gpu.py part1          # at most 290 s: `tests/gpu`, training, small sizes, torch
    python bench/gpu.py part2          # at most 200 s: time at every memory, ours and peers
    python bench/gpu.py part3          # at most 290 s: evaluation, options, ways, a model
    python bench/gpu.py ways blocks    # some suites
    python bench/gpu.py part1 --dry    # anywhere: tiny problems, Triton's interpreter
    python bench/gpu.py table bench/results/gpu-h200.json --page docs/benchmarks.md --plots docs

Every time is printed as it is known and written to $OUT/gpu.json (bench/results by default). A
suite is a process, so that a dead context costs one suite; a suite that is run again measures only
the problems that the file lacks. Times are medians of bursts by turns, beside the bare products of
the same turns, since a card that gets warm gets slower; tables divide by one number a size, the
median of all its bare products. Peers are measured where they are installed;
`pip install --target SITE wheels/*.whl` and PYTHONPATH=SITE bring them along. Where there is no
repository, COMMIT=... says which commit is measured.

What the figures decide: a step in a CUDA graph far below the step itself means that the host is
too slow; one GEMM below tiles raises `gemm_up_to`; the best of the blocks goes into `archs.py`; a
tile's product below 0.9 of the rate at 8192 cubed means that tiles must be larger.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

if "--dry" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import torch
import torch.nn.functional as F
from lib import engine
from lib.losses import DIVERGENCES, FLOOR, LOSSES, OPTIONS, bare_gemms
from lib.problems import Spec, errors, make_inputs, tiny
from lib.results import FOLDER, ROOT, device_name, of_commit, stamp, versions, write
from lib.tables import markdown, put
from torch import Tensor

import fusedce

DRY = "--dry" in sys.argv
DEVICE = "cpu" if DRY else "cuda"
OUT = Path(os.environ.get("OUT", FOLDER)) / "gpu.json"
BEGIN = time.monotonic()
Call = Callable[[], object]

# (N, H, V): Llama 3 8B, Gemma 2 2B, Llama 3.2 1B, and a size that peers have published times of
LLAMA, GEMMA, SMALL_LLAMA, PUBLISHED = SHAPES = (
    (8192, 4096, 128256), (8192, 2304, 256000), (16384, 2048, 128256), (4096, 4096, 128256),
)  # fmt: skip
MiB = 2**20
WIDE = [(8192, 5120, 151936), (8192, 8192, 128256), (2048, 4096, 128256), (4096, 896, 151936)]


# ---- what is measured -----------------------------------------------------------------------


def inputs(
    shape: tuple[int, int, int], dtype: str = "bfloat16", ignored: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    spec = Spec(*shape, dtype=dtype, device=DEVICE, ignored=ignored)
    hidden, weight, labels = make_inputs(tiny(spec)._replace(H=64) if DRY else spec)
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def training(loss: Callable[..., Tensor], h: Tensor, w: Tensor, y: Tensor) -> Call:
    def call() -> None:
        h.grad = w.grad = None
        loss(h, w, y).backward()

    return call


def evaluation(loss: Callable[..., Any], h: Tensor, w: Tensor, y: Tensor) -> Call:
    return torch.no_grad()(lambda: loss(h, w, y))


def ours(h: Tensor, w: Tensor, y: Tensor, **options: Any) -> Tensor:
    return fusedce.fused_ce(h, w, y, backend="triton" if DRY else None, **options).mean()


def by_one_gemm(one_gemm: bool) -> Callable[..., Tensor]:
    """Ours, the exponentials made by one GEMM of ours or by tiles of cuBLAS's."""
    from fusedce.backends.triton import archs

    row = archs.architecture(torch.device(DEVICE))
    up_to = archs.EVERY_H if one_gemm else 0
    row = row._replace(two_bytes=row.two_bytes._replace(gemm_up_to=up_to))

    def loss(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
        with mock.patch.object(archs, "architecture", return_value=row):
            return ours(h, w, y)

    return loss


def graphed(call: Call) -> Call:
    """The same step as a CUDA graph: what is left is the device's time.

    It is captured by the first call, whose error is a row's.
    """

    @functools.cache
    def captured() -> torch.cuda.CUDAGraph:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call()
            call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph

    return lambda: captured().replay()


# ---- suites: problems, and for each the calls by name ---------------------------------------

Problem = tuple[tuple[int, ...], dict[str, Call], float]  # shape, calls, FLOPs of the products


def flops(shape: tuple[int, int, int], products: int) -> float:
    N, H, V = shape
    return 2.0 * products * N * H * V


def suite_ceilings() -> Iterator[Problem]:
    """Measure the fastest product and copy, and a tile's product beside one of 8192 cubed."""
    n, rows, columns = (64, 32, 16) if DRY else (8192, 4096, 2048)
    kind = torch.float32 if DRY else torch.bfloat16
    a, b = (torch.randn(n, n, device=DEVICE, dtype=kind) for _ in range(2))
    total = torch.empty(n, n, device=DEVICE)
    wide = {} if DRY else {"out_dtype": torch.float32}  # a CPU has no such product
    of_tile = torch.empty(rows, columns, device=DEVICE)
    x, y = a[:rows, : n // 2], b[:columns, : n // 2].t()
    yield (n, n, n), {
        FLOOR: lambda: torch.mm(a, b.t()),
        "with a float32 result": lambda: torch.mm(a, b.t(), out=total, **wide),
        "copy of float32": lambda: total.clone(),
    }, flops((n, n, n), 1)  # fmt: skip
    yield (rows, n // 2, columns), {
        FLOOR: lambda: torch.mm(x, y, out=of_tile, **wide)
    }, flops((rows, n // 2, columns), 1)  # fmt: skip


def suite_training() -> Iterator[Problem]:
    """Measure the default beside the bare products, all logits at once, and a CUDA graph."""
    for shape in SHAPES:
        x = inputs(shape)
        step = training(ours, *x)
        calls = {FLOOR: bare_gemms(*x), "fused_ce": step}
        calls["fused_ce, all logits at once"] = training(
            functools.partial(ours, memory_budget=2**40), *x
        )
        if not DRY:
            calls["fused_ce in a CUDA graph"] = graphed(step)
        yield shape, calls, flops(shape, 3)


def suite_evaluation() -> Iterator[Problem]:
    for shape in SHAPES:
        x = inputs(shape)
        calls = {FLOOR: bare_gemms(*x, "forward"), "fused_ce": evaluation(ours, *x)}
        yield shape, calls, flops(shape, 1)


BUDGETS = (64, 128, 256, 512, 900)  # MiB


def suite_peers() -> Iterator[Problem]:
    """Measure time and memory: ours by default, within budgets and with all logits, and peers."""
    eager = ["eager", "compiled eager"]
    cut = ["cut-cross-entropy", "cut-cross-entropy, exact"]
    names = {
        LLAMA: [*eager, "Liger-Kernel", *cut, "QuACK", "Liger-Kernel, CuTe"],
        GEMMA: [*eager, "Liger-Kernel", *cut],
        PUBLISHED: [*eager, "QuACK", "Liger-Kernel, CuTe"],
    }
    for shape, some in names.items():
        x = inputs(shape)
        calls = {FLOOR: bare_gemms(*x), "fused_ce": training(ours, *x)}
        for budget in BUDGETS:
            within = functools.partial(ours, memory_budget=budget * (2**24 if DRY else MiB))
            calls[f"fused_ce, {budget} MiB"] = training(within, *x)
        whole = functools.partial(ours, memory_budget=2**40)
        calls["fused_ce, all logits at once"] = training(whole, *x)
        torch.compiler.reset()
        calls |= {name: training(LOSSES[name], *x) for name in some}
        yield shape, calls, flops(shape, 3)


def suite_ways() -> Iterator[Problem]:
    for shape in (LLAMA, GEMMA, *WIDE):
        x = inputs(shape)
        calls = {FLOOR: bare_gemms(*x)}
        calls |= {name: training(by_one_gemm(way), *x)
                  for name, way in (("one GEMM", True), ("tiles", False))}  # fmt: skip
        yield shape, calls, flops(shape, 3)


def suite_blocks() -> Iterator[Problem]:
    from fusedce.backends.triton import archs, forward
    from fusedce.contract.problem import Problem as Inputs

    B = functools.partial(archs.Blocks, DESCRIPTOR=True)
    some = [archs.Blocks(32, 64, 32, 4, 1)] if DRY else [
        B(128, 256, 64, 8, 3), B(128, 256, 64, 8, 4), B(128, 128, 64, 8, 4), B(256, 128, 64, 8, 3),
        B(128, 256, 64, 8, 3, GROUP_N=8), B(128, 256, 64, 8, 3, GROUP_N=32),
    ]  # fmt: skip
    for shape in (LLAMA, GEMMA):
        h, w, y = inputs(shape)
        problem = Inputs(h.detach(), w.detach(), y)
        calls = {FLOOR: bare_gemms(h, w, y, "forward")}
        for b in some:
            calls[f"forward {tuple(b)}"] = functools.partial(forward.loss, problem, b)
        yield shape, calls, flops(shape, 1)


def suite_options() -> Iterator[Problem]:
    x = inputs((4096, 2048, 128256))
    calls = {FLOOR: bare_gemms(*x), "fused_ce": training(ours, *x),
             "eager": training(LOSSES["eager"], *x)}  # fmt: skip
    calls |= {name: training(loss, *x) for name, loss in OPTIONS.items()}
    yield (4096, 2048, 128256), calls, flops((4096, 2048, 128256), 3)


def suite_divergences() -> Iterator[Problem]:
    shape = (4096, 2048, 128256)
    x = inputs(shape)
    calls = {FLOOR: bare_gemms(*x)}
    calls |= {name: training(loss, *x) for name, loss in DIVERGENCES.items()}
    yield shape, calls, flops(shape, 3)


def suite_classes() -> Iterator[Problem]:
    shape = (4096, 2048, 128256)
    x = inputs(shape)
    calls = {
        FLOOR: bare_gemms(*x, "forward"),
        "fused_argmax": evaluation(lambda h, w, y: fusedce.fused_argmax(h, w), *x),
        "eager argmax": evaluation(lambda h, w, y: F.linear(h, w).argmax(-1), *x),
        "fused_topk, 5": evaluation(lambda h, w, y: fusedce.fused_topk(h, w, 5), *x),
        "eager top 5": evaluation(
            lambda h, w, y: F.linear(h, w).float().log_softmax(-1).topk(5), *x
        ),
    }
    yield shape, calls, flops(shape, 1)


def suite_small() -> Iterator[Problem]:
    """Measure sizes at which the host counts, beside eager code."""
    for shape in (
        (64, 1024, 32000), (256, 1024, 32000), (1024, 1024, 32000), (261, 2048, 128256),
        (512, 2048, 128256), (2048, 1024, 32000), (2048, 896, 151936),
    ):  # fmt: skip
        x = inputs(shape)
        calls = {FLOOR: bare_gemms(*x), "fused_ce": training(ours, *x)}
        chunked = functools.partial(ours, chunk_tokens=shape[0])
        calls["fused_ce, as a chunk"] = training(chunked, *x)
        calls["eager"] = training(LOSSES["eager"], *x)
        if not DRY:
            calls["fused_ce in a CUDA graph"] = graphed(training(ours, *x))
        yield shape, calls, flops(shape, 3)


def suite_torch() -> Iterator[Problem]:
    """Measure the torch backend, which runs where the kernels cannot."""
    shape = (4096, 2048, 128256)
    for dtype in ("bfloat16", "float16"):
        x = inputs(shape, dtype)
        calls = {FLOOR: bare_gemms(*x), "triton": training(ours, *x)}
        for name, given in (("", {}), (", smoothing", {"label_smoothing": 0.1}),
                            (', reduction="none"', {"reduction": "none"})):  # fmt: skip

            def loss(h: Tensor, w: Tensor, y: Tensor, given: Any = given) -> Tensor:
                return fusedce.fused_cross_entropy(h, w, y, backend="torch", **given).mean()

            calls[f"torch{name}"] = training(loss, *x)
        calls["eager"] = training(LOSSES["eager"], *x)
        yield (*shape, dtype), calls, flops(shape, 3)


def suite_more() -> Iterator[Problem]:
    """Measure other dtypes, ignored labels, and a vocabulary that 16 does not divide."""
    for shape, dtype, ignored in (
        ((8192, 2048, 50257), "bfloat16", 0.0), (LLAMA, "bfloat16", 0.75),
        (PUBLISHED, "float16", 0.0), ((2048, 2048, 50304), "float32", 0.0),
    ):  # fmt: skip
        x = inputs(shape, dtype, ignored)
        calls = {FLOOR: bare_gemms(*x), "fused_ce": training(ours, *x)}
        calls["eager"] = training(LOSSES["eager"], *x)
        said = dtype + (f", {ignored:.0%} ignored" if ignored else "")
        yield (*shape, said), calls, flops(shape, 3) * (1 - ignored)


def suite_model() -> Iterator[Problem]:
    """A step of a Llama of 1.2 billion parameters, untouched and with the head replaced."""
    import transformers

    sizes = [640, 64, 64, 1, 2, 1] if DRY else [128256, 2048, 8192, 16, 32, 8]
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
             "num_attention_heads", "num_key_value_heads")  # fmt: skip
    config = transformers.LlamaConfig(
        **dict(zip(names, sizes, strict=True)), tie_word_embeddings=True, use_cache=False
    )
    batch = (1, 32) if DRY else (4, 2048)
    with torch.device(DEVICE):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config).bfloat16()
    ids = torch.randint(config.vocab_size, batch, device=DEVICE)
    replaced = False

    def step(fused: bool) -> Call:
        def call() -> None:
            nonlocal replaced
            if fused != replaced:
                (fusedce.replace_loss_head if fused else fusedce.restore_loss_head)(model)
                replaced = fused
            model.zero_grad()
            model(input_ids=ids, labels=ids).loss.backward()

        return call

    yield batch, {"untouched": step(False), "head replaced": step(True)}, 0.0


SUITES: dict[str, tuple[Callable[[], Iterator[Problem]], int]] = {  # with seconds at most
    "ceilings": (suite_ceilings, 20), "training": (suite_training, 60), "small": (suite_small, 50),
    "torch": (suite_torch, 40), "peers": (suite_peers, 150), "evaluation": (suite_evaluation, 40),
    "ways": (suite_ways, 60), "blocks": (suite_blocks, 45), "model": (suite_model, 45),
    "options": (suite_options, 40), "divergences": (suite_divergences, 40),
    "more": (suite_more, 40), "classes": (suite_classes, 40),
}  # fmt: skip
PARTS = {
    "part1": ["tests", "training", "small", "torch"],
    "part2": ["peers"],
    "part3": ["evaluation", "more", "options", "divergences", "ways", "model"],
}
TESTS_LIMIT = 120


# ---- measuring ------------------------------------------------------------------------------


def measure(calls: dict[str, Call], rounds: int) -> dict[str, dict[str, Any]]:
    """A row for each call, by name; what fails says so in its row."""
    rows: dict[str, dict[str, Any]] = {}
    measured = engine.measure(calls, DEVICE, rounds=rounds, burst=1 if DRY else 10, peaks=not DRY)
    for name, found in measured.items():
        if "failed" in found:
            rows[name] = found
            continue
        row = rows[name] = {"first_s": round(found["first_seconds"], 2)}
        if not DRY:  # what a step leaves, its gradients, was there before
            row["peak_mib"] = round(found["extra_peak_bytes"] / MiB, 1)
        if "mhz" in found:
            row["mhz"] = round(median(found["mhz"]))
        for kind, key in (("rounds", "ms"), ("wall_seconds", "wall_ms")):
            if kind in found:
                row[key] = round(1e3 * median(found[kind]), 3)
    return rows


def profile(call: Call) -> list[str]:
    if DRY:
        return []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        call()
        torch.cuda.synchronize()
    kernels = sorted(found.key_averages(), key=lambda e: -e.self_device_time_total)[:12]
    return [f"{e.self_device_time_total / 1e3:.2f} ms {e.count}x {e.key[:80]}" for e in kernels]


def load() -> dict[str, Any]:
    """Return the file's rows if they are of this device and these versions; else none."""
    now = {"device": device_name(DEVICE), "versions": versions(), "rows": []}
    if OUT.exists():
        old = json.loads(OUT.read_text())
        if (old["device"], old["versions"]) == (now["device"], now["versions"]):
            return old
    return now


def run_suite(suite: str) -> None:
    """Measure the problems that the file lacks, and write each as it is known."""
    for shape, calls, work in SUITES[suite][0]():
        data = load()
        mine = {"suite": suite, "shape": list(shape)} | stamp()
        if any(row | mine == row for row in data["rows"]):
            print(f"  {suite} {shape}: measured already", flush=True)
            continue
        rows = measure(calls, 1 if DRY else 3)
        floor = rows.get(FLOOR, {}).get("ms")
        lines = []
        for name, row in rows.items():
            if "ms" in row:
                row["tflops"] = round(work / row["ms"] / 1e9)
            lines.append(mine | {"name": name, **row})
            over = f"{row['ms'] / floor:.3f} of the products" if floor and "ms" in row else ""
            print(f"  {suite} {shape} {name}: {row} {over}", flush=True)
        own: dict[str, Any] = {}
        if suite in ("training", "small", "torch"):
            own["profile"] = profile(calls["torch" if suite == "torch" else "fused_ce"])
        if suite == "peers":  # relative errors against float64, of a few hundred tokens
            few = Spec(*shape, device=DEVICE)._replace(N=512)
            for line in lines:
                if "ms" in line and line["name"] in LOSSES:
                    line["errors"] = errors(line["name"], tiny(few)._replace(H=64) if DRY else few)
        kept = [r for r in data["rows"] if (r["suite"], r["shape"]) != (suite, list(shape))]
        data["rows"] = kept + [line | own | mine for line in lines]
        write(OUT, data)
        calls.clear()
        if not DRY:
            torch.cuda.empty_cache()


# ---- the parts ------------------------------------------------------------------------------


def limited(command: list[str], seconds: float, **more: Any) -> tuple[bool, str]:
    """Whether a command ends well within its limit, and its output if ``stdout`` is a pipe."""
    try:
        done = subprocess.run(command, cwd=ROOT, text=True, timeout=seconds, **more)
        return done.returncode == 0, done.stdout or ""
    except subprocess.TimeoutExpired as late:
        print(f"killed after {seconds:.0f} s", flush=True)
        return False, late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""


def tests() -> bool:
    """`tests/gpu`, by 15 processes: compiling the kernels takes most of the time."""
    # Not the root on sys.path: there the folder kernels/ hides the Hugging Face package.
    code = "import sys; del sys.path[0]; import pytest; sys.exit(pytest.main())"
    chosen = ["-m", "not slow"] if DRY else []
    well, said = limited(
        [sys.executable, "-c", code, "-q", "-n", "2" if DRY else "15", "-p", "no:cacheprovider",
         *chosen, "tests/gpu"],
        10 * TESTS_LIMIT if DRY else TESTS_LIMIT, stdout=subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    last = said.strip().splitlines()[-40:]
    print("\n".join(line for line in last if not line.startswith("SKIPPED")), flush=True)
    write(OUT, load() | {"tests": {"said": last[-1] if last else ""} | stamp()})
    return well


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="+", help="part1 to part3, tests, or suites; or table FILE")
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--page", type=Path, help="page whose marked tables to rewrite")
    parser.add_argument("--plots", type=Path, help="folder for the picture")
    args = parser.parse_args()
    if args.what[0] == "table":
        file = Path(args.what[1])
        data = json.loads(file.read_text())
        tables(data, args.page)
        if args.plots:
            from lib import pictures

            of = sorted({r["date"] for r in data["rows"] if r["suite"] == "peers"})
            where = f"{data['device']}, torch {data['versions']['torch']}, {of[-1]}"
            rows = over_products(data["rows"])
            print(pictures.gpu(rows, where, args.plots / f"{file.stem}.png"))
        return 0
    if args.what[0] == "suite":
        run_suite(args.what[1])
        return 0
    chosen = [name for what in args.what for name in PARTS.get(what, [what])]
    unknown = [name for name in chosen if name not in SUITES and name != "tests"]
    if unknown:
        print(f"no suite {', '.join(unknown)}: one of {', '.join([*PARTS, 'tests', *SUITES])}",
              file=sys.stderr)  # fmt: skip
        return 2
    failed = []
    with tempfile.TemporaryDirectory() as lib:
        os.symlink(ROOT / "fusedce", Path(lib) / "fusedce")
        paths = [lib, str(ROOT / "bench"), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = ":".join(p for p in paths if p)
        for name in chosen:
            print(f"== {name} (+{time.monotonic() - BEGIN:.0f} s)", flush=True)
            if name == "tests":
                well = tests()
            else:
                limit = SUITES[name][1] * (10 if DRY else 1)
                command = [sys.executable, __file__, "suite", name, *(["--dry"] if DRY else [])]
                well = limited(command, limit)[0]
            failed += [] if well else [name]
    print(f"== done in {time.monotonic() - BEGIN:.0f} s; {OUT}")
    if failed:
        print(f"failed: {', '.join(failed)}")
    return bool(failed)


# ---- tables ---------------------------------------------------------------------------------


def over_products(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with ``over_products``: times over the median of all bare products of their size."""

    def key(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row["shape"]), row["suite"] in ("evaluation", "blocks", "classes")

    floors: dict[tuple[Any, ...], list[float]] = {}
    for row in rows:
        if row["name"] == FLOOR and "ms" in row:
            floors.setdefault(key(row), []).append(row["ms"])
    return [
        row | {"over_products": row["ms"] / median(floors[key(row)])}
        if "ms" in row and key(row) in floors else row
        for row in rows
    ]  # fmt: skip


def tables(data: dict[str, Any], page: Path | None) -> None:
    """Print the suites as Markdown, or write them into the page's places ``<!-- gpu SUITE -->``."""
    rows = over_products(data["rows"])
    known = ", ".join(f"{k} {v}" for k, v in data["versions"].items() if v != "not installed")
    if page is not None:
        put(page, "gpu versions", f"{data['device']}; {known}")
    for suite in dict.fromkeys(row["suite"] for row in rows):
        mine = [row for row in rows if row["suite"] == suite]
        cells = [
            {
                "N, H, V": ", ".join(map(str, row["shape"])),
                "": row["name"],
                "ms": f"{row['ms']:.3g}" if "ms" in row else row.get("failed", "").split(":")[0],
                "/ bare products": f"{row['over_products']:.2f}" if "over_products" in row else "",
                "peak MiB": "" if row.get("peak_mib") is None else f"{row['peak_mib']:,.0f}",
                "largest error": f"{max(row['errors'].values()):.1e}" if row.get("errors") else "",
                "roundings of d_weight": f"{row['roundings']:.2f}" if "roundings" in row else "",
            }
            for row in mine
            if not row.get("failed", "").startswith(("ModuleNotFoundError", "ImportError"))
        ]
        dates = sorted({row["date"] for row in mine})
        of = ", ".join(of_commit(c) for c in sorted({row["commit"] for row in mine}))
        body = f"{markdown(cells, once=('N, H, V',))}\n\n{data['device']}; {dates[-1]}; {of}"
        if page is None:
            print(f"\n## {suite}\n\n{body}")
        elif f"<!-- gpu {suite} -->" in page.read_text():
            put(page, f"gpu {suite}", body)


if __name__ == "__main__":
    sys.exit(main())
