"""Implementations of the loss, and which of them runs."""
