/**
 * The AI SDK through memd: the base URL is changed. Its openai provider speaks the responses API, openai-compatible
 * chat completions.
 *
 * Usage: node ai_sdk.ts BASE_URL < REQUEST.json
 * Prints one JSON object: what came back at each step; the SDK runs the tool loop itself.
 */
import { text } from 'node:stream/consumers';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateText, isStepCount, jsonSchema, streamText, tool } from 'ai';
import type { MemoryIn, MemoryOut, WithMemory } from './memory.ts';

interface Asked {
  question: string;
  how: 'create' | 'stream';
  provider?: 'openai' | 'compatible';
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
const baseURL = process.argv[2] ?? '';
const model =
  asked.provider === 'compatible'
    ? createOpenAICompatible({ name: 'memd', baseURL })('tiny')
    : createOpenAI({ baseURL, apiKey: 'not needed' })('tiny');
const results = asked.results;
const read = tool({
  description: 'Read a file.',
  inputSchema: jsonSchema<{ path: string }>({
    type: 'object',
    properties: { path: { type: 'string' } },
    required: ['path'],
    additionalProperties: false,
  }),
  execute: async () => results?.shift() ?? '',
});
const settings = {
  model,
  prompt: asked.question,
  ...(results && { tools: { read } }),
  stopWhen: isStepCount(9),
  maxRetries: 0,
  providerOptions: {
    // llama.cpp keeps no responses that could be referred to later
    openai: { store: false, ...(asked.memory_in && { metadata: { memory_in: JSON.stringify(asked.memory_in) } }) },
    memd: { ...(asked.memory_in && { memory_in: JSON.stringify(asked.memory_in) }) },
  },
};

async function create(): Promise<Step[]> {
  const { steps } = await generateText({ ...settings, include: { responseBody: true } });
  return steps.map(({ text, response }) => {
    const { memory_out } = response.body as WithMemory;
    return {
      reply: text,
      memory_out: memory_out ? [memory_out] : [],
      memory_status: response.headers?.['x-memory-status'] ?? null,
    };
  });
}

async function stream(): Promise<Step[]> {
  const memory: MemoryOut[][] = [];
  const running = streamText({ ...settings, includeRawChunks: true, onError: ({ error }) => { throw error; } });
  for await (const part of running.fullStream) {
    if (part.type === 'start-step') memory.push([]);
    if (part.type !== 'raw') continue;
    const { memory_out } = part.rawValue as WithMemory;
    if (memory_out) memory.at(-1)?.push(memory_out);
  }
  return (await running.steps).map(({ text, response }, position) => ({
    reply: text,
    memory_out: memory[position] ?? [],
    memory_status: response.headers?.['x-memory-status'] ?? null,
  }));
}

console.log(JSON.stringify({ steps: await { create, stream }[asked.how]() }));
