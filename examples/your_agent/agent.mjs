// Asks for a phone number until it is nothing but digits: `node agent.mjs --task FILE`.

import { readFileSync } from "node:fs";
import { parseArgs } from "node:util";
import OpenAI from "openai";

async function solve(question, client) {
  const messages = [{ role: "user", content: question }];
  let text = "";
  for (let call = 0; call < 2; call++) {
    const answer = await client.chat.completions.create({ model: "policy", messages });
    text = answer.choices[0].message.content ?? "";
    if (/^\d+$/.test(text)) break;
    messages.push(
      { role: "assistant", content: text },
      { role: "user", content: "Digits only, please." },
    );
  }
  return text;
}

const { values } = parseArgs({ options: { task: { type: "string" } } });
const task = JSON.parse(readFileSync(values.task, "utf8"));
// The client reads OPENAI_BASE_URL and OPENAI_API_KEY from the environment.
console.log(await solve(task.question, new OpenAI()));
