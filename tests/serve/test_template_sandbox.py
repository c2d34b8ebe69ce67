# SPDX-License-Identifier: Apache-2.0
"""What a template could make of a few characters is refused before it is made; what templates do is the same as in plain Jinja."""

from __future__ import annotations

import resource
import time

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from phalanx.errors import RequestError
from phalanx.serve import template_sandbox
from phalanx.serve.chat_template import ChatTemplate
from phalanx.serve.template_sandbox import MAX_CHARACTERS

USER = [{"role": "user", "content": "x"}]
HUGE = "10**9"
NESTED = "{% set n = namespace(l=[1]) %}{% for i in range(40) %}{% set n.l = [n.l, n.l] %}{% endfor %}"
BATCHED = "{% set n = namespace(l=[1]) %}{% for i in range(40) %}{% set n.l = (n.l + n.l) | batch(2) | list %}{% endfor %}"
LONG = "{% set long = 'x' * (2**24) %}"
KEPT = "{{% set n = namespace(l=[]) %}}{{% for i in range(10**5) %}}{{% set n.l = n.l + [{}] %}}{{% endfor %}}"
"""Many values, none of which is large."""

GROWTHS = [
    f"{{{{ 'a' * {HUGE} }}}}", f"{{{{ {HUGE} * 'a' }}}}", f"{{{{ ['a'] * {HUGE} }}}}",
    *(f"{{{{ 'a'.{method}({HUGE}) }}}}" for method in ("ljust", "rjust", "center", "zfill")),
    f"{{{{ ('a' | attr('ljust'))({HUGE}) }}}}", f"{{{{ 'a'['ljust']({HUGE}) }}}}",
    f"{{% set f = 'a'.ljust %}}{{{{ f({HUGE}) }}}}", f"{{{{ '\\t'.expandtabs({HUGE}) }}}}",
    "{{ '{:1000000000}'.format('a') }}", f"{{{{ '{{:{{w}}}}'.format('a', w={HUGE}) }}}}",
    "{{ '{a:1000000000}'.format_map({'a': 1}) }}",
    "{{ '{:{}}'.format('a', '1000000000') }}", "{{ '{:.1000000000f}'.format(1.5) }}",
    "{{ '%1000000000d' % 1 }}", "{{ '%.1000000000f' % 1.5 }}", f"{{{{ '%*d' % ({HUGE}, 1) }}}}",
    f"{{{{ '%*d' | format({HUGE}, 1) }}}}",
    f"{{{{ 'a' | center({HUGE}) }}}}", f"{{{{ ['a'] | map('center', {HUGE}) | list }}}}", f"{{{{ 'a\\nb' | indent({HUGE}) }}}}",
    LONG + "{{ long.replace('', long) }}", LONG + "{{ long.replace('x', 'abc') }}", LONG + "{{ long | replace('x', 'abc') }}",
    LONG + "{{ long.join('abcd') }}", LONG + "{{ [1, 2, 3, 4] | join(long) }}", LONG + "{{ [long, long, long] | join }}",
    LONG + "{{ ''.join([long, long, long]) }}", LONG + "{{ 'xxx'.translate({120: long}) }}",
    LONG + "{{ '{0}{0}{0}'.format(long) }}", LONG + "{{ '%(a)s%(a)s%(a)s' % {'a': long} }}",
    LONG + "{% set s %}{% for i in range(1000) %}{{ long }}{% endfor %}{% endset %}",
    LONG + "{% macro m() %}{% for i in range(1000) %}{{ long }}{% endfor %}{% endmacro %}{% set s = m() %}",
    LONG + "{% filter upper %}{% for i in range(1000) %}{{ long }}{% endfor %}{% endfilter %}",
    f"{{{{ [1] | batch({HUGE}, 0) | list }}}}", f"{{{{ [1] | slice({HUGE}) | list }}}}", f"{{{{ [1] | tojson(indent={HUGE}) }}}}",
    f"{{{{ [] | tojson(indent={HUGE}) }}}}",
    *(NESTED + use for use in ("{{ n.l }}", "{{ n.l ~ '' }}", "{{ n.l | string }}", "{{ n.l | tojson }}", "{{ '%s' % [n.l] }}")),
    *(NESTED + use for use in ("{{ '{}'.format(n.l) }}", "{{ [n.l] | join }}", "{% if n.l == 1 %}{% endif %}")),
    BATCHED + "{{ n.l }}", BATCHED + "{% set a = n.l %}{{ 1 in a }}",
    f"{{{{ 10 ** ({HUGE}) }}}}", "{% set n = namespace(i=3) %}{% for i in range(60) %}{% set n.i = n.i * n.i %}{% endfor %}",
    KEPT.format("'x' * (2**20 - 1)"), KEPT.format("('xy ' * 2**18).split()"), KEPT.format("('\u4e00' * 2**20)[1:]"),
    "{{ range(10**5) | map('center', 2**20 - 1) | list }}", "{{ (['x' * (2**20 - 1)] * 10**4) | map('upper') | list }}",
]  # fmt: skip


@pytest.mark.parametrize("source", GROWTHS)
def test_what_grows_is_refused_before_it_is_made(source, monkeypatch):
    """The process may take no more memory than the values that are allowed."""
    monkeypatch.setattr(template_sandbox, "MAX_VALUES", 2**16)
    monkeypatch.setattr(template_sandbox, "MAX_MEMORY", 2**28)
    template = ChatTemplate(source, origin="test")
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + 16 * MAX_CHARACTERS, limits[1]))
    begin = time.monotonic()
    try:
        with pytest.raises(RequestError, match=r"the chat template (makes|indents|writes or compares|takes more than)"):
            template.render(USER)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert time.monotonic() - begin < 5


def test_large_values_are_limited_together(monkeypatch):
    monkeypatch.setattr(template_sandbox, "MAX_LARGE_CHARACTERS", 2**24)
    source = "{% set n = namespace(l=[]) %}{% for i in range(99) %}{% set n.l = n.l + ['x' * (2**21) ~ i] %}{% endfor %}"
    with pytest.raises(RequestError, match=r"long texts of 1[0-9]{7} characters together"):
        ChatTemplate(source, origin="test").render(USER)


def test_a_rendering_is_charged_with_its_own_memory_only(monkeypatch):
    """What the process took before it began does not count, nor does what is compiled after it."""
    monkeypatch.setattr(template_sandbox, "MAX_MEMORY", 2**24)
    monkeypatch.setattr(template_sandbox, "_FIRST_LOOK_SECONDS", 0.0)
    source = "{% for i in range(10**4) %}{{ i | string | upper }}{% endfor %}"
    template = ChatTemplate(source, origin="test")
    template.render(USER)
    kept = b"x" * 2**25
    assert ChatTemplate(source, origin="test").render(USER) == template.render(USER)
    assert len(kept) == 2**25


def test_endless_text_is_not_there():
    with pytest.raises(RequestError, match="'lipsum' is undefined"):
        ChatTemplate("{{ lipsum(n=10**6) }}", origin="test").render(USER)


SAME = [
    "{{ 'a'.ljust(5) }}|{{ 'a'.rjust(5, '-') }}|{{ 'a'.center(4) }}|{{ '7'.zfill(3) }}|{{ 'a\\tb'.expandtabs(4) }}",
    "{{ '{} {b:>4} {:{w}}'.format(1, 2, b=3, w=6) }}|{{ '{a}'.format_map({'a': 4}) }}|{{ '%s %05.1f %(' % () if false }}",
    "{{ '%s %5d %-4s|' % ('a', 3, 'b') }}{{ '%(a)s' % {'a': 1} }}|{{ '%s' % 'x' }}|{{ 7 % 3 }}|{{ '%s-%s' | format('a', 1) }}",
    "{{ ','.join(['a', 'b']) }}|{{ [1, 'b'] | join('-') }}|{{ messages | join(',', attribute='role') }}|{{ 'abc' | join('.') }}",
    "{{ ['b', 'a'] | map('upper') | join('+') }}|{{ '-'.join(['b', 'a'] | map('upper')) }}",
    "{{ 'banana'.replace('an', 'AN') }}|{{ 'banana' | replace('a', 'o', 2) }}|{{ 'banana'.replace('a', 'o', 1) }}",
    "{{ [1, 2, 3] | sum }}|{{ messages | sum(attribute='n', start=5) }}|{{ [[1], [2]] | sum(start=[]) }}",
    "{{ 'a\\nb' | indent(2) }}|{{ 'a' | center(5) }}|{{ 'one two three' | wordwrap(5) }}|{{ [1, 2, 3] | batch(2, 0) | list }}",
    "{{ [1, 2, 3] | slice(2) | list }}|{{ messages == messages }}|{{ 1 < 2 < 3 }}|{{ 'a' in ['a'] }}|{{ 2 ** 20 * 3 }}",
    "{% set s %}{{ messages[0].role }} {% endset %}{{ s ~ 'x' }}|{% macro m(a) %}<{{ a }}>{% endmacro %}{{ m(1) ~ m(2) }}",
    "{% filter upper %}abc{% endfilter %}|{{ {'a': [1, (2, 3)]} }}|{{ none }}|{{ [1, 2] | string | length }}|{{ 'x' * 3 }}",
    "{{ 'äb'.encode('utf-8') | length }}|{{ 'a,b'.split(',') }}|{{ ' a '.strip() }}|{{ 'abc'.translate({97: 'X'}) }}",
]  # fmt: skip


@pytest.mark.parametrize("source", SAME)
def test_what_templates_do_is_as_in_plain_jinja(source):
    messages = [{"role": "user", "content": "x", "n": 2}, {"role": "assistant", "content": "y", "n": 3}]
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(source)
    assert ChatTemplate(source, origin="test").render(messages) == plain.render(messages=messages)
