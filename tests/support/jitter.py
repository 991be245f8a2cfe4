"""Sum every matrix product in another order, as the BLAS library of another CPU would.

``pytest --jitter 7`` (``make test JITTER=7``) permutes the inner dimension of each product by one
permutation for each size, drawn from the seed: of torch's own products on a CPU, so that of the
library's torch backend and of what tests compare it with; and of ``tl.dot`` in the interpreter.
Equal products stay equal to the bit, and so do rows that must not depend on the rows beside them.
"""

import functools
import warnings

import torch

SEED = 0  # 0: products are left alone

# Operators of torch, and where in their arguments the operands stand: (..., m, k), (..., k, n).
_PRODUCTS = {
    "mm": (0, 1), "mm.out": (0, 1), "bmm": (0, 1), "bmm.out": (0, 1),
    "addmm": (1, 2), "addmm.out": (1, 2), "addmm_": (1, 2),
    "baddbmm": (1, 2), "baddbmm.out": (1, 2), "baddbmm_": (1, 2),
    "addmv": (1, 2), "addmv.out": (1, 2), "addmv_": (1, 2), "dot": (0, 1),
}  # fmt: skip
_libraries: list[torch.library.Library] = []  # what they register lives as long as they do


def install(seed: int) -> None:
    """From now on, in this process and in those that it forks."""
    global SEED
    SEED = seed
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that kernels are replaced
        for name, (a, b) in _PRODUCTS.items():
            _replace(name, functools.partial(_in_another_order, a, b))


def _replace(name, function):
    kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
    _libraries.append(torch.library.Library("aten", "IMPL"))
    replacement = functools.partial(function, kernel)
    _libraries[-1].impl(name, replacement, "CPU", with_keyset=True, allow_override=True)


def _in_another_order(first, second, kernel, keys, *args, **kwargs):
    given = list(args)
    given[first], given[second] = shuffled(given[first], given[second])
    return kernel.call_boxed(keys, *given, **kwargs)


def shuffled(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Operands ``(..., m, k)`` and ``(..., k, n)`` or ``(k,)`` whose product is the same sum."""
    k, inner = a.shape[-1], max(b.ndim - 2, 0)
    if not SEED or k < 2 or b.shape[inner] != k:  # torch says what does not fit
        return a, b
    order = permutation(k)
    return a.index_select(a.ndim - 1, order), b.index_select(inner, order)


@functools.cache
def permutation(k: int) -> torch.Tensor:
    """``(k,)`` int64: the order in which the terms of an inner dimension of ``k`` are summed."""
    return torch.randperm(k, generator=torch.Generator().manual_seed(SEED), device="cpu")
