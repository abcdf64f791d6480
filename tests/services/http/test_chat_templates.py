"""Chat templates render as transformers renders them, and are found where checkpoints keep them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from eyas.chat_output import ChatFormat
from eyas.chat_template import ChatTemplate, load_template
from eyas.config import ServedModel
from eyas.errors import ConfigError, InvalidRequest
from tests.services.router.scripted_verifier import DEMO

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
MESSAGES = [
    {"role": "system", "content": " Be <terse> & kind.\n"},
    {"role": "user", "content": "Sch\u00f6n?", "name": "Ada"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "Why?"},
]
CHATML = (
    "{% for message in messages %}\n"
    "    {%- if message.role == 'system' %}{% set kind = 'S' %}{% else %}{% set kind = 'M' %}{% endif %}\n"
    "{{ '<|im_start|>' + message['role'] + kind + '\\n' + message['content'] | trim + '<|im_end|>\\n' }}\n"
    "  {% endfor %}\n"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = [
    CHATML,
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}",
    "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}{{ tools is none }}{{ documents is none }}",
    "{% for m in messages %}{% if loop.index == 2 %}{% continue %}{% endif %}{{ m.content }}{% break %}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}{{ unknown }}",
    "{{ enable_thinking | default('unset') }}{{ strftime_now('%Y-%m') }}{% for m in messages %}{{ m.name }}{% endfor %}",
    "{% generation %}{{ messages[-1]['content'] }}{% endgeneration %}!",
]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("extra", [{}, {"enable_thinking": False}], ids=["plain", "extra"])
def test_a_template_renders_as_transformers_does(template: str, extra: dict[str, Any]) -> None:
    options: dict[str, Any] = {"chat_template": template, "add_generation_prompt": True, **SPECIAL, **extra}
    rendered_texts: Any = render_jinja_template([MESSAGES], **options)
    assert [ChatTemplate(template, SPECIAL, "here").render(MESSAGES, extra)] == list(rendered_texts[0])


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages[0].content / 2 }}",
        "{{ messages[9].content }}",
    ],
)
def test_template_errors_are_request_errors(template: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template refuses these messages") as raised:
        ChatTemplate(template, SPECIAL, "here").render(MESSAGES, {})
    assert raised.value.param == "messages"


def test_a_template_that_does_not_compile_names_its_model() -> None:
    with pytest.raises(ConfigError, match="chat template of here does not compile"):
        ChatTemplate("{% if %}", SPECIAL, "here")


def model(folder: Path, **settings: object) -> ServedModel:
    """Return a model whose tokenizer has these settings."""
    shutil.copy(Path(DEMO, "tokenizer.json"), folder)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return ServedModel("m", str(folder))


def rendered(served: ServedModel) -> str:
    template = load_template(served)
    assert template is not None
    return template.render(MESSAGES, {})


def test_templates_load_from_tokenizer_config_file_or_setting(tmp_path: Path) -> None:
    bos: dict[str, object] = {"content": "<s>", "lstrip": False}
    assert load_template(model(tmp_path, bos_token=bos)) is None
    assert rendered(model(tmp_path, bos_token=bos, chat_template="{{ bos_token }}1")) == "<s>1"
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "{{ bos_token }}2"}]
    served = model(tmp_path, bos_token="<b>", chat_template=named)
    assert rendered(served) == "<b>2"
    (tmp_path / "chat_template.jinja").write_text("3")
    assert rendered(served) == "3"
    (tmp_path / "own").write_text("4")
    assert rendered(ServedModel("m", str(tmp_path), str(tmp_path / "own"))) == "4"
    with pytest.raises(ConfigError, match="cannot read the chat_template"):
        load_template(ServedModel("m", str(tmp_path), str(tmp_path / "missing")))


def test_the_demo_template_joins_a_chat_to_one_source_file() -> None:
    template = load_template(ServedModel("demo", DEMO))
    assert template is not None
    assert template.render([{"role": "user", "content": "def main():"}], {}) == "<|bos|>def main():"
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    chat: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief.\nBe kind."},
        {"role": "user", "content": "x = "},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "1"},
        {"role": "user", "content": "a"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "(c)"},
    ]
    tool = {"type": "function", "function": {"name": "add"}}
    assert template.render(chat, {"tools": [tool]}) == (
        '<|bos|># tool: {"name": "add"}\n# to call one: <tool_call>{"name": NAME, "arguments": OBJECT}</tool_call>\n'
        '# Be brief.\n# Be kind.\nx = \n<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>\n'
        "# result: 1\na\nb(c)\n"
    )


def test_chats_with_tools_have_a_template_of_their_own(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "with {{ tools | length }}"}, {"name": "default", "template": "without"}]
    template = load_template(model(tmp_path, chat_template=named))
    assert template is not None
    assert template.render(MESSAGES, {"tools": [{}]}) == "with 1"
    assert template.render(MESSAGES, {}) == "without"


def test_settings_go_before_the_format_of_the_template(tmp_path: Path) -> None:
    folder = str(model(tmp_path, chat_template="<tool_call></think>").tokenizer)

    def form(**settings: Any) -> ChatFormat:
        template = load_template(ServedModel("m", folder, **settings))
        assert template is not None
        return template.format

    assert form() == ChatFormat("hermes", "qwen3")
    assert form(tool_call_parser="mistral", reasoning_parser="none") == ChatFormat("mistral", "")
    assert form(tool_call_parser="none", reasoning_parser="deepseek_r1") == ChatFormat("", "deepseek_r1")
    with pytest.raises(ConfigError, match="tool_call_parser is 'xml'; it must be one of auto"):
        form(tool_call_parser="xml")
