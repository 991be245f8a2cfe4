"""Mutants of chunks, launches and plans of the backends."""

from mutants import Mutant

CONTRACT = "test_fused_ce.py"
OPTIONS = "test_options.py"

MUTANTS = [
    Mutant(
        "rows: fp16 without amplification",
        "return 2.0 ** (14",
        "return 1.0 * 0 ** 0 * 2.0 ** (0 * 14",
        f"{CONTRACT} -k fp16",
    ),
    Mutant(
        "options: row factors not on the weight gradient",
        "h = (h.float() * factors[:, None]).to(h.dtype)",
        "h = h.clone()",
        f"{OPTIONS} -k pair",
    ),
    Mutant(
        "options: fp16 factors in fp16",
        "h.dtype == torch.float16",
        "h.dtype == torch.int8",
        f"{OPTIONS} -k fp16_factors",
    ),
    Mutant(
        "edge: chunks of any number of tokens",
        "most = min(most, _DEVICE_TOKENS)",
        "pass",
        "test_plan.py",
    ),
    Mutant(
        "edge: tuning draws from the user's generator",
        "H, device=device, generator=rng)",
        "H, device=device)",
        "test_tuning.py",
    ),
    Mutant(
        "tuning: an assembler's error ends the run",
        "    triton.runtime.errors.PTXASError,\n",
        "",
        "test_tuning.py -k cannot_run",
    ),
    Mutant(
        "tuning: a choice outlives its kernel",
        " source={source_hash()}",
        "",
        "test_tuning.py -k one_source",
    ),
    Mutant(
        "tuning: the mean decides",
        'return_mode="median"',
        'return_mode="mean"',
        "test_tuning.py -k median",
    ),
    Mutant(
        "operands: TF32 is asked for by the older interface first",
        "return bool(matmul.allow_tf32) if precision is None",
        "return bool(matmul.allow_tf32) if matmul.allow_tf32",
        "test_operands.py -k float32",
    ),
    Mutant(
        "relaunch: with the first launch's arguments",
        "        self._arguments.update(changing)\n",
        "",
        "backends/triton/test_relaunch.py",
    ),
]
