# SPDX-License-Identifier: Apache-2.0
"""Structured output: `compiler` has each format written as a grammar of llguidance and checked, in the process of `worker`.

`lark` writes grammars; `json_schema`, `regex`, `formats` and `parameters` prepare what goes into them. `vocabulary` is what the
engine needs of the tokenizer. The engine follows a grammar in `engine.grammar`.
"""
