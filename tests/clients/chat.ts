/**
 * The official OpenAI client talking to memd: the base URL is changed and nothing else.
 *
 * Usage: node chat.ts BASE_URL < REQUEST.json
 * REQUEST is {"question": string, "stream": boolean, "memory_in"?: MemoryIn}. Prints one JSON object: what came back.
 */
import { text } from 'node:stream/consumers';
import OpenAI from 'openai';
import type { ChatCompletion, ChatCompletionChunk, ChatCompletionCreateParams } from 'openai/resources/chat/completions';
import type { MemoryIn, MemoryOut, WithMemory } from './memory.ts';

interface Asked {
  question: string;
  stream: boolean;
  memory_in?: MemoryIn;
}

interface Told {
  reply: string;
  finish_reason: string | null;
  chunks: number;
  memory_out: MemoryOut[];
  memory_status: string | null;
}

const client = new OpenAI({ baseURL: process.argv[2], apiKey: 'not needed', maxRetries: 0 });

function paramsOf(asked: Asked): Omit<ChatCompletionCreateParams, 'stream'> {
  return {
    model: 'tiny',
    messages: [{ role: 'user', content: asked.question }],
    // The SDK types metadata values as strings; memd reads a JSON string as well as an object.
    ...(asked.memory_in && { metadata: { memory_in: JSON.stringify(asked.memory_in) } }),
  };
}

async function create(asked: Asked): Promise<Told> {
  const { data, response } = await client.chat.completions.create({ ...paramsOf(asked), stream: false }).withResponse();
  const completion: ChatCompletion & WithMemory = data;
  return {
    reply: completion.choices[0]?.message.content ?? '',
    finish_reason: completion.choices[0]?.finish_reason ?? null,
    chunks: 1,
    memory_out: completion.memory_out ? [completion.memory_out] : [],
    memory_status: response.headers.get('x-memory-status'),
  };
}

async function stream(asked: Asked): Promise<Told> {
  const { data, response } = await client.chat.completions.create({ ...paramsOf(asked), stream: true }).withResponse();
  const told: Told = {
    reply: '',
    finish_reason: null,
    chunks: 0,
    memory_out: [],
    memory_status: response.headers.get('x-memory-status'),
  };
  for await (const event of data) {
    const chunk: ChatCompletionChunk & WithMemory = event;
    told.chunks += 1;
    told.reply += chunk.choices[0]?.delta.content ?? '';
    told.finish_reason = chunk.choices[0]?.finish_reason ?? told.finish_reason;
    if (chunk.memory_out) told.memory_out.push(chunk.memory_out);
  }
  return told;
}

const asked = JSON.parse(await text(process.stdin)) as Asked;
console.log(JSON.stringify(await (asked.stream ? stream(asked) : create(asked))));
