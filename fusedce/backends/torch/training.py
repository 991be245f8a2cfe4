"""The torch backend: any device, no kernels; the default on a CPU.

Work goes by *chunks* of valid tokens and, inside a chunk, by *tiles* of the vocabulary. A tile of
logits is stored vocabulary-major, ``(v, C)``: both GEMMs that follow then read it along its fast
dimension, and the first writes it faster too (6 to 12% less time for the three on a CPU).

One exponential per logit. A tile keeps ``e = exp(z - k)`` with its own maximum ``k (C,)``; once
the log-sum-exp is known, ``p = e * exp(k - lse)`` differs from ``e`` by one factor per token and
tile, which is applied to the small ``(C, H)`` operand of each GEMM instead of to the big tile.

The label's own entry leaves the tile (``e = 0``), and the sums with it. With ``L`` the log-sum-exp
of the *other* logits, the loss is ``log(1 + exp(L - z_label))`` and the label's gradient, added as
a rank-one term, ``p - 1 = expm1(-loss)``: nothing cancels at p -> 1, where ``1 + (1 - p)`` in
float32 would have rounded most of the loss away.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedce.backends.plan import chunk_size
from fusedce.backends.torch.tiles import Head, MeanLogit, TileStats
from fusedce.contract import inplace as _inplace
from fusedce.contract.labels import bad_label_code, bad_label_message
from fusedce.contract.objective import PLAIN, Objective, slopes, token_losses

_FORWARD_CHUNK = 1024  # tokens at a time where no gradient is wanted


def loss(
    hidden: Tensor,  # (N, H)
    weight: Tensor,  # (V, H)
    labels: Tensor,  # (N,)
    bias: Tensor | None,  # (V,)
    ignore_index: int,
    softcap: float | None,
    logit_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """``loss_sum ()``, ``n_valid ()`` int64, ``lse (N,)``; holds one tile of logits."""
    rows, n_valid = valid_rows(labels, weight.shape[0], ignore_index)
    head = Head(weight, bias, softcap, logit_scale)
    lse_all = torch.zeros(len(labels), dtype=head.acc, device=hidden.device)
    total = torch.zeros((), dtype=torch.float64, device=hidden.device)
    for chunk in parts(rows, _FORWARD_CHUNK):
        h = hidden[chunk].to(head.acc)  # (C, H)
        stats = TileStats(labels[chunk].long(), head.acc)
        for begin, end in head.tiles(len(chunk)):
            stats.add(head.logits(h, begin, end), begin)
        total += stats.losses().sum()
        lse_all[chunk] = stats.lse().to(head.acc)
    return total.to(head.acc), n_valid, lse_all


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
    objective: Objective = PLAIN,  # with a soft-cap: no label smoothing
    argmax: Tensor | None = None,  # (N,) int64 to fill at valid rows
) -> tuple[Tensor, Tensor]:
    """``loss_sum ()`` and ``n_valid ()``; the gradients of the sum go to the given buffers."""
    V, H = weight.shape
    device = hidden.device
    rows, n_valid = valid_rows(labels, V, ignore_index, objective.token_weight)
    head = Head(weight, bias, softcap, logit_scale)
    acc = head.acc
    gemm = torch.bfloat16 if hidden.dtype == torch.bfloat16 and _fast_bf16(device) else acc

    C = chunk_size(
        len(rows),
        V,
        H,
        logit_bytes=gemm.itemsize,
        accumulator=d_weight is not None and d_weight.dtype != acc,
        on_cpu=device.type == "cpu",
        chunk_tokens=chunk_tokens,
    )
    chunks = rows.split(C)
    if d_hidden is not None:
        d_hidden.zero_()
    if not len(rows):
        for grad in (d_weight, d_bias):
            if grad is not None:
                grad.zero_()
        return torch.zeros((), dtype=acc, device=device), n_valid

    d_weight_sum = d_weight
    if d_weight is not None and d_weight.dtype != acc and len(chunks) > 1:
        d_weight_sum = torch.empty(V, H, dtype=acc, device=device)
    d_bias_sum = None if d_bias is None else torch.zeros(V, dtype=acc, device=device)
    buffer = torch.empty(V * len(chunks[0]), dtype=gemm, device=device)
    total = torch.zeros((), dtype=torch.float64, device=device)
    mean = MeanLogit(head, objective.class_weight) if objective.label_smoothing else None

    for number, chunk in enumerate(chunks):
        h = hidden[chunk].to(acc)  # (C, H)
        y = labels[chunk].long()
        C = len(chunk)
        e = buffer[: V * C].view(V, C)
        stats = TileStats(y, acc, argmax=argmax is not None)
        for begin, end in head.tiles(C):
            in_place = e[begin:end] if gemm == acc else None
            z = head.logits(h, begin, end, out=in_place)
            slope = None if softcap is None else 1 - (z / softcap).square_()
            stats.add(z, begin)  # z becomes exp(z - k)
            if slope is not None:
                z.mul_(slope)
            if in_place is None:
                e[begin:end] = z
        nll, lse = stats.losses(), stats.lse()
        if argmax is not None:
            argmax[chunk] = stats.argmax()

        y = y.clamp(0, V - 1)  # a bad label (NaN by now) must not index out of bounds
        part = objective.rows(chunk)
        zmean = None if mean is None else mean.of(h)
        total += token_losses(part, y, nll, lse, zmean).sum()
        u_nll, u_lse, u_zmean = slopes(part, y, lse)
        coefficient = u_nll * torch.expm1(-nll) + u_lse * torch.exp(-nll)
        if softcap is not None:
            coefficient *= 1 - (stats.z_label.double() / softcap).square()
        coefficient = (logit_scale * coefficient).to(acc)  # (C,)
        factors = stats.factors(lse).mul_(logit_scale * (u_nll + u_lse)).to(acc)  # (tiles, C)

        dh = None if d_hidden is None else torch.zeros(C, H, dtype=acc, device=device)
        for (begin, end), factor in zip(head.tiles(C), factors, strict=True):
            tile = e[begin:end]  # (v, C)
            if dh is not None:
                w = weight[begin:end].to(gemm)
                dh.addcmul_(torch.mm(tile.t(), w).to(acc), factor[:, None])
            if d_weight_sum is not None:
                scaled = (h * factor[:, None]).to(gemm)
                accumulate(d_weight_sum[begin:end], tile, scaled, first=number == 0)
            if d_bias_sum is not None:
                d_bias_sum[begin:end] += torch.mv(tile.to(acc), factor)

        if d_hidden is not None and dh is not None:
            dh.addcmul_(weight[y].to(acc), coefficient[:, None])
            if mean is not None:
                mean.add_hidden_gradient(dh, u_zmean)
            d_hidden[chunk] = dh.to(d_hidden.dtype)
        if d_weight_sum is not None:
            add_rows(d_weight_sum, y, h * coefficient[:, None])
        if d_bias_sum is not None:
            add_rows(d_bias_sum, y, coefficient)
        if mean is not None:
            mean.gather(h, u_zmean)

    if mean is not None:
        mean.add_head_gradients(d_weight_sum, d_bias_sum)
    if d_weight is not None and d_weight_sum is not None and d_weight_sum is not d_weight:
        d_weight.copy_(d_weight_sum)
    if d_bias is not None and d_bias_sum is not None:
        d_bias.copy_(d_bias_sum)
    return total.to(acc), n_valid


def scale_(x: Tensor, g: Tensor) -> None:
    """``x *= g``, left alone where ``g`` is 1 and reading it costs nothing."""
    if g.device.type != "cpu" or g.item() != 1:
        _inplace.scale_(x, g)


def valid_rows(
    labels: Tensor, V: int, ignore_index: int, token_weight: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Positions with a label to predict and a weight other than 0; the number of the former.

    A bad label raises on a CPU; elsewhere the number is a negative code (see `LossSum`) and the
    label's logit NaN, as with the Triton backend.
    """
    valid = labels != ignore_index
    n_valid = valid.sum()
    bad = valid & ((labels < 0) | (labels >= V))
    if bad.any():
        position = int(bad.nonzero()[0, 0])
        code = bad_label_code(position, int(labels[position]))
        if labels.device.type == "cpu":
            raise ValueError(bad_label_message(code, V, ignore_index))
        n_valid.fill_(code)
    if token_weight is not None:
        valid = valid & ((token_weight != 0) | bad)
    return valid.nonzero()[:, 0], n_valid


def parts(rows: Tensor, size: int) -> tuple[Tensor, ...]:
    """``rows`` in chunks; none at all where there is no row."""
    return rows.split(size) if len(rows) else ()


def accumulate(d_weight: Tensor, tile: Tensor, scaled: Tensor, *, first: bool) -> None:
    """``d_weight (v, H) (+)= tile (v, C) @ scaled (C, H)``."""
    if d_weight.dtype == tile.dtype:
        torch.addmm(d_weight, tile, scaled, beta=0 if first else 1, out=d_weight)
    elif first:
        d_weight.copy_(torch.mm(tile, scaled))
    else:
        d_weight.add_(torch.mm(tile, scaled))


def add_rows(total: Tensor, y: Tensor, rows: Tensor) -> None:
    """``total[y] += rows``, repeated labels summed in the dtype of ``rows`` before any rounding."""
    if total.dtype == rows.dtype and total.device.type == "cpu":
        total.index_add_(0, y, rows)
        return
    unique, inverse = y.unique(return_inverse=True)
    summed = rows.new_zeros(len(unique), *rows.shape[1:])
    summed.index_put_((inverse,), rows, accumulate=True)  # sorts first: deterministic everywhere
    total[unique] = (total[unique].to(rows.dtype) + summed).to(total.dtype)


def _fast_bf16(device: torch.device) -> bool:
    """Whether bf16 GEMMs run on units made for them. Elsewhere they are 3 to 4 times slower."""
    if device.type != "cpu":
        return True
    return any(
        probe()
        for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
        if (probe := getattr(torch.cpu, name, None)) is not None
    )
