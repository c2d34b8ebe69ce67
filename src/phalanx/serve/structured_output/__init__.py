# SPDX-License-Identifier: Apache-2.0
"""Structured output: `compiler` compiles a format (in the process of `worker`) after checks of what the grammar cannot enforce.

`json_schema`, `oneof` and `regex` reject such parts of schemas and regular expressions; `termination` rejects grammars that no
finite text satisfies. The engine follows a compiled grammar in `engine.grammar`.
"""
