"""Models whose norm, rope and MLP another library has replaced by kernels of its own."""

import copy
from unittest import mock

import numpy as np
import pytest
import torch
from support.bounds import same_model

from fusedce import head_report, replace_loss_head

transformers = pytest.importorskip("transformers")
modeling = pytest.importorskip("transformers.models.llama.modeling_llama")

V = 61


def llama():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=V, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def step(model):
    ids = torch.randint(3, V, (2, 9), generator=torch.Generator().manual_seed(1))
    ids = ids.to(model.device)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters()}


def assert_same_step(model):
    expected = step(copy.deepcopy(model))
    replaced = replace_loss_head(model)
    same_model(step(replaced), expected)
    report = head_report(replaced)
    assert (report.losses_fused, report.logits_made) == (1, 0)


class Norm(torch.autograd.Function):
    """An RMS norm with a backward written by hand, which writes into the gradient it is given."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        factor = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, factor)
        return x * factor * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight, factor = ctx.saved_tensors
        of_weight = (grad * x * factor).flatten(0, -2).sum(0)
        grad.mul_(weight)
        mean = (grad * x).mean(-1, keepdim=True)
        return grad.mul_(factor).sub_(x * factor**3 * mean), of_weight, None


def test_norms_replaced_by_functions_that_write_into_gradients(no_logits, monkeypatch):
    expected = step(llama())
    monkeypatch.setattr(
        modeling.LlamaRMSNorm,
        "forward",
        lambda self, x: Norm.apply(x, self.weight, self.variance_epsilon),
    )
    same_model(step(llama()), expected)
    assert_same_step(llama())


def test_liger_kernels_for_rope_and_mlp(no_logits):
    """The library's own Triton kernels, interpreted where there is no GPU."""
    liger = pytest.importorskip("liger_kernel.transformers", reason="Liger is not installed")
    from triton import language as tl
    from triton.runtime import interpreter

    convert = interpreter._implicit_cvt

    def with_numbers(x):  # kernels ask numbers for their `to`, which the interpreter leaves out
        if not isinstance(x, float):
            return convert(x)
        return tl.tensor(interpreter.TensorHandle(np.float32([x]), tl.float32), tl.float32)

    before = dict(vars(modeling))
    try:
        with mock.patch.object(interpreter, "_implicit_cvt", with_numbers):
            liger.apply_liger_kernel_to_llama(
                rope=True, swiglu=True, rms_norm=torch.cuda.is_available(),
                cross_entropy=False, fused_linear_cross_entropy=False,
            )  # fmt: skip
            assert modeling.apply_rotary_pos_emb is not before["apply_rotary_pos_emb"]
            assert_same_step(llama().to("cuda" if torch.cuda.is_available() else "cpu"))
    finally:
        vars(modeling).update(before)
