/**
 * Requests through one `Memory` without any SDK, one after the other.
 *
 * Usage: node fetch.ts < ASKED.json
 * Prints one JSON object: what came back at each step.
 */
import { text } from 'node:stream/consumers';
import { Memory } from 'memd-client';
import type { Correction } from 'memd-client';

interface Step {
  url: string;
  method: string;
  body?: string;
  /** Queued before the request. */
  corrections?: Correction[];
}

const asked = JSON.parse(await text(process.stdin)) as { steps: Step[] };
const memory = new Memory();
const steps: object[] = [];
for (const { url, method, body, corrections = [] } of asked.steps) {
  memory.correct(...corrections);
  const told = { status: 0, url: '', body: '', error: '' };
  try {
    const answer = await memory.fetch(url, { method, ...(body !== undefined && { body }) });
    Object.assign(told, { status: answer.status, url: answer.url });
    told.body = await answer.text();
  } catch (error) {
    told.error = (error as Error).constructor.name;
  }
  steps.push({ ...told, pending: memory.pending });
}
console.log(JSON.stringify({ steps }));
