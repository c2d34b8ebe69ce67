# SPDX-License-Identifier: Apache-2.0
"""The cluster token: the secret by which the hosts of one engine know each other."""

from __future__ import annotations

from pathlib import Path

from phalanx.config.options import EngineOptions
from phalanx.errors import OptionError

MIN_TOKEN_BYTES = 16
SECRET_OPTIONS = {"cluster_token", "cluster_token_file"}
"""Options that stay on their host: ranks get the token apart from the options, and do not compare them."""

_CURE = (
    "give every host the same secret with PHALANX_CLUSTER_TOKEN or --cluster_token_file (for example the output of "
    "openssl rand -hex 32); --insecure_cluster runs without one, for networks that nobody else can reach"
)


def read_cluster_token(options: EngineOptions, *, required: bool = True) -> str | None:
    """The token of these options, without the white space around it; None where there is none and none is needed:
    for one node, or where not `required`, since a launcher carries one.

    Raises OptionError for a token that is too short or cannot be read, and for several nodes without one. No error shows the token.
    """
    token, source = options.cluster_token, "cluster_token"
    if options.cluster_token_file is not None:
        source = f"cluster_token_file={options.cluster_token_file!r}"
        if token is not None:
            raise OptionError("cluster_token and cluster_token_file exclude each other", next="give one of them")
        try:
            token = Path(options.cluster_token_file).expanduser().read_text(encoding="utf-8-sig")
        except (OSError, RuntimeError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not the path of a text file"
            raise OptionError(f"{source} cannot be read", why=why or "", next="name a readable file") from None
    if token is None:
        if required and options.nnodes > 1 and not options.insecure_cluster:
            raise OptionError(
                f"nnodes={options.nnodes} needs a cluster token",
                why="without one, whoever reaches the ports of host 0 can end the engine, join it and read its prompts", next=_CURE,
            )  # fmt: skip
        return None
    if options.insecure_cluster:
        raise OptionError(f"insecure_cluster and {source.partition('=')[0]} exclude each other", next="give one of them")
    token = token.strip()
    if len(token.encode()) < MIN_TOKEN_BYTES:
        raise OptionError(f"{source} is too short", why=f"the token must have at least {MIN_TOKEN_BYTES} bytes", next=_CURE)
    return token
