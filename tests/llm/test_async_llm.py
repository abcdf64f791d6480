"""AsyncLLM: vLLM's asynchronous engine, with the tokens of LLM."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from eyas import LLM, AsyncLLM, RequestOutput, SamplingParams
from eyas.errors import InvalidRequest

PROMPTS = ["import os\n\ndef main(", "class Queue:\n"]
GREEDY = SamplingParams(max_tokens=24, temperature=0)
ENDLESS = SamplingParams(max_tokens=1500, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncLLM]:
    engine = AsyncLLM("models/demo/target", draft_model="models/demo/eagle3", validate_head="never", max_kv_tokens=8192)
    yield engine
    engine.shutdown()


async def last(outputs: AsyncIterator[RequestOutput]) -> RequestOutput:
    """The last output of a generator; all before it are unfinished."""
    found = None
    async for output in outputs:
        assert found is None or not found.finished
        found = output
    assert found is not None
    return found


def test_concurrent_requests_equal_generate(engine: AsyncLLM, plain_llm: LLM) -> None:
    stop = plain_llm.generate(PROMPTS[1], GREEDY)[0].outputs[0].text[8:13]
    asked = [
        SamplingParams(max_tokens=24, temperature=0.9, seed=3, n=2, logprobs=1),
        SamplingParams(max_tokens=24, temperature=0, stop=stop),
    ]

    async def body() -> list[RequestOutput]:
        generators = [engine.generate(PROMPTS[i], params, f"r{i}") for i, params in enumerate(asked)]
        return list(await asyncio.gather(*map(last, generators)))

    for ours, theirs in zip(asyncio.run(body()), plain_llm.generate(PROMPTS, asked), strict=True):
        assert ours.finished
        for one, other in zip(ours.outputs, theirs.outputs, strict=True):
            assert (one.token_ids, one.text, one.stop_reason) == (other.token_ids, other.text, other.stop_reason)


async def test_deltas_join_to_the_cumulative_output(engine: AsyncLLM) -> None:
    pieces = [one async for one in engine.generate(PROMPTS[0], GREEDY, output_kind="delta")]
    final = [one async for one in engine.generate(PROMPTS[0], GREEDY, output_kind="final_only")]
    assert len(pieces) > 1 == len(final)
    assert "".join(one.outputs[0].text for one in pieces) == final[0].outputs[0].text
    assert [token for one in pieces for token in one.outputs[0].token_ids] == final[0].outputs[0].token_ids
    assert (await last(engine.generate(PROMPTS[0], GREEDY))).outputs[0].text == final[0].outputs[0].text


async def test_an_aborted_request_ends_and_others_go_on(engine: AsyncLLM, plain_llm: LLM) -> None:
    other = asyncio.create_task(last(engine.generate(PROMPTS[0], GREEDY)))
    outputs = []
    async for output in engine.generate(PROMPTS[1], ENDLESS, "endless"):
        outputs.append(output)
        if len(outputs) == 2:
            await engine.abort("endless")
            await engine.abort("unknown")
    assert (outputs[-1].finished, outputs[-1].outputs[0].finish_reason) == (True, "cancelled")
    assert (await other).outputs[0].text == plain_llm.generate(PROMPTS[0], GREEDY)[0].outputs[0].text


async def test_a_generator_left_early_cancels_its_request(engine: AsyncLLM) -> None:
    generator = engine.generate(PROMPTS[0], ENDLESS, "left")
    await anext(generator)
    with pytest.raises(InvalidRequest, match="request_id 'left' is running already"):
        await anext(engine.generate(PROMPTS[0], GREEDY, "left"))
    await generator.aclose()
    await last(engine.generate(PROMPTS[0], GREEDY, "left"))


async def test_chat_streams_the_next_message(engine: AsyncLLM, plain_llm: LLM) -> None:
    messages = [{"role": "user", "content": "def main():"}]
    template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    expected = plain_llm.chat(messages, GREEDY, chat_template=template)[0]
    assert (await last(engine.chat(messages, GREEDY, chat_template=template))).outputs[0].text == expected.outputs[0].text
