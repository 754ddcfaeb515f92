/**
 * Calls of one `Memory` that need no model, one after the other.
 *
 * Usage: node routes.ts, with one JSON object in each line of its input, each for a `Memory` of its own.
 * Answers each with a line: what each call told, and what waited after it.
 */
import { createInterface } from 'node:readline';
import { MemdError, Memory, TooManyAttempts } from 'memd-client';
import type { Correction, LogPart, MemoryOptions, Note, SearchFilter } from 'memd-client';

type Call =
  | { call: 'search'; question: string; filter?: SearchFilter }
  | { call: 'log'; part?: LogPart }
  | { call: 'flush'; corrections?: Correction[]; notes?: Note[] };

let memory: Memory;

async function called(step: Call): Promise<object> {
  if (step.call === 'search') return memory.search(step.question, step.filter);
  if (step.call === 'log') return memory.log(step.part);
  memory.correct(...(step.corrections ?? []));
  memory.remember(...(step.notes ?? []));
  return memory.flush();
}

for await (const line of createInterface(process.stdin)) {
  const asked = JSON.parse(line) as { memory: MemoryOptions; steps: Call[] };
  memory = new Memory(asked.memory);
  const steps: object[] = [];
  for (const step of asked.steps) {
    const told = await called(step).catch((error: unknown) => {
      if (!(error instanceof MemdError)) throw error;
      const wait = error instanceof TooManyAttempts ? { retry_after: error.retryAfterSeconds } : {};
      return { error: error.message, status: error.status ?? null, ...(error.name !== 'MemdError' && { name: error.name }), ...wait };
    });
    const { pending, refused, pendingNotes, refusedNotes } = memory;
    const queues = { pending, refused, notes: pendingNotes, refused_notes: refusedNotes };
    steps.push({ told, ...queues });
  }
  console.log(JSON.stringify({ steps }));
}
