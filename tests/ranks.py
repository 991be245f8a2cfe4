"""Moved to support/ranks.py."""

from support.ranks import Failed, error_of, of, run

__all__ = ["Failed", "error_of", "of", "run"]
