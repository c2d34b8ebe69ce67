# SPDX-License-Identifier: Apache-2.0
"""`python -m phalanx.engine`: the engine process, started by a client."""

from phalanx.launch import importing

with importing():
    from phalanx.engine.process import main

if __name__ == "__main__":
    main()
