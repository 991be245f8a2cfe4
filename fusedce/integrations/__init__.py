"""Plug-ins of training frameworks, which import them; ``import fusedce`` never does."""
