"""Text and tokens: streaming equals decoding at once, and stop strings end it, however the tokens are grouped."""

import json
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as HuggingFaceTokenizer

from eyas.api.outputs import TextDecoder
from eyas.api.request import Chunk
from eyas.errors import CheckpointError, InvalidRequest
from eyas.text.tokenizer import TextStream, Tokenizer, load_tokenizer

DEMO = Path("models/demo/target")
TEXT = "def naïve(x):  # 日本語 🦅\n    return x + 1\n"


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return load_tokenizer(str(DEMO))


def byte_fallback() -> Tokenizer:
    """A tokenizer as Llama 2 has it: one token per byte, decoded in runs."""
    vocab = {"<unk>": 0, "a": 1, "▁b": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    tokenizer = HuggingFaceTokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return Tokenizer(tokenizer)


def llama2_like(**steps: Any) -> Tokenizer:
    """A tokenizer that puts a space before a text, and takes one away from its beginning, as that of Llama 2."""
    pieces = ["\u2581", "\u2581a", "\u2581is", "\u2581Paris", *"aisPr"]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    vocab |= {piece: 259 + number for number, piece in enumerate(pieces)}
    merges = [("\u2581", "a")]
    tokenizer = HuggingFaceTokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    fuse = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(fuse)
    for name, step in steps.items():
        setattr(tokenizer, name, step)
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in ("<unk>", "<s>", "</s>")])
    return Tokenizer(tokenizer)


def metaspace(scheme: Any) -> Tokenizer:
    return llama2_like(
        normalizer=normalizers.Sequence([]),
        pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme=scheme),
        decoder=decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=scheme)]),
    )


def folder_with(tmp_path: Path, settings: dict[str, object]) -> str:
    (tmp_path / "tokenizer.json").write_text((DEMO / "tokenizer.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(tmp_path)


def test_a_batch_of_texts_has_the_ids_of_each(demo: Tokenizer) -> None:
    texts = [TEXT, "", "<eos>", "x" * 50]
    for tokenizer in (demo, Tokenizer(demo.tokenizer), Tokenizer(demo.tokenizer, bos=7)):
        assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]
    assert demo.encode_batch([]) == []


@pytest.mark.slow
@given(st.lists(st.integers(0, 4095), max_size=40))
def test_streamed_text_is_the_decoded_text_of_any_tokens(ids: list[int]) -> None:
    tokenizer = load_tokenizer(str(DEMO))
    stream = TextStream(tokenizer)
    assert "".join(stream.push(ids)) + stream.flush() == tokenizer.decode(ids)


@given(st.lists(st.integers(0, 258), max_size=40))
def test_invalid_bytes_never_break_a_stream(ids: list[int]) -> None:
    stream = TextStream(byte_fallback())
    assert "".join(stream.push([*ids, 1])).endswith("a")
    assert stream.flush() == ""


def test_a_character_is_shown_when_its_last_byte_is_there(demo: Tokenizer) -> None:
    eagle = [3 + byte for byte in "🦅".encode()]
    stream = TextStream(byte_fallback())
    assert stream.push([1, *eagle]) == ["a", "", "", "", "🦅"]


def test_an_incomplete_character_at_the_end_is_flushed() -> None:
    stream = TextStream(byte_fallback())
    assert "".join(stream.push([1, 3 + 0xF0])) == "a"
    assert stream.flush() == "\ufffd"


def test_a_stop_string_in_the_flushed_text_ends_it() -> None:
    for finish, expected in (("length", ("stop", "\ufffd")), ("cancelled", ("cancelled", None))):
        decoder = TextDecoder(TextStream(byte_fallback(), ["\ufffd"]), (), 1, 0)
        chunk = decoder.add(Chunk("r", (1, 3 + 0xF0), (False, False), finish_reason=finish))  # type: ignore[arg-type]
        assert (chunk.text, chunk.chunk.finish_reason, chunk.stop_reason) == ("a", *expected)


@pytest.mark.parametrize("byte", [0xFF, 0x80, 0xE2])
def test_invalid_bytes_without_end_are_shown_as_they_come(byte: int) -> None:
    stream = TextStream(byte_fallback())
    text = "".join(stream.push([3 + byte] * 200))
    assert (set(text), len(text) > 190) == ({"\ufffd"}, True)
    assert len(text) + len(stream.flush()) == 200


def test_whole_characters_before_a_partial_one_are_emitted(demo: Tokenizer) -> None:
    ids = demo.encode("\u2603" * 40)
    assert len(ids) >= 120, "one token for each byte"
    broken = [token for token in ids[:120] if token != ids[2]]
    stream = TextStream(demo)
    assert len("".join(stream.push(broken))) > 30
    assert "".join(stream.push(ids)).endswith("\u2603")


@given(st.data())
def test_grouping_changes_nothing_in_broken_text(data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(3, 258), min_size=8, max_size=60))
    whole = TextStream(byte_fallback()).push(ids)
    stream = TextStream(byte_fallback())
    cut = data.draw(st.integers(0, len(ids)))
    assert stream.push(ids[:cut]) + stream.push(ids[cut:]) == whole


def test_leading_spaces_between_tokens_survive() -> None:
    stream = TextStream(byte_fallback())
    assert "".join(stream.push([2, 1, 2, 2])) == "ba b b"


def test_special_tokens_have_no_text(demo: Tokenizer) -> None:
    ids = demo.encode("return x")
    assert "".join(TextStream(demo).push([0, *ids, 1])) == "return x"


def test_a_stop_string_cuts_text_but_counts_its_last_token(demo: Tokenizer) -> None:
    ids = demo.encode("one two three four")
    stream = TextStream(demo, ["wo th"])
    texts = stream.push(ids)
    assert ("".join(texts), stream.stop_string) == ("one t", "wo th")
    assert "wo th" in demo.decode(ids[: len(texts)])
    assert "wo th" not in demo.decode(ids[: len(texts) - 1])


def test_text_that_may_become_a_stop_string_is_held_back(demo: Tokenizer) -> None:
    stream = TextStream(demo, ["three!"])
    assert "".join(stream.push(demo.encode("one two three"))) == "one two "
    assert "".join(stream.push(demo.encode(" four three"))) == "three four "
    assert stream.flush() == "three"


def test_the_first_of_two_stop_strings_in_one_token_counts(demo: Tokenizer) -> None:
    ids = demo.encode("x return")
    assert "".join(TextStream(demo, ["turn", "ret"]).push(ids)) == "x "


@pytest.mark.slow
@given(st.data())
def test_grouping_of_tokens_changes_nothing(data: st.DataObject) -> None:
    tokenizer = load_tokenizer(str(DEMO))
    ids = tokenizer.encode(TEXT * 2)
    stop = data.draw(st.lists(st.sampled_from([TEXT[i : i + n] for i in range(len(TEXT)) for n in (1, 3, 9)]), max_size=3))
    whole = TextStream(tokenizer, stop)
    whole_texts = whole.push(ids)
    stream, texts, at = TextStream(tokenizer, stop), list[str](), 0
    while at < len(ids) and stream.stop_string is None:
        size = data.draw(st.integers(1, 5))
        texts += stream.push(ids[at : at + size])
        at += size
    assert (texts, stream.stop_string) == (whole_texts, whole.stop_string)
    assert not any(string in "".join(texts) for string in stop)


def test_bos_is_added_where_the_config_asks_and_only_once(tmp_path: Path) -> None:
    asked = load_tokenizer(folder_with(tmp_path, {"add_bos_token": True, "bos_token": {"content": "<|bos|>"}}))
    plain = HuggingFaceTokenizer.from_file(str(DEMO / "tokenizer.json")).encode("x").ids
    assert asked.encode("x") == (0, *plain)
    assert asked.encode("<|bos|>x") == asked.encode("x")
    assert asked.encode("") == ()


def test_no_bos_is_added_without_being_asked(tmp_path: Path) -> None:
    silent = load_tokenizer(folder_with(tmp_path, {"bos_token": "<|bos|>"}))
    assert 0 not in silent.encode("x")


def test_stored_truncation_and_padding_do_not_touch_prompts(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, {})
    whole = load_tokenizer(folder).encode(TEXT)
    tokenizer = HuggingFaceTokenizer.from_file(str(DEMO / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(folder).encode(TEXT) == whole


def test_texts_that_cannot_fit_are_refused_early(demo: Tokenizer) -> None:
    for text in (TEXT * 9, " " * 500, "return " * 90, "x"):
        ids = demo.encode(text)
        assert demo.encode_within(text, len(ids)) == ids
        assert demo.encode_within(text, len(ids), is_rendered=True) == demo.encode_rendered(text)
    for text, least in (("x" * 10_000, "at least 121 tokens"), ("\u2603 " * 1000, "at least 1600 tokens")):
        with pytest.raises(InvalidRequest, match=least):
            demo.encode_within(text, 100)
    assert len(demo.encode_within(" " * 2000, 100)) < 100, "eight characters in a token are not the most"


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", ["{", "[]", "\x00"])
def test_a_damaged_tokenizer_is_named(tmp_path: Path, name: str, text: str) -> None:
    folder = folder_with(tmp_path, {})
    (tmp_path / name).write_text(text)
    with pytest.raises(CheckpointError, match=name):
        load_tokenizer(folder)


def test_a_folder_without_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json in"):
        load_tokenizer(str(tmp_path))


def test_a_source_that_is_neither_folder_nor_hub_id_is_named() -> None:
    with pytest.raises(CheckpointError, match="neither a folder nor a hub id"):
        load_tokenizer("no/such/folder/anywhere")


@given(st.integers(0, 12), st.lists(st.integers(1, 4), max_size=9))
def test_a_stop_string_is_looked_for_after_the_first_tokens_only(min_tokens: int, sizes: list[int]) -> None:
    tokenizer = load_tokenizer(str(DEMO))
    ids = tokenizer.encode("return x + x - x * x / x")
    stream, texts, stopped, at = TextStream(tokenizer, ["x"], min_tokens), [], False, 0
    for size in [*sizes, len(ids)]:
        if not stopped:
            texts += stream.push(ids[at : at + size])
            stopped, at = stream.stop_string is not None, at + size
    free = tokenizer.decode(ids[:min_tokens])
    rest = tokenizer.decode(ids)[len(free) :]
    assert "".join(texts) + ("" if stopped else stream.flush()) == free + rest.split("x")[0]
    assert stopped == ("x" in rest)


def test_a_bad_word_is_encoded_as_it_stands_and_after_a_space(demo: Tokenizer) -> None:
    words = demo.bad_token_ids(["return", " return", "self.x"])
    assert [demo.decode(ids) for ids in words] == ["return", " return", "self.x", " self.x"]


def test_kept_special_tokens_stay_in_the_text_unless_they_end_it() -> None:
    tokenizer = load_tokenizer("models/demo/target")
    kept = tokenizer.special_ids(["<|pad|>", "<|eos|>", "none", "def"])
    assert kept == {1, 2}
    ids = [*tokenizer.encode_rendered("def é"), 2, *tokenizer.encode_rendered(" x"), 0, 1]
    stream = TextStream(tokenizer, kept_tokens=kept)
    assert "".join("".join(stream.push([token], ends=token == 1)) for token in ids) + stream.flush() == "def é<|pad|> x"


def test_other_threads_run_while_a_long_text_is_encoded(demo: Tokenizer) -> None:
    thread = threading.Thread(target=demo.encode, args=(TEXT * 10_000,))  # 0.4 MB: at least 0.1 s
    thread.start()
    num_turns = 0
    while thread.is_alive():
        num_turns += 1
        time.sleep(0.001)
    assert num_turns > 2
    assert demo.encode_rendered(TEXT * 20) == tuple(demo.tokenizer.encode(TEXT * 20, add_special_tokens=False).ids)


LIKE_LLAMA2 = {"prepend": llama2_like(), **{scheme: metaspace(scheme) for scheme in ("always", "first", "never")}}


@pytest.mark.parametrize("tokenizer", LIKE_LLAMA2.values(), ids=list(LIKE_LLAMA2))
@given(data=st.data())
def test_text_goes_on_where_the_prompt_ends(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Prompt and output, decoded together, are the text of the prompt and that of the output."""
    text = data.draw(st.text("aisPr \u00e9\u65e5", min_size=1, max_size=12))
    prompt = data.draw(st.sampled_from([(1, *tokenizer.encode_rendered(text)), (1,), ()]))
    output = data.draw(st.lists(st.sampled_from([*range(259, 268), 1, 2]), max_size=12))
    stream = TextStream(tokenizer, context=partial(tokenizer.left_context, prompt))
    assert tokenizer.decode(prompt) + "".join(stream.push(output)) + stream.flush() == tokenizer.decode([*prompt, *output])


def test_the_first_word_of_an_output_keeps_its_space() -> None:
    tokenizer, paris = LIKE_LLAMA2["prepend"], 262
    prompt = (1, *tokenizer.encode_rendered("a is"))
    stream = TextStream(tokenizer, [" Paris"], context=partial(tokenizer.left_context, prompt))
    assert stream.push([paris]) == [""]
    assert stream.stop_string == " Paris"
    for ids, constrained, text in ((prompt, False, " Paris"), ((1,), False, "Paris"), ((1,), True, " Paris")):
        context = partial(tokenizer.left_context, ids, constrained)
        assert "".join(TextStream(tokenizer, context=context).push([paris])) == text
    assert (tokenizer.token_text(paris), tokenizer.num_characters(paris)) == (" Paris", 6)
    assert tokenizer.num_characters(paris, is_first=True) == 5


@pytest.mark.parametrize("cut", range(4))
def test_characters_of_bytes_go_on_where_the_prompt_ends(cut: int) -> None:
    tokenizer, text = LIKE_LLAMA2["prepend"], "\u65e5\u672c\u8a9e"
    ids = [3 + byte for byte in text.encode()]
    prompt = [1, 260, *ids * 3, *ids[: 3 * cut]]
    stream = TextStream(tokenizer, context=partial(tokenizer.left_context, prompt))
    assert "".join(stream.push(ids[3 * cut :])) == text[cut:]


def test_bad_words_are_banned_inside_of_texts() -> None:
    tokenizer = LIKE_LLAMA2["prepend"]
    assert tokenizer.bad_token_ids(["Pa"]) == ((266, 263), (259, 266, 263))


def test_a_mark_has_ids_if_no_text_beside_it_changes_them() -> None:
    tokenizer = llama2_like()
    assert tokenizer.mark_ids("Paris") is None
    tokenizer.tokenizer.add_tokens([AddedToken(name, normalized=False) for name in ("</think>", "<|a|>", "<|b|>")])
    tokenizer = Tokenizer(tokenizer.tokenizer)
    (end,) = tokenizer.mark_ids("</think>") or ()
    assert tokenizer.name_of(end) == "</think>"
    assert tokenizer.mark_ids("<|a|>is<|b|>") == tokenizer.encode_rendered("<|a|>is<|b|>")
    assert tokenizer.mark_ids("<|a|>is") is None


STOPS = st.lists(st.text("ab", min_size=1, max_size=6), max_size=4)


@given(STOPS, st.lists(st.text("abc", max_size=5), max_size=30))
def test_stop_strings_are_found_as_a_plain_search_does(stops: list[str], words: list[str]) -> None:
    ids = [token for word in words for token in LIKE_LLAMA2["prepend"].encode_rendered(word)]
    tokenizer = LIKE_LLAMA2["never"]
    stream, text = TextStream(tokenizer, stops), ""
    for number, token in enumerate(ids):
        text += "".join(stream.push([token]))
        so_far = tokenizer.decode(ids[: number + 1])
        found = min(((so_far.find(stop), stop) for stop in stops if stop in so_far), default=None)
        assert (stream.stop_string is not None) == (found is not None)
        if found is not None:
            assert (text, stream.stop_string) == (so_far[: found[0]], found[1])
            return
    assert text + stream.flush() == tokenizer.decode(ids)


def test_a_hostile_stop_string_costs_little_at_each_token() -> None:
    stream = TextStream(LIKE_LLAMA2["never"], ["a" * size + "b" + "a" * (1023 - size) for size in range(0, 1000, 8)])
    start = time.thread_time()
    for _ in range(1000):
        stream.push([263])
    assert time.thread_time() - start < 3


def test_names_of_special_tokens_stop_where_the_tokens_are() -> None:
    tokenizer, end, other = LIKE_LLAMA2["never"], 2, 1

    def stopped(stop: str, *ids: int, ends: bool = False, **options: Any) -> tuple[str, str | None, int]:
        stream = TextStream(tokenizer, [stop], stop_specials=tokenizer.specials_in([stop]), **options)
        texts = stream.push(ids, ends)
        return "".join(texts), stream.stop_string, len(texts)

    assert stopped("</s>", 263, end, 263) == ("a", "</s>", 2)
    assert stopped("a</s>i", 263, 263, end, 264, 263) == ("a", "a</s>i", 4)
    assert stopped("aa</s>", 263, other, 263, end, 263) == ("", "aa</s>", 4), (
        "a name that no stop string holds hides nothing"
    )
    assert stopped("aa", 263, end, 263, 263) == ("", "aa", 3)
    assert stopped("a</s>i", 263, end, 263) == ("a", None, 3)
    assert stopped("</s>", 263, end, include_stop=True) == ("a</s>", "</s>", 2)
    assert stopped("a</s>", 263, end, skip_special_tokens=False) == ("", "a</s>", 2)
    assert stopped("</", 263, end, 263) == ("aa", None, 3), "a part of a name is text, and the token has none"
    assert stopped("</s>", end, 263, end, min_tokens=2) == ("a", "</s>", 3)
    assert stopped("</s>", 263, end, ends=True) == ("a", "</s>", 2)


@pytest.mark.parametrize("bos", ["<nowhere>", "", None])
def test_a_bos_that_is_no_token_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture, bos: str | None) -> None:
    tokenizer = load_tokenizer(folder_with(tmp_path, {"add_bos_token": True, "bos_token": bos}))
    assert tokenizer.bos is None
    assert "add_bos_token" in caplog.text


@pytest.mark.parametrize("model", [{"vocab": {}}, {"continuing_subword_prefix": "many"}], ids=["no tokens", "panic"])
def test_a_tokenizer_that_cannot_work_is_refused(tmp_path: Path, model: dict[str, object]) -> None:
    settings = json.loads((DEMO / "tokenizer.json").read_text())
    if "vocab" in model:
        settings |= {"added_tokens": []}
        model |= {"merges": []}
    settings["model"] |= model
    (tmp_path / "tokenizer.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match="is damaged"):
        load_tokenizer(str(tmp_path))


def test_a_stop_string_may_begin_inside_a_hidden_name(demo: Tokenizer) -> None:
    (hidden,) = demo.special_ids(["<|eos|>"])
    stop = ">\n<|eos|>"
    stream = TextStream(demo, [stop], stop_specials=demo.specials_in([stop]))
    ids = (*demo.encode("a "), hidden, *demo.encode(" abcdefghijklmnop"), hidden, *demo.encode("b"))
    assert "".join(stream.push(ids)) + stream.flush() == "a  abcdefghijklmnopb"


@pytest.mark.parametrize("long_id", [1, 7], ids=["next", "after a gap"])
def test_the_longest_token_bounds_a_text_whatever_its_id(long_id: int) -> None:
    tokenizer = Tokenizer(HuggingFaceTokenizer(models.WordLevel({"a": 0, "éééé": long_id}, unk_token="a")))
    tokenizer.check_length(8 * 5, 5)
    with pytest.raises(InvalidRequest, match="at least 6 tokens"):
        tokenizer.check_length(8 * 6, 5)
