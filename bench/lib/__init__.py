"""Shared parts of the scripts of `bench/`: problems, one engine, tables, pictures."""
