# SPDX-License-Identifier: Apache-2.0
"""The load that two benchmarks share: as many equal requests as streams, all at once."""

from __future__ import annotations

import argparse

from phalanx.bench.load import Load


def add_arguments(parser: argparse.ArgumentParser, *, new_tokens: int) -> None:
    """The flags --streams, --prompt_tokens and --new_tokens."""
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--prompt_tokens", type=int, default=32)
    parser.add_argument("--new_tokens", type=int, default=new_tokens)


def load_of(arguments: argparse.Namespace) -> Load:
    """The load that these flags ask for."""
    streams = arguments.streams
    return Load(requests=streams, input_len=arguments.prompt_tokens, output_len=arguments.new_tokens, concurrency=streams)
