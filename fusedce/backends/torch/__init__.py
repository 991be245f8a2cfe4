"""The chunked implementation in plain torch."""
