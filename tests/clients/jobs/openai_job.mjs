// OpenAI's client for Node: completions, chats, streams, tools, schemas by zod, responses.
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import { check, MESSAGES, MODEL, PROMPT, require_, URL_ } from "./checks.mjs";

const client = new OpenAI({ baseURL: `${URL_}/v1`, apiKey: "none", maxRetries: 0 });
const chat = { model: MODEL, messages: MESSAGES, max_tokens: 16, seed: 1 };
const Answer = z.object({ city: z.enum(["Paris", "Oslo"]), is_warm: z.boolean() });
const parameters = {
  type: "object",
  properties: { city: { type: "string", enum: ["Paris", "Oslo"] } },
  required: ["city"],
  additionalProperties: false,
};
const tool = { type: "function", function: { name: "get_weather", parameters, strict: true } };
const forced = { tools: [tool], tool_choice: "required", parallel_tool_calls: false, max_tokens: 64 };

await check("models", async () => {
  const found = [];
  for await (const model of client.models.list()) found.push(model.id);
  require_(found.includes(MODEL), `models ${found}`);
});
await check("completions", async () => {
  const done = await client.completions.create({ model: MODEL, prompt: PROMPT, max_tokens: 16 });
  require_(done.choices[0].text && done.usage.completion_tokens > 0, "no text or usage");
});
let whole = "";
await check("chat", async () => {
  const done = await client.chat.completions.create(chat);
  whole = done.choices[0].message.content;
  require_(done.usage.completion_tokens > 0, "no usage");
});
await check("chat, streamed", async () => {
  const stream = await client.chat.completions.create({ ...chat, stream: true, stream_options: { include_usage: true } });
  let text = "";
  let usage = null;
  for await (const part of stream) {
    text += part.choices[0]?.delta?.content ?? "";
    usage = part.usage ?? usage;
  }
  require_(text === (whole ?? ""), "another text than whole");
  require_(usage?.completion_tokens > 0, "no usage");
});
await check("chat, stream helper", async () => {
  const done = await client.chat.completions.stream(chat).finalChatCompletion();
  require_(done.choices[0].message.content === whole, "another text than whole");
});
await check("chat, schema by zod (parse)", async () => {
  const format = zodResponseFormat(Answer, "answer");
  const done = await client.chat.completions.parse({ ...chat, max_tokens: 64, response_format: format });
  require_(Answer.safeParse(done.choices[0].message.parsed).success, "no object");
});
await check("chat, tools", async () => {
  const done = await client.chat.completions.create({ ...chat, ...forced });
  require_(done.choices[0].message.tool_calls[0].function.name === "get_weather", "no call");
});
await check("chat, tools, streamed", async () => {
  const done = await client.chat.completions.stream({ ...chat, ...forced }).finalChatCompletion();
  require_(JSON.parse(done.choices[0].message.tool_calls[0].function.arguments).city, "no arguments");
});
await check("chat, runTools", async () => {
  const called = [];
  const run = client.chat.completions.runTools(
    {
      ...chat,
      max_tokens: 64,
      parallel_tool_calls: false,
      tool_choice: { type: "function", function: { name: "get_weather" } },
      tools: [{ type: "function", function: { name: "get_weather", parameters, parse: JSON.parse, function: (given) => {
        called.push(given.city);
        return "mild";
      } } }],
    },
    { maxChatCompletions: 2 },
  );
  await run.done();
  require_(called.length > 0, "the tool was not called");
});
await check("responses", async () => {
  const done = await client.responses.create({ model: MODEL, input: "Add two numbers.", max_output_tokens: 16 });
  require_(done.usage.output_tokens > 0, "no usage");
});
await check("responses, streamed", async () => {
  const kinds = [];
  const stream = await client.responses.create({ model: MODEL, input: "Add.", max_output_tokens: 16, stream: true });
  for await (const event of stream) kinds.push(event.type);
  require_(kinds[0] === "response.created" && /completed|incomplete/.test(kinds.at(-1)), `events ${kinds.at(-1)}`);
});
await check("responses, schema by zod (parse)", async () => {
  const text = { format: zodTextFormat(Answer, "answer") };
  const done = await client.responses.parse({ model: MODEL, input: "Oslo?", max_output_tokens: 128, text, temperature: 0 });
  require_(Answer.safeParse(done.output_parsed).success, "no object");
});
await check("errors", async () => {
  try {
    await client.chat.completions.create({ ...chat, temperature: -1 });
  } catch (error) {
    require_(error instanceof OpenAI.BadRequestError && error.param === "temperature", `param ${error.param}`);
    return;
  }
  require_(false, "no error");
});
