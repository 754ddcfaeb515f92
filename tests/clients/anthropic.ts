/**
 * The official Anthropic client talking to memd: the base URL is changed and nothing else.
 *
 * Usage: node anthropic.ts BASE_URL < REQUEST.json
 * Prints one JSON object: what came back at each step. Tools are called until the model asks for no more.
 */
import { text } from 'node:stream/consumers';
import Anthropic from '@anthropic-ai/sdk';
import { MessageStream } from '@anthropic-ai/sdk/lib/MessageStream';
import type { Message, MessageCreateParamsNonStreaming, MessageParam, Tool, ToolResultBlockParam } from '@anthropic-ai/sdk/resources/messages';
import type { MemoryIn, MemoryOut, WithMemory } from './memory.ts';

interface Asked {
  question: string;
  /** How the client asks: one answer, a stream of events, or a stream that the client assembles. */
  how: 'create' | 'stream' | 'helper';
  memory_in?: MemoryIn;
  tools?: Tool[];
  /** What the tool says, one call after the other. */
  results?: string[];
}

interface Step {
  reply: string;
  stop_reason: string | null;
  events: string[];
  memory_out: MemoryOut[];
  memory_status: string | null;
}

const client = new Anthropic({ baseURL: process.argv[2], apiKey: 'not needed', maxRetries: 0 });

function note(step: Step, event: { type: string } & WithMemory): void {
  step.events.push(event.type);
  if (event.memory_out) step.memory_out.push(event.memory_out);
}

async function create(params: MessageCreateParamsNonStreaming, step: Step): Promise<Message> {
  const { data, response } = await client.messages.create(params).withResponse();
  step.memory_status = response.headers.get('x-memory-status');
  const answer: Message & WithMemory = data;
  if (answer.memory_out) step.memory_out.push(answer.memory_out);
  return answer;
}

/** Only events are seen here; the answer is put together from them by the client's own helper. */
async function stream(params: MessageCreateParamsNonStreaming, step: Step): Promise<Message> {
  const { data, response } = await client.messages.create({ ...params, stream: true }).withResponse();
  step.memory_status = response.headers.get('x-memory-status');
  const [seen, assembled] = data.tee();
  for await (const event of seen) note(step, event);
  return await MessageStream.fromReadableStream(assembled.toReadableStream()).finalMessage();
}

async function helper(params: MessageCreateParamsNonStreaming, step: Step): Promise<Message> {
  const running = client.messages.stream(params);
  running.on('streamEvent', (event) => note(step, event));
  const answer = await running.finalMessage();
  step.memory_status = running.response?.headers.get('x-memory-status') ?? null;
  return answer;
}

const asked = JSON.parse(await text(process.stdin)) as Asked;
const results = asked.results ?? [];
const messages: MessageParam[] = [{ role: 'user', content: asked.question }];
const steps: Step[] = [];
for (;;) {
  const step: Step = { reply: '', stop_reason: null, events: [], memory_out: [], memory_status: null };
  const params = {
    model: 'tiny',
    max_tokens: 100,
    messages,
    ...(asked.tools && { tools: asked.tools }),
    ...(asked.memory_in && { memory_in: asked.memory_in }),
  };
  const answer = await { create, stream, helper }[asked.how](params, step);
  for (const block of answer.content) if (block.type === 'text') step.reply += block.text;
  step.stop_reason = answer.stop_reason;
  steps.push(step);
  messages.push({ role: 'assistant', content: answer.content });
  const calls = answer.content.filter((block) => block.type === 'tool_use');
  if (calls.length === 0) break;
  const said = calls.map((call): ToolResultBlockParam => {
    return { type: 'tool_result', tool_use_id: call.id, content: results.shift() ?? '' };
  });
  messages.push({ role: 'user', content: said });
}
console.log(JSON.stringify({ steps, messages }));
