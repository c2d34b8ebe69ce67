# SPDX-License-Identifier: Apache-2.0
"""Write the fields of requests into docs/http_api.md, between its two markers, from the table in `serve.openai.schema.field_table`.

python scripts/http_fields.py            writes the page
python scripts/http_fields.py --check    exits with status 1 if the page is out of date
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from phalanx.serve.openai.schema.field_table import FIELDS, Row, Treatment

PAGE = Path(__file__).resolve().parents[1] / "docs" / "http_api.md"
BEGIN, END = "<!-- fields: written by scripts/http_fields.py -->", "<!-- end of fields -->"
TITLES = {
    "SampledRequest": "Fields of both completions and chat",
    "CompletionRequest": "Completions",
    "ChatRequest": "Chat",
    "PlainMessage": "Messages of system, developer and user",
    "AssistantMessage": "Messages of the assistant",
    "ToolMessage": "Results of tools",
    "TextPart": "Parts of a content: text",
    "RefusalPart": "Parts of a content of the assistant: a refusal",
    "RequestToolCall": "`tool_calls[]` of the assistant",
    "RequestFunctionCall": "`tool_calls[].function`",
    "Tool": "`tools[]`",
    "Function": "`tools[].function`",
    "NamedTool": "`tool_choice` of one function",
    "NamedFunction": "`tool_choice.function`",
    "AllowedToolsChoice": "`tool_choice` of some functions",
    "AllowedTools": "`tool_choice.allowed_tools`",
    "TextFormat": "`response_format` of a text",
    "JsonObjectFormat": "`response_format` of any object",
    "JsonSchemaFormat": "`response_format` of a schema",
    "Prediction": "`prediction`",
    "JsonSchema": "`response_format.json_schema`",
    "StreamOptions": "`stream_options`",
    "StructuredOutputs": "`structured_outputs`",
    "ResponsesRequest": "Responses",
    "ResponsesStreamOptions": "`stream_options` of a response",
    "TextConfig": "`text` of a response",
    "ReasoningConfig": "`reasoning` of a response",
    "OutputText": "`text.format` of a text",
    "OutputJsonObject": "`text.format` of any object",
    "OutputJsonSchema": "`text.format` of a schema",
    "InputMessage": "Items of an input: `message`",
    "InputText": "Parts of a message: text",
    "InputRefusal": "Parts of a message: a refusal",
    "OtherPart": "Parts of a message: others",
    "FunctionCallItem": "Items of an input: `function_call`",
    "FunctionCallOutputItem": "Items of an input: `function_call_output`",
    "ReasoningItem": "Items of an input: `reasoning`",
    "ReasoningText": "Parts of a reasoning",
    "ItemReference": "Items of an input: `item_reference`",
    "OtherItem": "Items of an input: others",
    "FunctionTool": "`tools[]` of a response: functions",
    "OtherTool": "`tools[]` of a response: others",
    "ChosenFunction": "`tool_choice` of a response: one function",
    "AllowedFunctions": "`tool_choice` of a response: some functions",
    "OtherChoice": "`tool_choice` of a response: others",
    "CountTokensRequest": "`/v1/messages` and `/v1/messages/count_tokens`",
    "MessagesRequest": "`/v1/messages`",
    "TurnMessage": "`messages[]` of `/v1/messages`",
    "TextBlock": "Blocks of `/v1/messages`: text",
    "ThinkingBlock": "Blocks of `/v1/messages`: thinking",
    "RedactedThinkingBlock": "Blocks of `/v1/messages`: redacted thinking",
    "ToolUseBlock": "Blocks of `/v1/messages`: a call",
    "ToolResultBlock": "Blocks of `/v1/messages`: the result of a call",
    "OtherBlock": "Blocks of `/v1/messages`: others",
    "CustomTool": "`tools[]` of `/v1/messages`",
    "ServerTool": "`tools[]` of `/v1/messages`: others",
    "MessagesToolChoice": "`tool_choice` of `/v1/messages`",
    "ThinkingConfig": "`thinking` of `/v1/messages`",
    "OutputConfig": "`output_config` of `/v1/messages`",
    "MessagesFormat": "`output_config.format` of `/v1/messages`",
    "EmbeddingsRequest": "`/v1/embeddings`",
    "RerankRequest": "`/v1/rerank`",
    "ScoreRequest": "`/v1/score`",
    "RerankDocument": "`documents[]` of `/v1/rerank`: an object",
    "TokenizeRequest": "`/tokenize`",
    "DetokenizeRequest": "`/detokenize`",
}


def fields() -> str:
    """The part of the page between the markers."""
    return "\n".join(f"### {TITLES[body]}\n\n{table(rows)}" for body, rows in FIELDS.items())


def table(rows: dict[str, Row]) -> str:
    lines = ["| field | treatment | meaning |", "|---|---|---|"]
    for treatment in Treatment:
        for name, row in rows.items():
            if row.treatment is treatment:
                neutral = " or ".join(f"`{json.dumps(value)}`" for value in row.neutral)
                only = f" Accepted with {neutral}." if neutral else ""
                meaning = row.meaning + ("." + only if only else "")
                lines.append(f"| `{name}` | {treatment.value} | {meaning.replace('|', chr(92) + '|')} |")
    return "\n".join(lines) + "\n"


def page(text: str) -> str:
    """The page with new fields."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{fields()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    current = PAGE.read_text(encoding="utf-8")
    if "--check" in sys.argv[1:]:
        sys.exit(current != page(current))
    PAGE.write_text(page(current), encoding="utf-8")
