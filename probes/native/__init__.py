"""Native frames: which file an address lies in, what it is called, and who called it."""
