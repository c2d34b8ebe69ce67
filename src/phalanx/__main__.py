# SPDX-License-Identifier: Apache-2.0
"""The command `phalanx`, and `python -m phalanx`: a Ctrl-C is answered in one word from the first import on."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line; returns the exit status."""
    try:
        from phalanx.cli import main as run
    except KeyboardInterrupt:
        return 130
    return run()


if __name__ == "__main__":
    sys.exit(main())
