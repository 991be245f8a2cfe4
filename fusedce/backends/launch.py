"""The Triton backend: allocates and launches. Arguments are checked before they come here.

``loss`` never waits for the GPU. ``loss_and_grads`` reads the number of valid tokens once, since
the GEMMs between its launches are cuBLAS's, whose sizes the host sets.
"""

from __future__ import annotations

import functools
import warnings
from contextlib import AbstractContextManager, nullcontext

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fusedce.backends import configs, tuning
from fusedce.backends.configs import ForwardConfig
from fusedce.backends.plan import chunk_size
from fusedce.kernels.compact import compact_kernel
from fusedce.kernels.forward import forward_kernel
from fusedce.kernels.grad_rows import grad_rows_kernel
from fusedce.kernels.scale import scale_kernel
from fusedce.labels import bad_label_message

_WEIGHT_GRAD_ROWS = 16384  # vocabulary rows whose chunk gradient is held before it is added


def loss(
    hidden: Tensor,  # (N, H)
    weight: Tensor,  # (V, H)
    labels: Tensor,  # (N,)
    bias: Tensor | None,  # (V,)
    ignore_index: int,
    softcap: float | None,
    logit_scale: float,
    config: ForwardConfig | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``loss_sum ()``, ``n_valid ()`` int64, ``lse (N,)`` fp32 (0 at ignored positions)."""
    hidden, weight = _unit_stride("hidden", hidden), _unit_stride("weight", weight)
    labels = labels.contiguous()
    for name, x in (("hidden", hidden), ("weight", weight)):
        if not _aligned(x):
            _say_once(f"rows of {name} are not aligned to 16 bytes, so loads are narrow")
    N, H = hidden.shape
    V = weight.shape[0]
    device = hidden.device
    if config is None:
        options = bias is not None or logit_scale != 1.0 or softcap is not None
        config = _forward_config(hidden, weight, bias, softcap, logit_scale, options)
    blocks = triton.cdiv(N, config.BLOCK_N)
    tiles_per_split, splits = configs.vocabulary_splits(V, config)
    weight_tiles = _descriptor(weight, config)

    lse = torch.zeros(N, dtype=torch.float32, device=device)
    partials = torch.empty((2 * splits + 1) * N, dtype=torch.float32, device=device)
    block_losses = torch.empty(blocks, dtype=torch.float64, device=device)
    tickets = torch.empty(1 + blocks, dtype=torch.int32, device=device)
    with _on(device):
        rows, count, n_valid, loss_sum = _compact(labels, V, ignore_index, tickets)
        if N:
            forward_kernel[(blocks * splits,)](
                hidden,
                weight,
                weight if weight_tiles is None else weight_tiles,
                weight if bias is None else bias.contiguous(),
                labels,
                rows,
                count,
                partials,
                block_losses,
                tickets,
                lse,
                loss_sum,
                N,
                H,
                V,
                hidden.stride(0),
                weight.stride(0),
                logit_scale,
                1.0 if softcap is None else softcap,
                tiles_per_split,
                splits,
                HAS_BIAS=bias is not None,
                HAS_SCALE=logit_scale != 1.0,
                HAS_SOFTCAP=softcap is not None,
                BLOCK_N=config.BLOCK_N,
                BLOCK_V=config.BLOCK_V,
                BLOCK_H=config.BLOCK_H,
                GROUP_N=config.GROUP_N,
                EVEN_H=H % config.BLOCK_H == 0,
                DESCRIPTOR=weight_tiles is not None,
                FLATTEN=config.FLATTEN,
                INPUT_PRECISION=_input_precision(hidden),
                UPCAST=device.type == "cpu",
                num_warps=config.num_warps,
                num_stages=config.num_stages,
            )
    _raise_on_cpu(n_valid, V, ignore_index)
    return loss_sum, n_valid, lse


def loss_and_grads(
    hidden: Tensor,  # (N, H)
    weight: Tensor,  # (V, H)
    labels: Tensor,  # (N,)
    bias: Tensor | None,  # (V,)
    ignore_index: int,
    softcap: float | None,
    logit_scale: float,
    chunk_tokens: int | None,
    d_hidden: Tensor | None,  # (N, H) to fill
    d_weight: Tensor | None,  # (V, H) to fill
    d_bias: Tensor | None,  # (V,) to fill
) -> tuple[Tensor, Tensor]:
    """``loss_sum ()`` and ``n_valid ()``; the gradients of the sum go to the given buffers."""
    V, H = weight.shape
    device = hidden.device
    labels = labels.contiguous()
    with _on(device):
        tickets = torch.empty(0, dtype=torch.int32, device=device)
        rows, count, n_valid, loss_sum = _compact(labels, V, ignore_index, tickets)
        _raise_on_cpu(n_valid, V, ignore_index)
        n = int(count)  # the one host synchronisation
        if d_hidden is not None:
            d_hidden.zero_()
        if n == 0:
            for grad in (d_weight, d_bias):
                if grad is not None:
                    grad.zero_()
            return loss_sum, n_valid

        rows = rows[:n].long()
        C = min(
            n,
            chunk_size(
                n,
                V,
                H,
                logit_bytes=4,
                accumulator=d_weight is not None and d_weight.dtype != torch.float32,
                on_cpu=False,
                chunk_tokens=chunk_tokens,
            ),
        )
        narrow = hidden.element_size() < 4
        several = n > C
        d_weight_sum = d_weight
        if several and d_weight is not None and d_weight.dtype != torch.float32:
            d_weight_sum = torch.empty(V, H, dtype=torch.float32, device=device)
        d_bias_sum = torch.zeros(0 if d_bias is None else V, device=device)
        buffer = torch.empty(C, V, dtype=torch.float32, device=device)
        losses = torch.empty(n, dtype=torch.float32, device=device)

        for begin in range(0, n, C):
            chunk = rows[begin : begin + C]
            h, y = hidden[chunk], labels[chunk]  # (C, H), (C,)
            logits = _mm(h, weight.t(), buffer[: len(chunk)])
            g = logits
            if narrow:  # packs the front of each row of logits
                g = logits.view(hidden.dtype)[:, :V]
            grad_rows_kernel[(len(chunk),)](
                logits,
                g,
                weight if bias is None else bias.contiguous(),
                y,
                losses[begin:],
                V,
                logits.stride(0),
                g.stride(0),
                logit_scale,
                1.0 if softcap is None else softcap,
                HAS_BIAS=bias is not None,
                HAS_SCALE=logit_scale != 1.0,
                HAS_SOFTCAP=softcap is not None,
                PACKED=narrow,
                BLOCK_V=min(triton.next_power_of_2(V), configs.GRAD_ROWS_BLOCK_V),
                num_warps=configs.GRAD_ROWS_WARPS,
            )
            if d_hidden is not None:
                d_hidden[chunk] = _mm(g, weight, None).to(d_hidden.dtype)
            if d_weight_sum is not None:
                _add_weight_grad(d_weight_sum, g, h, first=begin == 0)
            if d_bias is not None:
                d_bias_sum += g.sum(0, dtype=torch.float32)

        if d_weight is not None and d_weight_sum is not None and d_weight_sum is not d_weight:
            d_weight.copy_(d_weight_sum)
        if d_bias is not None:
            d_bias.copy_(d_bias_sum)
        return losses.sum(dtype=torch.float64).float(), n_valid


def scale_(x: Tensor, g: Tensor) -> None:
    """``x *= g``; nothing is written where ``g`` is 1, which only the GPU needs to know."""
    if x.numel():
        with _on(x.device):
            grid = (triton.cdiv(x.numel(), configs.SCALE_BLOCK),)
            scale_kernel[grid](x, g, x.numel(), BLOCK=configs.SCALE_BLOCK, num_warps=8)


def _compact(
    labels: Tensor, V: int, ignore_index: int, tickets: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``rows (N,)``, ``count ()`` int32, ``n_valid ()`` int64 and a zero ``loss_sum ()``."""
    N, device = len(labels), labels.device
    rows = torch.empty(N, dtype=torch.int32, device=device)
    count = torch.empty((), dtype=torch.int32, device=device)
    n_valid = torch.empty((), dtype=torch.int64, device=device)
    loss_sum = torch.empty((), dtype=torch.float32, device=device)
    compact_kernel[(1,)](
        labels,
        rows,
        count,
        n_valid,
        loss_sum,
        tickets,
        N,
        V,
        ignore_index,
        len(tickets),
        BLOCK_N=configs.COMPACT_BLOCK_N,
    )
    return rows, count, n_valid, loss_sum


def _mm(a: Tensor, b: Tensor, out: Tensor | None) -> Tensor:
    """``a @ b``: to float32 from float32 accumulators where ``out`` is given, else to a's dtype."""
    if a.dtype == torch.float32:
        return torch.mm(a, b, out=out)
    if a.device.type != "cuda":  # mixed output dtypes exist on CUDA only
        product = torch.mm(a.float(), b.float(), out=out)
        return product if out is not None else product.to(a.dtype)
    if out is None:
        return torch.mm(a, b)
    return torch.mm(a, b, out_dtype=torch.float32, out=out)


def _add_weight_grad(d_weight: Tensor, g: Tensor, h: Tensor, *, first: bool) -> None:
    """``d_weight (V, H) (+)= g (C, V).T @ h (C, H)``, accumulated in d_weight's dtype."""
    if d_weight.dtype == h.dtype:
        torch.addmm(d_weight, g.t(), h, beta=0 if first else 1, out=d_weight)
        return
    for begin in range(0, len(d_weight), _WEIGHT_GRAD_ROWS):
        part = d_weight[begin : begin + _WEIGHT_GRAD_ROWS]
        product = torch.empty_like(part)
        _mm(g[:, begin : begin + _WEIGHT_GRAD_ROWS].t(), h, product)
        part.copy_(product) if first else part.add_(product)


def _unit_stride(name: str, x: Tensor) -> Tensor:
    """The kernels walk along the last dimension; any other stride there is copied away."""
    if x.stride(-1) == 1:
        return x
    _say_once(f"{name} has stride {x.stride(-1)} in its last dimension: it is copied on every call")
    return x.contiguous()


def _aligned(x: Tensor) -> bool:
    """Whether every row starts at a multiple of 16 bytes, as wide loads need."""
    return x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0


def _forward_config(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    softcap: float | None,
    logit_scale: float,
    options: bool,
) -> ForwardConfig:
    family = configs.architecture(hidden.device)
    size = hidden.element_size()
    default = configs.forward(family, size, options=options)
    if not tuning.enabled() or size != 2 or family not in configs.CANDIDATES:
        return default
    V, H = weight.shape

    def milliseconds(config: ForwardConfig) -> float:
        rows = torch.randn(tuning.ROWS, H, device=hidden.device).to(hidden.dtype)
        labels = torch.randint(V, (tuning.ROWS,), device=hidden.device)
        call = functools.partial(
            loss, rows, weight, labels, bias, -100, softcap, logit_scale, config
        )
        return float(triton.testing.do_bench(call))

    key = tuning.key_of(hidden.device, hidden.dtype, H, V, options)
    return tuning.choose(key, (default, *configs.CANDIDATES[family]), milliseconds)


def _descriptor(weight: Tensor, config: ForwardConfig) -> TensorDescriptor | None:
    """What TMA reads weight by, where the configuration wants it and the addresses allow it."""
    if not config.DESCRIPTOR or not _aligned(weight):
        return None
    return TensorDescriptor.from_tensor(weight, [config.BLOCK_V, config.BLOCK_H])


@functools.cache
def _say_once(what: str) -> None:
    warnings.warn(f"fusedce: {what}; this is slower, the result is the same", stacklevel=5)


def _input_precision(x: Tensor) -> str:
    tf32 = x.is_cuda and torch.version.hip is None and torch.backends.cuda.matmul.allow_tf32
    return "tf32" if x.dtype == torch.float32 and tf32 else "ieee"


def _raise_on_cpu(n_valid: Tensor, V: int, ignore_index: int) -> None:
    if n_valid.device.type == "cpu" and n_valid.item() < 0:
        raise ValueError(bad_label_message(int(n_valid), V, ignore_index))


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the tensors'."""
    if device.type == "cpu":
        return nullcontext()
    return getattr(torch, device.type).device(device)
