"""What a cache will cost before anything runs: from a model's geometry alone, by the arithmetic of `geometry.py`."""
