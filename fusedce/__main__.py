"""``python -m fusedce`` is the command ``fusedce``."""

from .cli import main

main()
