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
        "if ours and type(grad) is Tensor and not keep:",
        "if ours and type(grad) is Tensor:",
        f"{CONTRACT} -k second_backward",
    ),
    Mutant(
        "backward: fp16 waits in fp16",
        "acc if dtype == torch.float16 else dtype",
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
        "at_classes if slope is None else at_classes * slope",
        "at_classes",
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
        "return not batched & _OF_HEADS",
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
        "argmax: computed and not written out",
        "argmax_out.copy_(values.argmax.view(argmax_out.shape))",
        "pass",
        "autograd/test_dispatch.py -k argmax",
    ),
    Mutant(
        "forward mode: tangents of weights are dropped",
        "is not None for x in inputs\n",
        "is not None for x in inputs[:2]\n",
        "autograd/test_derivatives.py -k tangents",
    ),
    Mutant(
        "batched factors: as one number",
        "if batched(factor):",
        "if False:",
        "autograd/test_derivatives.py -k several_factors",
    ),
    Mutant(
        "saved tensors: a user's are written into",
        "ctx.ours = not keeps_saved_tensors()",
        "ctx.ours = True",
        "autograd/test_derivatives.py -k hooks",
    ),
    Mutant(
        "fake tensors: asked for their values",
        "and not is_fake(x)",
        "",
        "autograd/test_derivatives.py -k fake_tensors",
    ),
    Mutant(
        "classes: log-probabilities in the temperature's dtype",
        "z = (z / problem.temperature[:, None]).to(head.acc)",
        "z = z / problem.temperature[:, None]",
        "autograd/test_derivatives.py -k one_dtype",
    ),
]
