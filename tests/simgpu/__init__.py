"""A simulated GPU: a driver library that counts what is asked of it, and loads to ask it."""
