# SPDX-License-Identifier: Apache-2.0
"""`python -m phalanx`: the same as the command `phalanx`."""

from __future__ import annotations

import sys

from phalanx.cli import main

sys.exit(main())
