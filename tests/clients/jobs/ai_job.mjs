// Vercel's AI SDK: its provider for servers of OpenAI's API, and its provider for OpenAI itself.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { check, MODEL, PROMPT, require_, URL_ } from "./checks.mjs";

globalThis.AI_SDK_LOG_WARNINGS = false;
const baseURL = `${URL_}/v1`;
const compatible = createOpenAICompatible({
  name: "eyas", baseURL, apiKey: "none", includeUsage: true, supportsStructuredOutputs: true,
});
const openai = createOpenAI({ baseURL, apiKey: "none" });
const asked = { prompt: "Write a function that adds two numbers.", maxOutputTokens: 16, seed: 1, maxRetries: 0 };
const schema = z.object({ city: z.enum(["Paris", "Oslo"]), is_warm: z.boolean() });
const weather = tool({
  description: "The weather.",
  inputSchema: z.object({ city: z.enum(["Paris", "Oslo"]) }),
  execute: async ({ city }) => `${city} is mild`,
});
const models = {
  "openai-compatible": compatible(MODEL),
  "openai chat": openai.chat(MODEL),
  "openai responses": openai.responses(MODEL),
};

for (const [name, model] of Object.entries(models)) {
  const own = name === "openai responses" ? { ...asked, seed: undefined } : asked;
  await check(`${name}: generateText`, async () => {
    const done = await generateText({ ...own, model });
    require_(done.usage.outputTokens > 0, "no usage");
  });
  await check(`${name}: streamText`, async () => {
    const errors = [];
    const result = streamText({ ...own, model, onError: ({ error }) => errors.push(error) });
    for await (const _ of result.textStream);
    require_(!errors.length, String(errors[0]));
    require_((await result.usage).outputTokens > 0, "no usage");
  });
  await check(`${name}: object of a schema`, async () => {
    const output = Output.object({ schema });
    const done = await generateText({ ...own, model, output, maxOutputTokens: 128 });
    require_(schema.safeParse(done.output).success, "no object");
  });
  await check(`${name}: tools, two steps`, async () => {
    const done = await generateText({
      ...own, model, tools: { weather }, toolChoice: "required", maxOutputTokens: 96, stopWhen: stepCountIs(2),
      providerOptions: { openai: { parallelToolCalls: false }, eyas: { parallel_tool_calls: false } },
    });
    require_(done.steps[0].toolResults.length > 0, "the tool was not called");
    require_(done.steps.length === 2, `${done.steps.length} steps`);
  });
}
await check("openai-compatible: completions", async () => {
  const done = await generateText({ ...asked, prompt: PROMPT, model: compatible.completionModel(MODEL) });
  require_(done.usage.outputTokens > 0, "no usage");
});
await check("openai-compatible: chain of messages", async () => {
  const messages = [
    { role: "system", content: "Be brief." },
    { role: "user", content: "Add." },
    { role: "assistant", content: "left + right" },
    { role: "user", content: "Again." },
  ];
  const done = await generateText({ model: compatible(MODEL), messages, maxOutputTokens: 16, maxRetries: 0 });
  require_(done.finishReason === "length" || done.finishReason === "stop", done.finishReason);
});
