"""``python -m fusedce`` is the command ``fusedce``."""

from fusedce.cli import main

main()
