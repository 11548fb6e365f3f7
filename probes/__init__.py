"""One file per probe, with its `.bpf.c` beside it, and the BPF loader and ring reader."""
