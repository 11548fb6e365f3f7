"""What Xid errors mean.

Source: NVIDIA's "Xid Errors" (docs.nvidia.com/deploy/xid-errors), in our own words.
"""

from __future__ import annotations

MEANINGS: dict[int, str] = {
    8: "the GPU stopped processing: a job ran too long or the GPU hangs",
    13: "a kernel faulted: most often an access out of bounds in the application",
    31: "a kernel accessed an address that is not mapped: most often the application's fault",
    32: "invalid or corrupted push buffer: the bus or the driver",
    38: "the driver's firmware failed",
    43: "a channel was reset after a fault of the application; the GPU is healthy",
    44: "a fault in graphics work: a context switch failed",
    45: "channels were torn down early: the application was killed, or another Xid came before",
    46: "the GPU stopped processing: reset it",
    48: "a double-bit ECC error: data is lost; reset the GPU",
    54: "auxiliary power is not connected",
    56: "the display engine failed",
    61: "an internal micro-controller halted: reset the GPU",
    62: "an internal micro-controller halted: reset the GPU",
    63: "a memory page or row was retired or remapped; takes effect at the next reset",
    64: "a memory page or row could not be retired or remapped: reset the GPU, or replace it",
    68: "the video processor failed",
    69: "a fault of the graphics engine's class: the application or the driver",
    74: "an NVLink error: a link failed; check it, the switch and the other end",
    79: "the GPU has fallen off the bus: power, seating, PCIe or heat; it needs a restart",
    92: "many single-bit ECC errors",
    94: "an uncorrectable ECC error was contained: only the applications hit must restart",
    95: "an uncorrectable ECC error was not contained: all work on the GPU is affected; reset it",
    109: "switching contexts timed out",
    110: "a security fault",
    119: "the GPU's system processor (GSP) did not answer: reset the GPU",
    120: "the GPU's system processor (GSP) failed: reset the GPU",
    121: "the C2C link had a corrected error",
    122: "the board's flash memory could not be read",
    123: "the board's flash memory could not be written",
    136: "NVLink link training failed",
    137: "an NVLink access failed at the other end",
    140: "an ECC error without recovery: reset the GPU",
    143: "GPU initialisation failed",
    **dict.fromkeys(range(144, 151), "an NVLink error: look at the link and its other end"),
    154: "a fault was found; the message in the kernel log says what recovery it needs",
}


def meaning(xid: int) -> str:
    """A sentence on ``xid``; for an unknown one, where to look it up."""
    return MEANINGS.get(xid, "not in our list: see NVIDIA's list of Xid errors")
