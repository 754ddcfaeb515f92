/**
 * The official Ollama client, with a tool loop that the client runs.
 *
 * Usage: node ollama.ts HOST < REQUEST.json
 * Prints one JSON object: what came back at each step.
 */
import { text } from 'node:stream/consumers';
import { type ChatResponse, type Message, Ollama, type Tool } from 'ollama';
import type { MemoryOut, WithMemory } from './memory.ts';

interface Asked {
  question: string;
  stream: boolean;
  /** What the tool `read` says, one call after the other; without it there is no tool. */
  results?: string[];
  /** What is asked when the loop has ended. */
  next?: string;
}

interface Step {
  reply: string;
  memory_out: MemoryOut[];
}

const asked = JSON.parse(await text(process.stdin)) as Asked;
const client = new Ollama({ host: process.argv[2] });
const read: Tool = {
  type: 'function',
  function: {
    name: 'read',
    description: 'Read a file.',
    parameters: { type: 'object', properties: { path: { type: 'string' } }, required: ['path'] },
  },
};
const messages: Message[] = [{ role: 'user', content: asked.question }];
const steps: Step[] = [];
const results = asked.results ?? [];

function took(step: Step, part: ChatResponse): Message {
  const out = (part as WithMemory).memory_out;
  if (out) step.memory_out.push(out);
  step.reply += part.message.content;
  return part.message;
}

async function answer(): Promise<Message> {
  const step: Step = { reply: '', memory_out: [] };
  steps.push(step);
  const request = { model: 'tiny', messages, ...(asked.results && { tools: [read] }), metadata: { memory_in: {} } };
  if (!asked.stream) return took(step, await client.chat(request));
  const calls = [];
  for await (const part of await client.chat({ ...request, stream: true })) {
    calls.push(...(took(step, part).tool_calls ?? []));
  }
  return { role: 'assistant', content: step.reply, ...(calls.length > 0 && { tool_calls: calls }) };
}

for (;;) {
  const reply = await answer();
  messages.push(reply);
  if (!reply.tool_calls?.length) {
    if (!asked.next) break;
    messages.push({ role: 'user', content: asked.next });
    asked.next = undefined;
  }
  for (const call of reply.tool_calls ?? []) {
    messages.push({ role: 'tool', content: results.shift() ?? 'No more.', tool_name: call.function.name });
  }
}
console.log(JSON.stringify({ steps }));
