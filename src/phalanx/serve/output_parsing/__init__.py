# SPDX-License-Identifier: Apache-2.0
"""What a model's text means: reasoning, content and tool calls, parsed while the text arrives in parts of any size.

`OutputFormat.detect` reads the formats from the checkpoint, or takes the names that the options give. `OutputFormat.parser` makes
one `OutputParser` per completion: it takes text and returns `Event`s. Every endpoint builds its own response fields from these.
"""

from phalanx.serve.output_parsing.events import CallArguments, CallBegin, ContentText, Event, OutputParser, ReasoningText
from phalanx.serve.output_parsing.families import OutputFormat
from phalanx.serve.output_parsing.markers import Markers

__all__ = [
    "CallArguments",
    "CallBegin",
    "ContentText",
    "Event",
    "Markers",
    "OutputFormat",
    "OutputParser",
    "ReasoningText",
]
