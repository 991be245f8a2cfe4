"""Triton's interpreter, made to compute as hardware does where numpy decides otherwise."""

import contextlib
import math
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch

from support import jitter


@contextlib.contextmanager
def as_on_hardware():
    """Inside, ``tl.dot`` adds in an order of its own, and float32 is rounded to bf16.

    Integers may overflow, as they may there: the check makes four operations of each addition.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    options = interpreter.InterpreterOptions(sanitize_overflow=False)
    create_dot, cast_impl = builder.create_dot, builder.cast_impl
    grid_call, min_max = interpreter.GridExecutor.__call__, interpreter.ReduceOps.min_max

    def reduced(self, input, val_reduce_op, idx_reduce_op=None):
        # Triton 3.9 asks numpy for nanargmax, which raises an error for a row of NaN.
        index = argmax_beside_nan if idx_reduce_op is np.nanargmax else idx_reduce_op
        return min_max(self, input, val_reduce_op, index)

    def dot(self, a, b, d, *precision):
        # numpy asks BLAS, which blocks by CPU and shape: there a row's sums depend on the rows
        # beside it, which on a GPU they do not.
        if a.data.ndim != 2 or a.data.dtype.kind != "f":
            return create_dot(self, a, b, d, *precision)
        return interpreter.TensorHandle(product(a.data, b.data, d.data), d.dtype.scalar)

    def cast(self, src, dst_type):
        # The interpreter cuts off, which doubles the errors.
        if src.dtype.scalar != tl.float32 or dst_type.scalar != tl.bfloat16:
            return cast_impl(self, src, dst_type)
        rounded = torch.from_numpy(np.asarray(src.data)).to(torch.bfloat16)
        return interpreter.TensorHandle(rounded.view(torch.uint16).numpy(), tl.bfloat16)

    def validate(self):
        itemsize = self.base.dtype.element_ty.primitive_bitwidth // 8
        assert self.base.data.item() % 16 == 0, "base must be 16-byte aligned"
        for stride in self.strides[:-1]:
            assert stride.data.item() * itemsize % 16 == 0, "stride must be 16-byte aligned"

    patched: set[int] = set()  # modules whose names of Triton's language are, in this launch

    def launch(self, *args, **kwargs):
        patched.clear()
        return grid_call(self, *args, **kwargs)

    def call(self, *args, **kwargs):
        # One function of a kernel calls another: the interpreter would patch the language again at
        # each such call, which is most of its time.
        if id(self.fn.__globals__) not in patched:
            patched.add(id(self.fn.__globals__))
            interpreter._patch_lang(self.fn)
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as e:
            raise interpreter.InterpreterError(repr(e)) from e

    mended = [
        (builder, "create_dot", dot),
        (builder, "cast_impl", cast),
        (interpreter.GridExecutor, "__call__", launch),
        (interpreter.InterpretedFunction, "__call__", call),
        (interpreter.ReduceOps, "min_max", reduced),
        (interpreter.interpreter_builder, "options", options),
        *made_once(),
    ]
    if counts_strides_in_elements(interpreter.TensorDescHandle.validate):
        mended.append((interpreter.TensorDescHandle, "validate", validate))
    with contextlib.ExitStack() as stack:
        for of, name, function in mended:
            stack.enter_context(mock.patch.object(of, name, function))
        yield


def argmax_beside_nan(x, **options):
    """The place of the largest number; of a row of NaN, its first."""
    return np.argmax(np.where(np.isnan(x), -np.inf, x), **options)


def made_once():
    """Types, and the shapes of tensors, which Triton makes again for each operation.

    That is a third of the interpreter's time. What is equal has the same name.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    block, builder = tl.core.block_type, interpreter.InterpreterBuilder
    numpy_type = interpreter._get_np_dtype
    with_element, get_block = block.with_element_ty, builder.get_block_ty
    kept = {}

    def once(key, make, *args):
        if key not in kept:
            kept[key] = make(*args)
        return kept[key]

    def of_numpy(kind):
        return once(("numpy", kind.scalar.name), numpy_type, kind)

    def other_element(self, kind):
        return once((self.name, kind.name), with_element, self, kind)

    def block_of(self, kind, shape):
        return once((kind.name, *shape), get_block, self, kind, shape)

    def shape_of(kind):
        sizes = kind.shape if kind.is_block() else ()
        shape = tl.core.tuple([tl.constexpr(n) for n in sizes])
        return shape, tl.constexpr(math.prod(sizes))

    def init(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = once(type.name, shape_of, type)

    return [
        (interpreter, "_get_np_dtype", of_numpy),
        (block, "with_element_ty", other_element),
        (builder, "get_block_ty", block_of),
        (tl.tensor, "__init__", init),
    ]


def product(a, b, d):
    """``a @ b + d`` in ``d``'s dtype: (M, K), (K, N), (M, N), each row by itself.

    einsum without ``optimize`` asks no BLAS: its loops are those of every CPU, and rows of one
    layout are added in one order.
    """
    if jitter.SEED:
        order = jitter.permutation(a.shape[1]).numpy()
        a, b = a[:, order], b[order]
    a, b = (np.ascontiguousarray(x, dtype=d.dtype) for x in (a, b))
    return np.einsum("mk,kn->mn", a, b) + d


def counts_strides_in_elements(validate) -> bool:
    """Whether a check of tensor descriptors wants strides of 16 elements instead of 16 bytes.

    That of Triton 3.4 and 3.5 does. It is asked about rows of 8 elements of 2 bytes.
    """

    def number(x):
        return SimpleNamespace(data=np.array([x]))

    of_two_bytes = SimpleNamespace(element_ty=SimpleNamespace(primitive_bitwidth=16))
    rows = SimpleNamespace(
        base=SimpleNamespace(data=np.array([0]), dtype=of_two_bytes),
        ndim=2,
        shape=[number(4), number(8)],
        strides=[number(8), number(1)],
        block_shape=[4, 8],
    )
    try:
        validate(rows)
    except AssertionError:
        return True
    return False
