"""The record model, the MCAP store, sessions and the pure analysis over them.

This is the bottom layer: it imports nothing else of dsprobe.
"""
