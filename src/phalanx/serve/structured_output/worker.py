# SPDX-License-Identifier: Apache-2.0
"""The task of a fork that checks structured output: it writes a format as a grammar (`lark_of`).

The fork gets {"kind", "text"}, and answers with {"grammar"} or {"invalid"}; it answers nothing where it reaches a limit.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from multiprocessing.connection import Connection

from phalanx.errors import OptionError
from phalanx.serve.structured_output.lark import lark_of
from phalanx.serve.structured_output.validation import problem_of


def make_task(_: bytes) -> Callable[[Connection], None]:
    """The library is imported before the forks, which would each import it. They have no vocabulary, so they are small."""
    problem_of("/a/")
    return check


def check(connection: Connection) -> None:
    """Check one format."""
    request = json.loads(connection.recv_bytes())
    try:
        reply = {"grammar": lark_of(request["kind"], request["text"])}
    except OptionError as error:
        reply = {"invalid": str(error)}
    except (MemoryError, RecursionError) as error:
        reply = {"invalid": f"this {request['kind']} cannot be checked: {type(error).__name__}; simplify it"}
    connection.send_bytes(json.dumps(reply).encode())
