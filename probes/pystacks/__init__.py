"""Python's own structures in the memory of another process, read without its help.

``offsets`` says where things lie in each version, ``interpreter`` finds one and checks that this
is true of it, ``objects`` reads names and code objects, ``lines`` their line tables, ``reader``
does it in a thread, since memory of a process that does not want it may not answer.  The walk
itself is BPF (stacks.bpf.h).
"""
