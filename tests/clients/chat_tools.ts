/**
 * The official OpenAI client's chat completions in its three ways, with a tool loop that the client or its helper runs.
 *
 * Usage: node chat_tools.ts BASE_URL < REQUEST.json
 * Prints one JSON object: what came back at each step.
 */
import { text } from 'node:stream/consumers';
import OpenAI from 'openai';
import type { ChatCompletionMessage, ChatCompletionMessageParam } from 'openai/resources/chat/completions';
import type { MemoryIn, MemoryOut, WithMemory } from './memory.ts';

interface Asked {
  question: string;
  how: 'create' | 'stream' | 'helper';
  memory_in?: MemoryIn;
  /** What the tool `read` says, one call after the other; without it there is no tool. */
  results?: string[];
}

interface Step {
  reply: string;
  memory_out: MemoryOut[];
  memory_status: string | null;
}

const asked = JSON.parse(await text(process.stdin)) as Asked;
const client = new OpenAI({ baseURL: process.argv[2], apiKey: 'not needed', maxRetries: 0 });
const read = {
  type: 'function' as const,
  function: {
    name: 'read',
    description: 'Read a file.',
    parameters: { type: 'object', properties: { path: { type: 'string' } }, required: ['path'] },
  },
};
const messages: ChatCompletionMessageParam[] = [{ role: 'user', content: asked.question }];
const steps: Step[] = [];

function params() {
  return {
    model: 'tiny',
    messages,
    ...(asked.results && { tools: [read] }),
    ...(asked.memory_in && { metadata: { memory_in: JSON.stringify(asked.memory_in) } }),
  };
}

function took(step: Step, out: WithMemory): void {
  if (out.memory_out) step.memory_out.push(out.memory_out);
}

async function create(step: Step): Promise<ChatCompletionMessage> {
  const { data, response } = await client.chat.completions.create(params()).withResponse();
  step.memory_status = response.headers.get('x-memory-status');
  took(step, data as WithMemory);
  return data.choices[0]!.message;
}

/** The helper that puts the pieces of a stream together; it gives no access to the headers. */
async function stream(step: Step): Promise<ChatCompletionMessage> {
  const runner = client.chat.completions.stream(params());
  runner.on('chunk', (chunk) => took(step, chunk as WithMemory));
  return await runner.finalMessage();
}

async function loop(next: (step: Step) => Promise<ChatCompletionMessage>): Promise<void> {
  for (let calling = true; calling; ) {
    const step: Step = { reply: '', memory_out: [], memory_status: null };
    const message = await next(step);
    step.reply = message.content ?? '';
    steps.push(step);
    messages.push(message);
    for (const call of message.tool_calls ?? []) {
      messages.push({ role: 'tool', tool_call_id: call.id, content: asked.results?.shift() ?? '' });
    }
    calling = Boolean(message.tool_calls?.length);
  }
}

/** The helper that runs the tool loop by itself. */
async function helper(): Promise<void> {
  const runner = client.chat.completions.runTools({
    model: 'tiny',
    messages,
    tools: [{ ...read, function: { ...read.function, function: () => asked.results?.shift() ?? '', parse: JSON.parse } }],
    ...(asked.memory_in && { metadata: { memory_in: JSON.stringify(asked.memory_in) } }),
  });
  runner.on('chatCompletion', (completion) => {
    const step: Step = { reply: completion.choices[0]?.message.content ?? '', memory_out: [], memory_status: null };
    took(step, completion as WithMemory);
    steps.push(step);
  });
  await runner.done();
}

if (asked.how === 'helper') await helper();
else await loop({ create, stream }[asked.how]);
console.log(JSON.stringify({ steps }));
