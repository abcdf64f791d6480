"""`eyas run-batch` against a server: responses and errors in OpenAI's form, going on after an interruption."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from rich.console import Console
from typer.testing import CliRunner

from eyas.cli.main import app
from eyas.errors import Unavailable
from eyas.services.local.batch import BatchFiles, answer_all, read_requests
from tests.support.services.openai_server import openai_server


def request(name: str, prompt: str = "x", **changes: Any) -> dict[str, Any]:
    body = {"model": "words", "prompt": prompt}
    return {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body} | changes


def run(file: Path, url: str, *words: str) -> Result:
    return CliRunner().invoke(app, ["run-batch", str(file), "--url", url, *words])


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "b.jsonl"
    file.write_text("".join(json.dumps(request(f"r{number}")) + "\n" for number in range(5)))
    return file


def test_responses_are_in_the_form_of_openai(file: Path) -> None:
    with openai_server() as server:
        result = run(file, server.url, "--api-key", "k")
    assert result.exit_code == 0, result.output
    found = lines(file.with_suffix(".out.jsonl"))
    assert {line["custom_id"] for line in found} == {f"r{number}" for number in range(5)}
    for line in found:
        assert (line["error"], line["response"]["status_code"], line["response"]["request_id"]) == (None, 200, "r-1")
        assert line["response"]["body"]["choices"] == [{"text": "word"}]
    assert {key for _, key, _ in server.bodies} == {"Bearer k"}
    assert file.with_suffix(".out.errors.jsonl").read_text() == ""


def test_each_bad_line_has_an_error_of_its_own(file: Path) -> None:
    rows = [request("a"), request("a"), request("b", "bad"), request("c", method="GET"), request("d", url="/v1/x")]
    rows += [request("e", body=None), request("f", body={"stream": True}), {"url": "/v1/completions"}]
    file.write_text("\n".join(map(json.dumps, rows)) + "\nno json\n[1]\n\n")
    with openai_server() as server:
        result = run(file, f"{server.url}/v1")
    assert result.exit_code == 1
    assert "1 answered, 9 failed" in result.output
    errors = lines(file.with_suffix(".out.errors.jsonl"))
    found = [(line["custom_id"], (line["error"] or {}).get("message", "")) for line in errors]
    texts = ("is there twice", "must be POST", "url is '/v1/x'", "body is missing", "stream is set", "no custom_id")
    for text in texts:
        assert [message for _, message in found if text in message], text
    assert sum("is no JSON object" in message for _, message in found) == 2
    (refused,) = [line for line in errors if line["custom_id"] == "b"]
    assert (refused["error"], refused["response"]["status_code"]) == (None, 400)
    assert refused["response"]["body"]["error"]["message"] == "bad prompt"


def test_only_an_object_with_status_200_is_an_answer(file: Path) -> None:
    rows = [request("a", "page"), request("b", "elsewhere"), request("c", "\ud800"), request("d", top_p=1)]
    file.write_text("\ufeff" + "\n".join([*map(json.dumps, rows), json.dumps(request("e")).replace('"x"', "1e999")]))
    with openai_server() as server:
        result = run(file, server.url)
    assert "3 answered, 2 failed" in result.output
    errors = {line["custom_id"]: line for line in lines(file.with_suffix(".out.errors.jsonl"))}
    assert errors["a"]["error"]["code"] == "invalid_response"
    assert errors["b"]["response"]["status_code"] == 307


def test_a_run_that_cannot_begin_erases_nothing(file: Path) -> None:
    with openai_server() as server:
        run(file, server.url)
        output, notes = file.with_suffix(".out.jsonl"), file.with_name("notes")
        answers = output.read_text()
        assert run(file, "http://127.0.0.1:9", "--restart").exit_code == 1
        assert output.read_text() == answers
        for text in ("# mine", "# mine\nmore", file.read_text()):
            notes.write_text(text)
            for words in (["--output"], ["--restart", "--output"], ["--error-file"]):
                result = run(file, server.url, *words, str(notes))
                assert (result.exit_code, notes.read_text()) == (1, text)
                assert "holds no responses of a batch" in result.output
    result = run(file, "http://x:abc", "--restart")
    assert "give one such as" in result.output
    assert output.read_text() == answers


def test_files_of_each_name_have_an_output_of_their_own(tmp_path: Path) -> None:
    with openai_server() as server:
        for name in ("prompts.2024", "prompts.2025"):
            (file := tmp_path / name).write_text(json.dumps(request(name)))
            assert run(file, server.url).exit_code == 0
            assert [line["custom_id"] for line in lines(tmp_path / f"{name}.out.jsonl")] == [name]


def test_the_reason_of_a_server_that_ended_ends_the_run(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def tend() -> None:
        raise Unavailable("verifier was killed")

    monkeypatch.setattr("eyas.services.local.batch.MAX_TRIES", 1)
    files = BatchFiles.of(file, None, None)
    with openai_server(failures=(503,) * 9) as server, pytest.raises(Unavailable, match="verifier was killed"):
        asyncio.run(answer_all(files, files.read(False), server.url, "", 2, Console(stderr=True), tend))


def test_an_interrupted_run_goes_on_where_it_stopped(file: Path) -> None:
    with openai_server() as server:
        run(file, server.url)
        output = file.with_suffix(".out.jsonl")
        kept = output.read_text().splitlines(keepends=True)[:2]
        output.write_text("".join(kept) + '{"custom_id": "r')
        server.bodies.clear()
        result = run(file, server.url)
        assert result.exit_code == 0, result.output
        assert "3 answered, 0 failed, 2 were there before" in result.output
        assert len(server.bodies) == 3
        assert sorted(line["custom_id"] for line in lines(output)) == [f"r{number}" for number in range(5)]
        server.bodies.clear()
        run(file, server.url, "--restart")
        assert len(server.bodies) == 5


def test_a_busy_server_is_asked_again(file: Path) -> None:
    with openai_server(failures=(503, 429, 503)) as server:
        result = run(file, server.url, "--concurrency", "1")
    assert result.exit_code == 0, result.output
    assert len(server.bodies) == 8


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "give either --url of a server, or --model"),
        (["--url", "http://127.0.0.1:9"], "cannot reach http://127.0.0.1:9"),
        (["--url", "http://x", "--output", "FILE"], "must be three files"),
        (["--url", "http://x", "--output", "README.md"], "holds no responses of a batch"),
    ],
)
def test_mistakes_of_a_run_are_one_line(words: list[str], reason: str, file: Path) -> None:
    words = [str(file) if word == "FILE" else word for word in words]
    if "README.md" in words:
        words[-1] = str(file.with_name("other"))
        Path(words[-1]).write_text("# no responses\n")
    result = CliRunner().invoke(app, ["run-batch", str(file), *words])
    assert result.exit_code == 1
    assert reason in result.output


def test_requests_are_read_one_by_one() -> None:
    taken = read_requests(iter([json.dumps(request("a")), json.dumps(request("b"))]), frozenset({"a"}))
    assert [each.custom_id for each in taken] == ["b"]
