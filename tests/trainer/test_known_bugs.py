"""Known bugs of the denominator in models of transformers: the naive loop is visibly wrong here.

Each test names the reports it stands for.
"""

import pytest
import torch
import torch.nn.functional as F
from support.bounds import SAME_MODEL
from support.loops import V, distance

from fusedce import LossAccumulator, count_valid, fused_ce, shift_labels


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
    assert naive == pytest.approx(8 * exact, rel=SAME_MODEL)
    acc = LossAccumulator()
    with acc.window([count_valid(x, offset=0) for x in micro]):
        for x in micro:
            hidden = model.model.decoder(input_ids=x).last_hidden_state
            acc.backward(fused_ce(hidden, model.lm_head.weight, x))
    assert acc.metrics()["loss"] == pytest.approx(exact, rel=SAME_MODEL)


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
        assert distance(dict(model.named_parameters())[name].grad, grad) <= SAME_MODEL, name
    assert acc.metrics()["loss"] == pytest.approx(tokens.item(), rel=SAME_MODEL)


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
    assert ours.mean().item() == pytest.approx(exact.mean().item(), rel=SAME_MODEL)
    assert abs(naive.mean() - exact.mean()) > 0.02
