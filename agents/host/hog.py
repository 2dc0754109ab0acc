"""A process that holds memory and nothing else: `python -I -S hog.py TOKEN MB LEAVE_MB`, started by memory.py.

The token names it to whoever is to end it. Memory is taken in pieces, each only while the machine keeps LEAVE_MB
available after it; then one line says how many MB it holds, or why it does not. Should memory run out all the same, it
is the first that the kernel kills. It ends by itself after an hour, whatever else happens.
"""

from __future__ import annotations

import mmap
import signal
import sys

PIECE_MB = 64
LIFE_S = 3600


def available_mb() -> int:
    """MemAvailable of /proc/meminfo (proc_meminfo(5)): what can be had without swapping."""
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) // 1024
    return 0


def main(wanted_mb: int, leave_mb: int) -> None:
    signal.alarm(LIFE_S)
    with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")
    held: list[mmap.mmap] = []
    taken = 0
    while taken < wanted_mb:
        piece = min(PIECE_MB, wanted_mb - taken)
        if available_mb() - piece < leave_mb:
            print(f"only {taken} MB could be taken, with {leave_mb} MB to be left", flush=True)
            return
        # MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE: the pages are there, and not only promised
        held.append(mmap.mmap(-1, piece << 20, flags=0x02 | 0x20 | 0x8000))
        taken += piece
    print(taken, flush=True)
    while True:
        signal.pause()


if __name__ == "__main__":
    main(int(sys.argv[2]), int(sys.argv[3]))
