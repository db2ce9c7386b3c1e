"""Benchmarks: ``python -m bench NAME [arguments]`` runs ``bench/NAME.py``, by default ``quantise``."""
