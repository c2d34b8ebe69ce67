# SPDX-License-Identifier: Apache-2.0
"""`python -m phalanx.worker`: the process of a rank, started by a launcher."""

from phalanx.launch import importing

with importing():
    from phalanx.worker.worker import main

if __name__ == "__main__":
    main()
