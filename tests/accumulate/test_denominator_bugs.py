"""Known bugs of the denominator: the naive loop is visibly wrong, and ours is right.

Each test names the reports it stands for.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from support.bounds import EXACT, SAME_MODEL, SAME_SUMS
from support.loops import (
    H,
    V,
    batches,
    distance,
    new_weight,
    run_streaming,
    run_window,
    weight_and_grad,
)

from fusedce import LossAccumulator, count_valid, fused_ce, shift_labels

SIZES = [1, 20, 3, 8]
RUNS = pytest.mark.parametrize("run", [run_window, run_streaming])


def loss_of(weight, one):
    return fused_ce(one[0], weight, one[1])


@RUNS
def test_mean_of_micro_batch_means(run):
    """trl#2175, transformers#24725, fixed by #34191."""
    micro = batches(SIZES)
    weight, exact, _ = weight_and_grad(micro)
    naive = new_weight()
    for one in micro:
        (loss_of(naive, one).mean() / len(micro)).backward()
    assert distance(naive.grad, exact) > 0.3
    run(LossAccumulator(), weight, micro)
    assert distance(weight.grad, exact) <= SAME_SUMS


@RUNS
def test_logged_loss_times_accumulation_steps(run):
    """transformers#35204, axolotl#2262, LlamaFactory#7443, Liger-Kernel#802."""
    micro = batches(SIZES)
    weight, _, exact = weight_and_grad(micro)
    naive = sum(loss_of(weight, one).mean().item() for one in micro)  # no loss was divided
    assert naive > 3 * exact
    acc = LossAccumulator()
    run(acc, weight, micro)
    assert acc.metrics()["loss"] == pytest.approx(exact, rel=1e-6)


def test_counted_before_the_shift():
    """transformers#46204: a causal model trains T - 1 of T tokens. 8 rows: 201 for 193."""
    lengths = [40, 33, 12, 30, 25, 41, 9, 11]
    labels = torch.full((8, 41), -100)
    for row, length in zip(labels, lengths, strict=True):
        row[:length] = torch.arange(length) % V
    naive = int((labels != -100).sum())
    assert (naive, int(count_valid(labels))) == (201, 193)

    hidden, weight = torch.randn(8, 41, H), new_weight()
    out = fused_ce(hidden, weight, shift_labels(labels))
    exact = F.cross_entropy(
        (hidden[:, :-1] @ weight.T).flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
    ).item()
    assert out.loss_sum.item() / naive < 0.97 * exact
    acc = LossAccumulator()
    with pytest.raises(RuntimeError, match="declared with 201 valid tokens, its loss counts 193"):
        with acc.window([naive]):  # the same mistake is an error here
            acc.backward(out)
    with acc.window([count_valid(labels)]):
        acc.backward(fused_ce(hidden, weight, shift_labels(labels)))
    assert acc.metrics()["loss"] == pytest.approx(exact, rel=1e-6)


def tiny(kind, config, **more):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": V, "max_position_embeddings": 64, "use_cache": False}
    return getattr(transformers, kind)(getattr(transformers, config)(**sizes, **more)).train()


def token_batches(lengths):
    rng = torch.Generator().manual_seed(0)
    return [torch.randint(3, V, (1, n), generator=rng) for n in lengths]


def test_denominator_swallowed_by_kwargs():
    """Bart takes `num_items_in_batch` among its `**kwargs` and ignores it: 8 times the loss."""
    model = tiny(
        "BartForCausalLM",
        "BartConfig",
        d_model=16,
        encoder_layers=0,
        decoder_layers=1,
        decoder_attention_heads=2,
        decoder_ffn_dim=16,
        dropout=0.0,
        is_decoder=True,
        is_encoder_decoder=False,
    )
    micro = token_batches([9, 9, 9, 9, 9, 9, 9, 9])
    n = sum(int(count_valid(x, offset=0)) for x in micro)  # its labels are aligned already
    logits = torch.cat([model(input_ids=x).logits for x in micro]).flatten(0, 1)
    exact = F.cross_entropy(logits, torch.cat(micro).flatten()).item()
    naive = sum(model(input_ids=x, labels=x, num_items_in_batch=n).loss.item() for x in micro)
    assert naive == pytest.approx(8 * exact, rel=1e-4)
    acc = LossAccumulator()
    with acc.window([count_valid(x, offset=0) for x in micro]):
        for x in micro:
            hidden = model.model.decoder(input_ids=x).last_hidden_state
            acc.backward(fused_ce(hidden, model.lm_head.weight, x))
    assert acc.metrics()["loss"] == pytest.approx(exact, rel=1e-5)


def test_router_loss_times_accumulation_steps():
    """Mixtral adds its auxiliary loss, a mean by itself, once per micro-batch."""
    model = tiny(
        "MixtralForCausalLM",
        "MixtralConfig",
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        router_aux_loss_coef=0.5,
        output_router_logits=True,
    )
    micro = token_batches([5, 30, 17, 9])
    n = sum(int(count_valid(x)) for x in micro)
    outs = [model(input_ids=x, labels=x, num_items_in_batch=n) for x in micro]
    auxiliary = 0.5 * sum(out.aux_loss for out in outs) / len(outs)
    tokens = sum(out.loss - 0.5 * out.aux_loss for out in outs)
    naive = sum(out.loss.item() for out in outs)
    (tokens + auxiliary).backward()
    exact = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert naive > (tokens + auxiliary).item() + 2.5 * auxiliary.item()

    model.zero_grad()
    acc = LossAccumulator()
    with acc.window([count_valid(x) for x in micro]):
        for x in micro:
            out = model(input_ids=x, output_hidden_states=True)
            acc.add_auxiliary(0.5 * out.aux_loss)
            acc.backward(fused_ce(out.hidden_states[-1], model.lm_head.weight, shift_labels(x)))
    for name, grad in exact.items():
        assert distance(dict(model.named_parameters())[name].grad, grad) < 2e-5, name
    assert acc.metrics()["loss"] == pytest.approx(tokens.item(), rel=1e-5)


@RUNS
def test_short_last_window(run):
    """transformers#38837, OpenRLHF#489: divided by the usual number of accumulation steps."""
    micro = batches([6, 6])  # two are left of windows of four
    weight, exact, _ = weight_and_grad(micro)
    naive = new_weight()
    for one in micro:
        (loss_of(naive, one).mean() / 4).backward()
    assert naive.grad.norm() < 0.51 * exact.norm()
    run(LossAccumulator(), weight, micro)
    assert distance(weight.grad, exact) <= SAME_SUMS


def test_leak_across_epochs():
    """transformers#22082, OpenRLHF#1337, Lightning#19987: left-over gradients in the next epoch."""
    epoch = batches([3, 9, 4])  # windows of two: one micro-batch is left
    naive, next_epoch = new_weight(), weight_and_grad(epoch[:2])
    loss_of(naive, epoch[2]).mean().backward()  # no step, no zero_grad
    for one in epoch[:2]:
        (loss_of(naive, one).loss_sum / 12).backward()
    assert distance(naive.grad, next_epoch[1]) > 0.3
    acc, weight = LossAccumulator(), new_weight()
    acc.backward(loss_of(weight, epoch[2]))
    with pytest.raises(RuntimeError, match=r"1 micro-batches since the last finish\(\)"):
        acc.metrics()  # as every epoch's end does
    acc.finish([weight])
    weight.grad = None
    run_streaming(acc, weight, epoch[:2])
    assert distance(weight.grad, next_epoch[1]) <= SAME_SUMS


def test_evaluation_as_a_mean_of_means():
    """transformers#39241, #41898."""
    data = batches(SIZES)
    weight, _, exact = weight_and_grad(data)
    naive = sum(loss_of(weight, one).mean().item() for one in data) / len(data)
    assert abs(naive - exact) > 0.05
    for parts in (data, [tuple(torch.cat(x) for x in zip(*data, strict=True))]):
        acc = LossAccumulator()
        for one in parts:
            acc.add(loss_of(weight.detach(), one))
        assert acc.metrics()["loss"] == pytest.approx(exact, rel=1e-6)


@RUNS
def test_all_ignored_is_nan(run):
    """nanochat#618: 0 / 0."""
    micro = batches([0])
    assert F.cross_entropy(micro[0][0] @ new_weight().T, micro[0][1]).isnan()
    weight, acc = new_weight(), LossAccumulator()
    run(acc, weight, micro)
    torch.testing.assert_close(weight.grad, torch.zeros(V, H), **EXACT)
    assert math.isnan(acc.metrics()["loss"])  # no token, no loss
    run(acc, weight, batches([4]))
    assert math.isfinite(acc.metrics()["loss"])


def test_packing_boundaries_trained():
    """torchtitan#4075, torchtune#1177: the last token of a document does not predict the next."""
    documents = [torch.tensor([1, 2, 3]), torch.tensor([4, 5]), torch.tensor([6, 7, 8, 9])]
    packed = torch.cat(documents)[None]
    borders = torch.tensor([0, 3, 5, 9])
    positions = torch.cat([torch.arange(len(d)) for d in documents])[None]
    alone = sum(int(count_valid(d[None])) for d in documents)
    assert int(count_valid(packed)) == alone + 2  # two borders
    for kwargs in ({"cu_seqlens": borders}, {"position_ids": positions}):
        assert int(count_valid(packed, **kwargs)) == alone
        exact = torch.cat([shift_labels(d) for d in documents])[None]
        torch.testing.assert_close(shift_labels(packed, **kwargs), exact)


def test_padding_free_batch():
    """trl#2834: concatenated sequences that see each other have another loss than padded ones."""
    model = tiny(
        "LlamaForCausalLM",
        "LlamaConfig",
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    sequences = [x[0] for x in token_batches([14, 5, 20])]
    padded = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=-100)
    packed = torch.cat(sequences)[None]
    positions = torch.cat([torch.arange(len(x)) for x in sequences])[None]

    def loss(labels, input_ids, **kwargs):
        hidden = model.model(input_ids=input_ids, **kwargs).last_hidden_state
        return fused_ce(hidden, model.lm_head.weight, labels)

    with torch.no_grad():
        model.lm_head.weight.mul_(50)  # so that what a token sees matters
        exact = loss(shift_labels(padded), padded.clamp(min=0))
        naive = loss(shift_labels(packed, position_ids=positions), packed)
        ours = loss(shift_labels(packed, position_ids=positions), packed, position_ids=positions)
    assert int(ours.n_valid) == int(exact.n_valid)
    assert ours.mean().item() == pytest.approx(exact.mean().item(), rel=1e-5)
    assert abs(naive.mean() - exact.mean()) > 0.02


def test_clipping_per_micro_step():
    """transformers#986, accelerate#641: gradients that are not complete yet are clipped."""
    micro = batches(SIZES)
    weight, exact, _ = weight_and_grad(micro)
    limit = 0.5 * exact.norm().item()
    exact = exact * (limit / exact.norm())
    naive = new_weight()
    for one in micro:
        (loss_of(naive, one).loss_sum / sum(SIZES)).backward()
        torch.nn.utils.clip_grad_norm_([naive], limit)
    assert distance(naive.grad, exact) > 0.05
    run_streaming(LossAccumulator(), weight, micro)
    torch.nn.utils.clip_grad_norm_([weight], limit)
    assert distance(weight.grad, exact) <= SAME_MODEL
