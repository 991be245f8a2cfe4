"""Mutants of the measurements."""

from mutants import Mutant

MUTANTS = [
    Mutant(
        "memory: pages of files count",
        'if line.startswith(f"{field}:"):',
        'if line.startswith(f"{field}:") and field != "RssFile":',
        "test_measure.py -k pages",
    ),
    Mutant(
        "memory: the level afterwards, not the peak",
        'peak = _resident("VmHWM")',
        'peak = _resident("VmRSS")',
        "test_measure.py -k known",
    ),
    Mutant(
        "times: every round starts with the first",
        "names[start:] + names[:start]",
        "names",
        "test_measure.py -k rounds",
    ),
]
