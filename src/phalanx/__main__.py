# SPDX-License-Identifier: Apache-2.0
"""The command `phalanx`, and `python -m phalanx`. Ctrl-C ends it without a traceback, even during the first imports."""

from __future__ import annotations

import os
import sys


def main() -> int:
    """Run the command line; return the exit status."""
    open_standard_descriptors()
    try:
        from phalanx.launch import importing

        with importing():
            from phalanx.cli import main as run
    except KeyboardInterrupt:
        return 130
    return run()


def open_standard_descriptors() -> None:
    """Open /dev/null where the parent process closed a standard descriptor: a socket with its number would be taken for a log."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free: this one


if __name__ == "__main__":
    sys.exit(main())
