"""Mutants of operators and derivatives."""

from mutants import Mutant

CONTRACT = "test_fused_ce.py"
TORCH = "test_properties.py -k torch_backend"
EDGES = "test_edges.py"

MUTANTS = [
    Mutant(
        "backward: the upstream gradient is dropped",
        "ratio = upstream / factor",
        "ratio = upstream / upstream",
        TORCH,
    ),
    Mutant(
        "backward: always in place",
        "not torch._C._autograd._get_current_graph_task_keep_graph()",
        "True",
        f"{CONTRACT} -k second_backward",
    ),
    Mutant(
        "backward: fp16 waits in fp16",
        "torch.float32 if dtype == torch.float16 else dtype",
        "dtype",
        f"{CONTRACT} -k may_overflow",
    ),
    Mutant(
        "tokens: upstream of the entropy dropped at the label",
        "at_label += beta * surprise",
        "at_label += 0 * surprise",
        "test_logprobs.py -k gradcheck",
    ),
    Mutant(
        "edge: weights of ignored positions",
        "lost.masked_fill(problem.labels == problem.ignore_index, 0)",
        "lost",
        EDGES,
    ),
    Mutant(
        "edge: forward mode gives nothing",
        "if forward_ad._current_level >= 0 and any(",
        "if False and any(",
        "test_derivatives.py",
    ),
    Mutant(
        "backward: what was expected counts twice",
        "ratio = upstream / factor",
        "ratio = upstream",
        "test_cross_entropy.py",
    ),
    Mutant(
        "backward: the backend is chosen anew",
        "ctx.dtype, ctx.backend = attached.hidden.dtype, attached.backend",
        "ctx.dtype, ctx.backend = attached.hidden.dtype, 'triton'",
        "test_dispatch.py",
    ),
]
