"""Breakages of the command line and of what it computes."""

from mutants import Mutant

MUTANTS = [
    Mutant(
        "check: gradients are not compared",
        "float(difference / norm),",
        "float(0 * difference / norm),",
        "test_check_command.py -k wrong_loss",
    ),
    Mutant(
        "check: real logits count as fused",
        "fused=not why and report.logits_made == 0,",
        "fused=True,",
        "test_check_command.py -k real_logits",
    ),
    Mutant(
        "plan: the optimizer's states are not divided",
        "STATE_BYTES * of.parameters // gpus",
        "STATE_BYTES * of.parameters",
        "test_plan_command.py -k more_devices",
    ),
    Mutant(
        "plan: activations are forgotten",
        "return b * N * of.H * ((of.layers or 0) + 2)",
        "return 0 * N",
        "test_plan_command.py -k most_tokens",
    ),
    Mutant(
        "doctor: nobody looks at the checks",
        '"right": all(c["right"] for d in devices for c in d["checks"]),',
        '"right": True,',
        "test_commands.py -k wrong_result",
    ),
    Mutant(
        "command line: traces for mistakes",
        "except UserError as mistake:",
        "except KeyError as mistake:",
        "test_commands.py -k mistake_is_named",
    ),
    Mutant(
        "command line: torch is imported for a help text",
        '_SHELLS = ("bash", "zsh", "fish")',
        'import torch\n\n_SHELLS = ("bash", "zsh", "fish")',
        "test_commands.py -k help_comes_at_once",
    ),
    Mutant(
        "doctor: the local part of a version makes it newer",
        "release = Version(Version(version).public)",
        "release = Version(version)",
        "test_commands.py -k ordered",
    ),
]
