"""Inputs and options of a loss, their checks, and its results: the lowest layer."""
