"""Gradients that are wanted, and errors for derivatives that do not exist."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fusedce.contract.problem import Problem, Wanted


def wanted_gradients(problem: Problem) -> Wanted:
    """Gradients of those inputs that require one now."""
    grad = torch.is_grad_enabled()
    return Wanted(
        hidden=grad and problem.hidden.requires_grad,
        weight=grad and problem.weight.requires_grad,
        bias=grad and problem.bias is not None and problem.bias.requires_grad,
    )


def needed_gradients(ctx: Any, record: Any) -> Wanted:
    """Gradients that the graph will ask of an operator; to be asked in its ``setup_context``.

    ``record`` is the tuple of the operator's first arguments. Later is too late: while a custom
    operator's backward pass runs, torch 2.13 shortens ``ctx.needs_input_grad`` for all threads.
    """
    needed = record(*ctx.needs_input_grad[: len(record._fields)])
    return Wanted(hidden=needed.hidden, weight=needed.weight, bias=bool(needed.bias))


def transformed() -> bool:
    """Whether a transform of ``torch.func`` is at work."""
    return torch._C._functorch.maybe_current_level() is not None


def keeps_saved_tensors() -> bool:
    """Whether tensors saved for backward now go to a user's ``saved_tensors_hooks``.

    Backward then gets what the hooks return, which may be the user's tensors: it must not write
    into them.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def refuse_forward_mode(*inputs: object) -> None:
    """Raise RuntimeError if an input has a tangent, which the operators would drop.

    Args:
        inputs: the fields of a problem; those that are no tensors are skipped.
    """
    if torch.compiler.is_compiling():
        return
    transforms = torch._C._functorch.get_interpreter_stack() or ()
    jvp = any(t.key() == torch._C._functorch.TransformType.Jvp for t in transforms)
    if jvp or (
        forward_ad._current_level >= 0
        and any(
            isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in inputs
        )
    ):
        raise RuntimeError(
            "fusedce has no forward-mode derivative (jvp, jacfwd, hessian, or an input that is a "
            "dual tensor): use F.cross_entropy(F.linear(...)) for it"
        )


def refuse_second_derivatives() -> None:
    """Raise RuntimeError where a backward pass is itself recorded.

    Transforms of ``torch.func`` always record it: there the operator of the gradients refuses to
    be differentiated.
    """
    if torch.is_grad_enabled() and not (torch.compiler.is_compiling() or transformed()):
        raise no_second_derivative()


def no_second_derivative() -> RuntimeError:
    """The error for a gradient that is to be differentiated again."""
    return RuntimeError(
        "fused_ce: the gradient of the loss is not differentiable (create_graph=True was given, or "
        "transforms are nested): its formula is written by hand. Use "
        "F.cross_entropy(F.linear(...)) for second derivatives."
    )
