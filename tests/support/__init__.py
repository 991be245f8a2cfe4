"""Helpers that several tests use."""
