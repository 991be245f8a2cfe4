"""The labels' rows of the gradient of the head: sums of runs, whatever the runs."""

import pytest
import torch

from fusedce.kernels.label_grad import label_grad_kernel

C, H, V = 45, 40, 20
LABELS = {
    "few": torch.arange(C) % 4 * 5,
    "one": torch.full((C,), V - 1),
    "all": torch.arange(C) % V,
    "bad": torch.tensor([-100, V, 2**40 + 3, 0, 7, 7] * 7 + [0, -1, 7]),
}


def add(labels, hidden, residuals, row_factors, d_weight, d_bias, factor):
    in_order, order = labels.sort(stable=True)
    label_grad_kernel[(C, 3)](
        hidden=hidden, labels=in_order, order=order, residuals=residuals, row_factors=row_factors,
        d_weight=d_weight, d_bias=d_bias, C=C, H=H, V=V, stride_hn=hidden.stride(0), factor=factor,
        BLOCK_C=8, BLOCK_H=16,
    )  # fmt: skip


@pytest.mark.parametrize("total", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("runs", LABELS)
def test_rows_of_a_label_are_added_up(runs, scaled, total):
    rng = torch.Generator().manual_seed(0)
    labels = LABELS[runs][torch.randperm(C, generator=rng)]
    hidden = torch.randn(C, 2 * H, generator=rng).bfloat16()[:, :H]
    known = (labels >= 0) & (labels < V)
    residuals = torch.randn(C, generator=rng).masked_fill(~known, torch.nan)
    row_factors = 1.0 + torch.arange(C) if scaled else None
    before = torch.randn(V, H, generator=rng).to(total), torch.randn(V, generator=rng)

    def added():
        d_weight, d_bias = (x.clone() for x in before)
        add(labels, hidden, residuals, row_factors, d_weight, d_bias, 0.37)
        return d_weight, d_bias

    lost = (0.37 * (residuals.double() * (row_factors if scaled else 1.0)))[known]
    exact = [x.double() for x in before]
    exact[0].index_add_(0, labels[known], lost[:, None] * hidden.double()[known])
    exact[1].index_add_(0, labels[known], lost)
    d_weight, d_bias = added()
    tolerance = {"rtol": 1e-6, "atol": 1e-4} if total == torch.float32 else {}
    torch.testing.assert_close(d_weight, exact[0].to(total), **tolerance)
    torch.testing.assert_close(d_bias, exact[1].float(), rtol=1e-6, atol=1e-4)
    others = torch.ones(V, dtype=torch.bool).index_fill_(0, labels[known], False)
    assert torch.equal(d_weight[others], before[0][others])
    torch.testing.assert_close(added(), (d_weight, d_bias), rtol=0, atol=0)


def test_either_gradient_may_be_missing():
    labels, hidden, residuals = LABELS["few"], torch.ones(C, H).bfloat16(), torch.ones(C)
    d_weight, d_bias = torch.zeros(V, H), torch.zeros(V)
    add(labels, hidden, residuals, None, d_weight, None, 1.0)
    add(labels, hidden, residuals, None, None, d_bias, 1.0)
    assert torch.equal(d_bias, labels.bincount(minlength=V).float())
    assert torch.equal(d_weight, d_bias[:, None].expand(V, H))
