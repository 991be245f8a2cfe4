"""The loss where every rank holds some rows of the vocabulary."""
