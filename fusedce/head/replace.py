"""Replace the loss head of a causal language model, by one call and for any model.

The output head (``model.get_output_embeddings()``) returns lazy logits, see
:mod:`fusedce.head.lazy.logits`. The model's own loss code, shift and denominators run unchanged
on them; ``F.cross_entropy`` at their end is the fused loss. Nothing of the model is patched but
the head's ``forward``.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusedce.contract.checks import autocast_dtype
from fusedce.head.call import Loss, Run, is_fsdp_unit
from fusedce.head.lazy.logits import LazyLogits
from fusedce.head.lazy.state import Lazy, State
from fusedce.head.lazy.traced import TracedLogits
from fusedce.head.recipe import check_linear, is_sum_of_products, plain_weight
from fusedce.loss.fused_ce import fused_ce

_ATTACHED = "_fusedce_head"
_PROBE_TOKENS = 4


class _Attached:
    """What was there before a head was replaced."""

    def __init__(self, module: nn.Module) -> None:
        self.dtype: torch.dtype | None = None  # of the logits, where that is not the weight's
        self.previous = module.__dict__.get("forward")  # an instance attribute, if there was one

    def original(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.previous is not None:
            return self.previous(*args, **kwargs)
        return type(module).forward(module, *args, **kwargs)


class _Forward:
    """The ``forward`` of a replaced head.

    It does not keep the head alive, which would then be freed by the garbage collector alone; a
    copied or pickled head gets its own.
    """

    def __init__(self, module: nn.Module) -> None:
        self.of = weakref.ref(module)

    @property
    def module(self) -> nn.Module:
        module = self.of()
        assert module is not None, "called while its module is being freed"
        return module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _forward(self.module, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Forward:
        return _Forward(memo.get(id(self.module), self.module))

    def __reduce__(self) -> Any:
        return _Forward, (self.module,)


def replace_loss_head(model: nn.Module, *, head: nn.Module | None = None) -> nn.Module:
    """Make ``model`` compute its loss without logits, in training and in evaluation.

    The head returns lazy logits: real ones are computed, once, only for code that looks at them
    (generation, metrics). Parameters, state dict and module types stay as they are. Steps between
    head and loss that are understood: multiplication and division by a number, ``tanh`` soft-caps,
    an added bias, changes of dtype, reshaping, slicing, transposing. ``F.cross_entropy`` may have
    any option but class probabilities as targets. Where a model does something else, the loss is
    computed from real logits, as before. ``torch.compile`` traces all of it in one graph, but for
    loss modules (``nn.CrossEntropyLoss()``), which break it.

    Use the logits of a training step before ``optimizer.step()``: once a parameter of the head has
    changed, asking for them is a ``RuntimeError`` (a write into ``parameter.data`` cannot be seen).
    With every label ignored a mean is 0, where torch gives NaN. Call this again after
    ``resize_token_embeddings``, which makes a new head. A compiled model returns logits that are no
    ``Tensor`` but answer like one; any operation on them gives tensors.

    Args:
        model: a causal language model of transformers, or any ``nn.Module`` that ends in a linear
            head.
        head: the output head, where ``model.get_output_embeddings()`` does not name it; by default
            the last ``nn.Linear`` of the model.

    Returns:
        ``model`` itself. Calling this again changes nothing; :func:`restore_loss_head` undoes it.

    Raises:
        TypeError: ``model`` is not a module, or the head is not a linear layer.
        ValueError: no head was found, or fused and native loss differ on a few random tokens: the
            message says by how much.

    Example:
        >>> model = replace_loss_head(AutoModelForCausalLM.from_pretrained(name))
        >>> model(input_ids=ids, labels=ids).loss.backward()
    """
    attach(model, head)
    if any(_is_trl_head(m.__dict__.get("forward")) for m in model.modules()):
        warnings.warn(
            "TRL has installed its own fused head on this model: SFTTrainer calls that one and "
            "never this one. Use a trainer with fusedce.FusedTrainerMixin",
            stacklevel=2,
        )
    return model


def attach(model: nn.Module, head: nn.Module | None = None) -> None:
    """:func:`replace_loss_head` without its warnings."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    head = _find_head(model) if head is None else head
    if _ATTACHED in head.__dict__:
        return
    check_linear(head)
    restore_loss_head(head)  # of a head that was replaced before an adapter was put around it
    attached = _Attached(head)
    with torch.inference_mode(False):
        _probe(attached, head)
    head.__dict__[_ATTACHED] = attached
    head.forward = _Forward(head)


def restore_loss_head(model: nn.Module) -> nn.Module:
    """Undo :func:`replace_loss_head`: the head is exactly what it was. Harmless without one.

    Raises:
        TypeError: ``model`` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    for module in model.modules():
        attached = module.__dict__.pop(_ATTACHED, None)
        if attached is not None:
            del module.__dict__["forward"]
            if attached.previous is not None:
                module.__dict__["forward"] = attached.previous
    return model


def _forward(self: nn.Module, *args: Any, _fusedce: Any = None, **kwargs: Any) -> Any:
    """What a replaced head runs."""
    attached: _Attached = self.__dict__[_ATTACHED]
    if _fusedce is not None:
        run, request = _fusedce
        return run.run(args[0], request)
    hidden = args[0] if len(args) == 1 and not kwargs else None
    if (
        not isinstance(hidden, Tensor)
        or isinstance(hidden, Lazy)
        or not hidden.is_floating_point()
        or hidden.dim() == 0
        or torch.jit.is_tracing()
        or torch.compiler.is_exporting()
        or hasattr(self, "_hf_hook")  # accelerate moves this head's weights around it
        or not is_sum_of_products(self)  # an adapter that has been switched to since
        or torch._C._functorch.maybe_current_level() is not None  # torch.func
    ):
        return attached.original(self, *args, **kwargs)
    cast = autocast_dtype(hidden.device)
    if cast is not None and hidden.dtype != torch.float64:
        hidden = hidden.to(cast)
    run = Run(self, hidden)
    hidden = run.hidden
    dtype = attached.dtype or hidden.dtype
    kind_of_logits = TracedLogits if torch.compiler.is_compiling() else LazyLogits
    return kind_of_logits.make(
        State(
            head=run,
            hidden=hidden,
            shape=(*hidden.shape[:-1], run.V),
            dtype=dtype,
            steps=() if dtype == hidden.dtype else (("to", dtype),),
            vocabulary=slice(0, run.V),
            class_dim=hidden.dim() - 1,
            detached=not torch.is_grad_enabled(),
        )
    )


# ---- what a head is made of -----------------------------------------------------------------


def _find_head(model: nn.Module) -> nn.Module:
    get = getattr(model, "get_output_embeddings", None)
    head = get() if callable(get) else None
    if isinstance(head, nn.Module):
        return head
    if callable(get):
        raise ValueError(
            f"model has no output embeddings: {type(model).__name__}.get_output_embeddings() "
            f"returned {type(head).__name__}. If it ends in a linear layer, pass head=that layer"
        )
    linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
    if not linears:
        raise ValueError(
            f"model must have a linear output head: {type(model).__name__} has no "
            f"get_output_embeddings() and no nn.Linear"
        )
    return linears[-1]


def _is_trl_head(forward: Any) -> bool:
    """Whether a model's forward is the one that TRL's trainers install."""
    code = getattr(getattr(forward, "__func__", None), "__code__", None)
    return code is not None and "fused_lm_head" in code.co_varnames


def _probe(attached: _Attached, module: nn.Module) -> None:
    """Fused against native on a few tokens; refuses a head that is not what it looks like."""
    weight = plain_weight(module)
    if (
        weight.is_meta
        or weight.is_inference()
        or hasattr(weight, "full_tensor")
        or is_fsdp_unit(module)
    ):
        return  # nothing to compute with, or other ranks would have to take part
    training = [(m, m.training) for m in module.modules()]
    module.eval()  # without LoRA's dropout, which would differ between the two
    try:
        rng = torch.Generator().manual_seed(0)
        V, H = weight.shape
        hidden = torch.randn(_PROBE_TOKENS, H, generator=rng).to(weight.device, weight.dtype)
        labels = torch.randint(0, V, (_PROBE_TOKENS,), generator=rng).to(weight.device)
        native, fused = _probe_once(attached, module, hidden, labels)
    finally:
        for m, mode in training:
            m.training = mode
    # Native logits are rounded to the weight's dtype, fused ones are not.
    tolerance = 4 * torch.finfo(weight.dtype).eps * max(float(native[2]), 1.0) + 1e-5
    for name, a, b in zip(("loss", "gradient"), fused, native[:2], strict=True):
        error = float((a.float() - b.float()).norm() / b.float().norm().clamp(min=1e-30))
        if not error <= tolerance:
            raise ValueError(
                f"head must be linear, logits = hidden @ weight.T + bias, but the {name} of "
                f"{type(module).__name__} differs from that by {error:.1e} (relative) on "
                f"{_PROBE_TOKENS} random tokens"
            )


@torch.enable_grad()
def _probe_once(
    attached: _Attached, module: nn.Module, hidden: Tensor, labels: Tensor
) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    x = hidden.clone().requires_grad_()
    logits = attached.original(module, x)
    V = len(plain_weight(module))
    if logits.shape != (_PROBE_TOKENS, V):
        raise ValueError(
            f"head must return (tokens, V) logits with V={V} (from its weight), "
            f"got {tuple(logits.shape)}"
        )
    if logits.dtype != hidden.dtype:
        attached.dtype = logits.dtype
    loss = F.cross_entropy(logits.float(), labels, reduction="sum")
    (gradient,) = torch.autograd.grad(loss, x)
    y = hidden.clone().requires_grad_()
    request = Loss(fused_ce, labels, slice(0, V), None, {})
    fused = Run(module, y).run(y, request)[0]
    (fused_gradient,) = torch.autograd.grad(fused, y)
    return (loss.detach(), gradient, logits.detach().abs().max()), (fused.detach(), fused_gradient)
