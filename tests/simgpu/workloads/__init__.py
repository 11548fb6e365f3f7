"""Programs that work on the simulated driver; each is run by its name (tests/simgpu/run.py).

Those in Python import nothing but the standard library: they run under any Python from 3.10 on.
"""
