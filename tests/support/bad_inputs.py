"""Values of every kind, and bad arguments of every public loss with the errors they raise."""

import math

import pytest
import torch

N, H, V = 6, 8, 10
# What an argument may wrongly be; a function takes few of them.
VALUES = {
    "None": None,
    "text": "x",
    "bytes": b"a",
    "list": [1.0],
    "dict": {},
    "object": object(),
    "module": torch.nn.Linear(2, 2),
    "true": True,
    "zero": 0,
    "three": 3,
    "minus one": -1,
    "2.5": 2.5,
    "1e300": 1e300,
    "2**70": 2**70,
    "nan": math.nan,
    "inf": math.inf,
    "-inf": -math.inf,
    "no elements": torch.zeros(0),
    "one dimension": torch.zeros(3),
    "three dimensions": torch.zeros(2, 2, 2),
    "(N,) int64": torch.zeros(N, dtype=torch.int64),
    "(N,) nan": torch.full((N,), math.nan),
    "(V,) leaf": torch.nn.Parameter(torch.zeros(V)),
    "(N, H) int64": torch.zeros(N, H, dtype=torch.int64),
    "(N, H) complex": torch.zeros(N, H, dtype=torch.complex64),
    "(N, H) float8": torch.zeros(N, H, dtype=torch.float8_e4m3fn),
    "(N, H) meta": torch.zeros(N, H, device="meta"),
    "(N, H) sparse": torch.zeros(N, H).to_sparse(),
}


def refused(function, taken):
    """Give ``function`` each of :data:`VALUES`; the kinds and words of errors of all not taken."""
    for kind, value in VALUES.items():
        value = value.clone() if isinstance(value, torch.Tensor) else value
        if kind in taken:
            function(value)
            continue
        with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
            function(value)
        yield kind, str(caught.value)


GOOD = {
    "hidden": torch.zeros(4, 8),
    "weight": torch.zeros(10, 8),
    "labels": torch.zeros(4, dtype=torch.int64),
}
# (change, error, message): for every function that has the argument. (Values of each kind, as
# VALUES has them, are refused by name in tests/contract/test_bad_values.py.)
BAD = [
    ({"hidden": torch.zeros(4, 8, dtype=torch.int64)}, TypeError, "hidden must be float32"),
    ({"hidden": torch.tensor(1.0)}, ValueError, r"hidden must be \(..., H\)"),
    ({"hidden": torch.zeros(4, 0)}, ValueError, "H >= 1"),
    ({"weight": torch.zeros(10, 9)}, ValueError, r"H=8 \(from hidden\), got \(10, 9\)"),
    ({"weight": torch.zeros(0, 8)}, ValueError, "V >= 1"),
    ({"weight": torch.zeros(10, 8).char()}, TypeError, "weight must have the dtype"),
    ({"weight": torch.zeros(10, 8, device="meta")}, ValueError, "weight must be on the device"),
    ({"labels": torch.zeros(5, dtype=torch.int64)}, ValueError, r"leading shape.*\(4,\).*\(5,\)"),
    ({"labels": torch.zeros(4).byte()}, TypeError, r"torch\.uint8: pass labels\.long\(\)"),
    ({"hidden": torch.nested.as_nested_tensor([torch.zeros(3, 8)])}, TypeError, "a nested one"),
    ({"labels": torch.zeros(4)}, TypeError, "labels must be int64 or int32.*float32"),
    ({"labels": torch.tensor([0, 10, 1, 2])}, ValueError, "V=10.*got 10 at flattened position 1"),
    ({"labels": torch.tensor([0, 1, -7, 2])}, ValueError, "got -7 at flattened position 2$"),
    ({"labels": torch.tensor([0, 1, -1, 2])}, ValueError, "got -1 .*pass ignore_index=-1 if"),
    ({"labels": None}, TypeError, "labels must be a tensor, got NoneType"),
    ({"labels": torch.zeros(4, 11)}, ValueError, "labels must have the leading shape"),
    ({"labels": torch.zeros(4, 10)}, TypeError, r"class probabilities .*fused_kl.*labels \(N, K\)"),
    ({"bias": torch.zeros(11)}, ValueError, r"bias must be \(V,\) = \(10,\)"),
    ({"bias": torch.zeros(10).int()}, TypeError, "bias must have the dtype"),
    ({"ignore_index": 2**63}, ValueError, r"ignore_index must fit the dtype of labels, torch"),
    (
        {"ignore_index": 2**40, "labels": torch.zeros(4, dtype=torch.int32)},
        ValueError,
        r"ignore_index must fit the dtype of labels, torch\.int32",
    ),
    ({"softcap": 1e39}, ValueError, "softcap must be .*range of float32"),
    ({"softcap": 1e-46}, ValueError, "softcap must be .*range of float32"),
    ({"logit_scale": -1e39}, ValueError, "logit_scale must be .*range of float32"),
    ({"softcap": 0.0}, ValueError, r"softcap must be None \(no cap\), or positive"),
    ({"label_smoothing": 1.5}, ValueError, r"label_smoothing must be in \[0, 1\], got 1.5"),
    ({"z_loss": float("nan")}, ValueError, "z_loss must be finite"),
    ({"token_weight": torch.ones(5)}, ValueError, r"token_weight must be .* \(4,\), got \(5,\)"),
    ({"token_weight": torch.ones(4).cfloat()}, TypeError, "token_weight must be real numbers"),
    ({"token_weight": torch.ones(4, device="meta")}, ValueError, "token_weight must be on"),
    ({"token_weight": torch.ones(4, requires_grad=True)}, ValueError, "must not require grad"),
    ({"class_weight": torch.ones(9)}, ValueError, r"class_weight must be \(V,\) = \(10,\)"),
    ({"class_weight": torch.ones(10).cfloat()}, TypeError, "class_weight must be real numbers"),
    ({"class_weight": torch.ones(10, requires_grad=True)}, ValueError, "must not require grad"),
    ({"temperature": 0.0}, ValueError, "temperature must be positive, at least .* got 0.0"),
    ({"temperature": float("inf")}, ValueError, "temperature must be .* finite"),
    ({"reduction": "average"}, ValueError, "reduction must be one of 'mean', 'sum', 'none'"),
    ({"argmax_out": torch.ones(4)}, TypeError, "argmax_out must be int64"),
    ({"argmax_out": torch.ones(2, 2, dtype=torch.int64)}, ValueError, "argmax_out must be of"),
    ({"chunk_tokens": 0}, ValueError, "chunk_tokens must be >= 1 and fit in 64 bits, got 0"),
    ({"chunk_tokens": 2**63}, ValueError, "fit in 64 bits, got 9223372036854775808"),
    ({"memory_budget": 2**63}, ValueError, "fit in 64 bits, got 9223372036854775808"),
    ({"memory_budget": 0}, ValueError, "memory_budget must be >= 1 .*got 0"),
    ({"memory_budget": 1e9}, TypeError, r"an int, in bytes \(4 \* 2\*\*30 .*, got float"),
    ({"memory_budget": 1000}, ValueError, "memory_budget must be at least"),
    (
        {"memory_budget": 2**30, "chunk_tokens": 7},
        ValueError,
        "give memory_budget or chunk_tokens, not both",
    ),
    ({"backend": "cuda"}, ValueError, "backend must be None, 'torch' or 'triton', got 'cuda'"),
]
