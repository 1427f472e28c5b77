"""Measuring: what a benchmark's result says, and how two of them compare."""
