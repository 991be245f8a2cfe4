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
        "large = dtype != torch.float16 and not small",
        "large = not small",
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
        "lost.masked_fill(~problem.valid(), 0)",
        "lost",
        EDGES,
    ),
    Mutant(
        "edge: forward mode gives nothing",
        "if jvp or (",
        "if jvp and (",
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
    Mutant(
        "classes: the first of them taken for the likeliest",
        "finite.masked_fill(~valid, -math.inf).argmax(1, keepdim=True)",
        "valid.int().argmax(1, keepdim=True)",
        "test_several_classes.py -k near",
    ),
    Mutant(
        "classes: slope of the cap left out",
        "g = g * slope",
        "g = g * 1",
        "test_several_classes.py -k gradcheck",
    ),
    Mutant(
        "func: inside vmap nothing is wanted",
        "train = torch.is_grad_enabled()",
        "pass",
        "test_functional.py -k vmap_over",
    ),
    Mutant(
        "func: samples flattened over the head's own",
        "return batched <= set(_BY_TOKENS)",
        "return True",
        "test_functional.py -k vmap_over",
    ),
    Mutant(
        "func: every sample counts all tokens",
        "torch.where(n_valid < 0, n_valid, own)",
        "n_valid.expand(B)",
        "test_functional.py -k counts",
    ),
    Mutant(
        "argmax: filled beside and copied",
        "if transformed() or not argmax_out.is_contiguous():",
        "if True:",
        "autograd/test_dispatch.py -k argmax",
    ),
]
