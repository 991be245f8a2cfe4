"""The commands behind ``fusedce.cli``: what each finds, and the text that it prints."""
