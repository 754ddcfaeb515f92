/**
 * One request to a model in each of the ways in which programs hand one to a `fetch`.
 *
 * Usage: node handed.ts < ASKED.json
 * Prints one JSON object: what came back, and whether the program's own request was left as it was.
 */
import { text } from 'node:stream/consumers';
import ky from 'ky';
import createClient from 'openapi-fetch';
import { Ollama } from 'ollama';
import { Memory, memoryHeaders } from 'memd-client';
import type { Correction, MemoryOptions, Note } from 'memd-client';

interface Asked {
  url: string;
  way: 'request' | 'request and init' | 'bytes' | 'blob' | 'stream' | 'length' | 'ky' | 'openapi-fetch' | 'ollama';
  memory: MemoryOptions;
  corrections?: Correction[];
  notes?: Note[];
  headers?: Record<string, string>;
}
interface Paths {
  '/v1/chat/completions': {
    post: { requestBody: { content: { 'application/json': object } }; responses: { 200: { content: { 'application/json': object } } } };
  };
}

const asked = JSON.parse(await text(process.stdin)) as Asked;
const memory = new Memory(asked.memory);
memory.correct(...(asked.corrections ?? []));
memory.remember(...(asked.notes ?? []));
const body = { model: 'tiny', messages: [{ role: 'user', content: 'Grüße' }], metadata: { user: 'marta' } };
const json = JSON.stringify(body);
const bytes = new TextEncoder().encode(json);
const url = `${asked.url}/v1/chat/completions`;
const headers = { 'content-type': 'application/json', 'x-own': 'kept', ...asked.headers };
const init = { method: 'POST', headers };

async function sent(given: RequestInit): Promise<string> {
  return (await memory.fetch(url, { ...init, ...given })).text();
}

let mode: string | undefined;

async function told(): Promise<string> {
  switch (asked.way) {
    case 'request': {
      const answer = await memory.fetch(new Request(url, { ...init, body: json }));
      mode = memoryHeaders(answer.headers)?.mode;
      return answer.text();
    }
    case 'request and init': // init counts before the request, as fetch has it
      return (await memory.fetch(new Request(url, { method: 'PUT', body: 'old' }), { ...init, body: json })).text();
    case 'bytes':
      return sent({ body: bytes });
    case 'blob':
      return sent({ body: new Blob([bytes]) });
    case 'stream': {
      const half = { body: new Blob([bytes]).stream(), duplex: 'half' };
      return sent(half);
    }
    case 'length':
      return sent({ body: json, headers: { ...headers, 'content-length': String(bytes.length) } });
    case 'ky':
      return ky.create({ fetch: memory.fetch, headers: { 'x-own': 'kept' } }).post(url, { json: body }).text();
    case 'openapi-fetch': {
      const client = createClient<Paths>({ baseUrl: asked.url, fetch: memory.fetch, headers: { 'x-own': 'kept' } });
      return JSON.stringify((await client.POST('/v1/chat/completions', { body })).data);
    }
    case 'ollama': {
      const ollama = new Ollama({ host: asked.url, fetch: memory.fetch, headers: { 'x-own': 'kept' } });
      const parts: object[] = [];
      const { model, messages } = body;
      for await (const part of await ollama.chat({ model, messages, stream: true })) parts.push(part);
      return JSON.stringify(parts);
    }
  }
}

const answered = await told();
const { pending, pendingNotes: notes, refusedNotes: refused_notes } = memory;
console.log(JSON.stringify({ body: answered, pending, notes, refused_notes, mode }));
