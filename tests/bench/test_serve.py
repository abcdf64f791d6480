"""`eyas bench serve`: what it sends, what it counts, and what it says of servers that do not answer."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from eyas.bench.serve import (
    DEFAULT_CONCURRENCY,
    RequestTimes,
    ServeResults,
    ServeSettings,
    load_texts,
    read_event,
    read_goodput,
    run_load,
)
from eyas.cli.main import app
from eyas.errors import ConfigError, Unavailable
from tests.support.services.openai_server import NUM_WORDS, openai_server


def settings(**changes: object) -> ServeSettings:
    return ServeSettings(url="http://x", **changes)  # type: ignore[arg-type]


def test_a_run_writes_what_it_measured(tmp_path: Path) -> None:
    words = [
        "--num-prompts",
        "6",
        "--concurrency",
        "2",
        "--goodput",
        "ttft:60000",
        "--endpoint",
        "chat",
        "--max-tokens",
        "8",
    ]
    with openai_server(owner="eyas") as server:
        result = CliRunner().invoke(app, ["bench", "serve", server.url, *words, "--out", str(tmp_path), "--api-key", "k"])
    assert result.exit_code == 0, result.output
    (file,) = tmp_path.glob("*-serve-cpu.json")
    found = json.loads(file.read_text())["results"]
    assert (found["num_done"], found["num_failed"], found["num_output_tokens"]) == (6, 0, 48)
    assert (found["tau"], found["accepted_share"]) == (2.0, 0.75)
    assert found["goodput"] == pytest.approx(6 / found["seconds"], rel=1e-4)
    assert set(found["latencies"]) == {"ttft", "itl", "tpot", "e2e"}
    path, key, body = server.bodies[0]
    assert (path, key, body["model"], body["max_tokens"]) == ("/v1/chat/completions", "Bearer k", "words", 8)
    assert body["return_speculation"] is True
    assert "requests: 0 of 6" in result.stderr


def test_other_servers_get_no_fields_of_eyas() -> None:
    with openai_server() as server:
        result = CliRunner().invoke(app, ["bench", "serve", f"{server.url}/v1", "--num-prompts", "1"])
    assert result.exit_code == 0, result.output
    assert set(server.bodies[0][2]) == {"model", "max_tokens", "temperature", "stream", "stream_options", "prompt"}
    assert "| drafted tokens accepted | 75.0% |" in result.stdout


def test_a_rate_has_no_limit_of_its_own() -> None:
    assert (settings().limit, settings(request_rate=1.0).limit) == (DEFAULT_CONCURRENCY, 0)
    assert (settings(request_rate=1.0, concurrency=3).limit, settings(concurrency=0).limit) == (3, 0)


async def test_the_wait_for_a_slot_counts_with_a_rate() -> None:
    with openai_server(wait_s=0.05) as server:
        load = ServeSettings(url=server.url, num_prompts=5, request_rate=1e6, concurrency=1)
        results = await run_load(load, "", lambda times: None)
    assert results.latencies["ttft"].by_percent[99] > 150


@pytest.mark.parametrize("listed", [{"data": ["m"]}, {"data": 3}, ["m"], {"data": [None]}])
def test_an_odd_list_of_models_is_one_line(listed: object) -> None:
    with openai_server(listed=listed) as server:
        result = CliRunner().invoke(app, ["bench", "serve", server.url])
    assert result.exit_code == 1
    assert "/v1/models does not answer" in result.stderr


def test_an_odd_event_is_an_error_of_its_request() -> None:
    with openai_server(events=({"choices": ["x"]},)) as server:
        result = CliRunner().invoke(app, ["bench", "serve", server.url, "--num-prompts", "1"])
    assert result.exit_code == 1
    assert "none of 1 requests was answered: AttributeError" in result.stderr


def test_failures_are_counted_by_their_reason() -> None:
    with openai_server(failures=(500, 500)) as server:
        words = ["bench", "serve", server.url, "--num-prompts", "4", "--concurrency", "1"]
        result = CliRunner().invoke(app, words)
    assert "2 answered, 2 failed" in result.stdout
    assert "error: 500: " in result.stdout


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["http://127.0.0.1:9"], "http://127.0.0.1:9/v1/models does not answer"),
        (["http://x:abc"], "the URL is 'http://x:abc'"),
        (["127.0.0.1:9"], "give one such as http://127.0.0.1:8000"),
        (["http://x", "--goodput", "ttft"], "goodput is 'ttft'; give a latency and its milliseconds"),
        (["http://x", "--goodput", "speed:3"], "goodput is 'speed'; it must be one of ttft, itl, tpot, e2e"),
        (["http://x", "--endpoint", "embeddings"], "endpoint is 'embeddings'"),
        (["http://x", "--prompts", "nowhere"], "cannot read prompts from nowhere"),
    ],
)
def test_what_cannot_be_measured_is_refused(words: list[str], reason: str) -> None:
    result = CliRunner().invoke(app, ["bench", "serve", *words])
    assert result.exit_code == 1
    assert reason in result.stderr


def test_latencies_are_those_of_the_chunks() -> None:
    times = RequestTimes(10.0, [10.5, 10.6, 10.8], 11.0, num_output_tokens=7)
    found = times.latencies()
    assert found["ttft"] == pytest.approx(500)
    assert found["itl"] == pytest.approx(150)
    assert found["tpot"] == pytest.approx(50)
    assert found["e2e"] == pytest.approx(1000)
    results = ServeResults.of(settings(goodput=read_goodput(["ttft:400"])), [times], 2.0)
    assert (results.goodput, results.num_done, results.tau, results.accepted_share) == (0.0, 1, None, None)
    assert results.latencies["itl"].mean == pytest.approx(150)
    with pytest.raises(Unavailable, match="none of 1 requests was answered: no text came"):
        ServeResults.of(settings(), [RequestTimes(0.0)], 1.0)


def test_an_error_in_a_stream_is_the_requests() -> None:
    times = RequestTimes(0.0)
    for event in ({"choices": [{"text": "a"}]}, {"choices": [{"text": ""}]}, {"error": {"message": "lost"}}):
        read_event(times, event, 1.0)
    assert (times.chunks, times.error, times.is_answered) == ([1.0], "lost", False)
    assert NUM_WORDS > 1


def test_prompts_come_from_rows_of_every_usual_form(tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": None}]}, {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        {"prompt": "one"}, {"text": "two"}, {"turns": ["three", "x"]}, {"question": "four"}, {"other": 1},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "five"}]},
        {"conversations": [{"from": "human", "value": "six"}, {"from": "gpt", "value": "x"}]},
    ]  # fmt: skip
    (file := tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (listed := tmp_path / "rows.json").write_text(json.dumps(rows))
    expected = ["one", "two", "three", "four", "five", "six", "one"]
    assert (
        load_texts(settings(prompts=file, num_prompts=7)) == load_texts(settings(prompts=listed, num_prompts=7)) == expected
    )
    chats = load_texts(settings(prompts=file, num_prompts=6, endpoint="chat"))
    assert [message["role"] for message in chats[4]] == ["system", "user"]
    assert chats[5] == [{"role": "user", "content": "six"}]
    random = load_texts(settings(num_prompts=2, input_tokens=9))
    assert [len(text.split()) for text in random] == [9, 9]
    assert random == load_texts(settings(num_prompts=2, input_tokens=9)) != load_texts(settings(num_prompts=2, seed=1))
    (file := tmp_path / "empty.jsonl").write_text('{"other": 1}\n')
    with pytest.raises(ConfigError, match="holds no prompts"):
        load_texts(settings(prompts=file))
