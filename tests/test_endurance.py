"""Sizes and lengths of real runs: products past 2**31 entries, and no growth over many steps.

They take minutes and gigabytes: ``FUSEDCE_ENDURANCE=1`` runs them.
"""

import gc
import os
from pathlib import Path

import pytest
import torch
from support.bounds import SAME_SUMS, STATISTIC, logit_rounding
from support.heads import plain_model, tokens

from fusedce import LossAccumulator, fused_ce, replace_loss_head

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        os.environ.get("FUSEDCE_ENDURANCE", "0") != "1",
        reason="takes minutes and 16 GiB: set FUSEDCE_ENDURANCE=1",
    ),
]


def resident() -> int:
    """Bytes of this process in memory."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def training_step(hidden, weight, labels, **options):
    """Mean loss, count and the gradients of hidden and weight."""
    leaves = [x.detach().requires_grad_() for x in (hidden, weight)]
    out = fused_ce(*leaves, labels, **options)
    loss = out.mean()
    loss.backward()
    return [loss.detach(), out.n_valid, *(x.grad for x in leaves)]


def test_more_than_2_to_the_31_logits_are_the_sum_of_their_halves():
    N, H, V = 20_000, 4, 131_072
    assert N * V > 2**31
    rng = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(N, H, generator=rng), torch.randn(V, H, generator=rng)
    labels = torch.randint(V, (N,), generator=rng)
    labels[-1] = V - 1
    loss, count, d_hidden, d_weight = training_step(hidden, weight, labels)
    halves = [
        training_step(hidden[rows], weight, labels[rows])
        for rows in (slice(None, N // 2), slice(N // 2, None))
    ]
    assert count == N
    torch.testing.assert_close(2 * loss, halves[0][0] + halves[1][0], rtol=STATISTIC, atol=0)
    both = torch.cat([x[2] for x in halves]) / 2
    torch.testing.assert_close(d_hidden, both, rtol=0, atol=SAME_SUMS * float(both.abs().max()))
    both = (halves[0][3] + halves[1][3]) / 2
    many = 16 * SAME_SUMS  # 20,000 terms
    torch.testing.assert_close(d_weight, both, rtol=0, atol=many * float(both.abs().max()))


def test_a_weight_of_more_than_2_to_the_31_entries_has_the_gradient_of_its_last_rows():
    N, H, V = 3, 16_384, 131_200
    assert V * H > 2**31
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, H, generator=rng, dtype=torch.bfloat16) / H**0.5
    weight = torch.randn(1024, H, generator=rng, dtype=torch.bfloat16).repeat(V // 1024 + 1, 1)[:V]
    labels = torch.tensor([V - 1, 0, V // 2])
    loss, _, d_hidden, d_weight = training_step(hidden, weight, labels, memory_budget=2**27)
    logits = torch.cat([hidden.float() @ w.float().T for w in weight.split(4096)], 1)
    lse = logits.logsumexp(1)
    expected = (lse - logits.gather(1, labels[:, None])[:, 0]).mean()
    # both losses are of float32 logits, sums of 16,384 products
    bound = STATISTIC * float(expected) + 2 * logit_rounding(hidden, weight[:1024])
    torch.testing.assert_close(loss.float(), expected, rtol=0, atol=bound)
    p = (logits - lse[:, None]).exp()
    p[torch.arange(N), labels] -= 1
    for rows in (slice(0, 64), slice(V // 2 - 32, V // 2 + 32), slice(V - 64, V)):
        exact = p[:, rows].T @ hidden.float() / N
        error = (d_weight[rows].float() - exact).abs().max()
        assert error <= 2**-8 * exact.abs().max()  # one rounding
    assert d_hidden.isfinite().all()


def steps():
    rng = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(64, 32, generator=rng), torch.randn(5000, 32, generator=rng)
    labels = torch.randint(5000, (64,), generator=rng)
    return lambda: training_step(hidden, weight, labels)


def windows():
    weight = torch.zeros(7, 3, requires_grad=True)
    hidden, labels = torch.ones(2, 3), torch.tensor([1, 2])
    accumulator = LossAccumulator()

    def window():
        weight.grad = None
        with accumulator.window([2]):
            accumulator.backward(fused_ce(hidden, weight, labels))

    return window


def replaced_models():
    x = tokens(2, 5)

    def use():
        model = replace_loss_head(plain_model())
        torch.nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()

    return use


@pytest.mark.parametrize(
    ("make", "times"), [(steps, 1000), (windows, 100_000), (replaced_models, 1000)]
)
def test_memory_does_not_grow(make, times):
    use = make()
    for _ in range(max(times // 100, 100)):
        use()
    before = resident()
    for _ in range(times):
        use()
    assert resident() - before < 8 * 2**20
