"""A simulated GPU: a driver library that counts what is asked of it, and loads to ask it.

``libcuda/`` is the library and ``build.py`` builds it; ``truth.py`` reads what it was asked;
``scenario.py`` and ``run.py`` are behind ``scripts/simgpu``; ``target.py`` is a process that a test
drives call by call; ``workloads/`` are programs for ``scenarios/`` and tests.

It is for tests, and its numbers are never a GPU's.
"""
