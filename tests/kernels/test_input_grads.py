"""The labels' rows of the gradient of the head: sums over runs of one label."""

import pytest
import torch
from support.bounds import EXACT

from fusedce.kernels.input_grads import label_grad_kernel

C, H, V = 45, 40, 20
LABELS = {
    "few": torch.arange(C) % 4 * 5,
    "one": torch.full((C,), V - 1),
    "all": torch.arange(C) % V,
    "bad": torch.tensor([-100, V, 2**40 + 3, 0, 7, 7] * 7 + [0, -1, 7]),
}


def add(columns, hidden, entries, d_weight, d_bias, factor, rows=None):
    in_order, order = columns.sort(stable=True)
    label_grad_kernel[(len(in_order), 3)](
        hidden=hidden, columns=in_order, order=order, label_grads=entries, rows=rows,
        d_weight=d_weight, d_bias=d_bias, C=C, H=H, V=V, stride_hn=hidden.stride(0), factor=factor,
        BLOCK_C=8, BLOCK_H=16,
    )  # fmt: skip


@pytest.mark.parametrize("total", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("runs", LABELS)
def test_rows_of_a_class_are_added_up(runs, total):
    rng = torch.Generator().manual_seed(0)
    columns = LABELS[runs][torch.randperm(C, generator=rng)]
    hidden = torch.randn(C, 2 * H, generator=rng).bfloat16()[:, :H]
    known = (columns >= 0) & (columns < V)
    entries = torch.randn(C, generator=rng).masked_fill_(~known, torch.nan)
    before = torch.randn(V, H, generator=rng).to(total), torch.randn(V, generator=rng)

    def added():
        d_weight, d_bias = (x.clone() for x in before)
        add(columns, hidden, entries, d_weight, d_bias, 0.37)
        return d_weight, d_bias

    more = (0.37 * entries.double())[known]
    rows = hidden.double()[known]
    exact = [x.double() for x in before]
    exact[0].index_add_(0, columns[known], more[:, None] * rows)
    exact[1].index_add_(0, columns[known], more)
    sizes = [x.double().abs() for x in before]  # of the terms, at most C of them a class
    sizes[0].index_add_(0, columns[known], (more[:, None] * rows).abs())
    sizes[1].index_add_(0, columns[known], more.abs())
    d_weight, d_bias = added()
    rounding = (C + 2) * torch.finfo(torch.float32).eps / 2
    for x, e, size in zip((d_weight, d_bias), exact, sizes, strict=True):
        once = 2**-8 * e.abs() if x.dtype == torch.bfloat16 else 0
        assert ((x.double() - e).abs() <= rounding * size + once).all()
    others = torch.ones(V, dtype=torch.bool).index_fill_(0, columns[known], False)
    assert torch.equal(d_weight[others], before[0][others])
    torch.testing.assert_close(added(), (d_weight, d_bias), **EXACT)


def test_either_gradient_may_be_missing():
    labels, hidden, entries = LABELS["few"], torch.ones(C, H).bfloat16(), torch.ones(C)
    d_weight, d_bias = torch.zeros(V, H), torch.zeros(V)
    add(labels, hidden, entries, d_weight, None, 1.0)
    add(labels, hidden, entries, None, d_bias, 1.0)
    assert torch.equal(d_bias, labels.bincount(minlength=V).float())
    assert torch.equal(d_weight, d_bias[:, None].expand(V, H))


def test_entries_of_some_rows_find_their_hidden_states():
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(2 * C, H, generator=rng)
    rows = torch.randperm(2 * C, generator=rng)[:C].int()
    columns, entries = torch.randint(V, (C,), generator=rng), torch.randn(C, generator=rng)
    found, expected = torch.zeros(2, V, H)
    add(columns, hidden, entries, found, None, 0.5, rows)
    add(columns, hidden[rows.long()], entries, expected, None, 0.5)
    assert found.equal(expected)
    assert found.any()
