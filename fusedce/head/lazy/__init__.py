"""Logits that are computed when somebody looks."""
