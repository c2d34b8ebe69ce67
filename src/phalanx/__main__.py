# SPDX-License-Identifier: Apache-2.0
"""The command `phalanx`, and `python -m phalanx`. Ctrl-C ends it without a traceback, even during the first imports."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line; return the exit status."""
    try:
        from phalanx.cli import main as run
    except KeyboardInterrupt:
        return 130
    return run()


if __name__ == "__main__":
    sys.exit(main())
