"""The benchmarks behind ``scripts/bench``: one file per subject, listed in ``registry``."""
