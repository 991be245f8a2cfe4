"""Cost of agreement between ranks: time of a window over no window, under DDP.

    python bench/ranks.py

The window runs on two gloo processes: the same micro-batches without an accumulator, with
declared counts and streaming, in turn, so that each ratio is one of neighbours in one run: of time,
and of the CPU time of rank 0, which a busy machine changes less.
"""

from __future__ import annotations

import argparse
import contextlib
import operator
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from torch.nn.parallel import DistributedDataParallel

import fusedce

MICRO_BATCHES, ROWS, TOKENS, VOCABULARY = 4, 2, 128, 16384


def make_model() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
        num_attention_heads=4, use_cache=False, max_position_embeddings=TOKENS,
    )  # fmt: skip
    return fusedce.replace_loss_head(transformers.LlamaForCausalLM(config))


def loops(model: Any, micro: list[torch.Tensor]) -> dict[str, Callable[[], None]]:
    """The three loops over the same micro-batches: without an accumulator, declared, streaming."""
    acc = fusedce.LossAccumulator()
    n = torch.tensor(ROWS * (TOKENS - 1))

    def each(backward: Callable[[Any], None]) -> None:
        for i, ids in enumerate(micro):
            last = i == len(micro) - 1
            with contextlib.nullcontext() if last else model.no_sync():
                backward(model(input_ids=ids, labels=ids).loss)

    def none() -> None:
        each(lambda loss: (loss / len(micro)).backward())

    def declared() -> None:
        with acc.window([n] * len(micro)):
            each(lambda loss: acc.backward((loss * n, n)))

    def streaming() -> None:
        each(lambda loss: acc.backward((loss * n, n)))
        acc.finish(model.parameters())

    return {"none": none, "declared": declared, "streaming": streaming}


def windows(rank: int, folder: str, times: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model = DistributedDataParallel(make_model())
    rng = torch.Generator().manual_seed(rank)
    micro = [torch.randint(VOCABULARY, (ROWS, TOKENS), generator=rng) for _ in range(MICRO_BATCHES)]
    steps = loops(model, micro)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for i in range(times + 2):
        for name in (*steps, *steps)[i % 3 : i % 3 + 3]:
            dist.barrier()
            begin = time.perf_counter(), time.process_time()
            steps[name]()
            seconds[name].append((time.perf_counter() - begin[0], time.process_time() - begin[1]))
            model.zero_grad()
    for i, what in enumerate(("time", "CPU time") if rank == 0 else ()):
        taken = {name: [x[i] for x in found[2:]] for name, found in seconds.items()}
        base = taken.pop("none")
        print(f"{what}: {1e3 * statistics.median(base):.1f} ms without an accumulator")
        for name, found in taken.items():
            low, middle, high = statistics.quantiles(map(operator.truediv, found, base), n=4)
            print(
                f"  {name}: {middle:.3f} x (quartiles {low:.3f}, {high:.3f}); of medians "
                f"{statistics.median(found) / statistics.median(base):.3f}"
            )
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--times", type=int, default=40, help="windows of each kind")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(windows, (folder, args.times), nprocs=2, start_method="spawn")


if __name__ == "__main__":
    main()
