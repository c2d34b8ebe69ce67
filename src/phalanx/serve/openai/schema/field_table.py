# SPDX-License-Identifier: Apache-2.0
"""The one table of request fields: what the server honours, what it accepts without effect, and what it refuses.

`FIELDS[body][field]` is a `Row`. The bodies are the classes of this package (`ChatRequest`, `AssistantMessage`, ...); a subclass
has the rows of its bases, too. `Body` validates by this table, `/openapi.json` and docs/http_api.md are generated from it, and the
tests send the example of each row.

The rule: a field that would change the answer and cannot be honoured is refused by name. A field that carries no promise (an id, an
echo of what an SDK or this server sent, a hint, a key of a cache) is accepted, and counted on /metrics. null means absent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Treatment(Enum):
    """What the server does with a field."""

    HONOURED = "honoured"
    ACCEPTED = "accepted without effect"
    REFUSED = "refused"


@dataclass(frozen=True)
class Row:
    """One field. meaning: what it does, why it has no effect, or why it is refused. neutral: values of a refused field that change
    nothing and are therefore accepted. example: a value for tests that is accepted without effect, or refused."""

    treatment: Treatment
    meaning: str
    neutral: tuple[Any, ...] = ()
    example: Any = None

    def takes(self, value: Any) -> bool:
        """Whether the value is accepted. 1, 1.0 and true are different values."""
        return self.treatment is not Treatment.REFUSED or any(type(value) is type(one) and value == one for one in self.neutral)

    def json_schema(self) -> dict[str, Any]:
        """The schema of a field that no class declares."""
        if self.treatment is Treatment.REFUSED:
            return {"enum": [None, *self.neutral], "description": f"Not supported: {self.meaning}."}
        return {"description": f"Accepted without effect: {self.meaning}."}


def _honoured(meaning: str) -> Row:
    return Row(Treatment.HONOURED, meaning)


def _accepted(meaning: str, example: Any) -> Row:
    return Row(Treatment.ACCEPTED, meaning, example=example)


def _refused(meaning: str, example: Any, *neutral: Any) -> Row:
    return Row(Treatment.REFUSED, meaning, neutral=neutral, example=example)


_TEXT_ONLY = "the models read and write text only"
_SCHEMA = "structured output by vLLM's name"
_ECHO = "an echo of what an SDK or a server sent"
_CACHE = "prompts are always cached, by their content"

_IDS: dict[str, Row] = {
    "user": _accepted("an id", "me"),
    "safety_identifier": _accepted("an id", "s-1"),
    "prompt_cache_key": _accepted(_CACHE, "key"),
    "prompt_cache_retention": _accepted("a hint; cached prompts leave by least recent use", "24h"),
    "prompt_cache_options": _accepted("a hint; cached prompts leave by least recent use", {"mode": "implicit"}),
    "service_tier": _accepted("there is one tier, 'default'", "flex"),
    "request_id": _accepted("an id", "r-1"),
    "rid": _accepted("an id", "r-1"),
    "priority": _accepted("a hint; requests start in order of arrival", 3),
}
"""Fields that all endpoints accept."""
_INSTRUCTION = _honoured("what makes a text relevant; of models that answer yes or no")
_SERVED = {"model": _honoured("the served name"), **_IDS}

_EXTENSIONS: dict[str, Row] = {
    "top_k": _honoured("the k most likely tokens; -1 and 0 switch it off"),
    "min_p": _honoured("0 to 1: minimum probability, relative to the most likely token"),
    "repetition_penalty": _honoured("above 0 to 100: penalty on tokens of prompt and output"),
    "min_tokens": _honoured("no stop before so many tokens"),
    "stop_token_ids": _honoured("token ids that end the completion"),
    "ignore_eos": _honoured("do not stop at the model's end token"),
    "include_stop_str_in_output": _honoured("keep the stop string in the text"),
    "skip_special_tokens": _honoured("leave special tokens out of the text"),
    "guided_json": _honoured(f"a JSON schema: {_SCHEMA}"),
    "guided_regex": _honoured(f"a regular expression: {_SCHEMA}"),
    "guided_choice": _honoured(f"a list of texts, of which the answer is one: {_SCHEMA}"),
    "guided_grammar": _honoured(f"Lark or GBNF: {_SCHEMA}"),
    "structured_outputs": _honoured("an object with one of `json`, `regex`, `choice`, `grammar`, `json_object`, `structural_tag`"),
    "add_special_tokens": _honoured(
        "add the tokens that begin a prompt; on by default for texts, off for chats, whose template has them"
    ),
    "truncate_prompt_tokens": _honoured("keep the last so many tokens of the prompt; -1: as many as fit"),
    "prompt_logprobs": _honoured("log probabilities of the prompt's tokens, with up to 20 alternatives; not in streams"),
    "guided_decoding_backend": _accepted("a hint; there is one back end", "guidance"),
    "guided_whitespace_pattern": _refused("JSON is written with one space after a colon or comma", "[ ]*"),
    "spaces_between_special_tokens": _refused("no space is added between special tokens", False, True),
    "allowed_token_ids": _refused("it is not implemented; `logit_bias` is", [1]),
    "bad_words": _refused("it is not implemented", ["x"], []),
    "logits_processors": _refused("no code of a client is run", ["x"], []),
    "use_beam_search": _refused("it is not implemented", True, False),
    "length_penalty": _refused("it belongs to beam search, which is not implemented", 2.0, 1.0, 1),
    "early_stopping": _refused("it belongs to beam search, which is not implemented", True, False),
    "return_tokens_as_token_ids": _refused("logprobs name tokens by their text", True, False),
    "return_token_ids": _refused("answers are texts; `/tokenize` gives the ids", True, False),
    "cache_salt": _honoured("a text: cached prompts are shared only between requests with the same salt"),
    "kv_transfer_params": _refused("KV blocks are not transferred between servers", {"a": 1}),
    "vllm_xargs": _refused("they are arguments of another engine", {"a": 1}, {}),
    # SGLang's router adds these to every request, with the values that change nothing.
    "no_stop_trim": _refused("a stop text is cut off; `include_stop_str_in_output` keeps it", True, False),
    "separate_reasoning": _refused("reasoning is always apart from the answer", False, True),
    "stream_reasoning": _refused("reasoning is streamed as it comes", False, True),
    "return_hidden_states": _refused("answers are texts", True, False),
}
"""Fields beyond OpenAI's, with the names that other servers use."""

_SAMPLED: dict[str, Row] = {
    "model": _honoured("the served name"),
    "stream": _honoured("answer by server-sent events"),
    "stream_options": _honoured("`include_usage`: a last event with token counts; `continuous_usage_stats`: counts in each event"),
    "n": _honoured("1 to 128 completions per prompt"),
    "temperature": _honoured("0 to 2; 0 takes the most likely token; see [Defaults](#defaults)"),
    "top_p": _honoured("above 0 to 1: nucleus sampling"),
    "presence_penalty": _honoured("-2 to 2: penalty on generated tokens"),
    "frequency_penalty": _honoured("-2 to 2: penalty on generated tokens, by their count"),
    "seed": _honoured(
        "seeds the random numbers of this request; in 16 bit on a GPU its tokens depend on the batch, too: see "
        "[Seeds](python_api.md#seeds)"
    ),
    "stop": _honoured("a text, or up to 16 texts, that end the completion; empty ones are none"),
    "logit_bias": _honoured("token id: -100 to 100, added to the logit"),
    **_EXTENSIONS,
    **_IDS,
}

_MESSAGE: dict[str, Row] = {
    "role": _honoured("`system`, `developer`, `user`, `assistant` or `tool`"),
    "content": _honoured("a text, or a list of text parts"),
    "name": _honoured("given to the chat template"),
    "id": _accepted(_ECHO, "msg_1"),
    "provider_specific_fields": _accepted(_ECHO, {"refusal": None}),
    "cache_control": _accepted(_CACHE, {"type": "ephemeral"}),
    "metadata": _accepted("a note of the client", {"a": "b"}),
}

_PART: dict[str, Row] = {
    "type": _honoured("`text`"),
    "text": _honoured("the text"),
    "cache_control": _accepted(_CACHE, {"type": "ephemeral"}),
    "prompt_cache_breakpoint": _accepted(_CACHE, {"mode": "explicit"}),
    "annotations": _accepted(_ECHO, []),
    "citations": _accepted(_ECHO, []),
    "logprobs": _accepted(_ECHO, []),
    "id": _accepted(_ECHO, "p"),
    "index": _accepted(_ECHO, 0),
    "provider_specific_fields": _accepted(_ECHO, {}),
}

_CACHED: dict[str, Row] = {"cache_control": _accepted(_CACHE, {"type": "ephemeral"})}

FIELDS: Mapping[str, Mapping[str, Row]] = {
    "SampledRequest": _SAMPLED,
    "CompletionRequest": {
        "prompt": _honoured("a text, token ids, or a list of up to 1,024 of either"),
        "max_tokens": _honoured("generated tokens at most (16); 0 with `echo` scores the prompt"),
        "logprobs": _honoured("log probabilities of the tokens, and up to 20 alternatives; a stop string's tokens are among them"),
        "echo": _honoured("repeat the prompt before the completion"),
        "best_of": _honoured("must equal `n`: completions are not ranked"),
        "suffix": _refused("insertion before a suffix is not implemented", "end", ""),
        "response_format": _honoured("`text`, `json_object`, or `json_schema`"),
    },
    "ChatRequest": {
        "messages": _honoured("the conversation; the fields of messages are below"),
        "max_tokens": _honoured("generated tokens at most; without it, up to `max_seq_len`"),
        "max_completion_tokens": _honoured("the same"),
        "logprobs": _honoured("log probabilities of the tokens; a stop string's are among them"),
        "top_logprobs": _honoured("up to 20 alternatives of each"),
        "response_format": _honoured("`text`, `json_object`, or `json_schema`"),
        "tools": _honoured("functions; [formats](#reasoning-and-tool-calls)"),
        "tool_choice": _honoured("`none`, `auto`, `required`, one function, or `allowed_tools`"),
        "parallel_tool_calls": _honoured("false: at most one call"),
        "chat_template_kwargs": _honoured("more variables of the chat template, for example `enable_thinking`"),
        "reasoning_effort": _honoured(
            "given to a chat template that reads `reasoning_effort`; `none` is `enable_thinking: false` for one that reads that; "
            "else counted as without effect"
        ),
        "add_generation_prompt": _honoured("false: the prompt ends after the last message"),
        "continue_final_message": _honoured("the answer continues the last message; needs `add_generation_prompt: false`"),
        "echo": _refused("a chat has no text to repeat", True, False),
        "metadata": _accepted("answers are not stored", {"a": "b"}),
        "store": _accepted("chats are not stored; `/v1/responses` are", True),
        "verbosity": _accepted("a hint; ask for it in a message", "low"),
        "prediction": _honoured(
            "an answer that is expected, which changes no token: a hint for n-gram [speculation]"
            "(speculative.md#predicted-outputs); without that it does nothing"
        ),
        "include_reasoning": _honoured("false: leave `reasoning_content` out of the answer; the model thinks all the same"),
        "modalities": _refused(_TEXT_ONLY, ["text", "audio"], ["text"]),
        "audio": _refused(_TEXT_ONLY, {"voice": "x", "format": "wav"}),
        "web_search_options": _refused("there is no web search", {}),
        "moderation": _refused("there is no moderation", {"model": "x"}),
        "functions": _refused("it is replaced by `tools`", [{"name": "f"}], []),
        "function_call": _refused("it is replaced by `tool_choice`", {"name": "f"}, "none", "auto"),
        "documents": _refused("the server has no documents for templates; put them into a message", [{"text": "x"}], []),
        "chat_template": _refused("no template of a client is run; start the server with --chat_template", "{{ messages }}"),
        "mm_processor_kwargs": _refused(_TEXT_ONLY, {"a": 1}, {}),
    },
    "Prediction": {"type": _honoured("`content`"), "content": _honoured("a text, or a list of text parts")},
    "PlainMessage": _MESSAGE,
    "AssistantMessage": {
        **_MESSAGE,
        "tool_calls": _honoured("calls; `arguments` that are empty or cut off are completed"),
        "refusal": _honoured("the text of a message without content"),
        "reasoning_content": _honoured("given to the chat template, under the name that it reads"),
        "reasoning": _honoured("the same, under its newer name"),
        "annotations": _accepted(_ECHO, []),
        "citations": _accepted(_ECHO, []),
        "thinking_blocks": _accepted(_ECHO, []),
        "reasoning_details": _accepted(_ECHO, []),
        "reasoning_items": _accepted(_ECHO, []),
        "images": _accepted(_ECHO, []),
        "parsed": _accepted(_ECHO, {"a": 1}),
        "index": _accepted(_ECHO, 0),
        "finish_reason": _accepted(_ECHO, "stop"),
        "stop_reason": _accepted(_ECHO, "stop"),
        "logprobs": _accepted(_ECHO, {}),
        "status": _accepted(_ECHO, "completed"),
        "phase": _accepted(_ECHO, "final_answer"),
        "audio": _refused(_TEXT_ONLY, {"id": "x"}),
        "function_call": _refused("it is replaced by `tool_calls`", {"name": "f", "arguments": "{}"}),
    },
    "ToolMessage": {
        **_MESSAGE,
        "tool_call_id": _honoured("the call that it answers"),
        "is_error": _accepted("say so in the content", True),
        "status": _accepted(_ECHO, "success"),
        "artifact": _accepted(_ECHO, {}),
    },
    "TextPart": _PART,
    "RefusalPart": {**_PART, "type": _honoured("`refusal`"), "refusal": _honoured("the text"), "text": _accepted(_ECHO, "x")},
    "RequestToolCall": {
        "id": _honoured("the id of the call"),
        "type": _honoured("`function`"),
        "function": _honoured("`name` and `arguments`"),
        "index": _accepted(_ECHO, 0),
        "provider_specific_fields": _accepted(_ECHO, {}),
        "cache_control": _accepted(_CACHE, {"type": "ephemeral"}),
        "extra_content": _accepted(_ECHO, {}),
    },
    "RequestFunctionCall": {
        "name": _honoured("the function"),
        "arguments": _honoured("JSON as text"),
        "parsed_arguments": _accepted(_ECHO, {}),
        "provider_specific_fields": _accepted(_ECHO, {}),
    },
    "Tool": {
        "type": _honoured("`function`"),
        "function": _honoured("`name`, `description`, `parameters`, `strict`"),
        "cache_control": _accepted(_CACHE, {"type": "ephemeral"}),
        "defer_loading": _accepted("a hint; the prompt describes all tools", True),
    },
    "Function": {
        "name": _honoured("up to 128 letters, digits, `_` and `-`"),
        "description": _honoured("given to the model"),
        "parameters": _honoured("the JSON schema of the arguments"),
        "strict": _honoured("enforce the schema"),
        "cache_control": _accepted(_CACHE, {"type": "ephemeral"}),
    },
    "NamedTool": {"type": _honoured("`function`"), "function": _honoured("`name`")},
    "NamedFunction": {"name": _honoured("one of `tools`")},
    "AllowedToolsChoice": {"type": _honoured("`allowed_tools`"), "allowed_tools": _honoured("`mode` and `tools`")},
    "AllowedTools": {"mode": _honoured("`auto`, or `required`: at least one call"), "tools": _honoured("names of some of `tools`")},
    "TextFormat": {"type": _honoured("`text`")},
    "JsonObjectFormat": {"type": _honoured("`json_object`")},
    "JsonSchemaFormat": {"type": _honoured("`json_schema`"), "json_schema": _honoured("`name` and `schema`")},
    "JsonSchema": {
        "name": _honoured("a name"),
        "description": _honoured("a description"),
        "schema": _honoured("the schema"),
        "strict": _honoured("a schema is always enforced"),
    },
    "StreamOptions": {
        "include_usage": _honoured("a last event with token counts"),
        "continuous_usage_stats": _honoured("token counts in each event, with or without `include_usage`"),
        "include_obfuscation": _refused("chunks are not padded; remove it", True, False),
    },
    "StructuredOutputs": {
        "json": _honoured("a JSON schema"),
        "regex": _honoured("a regular expression"),
        "choice": _honoured("a list of texts"),
        "grammar": _honoured("Lark or GBNF"),
        "json_object": _honoured("any JSON object"),
        "structural_tag": _honoured("a structural tag of xgrammar, as text"),
        "disable_any_whitespace": _refused("JSON is written with one space after a colon or comma", False, True),
        "whitespace_pattern": _refused("JSON is written with one space after a colon or comma", " *"),
        "disable_fallback": _accepted("a hint; there is one back end", True),
        "disable_additional_properties": _refused("a property that the schema does not mention is never written", False, True),
    },
    "ResponsesRequest": {
        "model": _honoured("the served name"),
        "input": _honoured("a text, or a list of items, which are below"),
        "instructions": _honoured("the system message of this response; not carried on by `previous_response_id`"),
        "previous_response_id": _honoured("a stored response that this one continues: its input and output come first"),
        "store": _honoured("keep the response in memory for a while; on by default"),
        "stream": _honoured("answer by server-sent events"),
        "stream_options": _honoured("an object"),
        "max_output_tokens": _honoured("generated tokens at most; without it, up to `max_seq_len`"),
        "temperature": _SAMPLED["temperature"],
        "top_p": _SAMPLED["top_p"],
        "top_logprobs": _honoured("log probabilities, with up to 20 alternatives"),
        "include": _honoured("`message.output_text.logprobs`; what else OpenAI lists belongs to tools that are not built"),
        "text": _honoured("`format`: `text`, `json_object` or `json_schema`"),
        "reasoning": _honoured("`effort`"),
        "tools": _honoured("functions"),
        "tool_choice": _honoured("`none`, `auto`, `required`, one function, or `allowed_tools`"),
        "parallel_tool_calls": _honoured("false: at most one call"),
        "metadata": _honoured("returned with the response"),
        **{
            name: _SAMPLED[name]
            for name in (
                "presence_penalty",
                "frequency_penalty",
                "repetition_penalty",
                "top_k",
                "min_p",
                "seed",
                "stop",
                "stop_token_ids",
                "min_tokens",
                "ignore_eos",
                "logit_bias",
                "cache_salt",
            )
        },
        "chat_template_kwargs": _honoured("more variables of the chat template, for example `enable_thinking`"),
        **_IDS,
        "max_tool_calls": _accepted("it limits built-in tools, which are not built", 3),
        "background": _refused("responses in the background are not built", True, False),
        "background_options": _refused("responses in the background are not built", {"type": "x"}),
        "conversation": _refused("conversations are not built; `previous_response_id` is", "conv_1"),
        "prompt": _refused("stored prompts are not built", {"id": "pmpt_1"}),
        "truncation": _refused("an input that is too long is an error", "auto", "disabled"),
        "context_management": _refused("compaction is not built", [{"type": "compaction"}], []),
        "moderation": _refused("there is no moderation", {"model": "x"}),
        "image": _refused(_TEXT_ONLY, {"a": 1}),
    },
    "ResponsesStreamOptions": {"include_obfuscation": _refused("events are not padded; remove it", True, False)},
    "TextConfig": {"format": _honoured("the format"), "verbosity": _accepted("a hint; ask for it in the instructions", "low")},
    "ReasoningConfig": {
        "effort": _honoured("as `reasoning_effort` of a chat"),
        "summary": _accepted("a hint; reasoning is returned as it is", "auto"),
        "generate_summary": _accepted("a hint; reasoning is returned as it is", "auto"),
        "context": _accepted("a hint; reasoning stays with its turn", "auto"),
        "mode": _refused("there is one mode", "pro", "standard"),
    },
    "OutputText": {"type": _honoured("`text`")},
    "OutputJsonObject": {"type": _honoured("`json_object`")},
    "OutputJsonSchema": {
        "type": _honoured("`json_schema`"),
        "name": _honoured("a name"),
        "description": _honoured("a description"),
        "schema": _honoured("the schema"),
        "strict": _honoured("a schema is always enforced"),
    },
    "InputMessage": {
        "type": _honoured("`message`"),
        "role": _honoured("`user`, `assistant`, `system` or `developer`"),
        "content": _honoured("a text, or a list of text parts"),
        "id": _accepted(_ECHO, "msg_1"),
        "status": _accepted(_ECHO, "completed"),
        "phase": _accepted(_ECHO, "final_answer"),
        "provider_specific_fields": _accepted(_ECHO, {}),
    },
    "InputText": {
        "type": _honoured("`input_text` or `output_text`"),
        "text": _honoured("the text"),
        "annotations": _accepted(_ECHO, []),
        "logprobs": _accepted(_ECHO, []),
        "prompt_cache_breakpoint": _accepted(_CACHE, {"mode": "explicit"}),
        "parsed": _accepted(_ECHO, {}),
    },
    "InputRefusal": {"type": _honoured("`refusal`"), "refusal": _honoured("the text")},
    "OtherPart": {"type": _honoured("none: the models read text only")},
    "FunctionCallItem": {
        "type": _honoured("`function_call`"),
        "call_id": _honoured("the id of the call"),
        "name": _honoured("the function"),
        "arguments": _honoured("JSON as text; empty or cut-off ones are completed"),
        "id": _accepted(_ECHO, "fc_1"),
        "status": _accepted(_ECHO, "completed"),
        "parsed_arguments": _accepted(_ECHO, {}),
        "caller": _accepted(_ECHO, {"type": "direct"}),
        "provider_specific_fields": _accepted(_ECHO, {}),
    },
    "FunctionCallOutputItem": {
        "type": _honoured("`function_call_output`"),
        "call_id": _honoured("the call that it answers"),
        "output": _honoured("a text, or a list of text parts"),
        "id": _accepted(_ECHO, "fco_1"),
        "status": _accepted(_ECHO, "completed"),
        "name": _accepted(_ECHO, "f"),
        "caller": _accepted(_ECHO, {"type": "direct"}),
    },
    "ReasoningItem": {
        "type": _honoured("`reasoning`"),
        "content": _honoured("given to the chat template with the message that follows"),
        "id": _accepted(_ECHO, "rs_1"),
        "status": _accepted(_ECHO, "completed"),
        "summary": _accepted(_ECHO, []),
        "encrypted_content": _accepted("it is of another server; this one returns reasoning as it is", "x"),
    },
    "ReasoningText": {"type": _honoured("`reasoning_text`"), "text": _honoured("the text")},
    "ItemReference": {"type": _honoured("`item_reference`"), "id": _honoured("an item of a stored response")},
    "OtherItem": {"type": _honoured("none: items of built-in tools are not built")},
    "FunctionTool": {
        "type": _honoured("`function`"),
        "name": _honoured("up to 128 letters, digits, `_` and `-`"),
        "description": _honoured("given to the model"),
        "parameters": _honoured("the JSON schema of the arguments"),
        "strict": _honoured("true: enforce the schema"),
        "defer_loading": _accepted("a hint; the prompt describes all tools", True),
        "output_schema": _accepted("a note on what the function returns", {}),
        "allowed_callers": _accepted("the model is the only caller", ["direct"]),
    },
    "OtherTool": {"type": _honoured("none: built-in tools are not built")},
    "ChosenFunction": {"type": _honoured("`function`"), "name": _honoured("one of `tools`")},
    "AllowedFunctions": {
        "type": _honoured("`allowed_tools`"),
        "mode": _honoured("`auto`, or `required`: at least one call"),
        "tools": _honoured("some of `tools`"),
    },
    "OtherChoice": {"type": _honoured("none: built-in tools are not built")},
    "CountTokensRequest": {
        "model": _honoured("the served name"),
        "messages": _honoured("the conversation; consecutive messages of a role are one turn; a last one of the assistant goes on"),
        "system": _honoured("the system message: a text, or text blocks"),
        "tools": _honoured("tools with an `input_schema`"),
        "tool_choice": _honoured("`auto`, `any`, `tool` or `none`"),
        "thinking": _honoured(
            "`disabled` leaves thinking out of the answer; it is also given to a chat template that has a switch"
        ),
        "output_config": _honoured("`effort`, as `reasoning_effort` of a chat, and `format`"),
        "cache_control": _accepted(_CACHE, {"type": "ephemeral"}),
        "context_management": _accepted("a hint that could only shorten the prompt", {"edits": []}),
        "mcp_servers": _refused("tools of servers are not built", [{"type": "url", "name": "x", "url": "http://x"}], []),
        "output_format": _refused("it is replaced by `output_config.format`", {"type": "json_schema", "schema": {}}),
        "speed": _accepted("there is one speed", "standard"),
        "user_profile_id": _accepted("an id", "p-1"),
        "workspace_id": _accepted("an id", "w-1"),
    },
    "MessagesRequest": {
        "max_tokens": _honoured("generated tokens at most"),
        "stream": _SAMPLED["stream"],
        "temperature": _SAMPLED["temperature"],
        "top_p": _SAMPLED["top_p"],
        "top_k": _honoured("the k most likely tokens; 0 switches it off"),
        "stop_sequences": _honoured("up to 16 texts that end the answer"),
        "metadata": _accepted("an id", {"user_id": "me"}),
        "service_tier": _IDS["service_tier"],
        "inference_geo": _accepted("the server is where it is", "us"),
        "diagnostics": _accepted("a hint; prompts are always cached, by their content", {"previous_message_id": "msg_1"}),
        "container": _refused("no code is run", "c_1"),
    },
    "TurnMessage": {
        "role": _honoured("`user`, `assistant` or `system`"),
        "content": _honoured("a text, or a list of blocks"),
        **{
            name: _accepted(_ECHO, example)
            for name, example in (
                ("id", "msg_1"),
                ("type", "message"),
                ("model", "m"),
                ("stop_reason", "end_turn"),
                ("stop_sequence", "x"),
                ("usage", {}),
            )
        },
    },
    "TextBlock": {"type": _honoured("`text`"), "text": _honoured("the text"), "citations": _accepted(_ECHO, []), **_CACHED},
    "ThinkingBlock": {
        "type": _honoured("`thinking`"),
        "thinking": _honoured("given to the chat template"),
        "signature": _accepted(_ECHO, "x"),
        **_CACHED,
    },
    "RedactedThinkingBlock": {"type": _honoured("`redacted_thinking`: left out"), "data": _accepted(_ECHO, "x"), **_CACHED},
    "ToolUseBlock": {
        "type": _honoured("`tool_use`"),
        "id": _honoured("the id of the call"),
        "name": _honoured("the tool"),
        "input": _honoured("an object"),
        "caller": _accepted(_ECHO, {"type": "direct"}),
        "toolset_name": _accepted(_ECHO, "x"),
        **_CACHED,
    },
    "ToolResultBlock": {
        "type": _honoured("`tool_result`"),
        "tool_use_id": _honoured("the call that it answers"),
        "content": _honoured("a text, or a list of text blocks"),
        "is_error": _accepted("say so in the content", True),
        "toolset_name": _accepted(_ECHO, "x"),
        **_CACHED,
    },
    "OtherBlock": {"type": _honoured("none: the models read text only")},
    "CustomTool": {
        "type": _honoured("`custom`, or left out"),
        "name": _honoured("up to 128 letters, digits, `_` and `-`"),
        "description": _honoured("given to the model"),
        "input_schema": _honoured("the JSON schema of the input"),
        "strict": _honoured("true: enforce the schema"),
        "input_examples": _accepted("a hint; put them into the description", [{}]),
        "defer_loading": _accepted("a hint; the prompt describes all tools", True),
        "eager_input_streaming": _accepted("inputs are always streamed as they are written", True),
        "allowed_callers": _accepted("the model is the only caller", ["direct"]),
        **_CACHED,
    },
    "ServerTool": {"type": _honoured("none: tools of Anthropic's servers are not built")},
    "MessagesToolChoice": {
        "type": _honoured("`auto`, `any`, `tool` or `none`"),
        "name": _honoured("with `tool`: one of `tools`"),
        "disable_parallel_tool_use": _honoured("true: at most one call"),
    },
    "ThinkingConfig": {
        "type": _honoured("`enabled`, `adaptive` and `between_tools`, which are the same here, or `disabled`"),
        "budget_tokens": _accepted("thinking is limited by `max_tokens` alone", 1024),
        "display": _accepted("a hint; thinking is returned as it is", "summarized"),
    },
    "OutputConfig": {
        "effort": _honoured("as `reasoning_effort` of a chat"),
        "format": _honoured("`json_schema`"),
        "task_budget": _accepted("a hint", {"type": "tokens", "total": 1}),
    },
    "MessagesFormat": {"type": _honoured("`json_schema`"), "schema": _honoured("the schema; it is always enforced")},
    "EmbeddingsRequest": {
        **_SERVED,
        "input": _honoured("a text, token ids, or a list of up to 2,048 of either"),
        "encoding_format": _honoured("`float`, or `base64` of 32-bit numbers"),
        "dimensions": _honoured("the first so many numbers of each vector, for models that were trained for it"),
        "normalize": _honoured("vectors of length 1; on by default"),
    },
    "RerankRequest": {
        **_SERVED,
        "query": _honoured("a text"),
        "documents": _honoured("up to 2,047 texts, or objects with a `text`"),
        "top_n": _honoured("results at most"),
        "max_tokens_per_doc": _honoured("documents are cut behind so many tokens; without it, one that is too long is a 400"),
        "return_documents": _honoured("true: results have the text of the document; off by default"),
        "instruction": _INSTRUCTION,
    },
    "ScoreRequest": {
        **_SERVED,
        "text_1": _honoured("a text, or up to 1,024; one is compared with each of `text_2`"),
        "text_2": _honoured("a text, or up to 1,024"),
        "instruction": _INSTRUCTION,
    },
    "RerankDocument": {"text": _honoured("the text")},
    "TokenizeRequest": {
        "model": _honoured("the served name"),
        "prompt": _honoured("the text"),
        "messages": _honoured("a conversation, instead of a text"),
        "tools": _honoured("with `messages`: functions that the template describes"),
        "add_special_tokens": _honoured("add the tokens that begin a prompt; on by default for a text, off for messages"),
        "add_generation_prompt": _honoured("with `messages`: begin the answer; on by default"),
        "continue_final_message": _honoured("with `messages`: leave the last message open; needs `add_generation_prompt: false`"),
        "chat_template_kwargs": _honoured("with `messages`: more variables of the chat template"),
        "return_token_strs": _accepted("the texts of the tokens are always returned", True),
        "chat_template": _refused("no template of a client is run; start the server with --chat_template", "{{ messages }}"),
        "mm_processor_kwargs": _refused(_TEXT_ONLY, {"a": 1}, {}),
    },
    "DetokenizeRequest": {
        "model": _honoured("the served name"),
        "tokens": _honoured("token ids"),
        "skip_special_tokens": _honoured("leave special tokens out of the text"),
    },
}


def rows_of(kind: type) -> dict[str, Row]:
    """The rows of a body and of its bases."""
    rows: dict[str, Row] = {}
    for base in reversed(kind.__mro__):
        rows.update(FIELDS.get(base.__name__, {}))
    return rows


def undeclared(kind: type, declared: Mapping[str, Any]) -> dict[str, Row]:
    """The rows of a body without those fields that its class declares (by their names in JSON): they have no effect, or are
    refused."""
    return {name: row for name, row in rows_of(kind).items() if name not in declared}


def every_row() -> Iterator[tuple[str, str, Row]]:
    """All rows, with their body and field."""
    yield from ((body, name, row) for body, rows in FIELDS.items() for name, row in rows.items())
