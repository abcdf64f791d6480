"""Chat templates that make large values from many messages or few characters are stopped before memory is taken."""

import resource

import pytest

from eyas.text.template_sandbox import BoundedSandbox, CostlyTemplate

CHAT = [{"role": "user", "content": f"Hello {number}"} for number in range(60)]
GROWS = "{%% set ns = namespace(t='ab') %%}{%% for m in messages %%}%s{%% endfor %%}{{ ns.t | length }}"
GROWTHS = {
    "tilde": "{% set ns.t = ns.t ~ ns.t %}",
    "plus": "{% set ns.t = ns.t + ns.t %}",
    "block": "{% set x %}{{ ns.t }}{{ ns.t }}{% endset %}{% set ns.t = x %}",
    "macro": "{% macro d(t) %}{{ t }}{{ t }}{% endmacro %}{% set ns.t = d(ns.t) %}",
    "replace method": "{% set ns.t = ns.t.replace('b', 'bb') %}",
    "replace filter": "{% set ns.t = ns.t | replace('b', 'bb') %}",
    "join filter": "{% set ns.t = [ns.t, ns.t] | join('-') %}",
    "join method": "{% set ns.t = '-'.join([ns.t, ns.t]) %}",
    "format method": "{% set ns.t = '{}{}'.format(ns.t, ns.t) %}",
    "format filter": "{% set ns.t = '%s%s' | format(ns.t, ns.t) %}",
    "percent": "{% set ns.t = '%s%s' % (ns.t, ns.t) %}",
    "string of a list": "{% set ns.t = [ns.t, ns.t] | string %}",
    "JSON": "{% set ns.t = [ns.t, ns.t] | tojson %}",
}
WIDE = (
    "{{ 'a'.center(10**10) }}",
    "{{ 'a' | center(10**10) }}",
    "{{ 'a'.zfill(width=10**10) }}",
    "{{ '%9999999999d' % 1 }}",
    "{{ '%*d' | format(10**10, 1) }}",
    "{{ '{:>9999999999}'.format(1) }}",
    "{{ '{:>{}}'.format(1, 10**10) }}",
    "{{ [1] | batch(10**10, 'x') | list }}",
    "{{ [1] | slice(10**10) | list }}",
    "{{ ('a\n' * 10**6) | indent(1000) }}",
    "{{ ('\t' * 10**6).expandtabs(1000) }}",
    "{{ {'a': [1]} | tojson(indent=10**10) }}",
)


def rendered(source: str) -> str:
    sandbox = BoundedSandbox()
    return sandbox.rendered(sandbox.from_string(source), {"messages": CHAT})


@pytest.mark.parametrize("source", [*(GROWS % growth for growth in GROWTHS.values()), *WIDE], ids=[*GROWTHS, *WIDE])
def test_a_value_that_grows_without_end_is_refused(source: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CostlyTemplate, match="size above"):
        rendered(source)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 600_000  # KiB


def test_what_a_template_makes_in_all_is_bounded() -> None:
    source = "{% set ns = namespace(t='') %}{% for m in range(400) %}{% set ns.t = 'a' * 60000000 %}{% endfor %}"
    with pytest.raises(CostlyTemplate, match="makes more than"):
        rendered(source)


def test_what_templates_use_works_as_in_jinja() -> None:
    source = """{{ '%5.2f' | format(1.5) }}|{{ '{:>4} {}'.format(1, 'b') }}|{{ ['a', 'b'] | join(', ') }}|
{{- 'a' ~ 1 ~ none }}{{ 'a\nb' | indent(2) }}|{{ messages | map(attribute='role') | join | length }}|
{{- 'xx'.replace('x', 'y', 1) }}
{{- [1] + [2] }}|{{ 5 % 3 + 1 }}|{{ '%s' % 'a' }}|{{ {'a': [1]} | tojson(indent=1) }}|{{ messages[:2] | join('+', 'role') }}
{{- ['a', {'b': 1}] }}|{{ none }}|{{ 'a,b'.split(',') | join }}"""
    expected = """ 1.50|   1 b|a, b|a1Nonea\n  b|240|yx[1, 2]|3|a|{\n "a": [\n  1\n ]\n}|user+user['a', {'b': 1}]|None|ab"""
    assert rendered(source) == expected
