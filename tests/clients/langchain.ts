/**
 * LangChain's ChatOpenAI through memd: the base URL is changed, MemoryIn goes along as a further member of the body.
 *
 * Usage: node langchain.ts BASE_URL < REQUEST.json
 * Prints one JSON object: what came back at each step.
 */
import { text } from 'node:stream/consumers';
import { HumanMessage, ToolMessage, type AIMessage, type BaseMessage } from '@langchain/core/messages';
import { concat } from '@langchain/core/utils/stream';
import { ChatOpenAI } from '@langchain/openai';
import type { MemoryIn, MemoryOut, WithMemory } from './memory.ts';

interface Asked {
  question: string;
  how: 'create' | 'stream';
  memory_in?: MemoryIn;
  /** What the tool `read` says, one call after the other; without it there is no tool. */
  results?: string[];
}

const asked = JSON.parse(await text(process.stdin)) as Asked;
const read = {
  type: 'function' as const,
  function: {
    name: 'read',
    description: 'Read a file.',
    parameters: { type: 'object', properties: { path: { type: 'string' } }, required: ['path'] },
  },
};
const model = new ChatOpenAI({
  model: 'tiny',
  apiKey: 'not needed',
  maxRetries: 0,
  configuration: { baseURL: process.argv[2] },
  __includeRawResponse: true,
  ...(asked.memory_in && { modelKwargs: { memory_in: asked.memory_in } }),
});
const bound = asked.results ? model.bindTools([read]) : model;
const messages: BaseMessage[] = [new HumanMessage(asked.question)];

function memoryOf(message: AIMessage): MemoryOut[] {
  const { memory_out } = (message.additional_kwargs['__raw_response'] ?? {}) as WithMemory;
  return memory_out ? [memory_out] : [];
}

async function create(): Promise<[AIMessage, MemoryOut[]]> {
  const message = await bound.invoke(messages);
  return [message, memoryOf(message)];
}

async function stream(): Promise<[AIMessage, MemoryOut[]]> {
  const memory: MemoryOut[] = [];
  let whole;
  for await (const chunk of await bound.stream(messages)) {
    memory.push(...memoryOf(chunk));
    chunk.additional_kwargs = {};
    whole = whole === undefined ? chunk : concat(whole, chunk);
  }
  if (whole === undefined) throw new Error('an empty stream');
  return [whole, memory];
}

const steps = [];
for (let calling = true; calling; ) {
  const [message, memory] = await { create, stream }[asked.how]();
  steps.push({ reply: message.text, memory_out: memory, memory_status: null });
  messages.push(message);
  for (const call of message.tool_calls ?? []) {
    messages.push(new ToolMessage({ content: asked.results?.shift() ?? '', tool_call_id: call.id ?? '' }));
  }
  calling = Boolean(message.tool_calls?.length);
}
console.log(JSON.stringify({ steps }));
