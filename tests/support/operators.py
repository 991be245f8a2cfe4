"""The package's operators, as its public functions call them with each of their options."""

import contextlib
from unittest import mock

import torch

import fusedce

N, H, V, K = 5, 6, 11, 3


def registered():
    """Names of all operators of the package, whose functions are imported at their first use."""
    assert all(hasattr(fusedce, name) for name in fusedce.__all__)
    operators = torch._C._dispatch_get_all_op_names()
    return {name.removeprefix("fusedce::") for name in operators if name.startswith("fusedce::")}


@contextlib.contextmanager
def recorded():
    """``[(name, operator, its arguments)]`` of the calls inside, backward passes included."""
    calls = []

    def recording(name):
        operator = getattr(torch.ops.fusedce, name)

        def call(*arguments):
            apart = not torch.is_grad_enabled()  # as in backward: nothing differentiates the call
            calls.append((name, operator, [_detached(x) if apart else x for x in arguments]))
            return operator(*arguments)

        return call

    with contextlib.ExitStack() as stack:
        for name in registered():
            stack.enter_context(mock.patch.object(torch.ops.fusedce, name, recording(name)))
        yield calls


def _detached(x):
    return x.detach() if isinstance(x, torch.Tensor) else x


def _draw(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + shape[0]))


def _options():
    """Values of every option that reaches an operator, by name."""
    return {
        "bias": _draw(V).requires_grad_(),
        "softcap": 5.0,
        "logit_scale": -0.7,
        "label_smoothing": 0.1,
        "z_loss": 0.1,
        "ignore_index": 7,
        "token_weight": torch.linspace(0, 1, N),
        "class_weight": torch.linspace(0, 1, V),
        "chunk_tokens": 2,
        "memory_budget": 2**24,
        "argmax_out": torch.zeros(N, dtype=torch.int64),
        "monitor": ("correct", "entropy", "z_loss"),
        "temperature": torch.linspace(0.5, 2, N),
        "mean_logit": True,
        "divergence": "jsd",
        "beta": 0.3,
        "ce_weight": 0.4,
        "teacher_bias": _draw(V),
        "teacher_softcap": 3.0,
        "teacher_logit_scale": 1.3,
    }


_OF_LOGITS = ("bias", "softcap", "logit_scale")
_OF_CHUNKS = ("ignore_index", "chunk_tokens", "memory_budget")
_OF_LOSSES = (*_OF_LOGITS, *_OF_CHUNKS, "label_smoothing", "z_loss", "token_weight")
_OF_TOKENS = (*_OF_LOGITS, *_OF_CHUNKS, "temperature")
_OF_TEACHERS = ("divergence", "beta", "ce_weight", "teacher_bias", "teacher_softcap",
                "teacher_logit_scale", "token_weight")  # fmt: skip
OPTIONS_OF = {
    "fused_ce": (*_OF_LOSSES, "argmax_out", "monitor"),
    "fused_cross_entropy": (*_OF_LOSSES, "class_weight"),
    "fused_cross_entropy of tokens": (*_OF_LOSSES, "class_weight"),
    "fused_cross_entropy of class probabilities": (
        *_OF_LOGITS, "label_smoothing", "z_loss", "token_weight", "class_weight",
    ),
    "fused_logprobs": (*_OF_TOKENS, "mean_logit"),
    "fused_logprobs of several classes": _OF_TOKENS,
    "fused_argmax": _OF_LOGITS,
    "fused_kl": (*_OF_LOGITS, *_OF_CHUNKS, *_OF_TEACHERS),
    "fused_kl_tokens": (*_OF_LOGITS, *_OF_CHUNKS, *_OF_TEACHERS),
}  # fmt: skip
"""Functions, and the options of each that change what its operators get."""


def run(name, options, backend="torch"):
    """Call a function with some options, with gradients twice through one graph and without."""
    given = {k: v for k, v in _options().items() if k in options} | {"backend": backend}
    if name.startswith("fused_kl") and "temperature" in given:
        given["temperature"] = 1.7
    leaves = [_draw(N, H).requires_grad_(), _draw(V, H).requires_grad_()]
    labels = torch.tensor([1, V - 1, -100 if "ignore_index" not in options else 7, 0, 7])
    function, _, of = name.partition(" of ")
    if of == "several classes":
        labels = torch.stack([labels, labels.clamp(min=3), labels], dim=1)
    elif of == "class probabilities":
        labels = _draw(N, V).softmax(-1)
    arguments = [*leaves, labels]
    if function.startswith("fused_kl"):
        arguments = [*leaves, _draw(N, 4), _draw(V, 4), labels]
    if function == "fused_argmax":
        arguments = leaves
    if of == "tokens":
        given["reduction"] = "none"
    found = getattr(fusedce, function)(*arguments, **given)
    with torch.no_grad():
        getattr(fusedce, function)(*arguments, **given)
    found = (found,) if isinstance(found, torch.Tensor) else found
    loss = sum(x.sum() for x in found if x.requires_grad)
    if isinstance(loss, torch.Tensor):
        loss.backward(retain_graph=True)
        loss.backward()


def signature(name, arguments):
    """Key of a call: its options, shapes and dtypes."""
    return name, tuple(
        (tuple(x.shape), x.dtype, x.requires_grad) if isinstance(x, torch.Tensor) else x
        for x in arguments
    )
