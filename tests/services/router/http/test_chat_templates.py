"""Chat templates render as transformers renders them, and are found where checkpoints keep them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from eyas.config import ServedModel
from eyas.errors import CheckpointError, ConfigError, InvalidRequest
from eyas.text.chat_parser import ChatFormat
from eyas.text.chat_template import ChatTemplate, load_template
from eyas.text.tool_call_formats import DEEPSEEK
from tests.support.services.scripted_verifier import DEMO

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
    (tmp_path / "chat_template.jinja").write_text("file")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("file with {{ tools | length }}")
    template = load_template(ServedModel("m", str(tmp_path)))
    assert template is not None
    assert [template.render(MESSAGES, {"tools": tools}) for tools in ([{}], None)] == ["file with 1", "file"]


def test_settings_go_before_the_format_of_the_template(tmp_path: Path) -> None:
    folder = str(model(tmp_path, chat_template="<tool_call></think>").tokenizer)

    def form(**settings: Any) -> ChatFormat:
        template = load_template(ServedModel("m", folder, **settings))
        assert template is not None
        return template.format

    assert form() == ChatFormat("hermes", "qwen3")
    assert form(tool_call_parser="mistral", reasoning_parser="none") == ChatFormat("mistral", "")
    assert form(tool_call_parser="none", reasoning_parser="deepseek_r1") == ChatFormat("", "deepseek_r1")


def call(id_: str, name: str, arguments: str = "{}") -> dict[str, Any]:
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(id_: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id_, "content": content}


USER: dict[str, Any] = {"role": "user", "content": "Hi"}
SYSTEM: dict[str, Any] = {"role": "system", "content": "Be brief."}
LINES = "{% for m in messages %}{{ m.role }}:{{ m.content }} {% endfor %}"
# Of the structure of the templates of Llama 3 (refuses a second call) and gpt-oss (leaves it out).
ONE_CALL = (
    "{% if m.tool_calls %}{{ m.tool_calls[0].function.name }} "
    "{% else %}{{ m.role }}:{{ m.name }}:{{ m.content }} {% endif %}"
)
REFUSES = "{% if m.tool_calls | length > 1 %}{{ raise_exception('single tool-calls') }}{% endif %}"
# One system message at the beginning: Mistral refuses others, gpt-oss leaves them out.
ONE_SYSTEM = "{% if messages[0].role == 'system' %}S:{{ messages[0].content }} {% set messages = messages[1:] %}{% endif %}"
USERS = "{% for m in messages %}{% if m.role == 'user' %}U:{{ m.content }} {% endif %}{% endfor %}"


def text_of(source: str, *messages: dict[str, Any], **extra: Any) -> str:
    return ChatTemplate(source, SPECIAL, "here").render(messages, extra)


@pytest.mark.parametrize("refuses", ["", REFUSES])
def test_calls_have_a_message_each_where_templates_take_one(refuses: str) -> None:
    source = "{% for m in messages %}" + refuses + ONE_CALL + "{% endfor %}"
    both = {"role": "assistant", "content": None, "tool_calls": [call("a", "add"), call("b", "sub")]}
    chat = (USER, both, result("b", "2"), result("a", "1"), USER)
    assert text_of(source, *chat) == "user::Hi add tool:add:1 sub tool:sub:2 user::Hi "
    assert text_of(source, USER, both, result("", "1"), result("", "2")) == "user::Hi add tool::1 sub tool::2 "
    every = (
        "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.name }} {% endfor %}"
        "{{ m.content if m.role == 'tool' }}{% endfor %}"
    )
    assert text_of(every, *chat) == "add sub 21"


def test_developers_become_the_system_where_templates_skip_them() -> None:
    developer = {"role": "developer", "content": "Be brief."}
    skips = (
        "{% for m in messages %}{% if m.role in ['system', 'user'] %}{{ m.role }}:{{ m.content }} {% endif %}{% endfor %}"
    )
    assert text_of(skips, developer, USER) == "system:Be brief. user:Hi "
    assert text_of(LINES, developer, USER) == "developer:Be brief. user:Hi "


def test_instructions_are_joined_where_templates_show_one() -> None:
    more = {"role": "system", "content": "Be kind."}
    assert text_of(ONE_SYSTEM + USERS, SYSTEM, more, USER) == "S:Be brief.\n\nBe kind. U:Hi "
    assert text_of(LINES, SYSTEM, more, USER) == "system:Be brief. system:Be kind. user:Hi "


def test_instructions_that_a_template_leaves_out_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="system messages at the beginning only"):
        text_of(ONE_SYSTEM + USERS, USER, SYSTEM, USER)
    assert text_of(LINES, USER, SYSTEM) == "user:Hi system:Be brief. "


def test_instructions_stay_while_tools_are_called() -> None:
    nemo = (
        "{% if messages[0].role == 'system' %}{% set s = messages[0].content %}{% set messages = messages[1:] %}{% endif %}"
        "{% for m in messages %}{% if m.role == 'user' %}[{{ s + '\n\n' if loop.last and s }}{{ m.content }}]{% endif %}"
        "{{ m.tool_calls[0].function.name if m.tool_calls }}{{ m.content if m.role == 'tool' }}{% endfor %}"
    )
    chat = (SYSTEM, USER, {"role": "assistant", "content": None, "tool_calls": [call("a", "add")]}, result("a", "1"))
    assert text_of(nemo, SYSTEM, USER) == "[Be brief.\n\nHi]"
    assert text_of(nemo, *chat) == "[Be brief.\n\nHi]add1"


def test_mistral_gets_ids_of_nine_letters_and_digits() -> None:
    source = (
        "{% for m in messages %}{% for c in m.tool_calls %}[TOOL_CALLS]{{ c.function.name }}-{{ c.id }} {% endfor %}"
        "{% if m.tool_call_id %}result-{{ m.tool_call_id }} {% endif %}{% endfor %}"
    )
    chat = ({"role": "assistant", "tool_calls": [call("call_1", "add"), call("abcdefgh1", "sub")]}, result("call_1", "1"))
    ids = [shown.partition("-")[2] for shown in text_of(source, USER, *chat).split()]
    assert ids[1] == "abcdefgh1"
    assert ids[0] == ids[2]
    assert len(ids[0]) == 9
    assert ids[0].isalnum()


def test_reasoning_reaches_templates_in_their_own_form() -> None:
    turn = {"role": "assistant", "content": "Well.", "reasoning_content": "Hm"}
    parts = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for b in m.content %}"
        "{% if b['type'] == 'thinking' %}[THINK]{{ b['thinking'] }}[/THINK]{% else %}{{ b['text'] }}{% endif %}{% endfor %}"
        "{% endif %}{% endfor %}"
    )
    assert text_of(parts, USER, turn) == "Hi[THINK]Hm[/THINK]Well."
    fields = "{% for m in messages %}{{ m.reasoning_content }}{{ m.reasoning }}{{ m.thinking }}{{ m.content }}{% endfor %}"
    assert text_of(fields, USER, turn) == "HiHmHmHmWell."
    either = "{{ raise_exception('Cannot pass both') if messages[1].content and messages[1].thinking }}"
    harmony = f"{{# <|channel|><|message|> #}}{either}{{{{ messages[1].thinking }}}}{{{{ messages[1].tool_calls }}}}"
    assert text_of(harmony, USER, turn | {"tool_calls": [call("a", "add")]}).startswith("Hm\n\nWell.")


def test_templates_get_arguments_as_objects_and_names_of_results() -> None:
    source = "{{ messages[1].tool_calls[0].function.arguments | tojson }}{{ messages[2].name }}{{ messages[1].content }}"
    chat = (USER, {"role": "assistant", "content": None, "tool_calls": [call("a", "add", '{"b": 1}')]}, result("a", "1"))
    assert text_of(source, *chat) == '{"b": 1}add'
    with pytest.raises(InvalidRequest, match="messages must have OpenAI's form"):
        text_of(source, USER, {"role": "assistant", "tool_calls": [{"name": "add"}]})


def test_templates_of_deepseek_get_arguments_as_text() -> None:
    show = "{{ '<' + c['function']['arguments'] + '>' }}"
    body = f"{{% for m in messages %}}{{% for c in m.tool_calls %}}{show}{{% endfor %}}{{% endfor %}}"
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    template = ChatTemplate(f"{body}{{# {DEEPSEEK.section} #}}", SPECIAL, "here")
    assert template.format.tool_call_parser == "deepseek_v31"
    assert template.render(messages, {}) == '<{"a": 1}>'


PARTS = (
    "{% for m in messages %}[{{ m.role }}]{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endfor %}"
)
ONLY_USERS_PARTS = (
    "{% for m in messages %}[{{ m.role }}]"
    "{% if m.role == 'user' %}{{ m.content[0]['text'] }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("content", ["Hi", [{"type": "text", "text": "Hi"}]])
def test_templates_of_parts_show_every_text(content: Any) -> None:
    chat = (SYSTEM, {"role": "user", "content": content}, {"role": "assistant", "content": "Yes"}, USER)
    for template in (PARTS, ONLY_USERS_PARTS):
        assert text_of(template, *chat) == "[system]Be brief.[user]Hi[assistant]Yes[user]Hi"
    assert text_of(PARTS, USER, {"role": "assistant", "content": None}) == "[user]Hi[assistant]"


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{% if m.role == 'user' %}[{{ m.content }}]{% endif %}{% endfor %}",
        "{% for m in messages %}{{ raise_exception('none') if m.role == 'system' }}[{{ m.content }}]{% endfor %}",
    ],
)
def test_instructions_move_to_the_user_where_there_is_no_place(source: str) -> None:
    assert text_of(source, SYSTEM, USER, USER) == "[Be brief.\n\nHi][Hi]"
    assert text_of(source, SYSTEM) == "[Be brief.]"


def test_tools_and_documents_that_a_template_hides_are_refused() -> None:
    users = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    calls = {"role": "assistant", "content": "", "tool_calls": [call("a", "add")]}
    for messages, words in (((USER, calls), "no calls"), ((USER, result("a", "1")), "no results")):
        with pytest.raises(InvalidRequest, match=words):
            text_of(users, *messages)
    with pytest.raises(InvalidRequest, match="no documents"):
        ChatTemplate(users, SPECIAL, "here").render([USER], {"documents": [{"text": "x"}]})


def test_what_is_no_text_is_refused() -> None:
    for content in ([{"type": "image_url", "image_url": {"url": "data:,x"}}], {"text": "x"}, 5):
        with pytest.raises(InvalidRequest, match="images, audio and files"):
            text_of(CHATML, {"role": "user", "content": content})
    with pytest.raises(InvalidRequest, match="empty"):
        text_of(CHATML)


TRIMMING = "{% for m in messages %}<{{ m.role }}>\n{{ m.content | trim }}</{{ m.role }}>{% endfor %}"
KEEPING = "{% for m in messages %}<{{ m.role }}>\n{{ m.content }}</{{ m.role }}>{% endfor %}"


@pytest.mark.parametrize("content", ["Yes", "e", "assistant", " Yes", "Yes \n", "", " ", "</assistant>"])
def test_a_continued_message_ends_where_its_content_ends(content: str) -> None:
    chat = [USER, {"role": "assistant", "content": content}]
    before = "<user>\nHi</user><assistant>\n"
    kept = ChatTemplate(KEEPING, SPECIAL, "here").render(chat, {}, continues_last=True)
    trimmed = ChatTemplate(TRIMMING, SPECIAL, "here").render(chat, {}, continues_last=True)
    assert (kept, trimmed) == (before + content, before + content.strip())
    with pytest.raises(InvalidRequest, match="cannot be continued"):
        ChatTemplate("Hi", SPECIAL, "here").render(chat, {}, continues_last=True)


def test_rendering_is_bounded() -> None:
    long = "{% for m in messages %}{% for n in messages %}{{ m.content }}{% endfor %}{% endfor %}"
    with pytest.raises(InvalidRequest, match="rendered to more than"):
        text_of(long, *[{"role": "user", "content": "x" * 2**14}] * 70)


def test_what_a_template_would_leave_out_is_refused() -> None:
    users = "{% for m in messages if m.role in ['user', 'assistant'] %}{{ m.content }}{% endfor %}"
    with pytest.raises(InvalidRequest, match="no messages of the role 'critic'"):
        text_of(users, {"role": "critic", "content": "No."}, USER)
    assert text_of(LINES, {"role": "critic", "content": "No."}, USER) == "critic:No. user:Hi "


def test_instructions_alone_become_a_users_text() -> None:
    before_last = (
        "{% set first = messages[0].content if messages[0].role == 'system' %}"
        "{% for m in messages if m.role != 'system' %}{% if loop.last and m.role == 'user' %}{{ first }} {% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    assert text_of(before_last, {"role": "system", "content": "Be kind."}).strip() == "Be kind."


ENDLESS = {
    "loops": "{% set turns = range(99999) %}{% for i in turns %}{% for j in turns %}{% endfor %}{% endfor %}",
    "macros": "{% macro twice(n) %}{% if n %}{{ twice(n - 1) }}{{ twice(n - 1) }}{% endif %}{% endmacro %}{{ twice(99) }}",
    "recursive loop": "{% for i in [1] recursive %}{{ loop([1, 1]) if loop.depth < 60 }}{% endfor %}",
    "squares": "{% set ns = namespace(x=3) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "power": "{% set ns = namespace(x=9) %}{{ ns.x ** (9 ** 9) }}",
    "text": "{{ 'a' * 10 ** 12 }}",
    "list": "{{ 10 ** 12 * [1] }}",
}


@pytest.mark.parametrize("shape", ENDLESS)
def test_endless_templates_are_stopped(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.text.template_sandbox.MAX_RENDER_SECONDS", 0.1)
    with pytest.raises(ConfigError, match="the chat template of m fails on a short chat"):
        ChatTemplate(ENDLESS[shape], SPECIAL, "m")
    later = ChatTemplate(f"{{% if messages | length > 4 %}}{ENDLESS[shape]}{{% endif %}}x", SPECIAL, "m")
    assert later.render([USER], {}) == "x"
    with pytest.raises(InvalidRequest, match=r"takes more than|a value of a size"):
        later.render([USER] * 5, {})


@pytest.mark.parametrize(
    "source",
    ["{% set ns = namespace(t=[]) %}{% for m in range(8) %}{% set ns.t = ns.t + ['\U0001f600' * 60000000] %}{% endfor %}"],
)
def test_a_template_that_takes_all_memory_ends_a_child(source: str, tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text(source)
    with pytest.raises(ConfigError, match=r"template\.jinja takes too much time or memory"):
        load_template(ServedModel("m", DEMO, chat_template=str(file)))


@pytest.mark.parametrize(
    "source", ["{{ " + "(" * 9999, "{% if 1 %}" * 3000 + "{% endif %}" * 3000, "{{ " + "9" * 5000 + " }}"]
)
def test_templates_beyond_a_parsers_limits_do_not_compile(source: str) -> None:
    with pytest.raises(ConfigError, match="does not compile"):
        ChatTemplate(source, SPECIAL, "m")


def test_templates_are_found_wherever_checkpoints_keep_them(tmp_path: Path) -> None:
    shutil.copy(f"{DEMO}/tokenizer.json", tmp_path)
    model = ServedModel("m", str(tmp_path))

    def found(**files: Any) -> str:
        for name, content in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        template = load_template(model)
        return template.render([USER], {}) if template else ""

    assert found(chat_template={"chat_template": "<{{ messages[0].content }}>"}) == "<Hi>"
    assert found(tokenizer_config={"chat_template": [{"name": "default", "template": "list"}]}) == "list"
    assert found(tokenizer_config={"chat_template": {"default": "mapping"}}) == "mapping"
    assert found(tokenizer_config={"chat_template": [{"name": "rag", "template": "only"}]}) == "only"
    with pytest.raises(CheckpointError, match="chat_template"):
        found(tokenizer_config={"chat_template": [{"name": "default"}]})
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "chat_templates").mkdir()
    (tmp_path / "chat_templates" / "default.jinja").write_text("folder")
    (tmp_path / "chat_templates" / "tool_use.jinja").write_text("tools")
    assert found() == "folder"
    assert load_template(model).render([USER], {"tools": [{}]}) == "tools"  # type: ignore[union-attr]
