"""What the scripts of `bench/` share: problems, implementations, one engine, tables, pictures."""
