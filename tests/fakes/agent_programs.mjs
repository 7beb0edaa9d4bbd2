// JavaScript agents of other projects, unmodified:
// `node agent_programs.mjs NODE_MODULES NAME BASE_URL API_KEY`.
//
// Each asks one question and has one tool, `calculator`; it prints what it answers.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [, , folder, name, baseURL, apiKey] = process.argv;
const require = createRequire(pathToFileURL(`${folder}/`));
const load = (module) => import(pathToFileURL(require.resolve(module)).href);
const QUESTION = "What is 12 * 7?";
const PARAMETERS = {
  type: "object",
  properties: { expression: { type: "string" } },
  required: ["expression"],
};

async function vercel(mode) {
  const { generateText, streamText, stepCountIs, tool, jsonSchema } = await load("ai");
  const { createOpenAI } = await load("@ai-sdk/openai");
  const { createAnthropic } = await load("@ai-sdk/anthropic");
  const openai = createOpenAI({ baseURL, apiKey });
  const models = {
    responses: () => openai("policy"),
    chat: () => openai.chat("policy"),
    messages: () => createAnthropic({ baseURL, apiKey })("policy"),
  };
  const calculator = tool({
    description: "Computes.",
    inputSchema: jsonSchema(PARAMETERS),
    execute: async () => "84",
  });
  const asked = {
    model: models[mode.split("-")[0]](),
    prompt: QUESTION,
    tools: { calculator },
    stopWhen: stepCountIs(4),
  };
  if (!mode.endsWith("stream")) return (await generateText(asked)).text;
  const errors = [];
  const text = await streamText({ ...asked, onError: ({ error }) => errors.push(error) }).text;
  if (errors.length) throw errors[0];
  return text;
}

async function anthropicRunner() {
  const Anthropic = (await load("@anthropic-ai/sdk")).default;
  const client = new Anthropic({ baseURL: baseURL.replace(/\/v1$/, ""), apiKey });
  const calculator = {
    name: "calculator",
    description: "Computes.",
    input_schema: PARAMETERS,
    parse: (given) => given,
    run: async () => "84",
  };
  const message = await client.beta.messages.toolRunner({
    model: "policy",
    max_tokens: 256,
    messages: [{ role: "user", content: QUESTION }],
    tools: [calculator],
  });
  return message.content.filter((block) => block.type === "text").map((block) => block.text).join("");
}

async function openaiRunner() {
  const OpenAI = (await load("openai")).default;
  const client = new OpenAI({ baseURL, apiKey });
  const definition = {
    name: "calculator",
    description: "Computes.",
    parameters: PARAMETERS,
    parse: JSON.parse,
    function: async () => "84",
  };
  const runner = client.chat.completions.runTools({
    model: "policy",
    messages: [{ role: "user", content: QUESTION }],
    tools: [{ type: "function", function: definition }],
  });
  return await runner.finalContent();
}

async function langchain(mode) {
  const { ChatOpenAI } = await load("@langchain/openai");
  const { HumanMessage, ToolMessage } = await load("@langchain/core/messages");
  const model = new ChatOpenAI({
    model: "policy",
    apiKey,
    configuration: { baseURL },
    useResponsesApi: mode === "responses",
  }).bindTools([
    { type: "function", function: { name: "calculator", description: "Computes.", parameters: PARAMETERS } },
  ]);
  const messages = [new HumanMessage(QUESTION)];
  for (;;) {
    const answer = await model.invoke(messages);
    messages.push(answer);
    if (!answer.tool_calls.length) return answer.text;
    for (const call of answer.tool_calls) {
      messages.push(new ToolMessage({ content: "84", tool_call_id: call.id }));
    }
  }
}

const AGENTS = {
  vercel,
  "anthropic-runner": anthropicRunner,
  "openai-runner": openaiRunner,
  langchain,
};
const [agent, mode = ""] = name.split(":");
console.log(await AGENTS[agent](mode));
