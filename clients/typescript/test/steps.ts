/**
 * Requests through one `Memory`, by several SDKs, one after the other.
 *
 * Usage: node steps.ts, with one JSON object in each line of its input, each for a `Memory` of its own.
 * Answers each with a line: what came back at each step.
 */
import { createInterface } from 'node:readline';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import Anthropic from '@anthropic-ai/sdk';
import { generateText, streamText, wrapLanguageModel } from 'ai';
import OpenAI from 'openai';
import { Memory, memoryHeaders, memoryOut } from 'memd-client';
import type { Correction, MemoryHeaders, MemoryOptions, MemoryOut } from 'memd-client';
import { memoryMiddleware } from 'memd-client/ai-sdk';

interface Step {
  sdk: 'openai chat' | 'openai responses' | 'anthropic' | 'ai compatible' | 'ai openai chat' | 'ai openai responses';
  base_url: string;
  question: string;
  /** `leave`: a stream of which only the first event is read. */
  how: 'create' | 'stream' | 'leave';
  /** Queued before the request. */
  corrections?: Correction[];
  headers?: Record<string, string>;
  metadata?: Record<string, string>;
  retries?: number;
}

interface Told {
  reply: string;
  memory_out: MemoryOut | null;
  headers: MemoryHeaders | null;
  pending: number;
  refused: number;
  /** The name of the error that the SDK threw, if it did. */
  error: string | null;
}

type Answer = Pick<Told, 'reply'> & { out: MemoryOut | undefined; headers: MemoryHeaders | undefined };

let memory: Memory;

/** The text and the memory of a stream's events, read to the end or left after the first one. */
async function read<Event>(events: AsyncIterable<Event>, how: Step['how'], said: (event: Event) => string) {
  let reply = '';
  let out: MemoryOut | undefined;
  for await (const event of events) {
    reply += said(event);
    out ??= memoryOut(event);
    if (how === 'leave') break;
  }
  return { reply, out };
}

async function chat(client: OpenAI, { question, how, metadata }: Step): Promise<Answer> {
  const messages = [{ role: 'user' as const, content: question }];
  const params = { model: 'tiny', messages, ...(metadata && { metadata }) };
  if (how === 'create') {
    const { data, response } = await client.chat.completions.create(params).withResponse();
    const reply = data.choices[0]?.message.content ?? '';
    return { reply, out: memoryOut(data), headers: memoryHeaders(response.headers) };
  }
  const { data, response } = await client.chat.completions.create({ ...params, stream: true }).withResponse();
  const answer = await read(data, how, (chunk) => chunk.choices[0]?.delta.content ?? '');
  return { ...answer, headers: memoryHeaders(response.headers) };
}

async function responses(client: OpenAI, { question, how, metadata }: Step): Promise<Answer> {
  const params = { model: 'tiny', input: question, ...(metadata && { metadata }) };
  if (how === 'create') {
    const { data, response } = await client.responses.create(params).withResponse();
    return { reply: data.output_text, out: memoryOut(data), headers: memoryHeaders(response.headers) };
  }
  const { data, response } = await client.responses.create({ ...params, stream: true }).withResponse();
  const answer = await read(data, how, (event) => (event.type === 'response.output_text.delta' ? event.delta : ''));
  return { ...answer, headers: memoryHeaders(response.headers) };
}

async function anthropic({ question, how, base_url, headers, retries }: Step): Promise<Answer> {
  const baseURL = base_url.replace(/\/v1$/, '');
  const options = { baseURL, apiKey: '-', fetch: memory.fetch, maxRetries: retries ?? 0 };
  const client = new Anthropic({ ...options, defaultHeaders: headers ?? {} });
  const params = { model: 'tiny', max_tokens: 64, messages: [{ role: 'user' as const, content: question }] };
  if (how === 'create') {
    const { data, response } = await client.messages.create(params).withResponse();
    const reply = data.content.map((block) => (block.type === 'text' ? block.text : '')).join('');
    return { reply, out: memoryOut(data), headers: memoryHeaders(response.headers) };
  }
  const { data, response } = await client.messages.create({ ...params, stream: true }).withResponse();
  const answer = await read(data, how, (event) =>
    event.type === 'content_block_delta' && event.delta.type === 'text_delta' ? event.delta.text : '',
  );
  return { ...answer, headers: memoryHeaders(response.headers) };
}

async function aiSdk({ sdk, question, how, base_url, headers, retries }: Step): Promise<Answer> {
  const options = { baseURL: base_url, apiKey: '-', fetch: memory.fetch, headers: headers ?? {} };
  const compatible = sdk === 'ai compatible';
  const openai = sdk === 'ai openai chat' ? createOpenAI(options).chat('tiny') : createOpenAI(options)('tiny');
  const inner = compatible ? createOpenAICompatible({ name: 'memd', ...options })('tiny') : openai;
  const model = wrapLanguageModel({ model: inner, middleware: memoryMiddleware });
  const providerOptions = { openai: { store: false } }; // llama.cpp keeps no responses
  const params = { model, prompt: question, maxRetries: retries ?? 0, providerOptions };
  if (how === 'create') {
    const { text, providerMetadata, response } = await generateText(params);
    const out = memoryOut(providerMetadata?.['memd']);
    return { reply: text, out, headers: memoryHeaders(response.headers) };
  }
  const running = streamText({ ...params, onError: ({ error }) => { throw error; } });
  let reply = '';
  for await (const part of running.fullStream) {
    if (part.type === 'raw') throw new Error('nobody asked for raw chunks');
    if (part.type === 'text-delta') reply += part.text;
  }
  const out = memoryOut((await running.providerMetadata)?.['memd']);
  return { reply, out, headers: memoryHeaders((await running.response).headers) };
}

async function answer(step: Step): Promise<Answer> {
  if (step.sdk.startsWith('ai ')) return aiSdk(step);
  if (step.sdk === 'anthropic') return anthropic(step);
  const options = { baseURL: step.base_url, apiKey: '-', fetch: memory.fetch, maxRetries: step.retries ?? 0 };
  const client = new OpenAI({ ...options, defaultHeaders: step.headers });
  return step.sdk === 'openai chat' ? chat(client, step) : responses(client, step);
}

for await (const line of createInterface(process.stdin)) {
  const asked = JSON.parse(line) as { memory: MemoryOptions; steps: Step[] };
  memory = new Memory(asked.memory);
  const steps: Told[] = [];
  for (const step of asked.steps) {
    memory.correct(...(step.corrections ?? []));
    const told: Told = { reply: '', memory_out: null, headers: null, pending: 0, refused: 0, error: null };
    try {
      const { reply, out, headers } = await answer(step);
      Object.assign(told, { reply, memory_out: out ?? null, headers: headers ?? null });
    } catch (error) {
      told.error = (error as Error).constructor.name;
    }
    steps.push({ ...told, pending: memory.pending.length, refused: memory.refused.length });
  }
  console.log(JSON.stringify({ steps }));
}
