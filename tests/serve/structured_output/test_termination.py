# SPDX-License-Identifier: Apache-2.0
"""A rule that leads only to itself is found in whatever xgrammar compiles; what repeats but may end is none."""

from __future__ import annotations

import json

import pytest
import xgrammar

from phalanx.serve.structured_output.termination import nonterminating_rule

VOCABULARY = [bytes([i]) for i in range(256)] + [b"<end>"]


@pytest.fixture(scope="module")
def compiler():
    info = xgrammar.TokenizerInfo(VOCABULARY, xgrammar.VocabType.RAW, vocab_size=257, stop_token_ids=[256])
    return xgrammar.GrammarCompiler(info, max_threads=1)


@pytest.mark.parametrize(
    ("grammar", "rule"),
    [
        ("root ::= root", "root"),
        ('root ::= "a" root', "root"),
        ('root ::= "a" x | "b"\nx ::= "y" z\nz ::= x', "x"),
        ('root ::= "a" x{0,9} "b"\nx ::= x', "x"),
        ('root ::= "a"\nx ::= x', None),  # nobody comes there
        ('root ::= "(" root ")" | [0-9]+', None),
        ('root ::= "| root" x{2,300}\nx ::= "a" | x "\\"" x', None),
        ('root ::= [\\]|"(=(] x?\nx ::= [x]', None),
        ('root ::= ""', None),
    ],
)
def test_grammars(compiler, grammar, rule):
    assert nonterminating_rule(str(compiler.compile_grammar(grammar).grammar)) == rule


REQUIRED = {"type": "object", "required": ["x"]}


@pytest.mark.parametrize(
    ("schema", "ends"),
    [
        ({"anyOf": [{"$ref": "#"}]}, False),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/b"}]}, "b": {"anyOf": [{"$ref": "#/$defs/a"}]}}}, False),
        ({**REQUIRED, "properties": {"x": {"$ref": "#"}}}, False),
        (
            {**REQUIRED, "properties": {"x": {}, "y": {"$ref": "#/$defs/y"}}, "$defs": {"y": {"anyOf": [{"$ref": "#/$defs/y"}]}}},
            False,
        ),
        ({"type": "array", "minItems": 1, "items": {"$ref": "#"}}, False),
        ({"type": "array", "items": {"$ref": "#"}}, True),
        ({**REQUIRED, "properties": {"x": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}}}, True),
        ({"type": "object", "properties": {"x": {"$ref": "#"}}}, True),
        ({"type": "string", "pattern": "^(x=y|[(=]root)*$"}, True),
        ({"enum": ["root ::= root | root"]}, True),
        ({}, True),
    ],
)
def test_schemas(compiler, schema, ends):
    assert (nonterminating_rule(str(compiler.compile_json_schema(json.dumps(schema), strict_mode=True).grammar)) is None) == ends


@pytest.mark.parametrize("ends", [True, False])
def test_tags(compiler, ends):
    content = {"type": "json_schema", "json_schema": {"type": "object"} if ends else {"anyOf": [{"$ref": "#"}]}}
    tag = {"type": "tag", "begin": "<call>", "content": content, "end": "</call>"}
    layout = {"type": "triggered_tags", "triggers": ["<c"], "tags": [tag]}
    compiled = compiler.compile_structural_tag(json.dumps({"type": "structural_tag", "format": layout}))
    assert (nonterminating_rule(str(compiled.grammar)) is None) == ends
