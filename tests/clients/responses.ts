/**
 * The official OpenAI client using the responses API through memd: the base URL is changed and nothing else.
 *
 * Usage: node responses.ts BASE_URL < REQUEST.json
 * Prints one JSON object: what came back at each step. Tools are called until the model asks for no more.
 */
import { text } from 'node:stream/consumers';
import OpenAI from 'openai';
import type { Response, ResponseCreateParamsNonStreaming, ResponseInputItem, Tool } from 'openai/resources/responses/responses';
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
  events: string[];
  memory_out: MemoryOut[];
  memory_status: string | null;
}

const client = new OpenAI({ baseURL: process.argv[2], apiKey: 'not needed', maxRetries: 0 });

async function create(params: ResponseCreateParamsNonStreaming, step: Step): Promise<Response> {
  const { data, response } = await client.responses.create(params).withResponse();
  step.memory_status = response.headers.get('x-memory-status');
  const answer: Response & WithMemory = data;
  if (answer.memory_out) step.memory_out.push(answer.memory_out);
  return answer;
}

async function stream(params: ResponseCreateParamsNonStreaming, step: Step): Promise<Response> {
  const { data, response } = await client.responses.create({ ...params, stream: true }).withResponse();
  step.memory_status = response.headers.get('x-memory-status');
  let answer: Response | undefined;
  for await (const event of data) {
    step.events.push(event.type);
    const memory: WithMemory = event as WithMemory;
    if (memory.memory_out) step.memory_out.push(memory.memory_out);
    if (event.type === 'response.output_text.delta') step.reply += event.delta;
    if (event.type === 'response.completed') answer = event.response;
  }
  if (!answer) throw new Error('the stream did not come to its end');
  return answer;
}

async function helper(params: ResponseCreateParamsNonStreaming, step: Step): Promise<Response> {
  const { stream: _, ...rest } = params;
  const running = client.responses.stream(rest);
  running.on('event', (event) => {
    step.events.push(event.type);
    const memory: WithMemory = event as WithMemory;
    if (memory.memory_out) step.memory_out.push(memory.memory_out);
  });
  return await running.finalResponse();
}

const asked = JSON.parse(await text(process.stdin)) as Asked;
const results = asked.results ?? [];
const input: ResponseInputItem[] = [{ role: 'user', content: asked.question }];
const steps: Step[] = [];
for (;;) {
  const step: Step = { reply: '', events: [], memory_out: [], memory_status: null };
  const answer = await { create, stream, helper }[asked.how](
    {
      model: 'tiny',
      input,
      ...(asked.tools && { tools: asked.tools }),
      // The SDK types metadata values as strings; memd reads a JSON string as well as an object.
      ...(asked.memory_in && { metadata: { memory_in: JSON.stringify(asked.memory_in) } }),
    },
    step,
  );
  step.reply ||= answer.output_text ?? '';
  steps.push(step);
  input.push(...(answer.output as ResponseInputItem[]));
  const calls = answer.output.filter((item) => item.type === 'function_call');
  for (const call of calls) {
    input.push({ type: 'function_call_output', call_id: call.call_id, output: results.shift() ?? '' });
  }
  if (calls.length === 0) break;
}
console.log(JSON.stringify({ steps, input }));
