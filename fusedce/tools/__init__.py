"""The commands behind ``fusedce.cli``: what each finds, and how the findings are printed."""
