/**
 * Requests through one `Memory` without any SDK, one after the other.
 *
 * Usage: node fetch.ts, with one JSON object in each line of its input, each for a `Memory` of its own.
 * Answers each with a line: what came back at each step.
 */
import { createInterface } from 'node:readline';
import { Memory } from 'memd-client';
import type { Correction, Note } from 'memd-client';

interface Step {
  url: string;
  method: string;
  body?: string;
  /** Queued before the request. */
  corrections?: Correction[];
  /** Queued while the request is under way. */
  meanwhile?: Correction[];
  notes?: Note[];
  /** Cancel the answer after its first bytes. */
  leave?: boolean;
  /** Let the answer come in pieces of so many bytes. */
  slice?: number;
}

let slice: number | undefined;

async function sliced(input: RequestInfo | URL, init?: RequestInit): Promise<Response> {
  const answer = await fetch(input, init);
  if (!slice) return answer;
  const bytes = new Uint8Array(await answer.arrayBuffer());
  const size = slice;
  const pieces = new ReadableStream<Uint8Array>({
    start(passing) {
      for (let start = 0; start < bytes.length; start += size) passing.enqueue(bytes.slice(start, start + size));
      passing.close();
    },
  });
  return new Response(pieces, answer);
}

async function first(answer: Response): Promise<string> {
  const reader = answer.body!.getReader();
  const { value } = await reader.read();
  await reader.cancel();
  return new TextDecoder().decode(value);
}

for await (const line of createInterface(process.stdin)) {
  const asked = JSON.parse(line) as { steps: Step[] };
  const memory = new Memory({ fetch: sliced });
  const steps: object[] = [];
  for (const { url, method, body, corrections = [], meanwhile = [], notes = [], leave, ...step } of asked.steps) {
    slice = step.slice;
    memory.correct(...corrections);
    memory.remember(...notes);
    const told = { status: 0, url: '', body: '', error: '' };
    try {
      const asking = memory.fetch(url, { method, ...(body !== undefined && { body }) });
      memory.correct(...meanwhile);
      const answer = await asking;
      Object.assign(told, { status: answer.status, url: answer.url });
      told.body = leave ? await first(answer) : await answer.text();
    } catch (error) {
      told.error = (error as Error).constructor.name;
    }
    steps.push({ ...told, pending: memory.pending, notes: memory.pendingNotes });
  }
  console.log(JSON.stringify({ steps }));
}
