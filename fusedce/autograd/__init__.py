"""The operators and their derivatives."""

import torch

NAMESPACE = __name__.partition(".")[0]
OPERATORS = getattr(torch.ops, NAMESPACE)
"""The operators, in a namespace called as the package.

Hugging Face's `kernels` imports each version of a kernel repository under a name of its own, so the
operators of two versions do not meet in one process.
"""
