"""Which change? Axes, cells, conclusion, search, bisect: pure algorithms, no I/O."""
