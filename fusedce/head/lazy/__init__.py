"""Lazy logits: tensors that are computed when code reads their values."""
