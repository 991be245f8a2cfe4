"""The operators and their derivatives."""
