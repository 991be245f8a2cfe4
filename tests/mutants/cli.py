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
        "_NOT_FUSED, _INTERRUPTED = 3, 130",
        "import torch\n\n_NOT_FUSED, _INTERRUPTED = 3, 130",
        "test_commands.py -k help_comes_at_once",
    ),
    Mutant(
        "doctor: the local part of a version makes it newer",
        "release = Version(Version(version).public)",
        "release = Version(version)",
        "test_commands.py -k ordered",
    ),
]
