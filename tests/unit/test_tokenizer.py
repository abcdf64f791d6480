"""Text and tokens: streaming equals decoding at once, and stop strings end it, however the tokens are grouped."""

import json
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as HuggingFaceTokenizer
from tokenizers import decoders, models

from eyas.errors import CheckpointError
from eyas.outputs import TextDecoder
from eyas.request import Chunk
from eyas.tokenizer import TextStream, Tokenizer, load_tokenizer

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


def folder_with(tmp_path: Path, settings: dict[str, object]) -> str:
    (tmp_path / "tokenizer.json").write_text((DEMO / "tokenizer.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(tmp_path)


def test_a_batch_of_texts_has_the_ids_of_each(demo: Tokenizer) -> None:
    texts = [TEXT, "", "<eos>", "x" * 50]
    for tokenizer in (demo, Tokenizer(demo.tokenizer), Tokenizer(demo.tokenizer, bos=7)):
        assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]
    assert demo.encode_batch([]) == []


def test_streamed_text_is_the_decoded_text(demo: Tokenizer) -> None:
    stream = TextStream(demo)
    pieces = stream.push(demo.encode(TEXT))
    assert pieces.text + stream.flush() == TEXT


@pytest.mark.slow
@given(st.lists(st.integers(0, 4095), max_size=40))
def test_streamed_text_is_the_decoded_text_of_any_tokens(ids: list[int]) -> None:
    tokenizer = load_tokenizer(str(DEMO))
    stream = TextStream(tokenizer)
    assert stream.push(ids).text + stream.flush() == tokenizer.decode(ids)


@given(st.lists(st.integers(0, 258), max_size=40))
def test_invalid_bytes_never_break_a_stream(ids: list[int]) -> None:
    stream = TextStream(byte_fallback())
    assert stream.push([*ids, 1]).text.endswith("a")
    assert stream.flush() == ""


def test_a_character_is_shown_when_its_last_byte_is_there(demo: Tokenizer) -> None:
    eagle = [3 + byte for byte in "🦅".encode()]
    stream = TextStream(byte_fallback())
    assert stream.push([1, *eagle]).texts == ("a", "", "", "", "🦅")


def test_an_incomplete_character_at_the_end_is_flushed() -> None:
    stream = TextStream(byte_fallback())
    assert stream.push([1, 3 + 0xF0]).text == "a"
    assert stream.flush() == "\ufffd"


def test_a_stop_string_in_the_flushed_text_ends_it() -> None:
    for finish, expected in (("length", ("stop", "\ufffd")), ("cancelled", ("cancelled", None))):
        decoder = TextDecoder(TextStream(byte_fallback(), ["\ufffd"]), (), 1, 0)
        chunk = decoder.add(Chunk("r", (1, 3 + 0xF0), (False, False), finish_reason=finish))  # type: ignore[arg-type]
        assert (chunk.text, chunk.chunk.finish_reason, chunk.stop_reason) == ("a", *expected)


@pytest.mark.parametrize("byte", [0xFF, 0x80, 0xE2])
def test_invalid_bytes_without_end_are_shown_as_they_come(byte: int) -> None:
    stream = TextStream(byte_fallback())
    piece = stream.push([3 + byte] * 200)
    assert (set(piece.text), len(piece.text) > 190) == ({"\ufffd"}, True)
    assert len(piece.text) + len(stream.flush()) == 200


def test_whole_characters_before_a_partial_one_are_emitted(demo: Tokenizer) -> None:
    ids = demo.encode("\u2603" * 40)
    assert len(ids) >= 120, "one token for each byte"
    broken = [token for token in ids[:120] if token != ids[2]]
    stream = TextStream(demo)
    assert len(stream.push(broken).text) > 30
    assert stream.push(ids).text.endswith("\u2603")


@given(st.data())
def test_grouping_changes_nothing_in_broken_text(data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(3, 258), min_size=8, max_size=60))
    whole = TextStream(byte_fallback()).push(ids)
    stream = TextStream(byte_fallback())
    cut = data.draw(st.integers(0, len(ids)))
    assert stream.push(ids[:cut]).texts + stream.push(ids[cut:]).texts == whole.texts


def test_leading_spaces_between_tokens_survive() -> None:
    stream = TextStream(byte_fallback())
    assert stream.push([2, 1, 2, 2]).text == "ba b b"


def test_special_tokens_have_no_text(demo: Tokenizer) -> None:
    ids = demo.encode("return x")
    assert TextStream(demo).push([0, *ids, 1]).text == "return x"


def test_a_stop_string_cuts_text_but_counts_its_last_token(demo: Tokenizer) -> None:
    ids = demo.encode("one two three four")
    piece = TextStream(demo, ["wo th"]).push(ids)
    assert (piece.text, piece.stopped) == ("one t", True)
    assert "wo th" in demo.decode(ids[: len(piece.texts)])
    assert "wo th" not in demo.decode(ids[: len(piece.texts) - 1])


def test_text_that_may_become_a_stop_string_is_held_back(demo: Tokenizer) -> None:
    stream = TextStream(demo, ["three!"])
    assert stream.push(demo.encode("one two three")).text == "one two "
    assert stream.push(demo.encode(" four")).text == "three four"


def test_held_text_is_flushed_at_the_end(demo: Tokenizer) -> None:
    stream = TextStream(demo, ["three!"])
    stream.push(demo.encode("one two three"))
    assert stream.flush() == "three"


def test_the_first_of_two_stop_strings_in_one_token_counts(demo: Tokenizer) -> None:
    ids = demo.encode("x return")
    assert TextStream(demo, ["turn", "ret"]).push(ids).text == "x "


@pytest.mark.slow
@given(st.data())
def test_grouping_of_tokens_changes_nothing(data: st.DataObject) -> None:
    tokenizer = load_tokenizer(str(DEMO))
    ids = tokenizer.encode(TEXT * 2)
    stop = data.draw(st.lists(st.sampled_from([TEXT[i : i + n] for i in range(len(TEXT)) for n in (1, 3, 9)]), max_size=3))
    whole = TextStream(tokenizer, stop).push(ids)
    stream, texts, stopped, at = TextStream(tokenizer, stop), (), False, 0
    while at < len(ids) and not stopped:
        size = data.draw(st.integers(1, 5))
        piece = stream.push(ids[at : at + size])
        texts, stopped, at = (*texts, *piece.texts), piece.stopped, at + size
    assert (texts, stopped) == (whole.texts, whole.stopped)
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


def test_least_tokens_is_never_more_than_there_are(demo: Tokenizer) -> None:
    for text in (TEXT, " " * 500, "return " * 90, ""):
        assert demo.least_tokens(text) <= len(demo.encode(text))
    assert demo.least_tokens("x" * 100_000) > 1000


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
            piece = stream.push(ids[at : at + size])
            texts, stopped, at = [*texts, *piece.texts], piece.stopped, at + size
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
    assert "".join(stream.push([token], ends=token == 1).text for token in ids) + stream.flush() == "def é<|pad|> x"


def test_other_threads_run_while_a_long_text_is_encoded(demo: Tokenizer) -> None:
    thread = threading.Thread(target=demo.encode, args=(TEXT * 10_000,))  # 0.4 MB: at least 0.1 s
    thread.start()
    num_turns = 0
    while thread.is_alive():
        num_turns += 1
        time.sleep(0.001)
    assert num_turns > 2
    assert demo.encode_rendered(TEXT * 20) == tuple(demo.tokenizer.encode(TEXT * 20, add_special_tokens=False).ids)
