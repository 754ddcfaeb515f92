/**
 * A `fetch` that puts a MemoryIn into every request to a model: any SDK that takes a `fetch` can speak to memd with it.
 *
 * Rule: requests that are none to a model, or carry a MemoryIn of their own, and all answers reach the other side as
 * they are. A correction leaves the queue for good only when memd said what became of it.
 */
import { isRecord, memoryHeaders, memoryOut, type Correction, type MemoryIn, type MemoryOut, type Note } from './protocol.ts';

const NOTES_MAX = 100; // memd takes so many at once
const MODEL_REQUEST = /\/(chat\/completions|responses|messages)$/;

/** What all requests through one {@link Memory} have in common. */
export interface MemoryOptions {
  /** The memory that is read and written. Default: the URL's topic, else `default`. */
  topic?: string | undefined;
  /** Topics that are searched too and never written to. */
  relatedTopics?: readonly string[] | undefined;
  /** What sends the requests. Default: the global `fetch`. */
  fetch?: typeof globalThis.fetch | undefined;
}

/** One topic's side of the conversation with memd: give its {@link Memory.fetch} to the SDK. */
export class Memory {
  readonly #scope: MemoryIn;
  readonly #send: typeof globalThis.fetch;
  readonly #pending: Correction[] = [];
  readonly #refused: Correction[] = [];
  readonly #notes: Note[] = [];
  readonly #refusedNotes: Note[] = [];

  constructor({ topic, relatedTopics, fetch }: MemoryOptions = {}) {
    this.#scope = { ...(topic && { topic_id: topic }), ...(relatedTopics && { related_topic_ids: relatedTopics }) };
    this.#send = fetch ?? ((input, init) => globalThis.fetch(input, init));
  }

  /**
   * Queue corrections for the next request to a model.
   *
   * They are queued again, before later ones, if that request fails or is answered without memory. So none is lost, and
   * one may be applied twice: memd stores corrections before it asks the model, and takes a repeated request for a
   * retry only while its last message and its corrections are the same.
   */
  correct(...corrections: Correction[]): void {
    this.#pending.push(...corrections);
  }

  /**
   * Queue notes for the next request to a model: memd stores them before it asks the model.
   *
   * They are queued again, before later ones, if that request fails or memd does not say that it took them. One that
   * memd has already is not stored again, so nothing is kept twice.
   */
  remember(...notes: Note[]): void {
    this.#notes.push(...notes);
  }

  /** The notes that wait for the next request. */
  get pendingNotes(): readonly Note[] {
    return [...this.#notes];
  }

  /** The notes that memd could not read (`X-Memory-Status: bad-memory-in`). They are not sent again. */
  get refusedNotes(): readonly Note[] {
    return [...this.#refusedNotes];
  }

  /** The corrections that wait for the next request. */
  get pending(): readonly Correction[] {
    return [...this.#pending];
  }

  /** The corrections that memd could not read (`X-Memory-Status: bad-memory-in`). They are not sent again. */
  get refused(): readonly Correction[] {
    return [...this.#refused];
  }

  /** A `fetch` for the options of an SDK's client or provider. */
  readonly fetch: typeof globalThis.fetch = async (input, init) => {
    const body = modelRequest(input, init);
    if (!body) return this.#send(input, init);
    const corrections = this.#pending.splice(0);
    const notes = this.#notes.splice(0, NOTES_MAX);
    const memoryIn: MemoryIn = {
      ...this.#scope,
      ...(corrections.length > 0 && { corrections }),
      ...(notes.length > 0 && { notes }),
    };
    // A string, because that is what metadata's values are in the OpenAI API.
    body.metadata['memory_in'] = JSON.stringify(memoryIn);
    let answer: Response;
    try {
      answer = await this.#send(input, { ...init, body: JSON.stringify(body) });
    } catch (error) {
      this.#pending.unshift(...corrections);
      this.#notes.unshift(...notes);
      throw error;
    }
    if (corrections.length === 0 && notes.length === 0) return answer;
    return watched(answer, (out) => {
      this.#settle(corrections, answer, out);
      this.#settleNotes(notes, answer, out);
    });
  };

  #settleNotes(notes: Note[], answer: Response, out: MemoryOut | undefined): void {
    if (memoryHeaders(answer.headers)?.status === 'bad-memory-in') this.#refusedNotes.push(...notes);
    else this.#notes.unshift(...notes.filter((_, place) => !out?.notes?.[place]?.chunk_ids));
  }

  #settle(corrections: Correction[], answer: Response, out: MemoryOut | undefined): void {
    const { status, mode } = memoryHeaders(answer.headers) ?? {};
    if (status === 'bad-memory-in') {
      this.#refused.push(...corrections); // sent again, they would cost every request its memory
      return;
    }
    const failed = new Set(out?.signals?.map((signal) => 'chunk_id' in signal && signal.chunk_id));
    const noneApplied = corrections.every((correction) => correction.chunk_ids.every((id) => failed.has(id)));
    const unwritten = status?.startsWith('degraded:') && noneApplied; // else another time would fail too
    if (corrections.length === 0) return;
    if (!out || mode === 'readonly' || unwritten) this.#pending.unshift(...corrections);
  }
}

type ModelRequest = Record<string, unknown> & { metadata: Record<string, unknown> };

/** The body of a request to a model into which a MemoryIn can be put. */
function modelRequest(input: RequestInfo | URL, init: RequestInit | undefined): ModelRequest | undefined {
  if (init?.method?.toUpperCase() !== 'POST' || typeof init.body !== 'string') return undefined;
  const url = typeof input === 'string' || input instanceof URL ? input : input.url;
  if (!MODEL_REQUEST.test(new URL(url, 'http://localhost').pathname)) return undefined;
  const body = parsed(init.body);
  if (!isRecord(body)) return undefined;
  const metadata = body['metadata'] ?? {};
  if (!isRecord(metadata) || 'memory_in' in metadata || 'memory_in' in body) return undefined;
  return { ...body, metadata };
}

/**
 * `answer`, whose MemoryOut is told as it passes by: once, as soon as it is known, undefined if there is none.
 *
 * Nothing is read ahead: who stops reading stops the model server, as without this.
 */
function watched(answer: Response, tell: (out: MemoryOut | undefined) => void): Response {
  let told = false;
  const settle = (out: MemoryOut | undefined): void => {
    if (!told) tell(out);
    told = true;
  };
  if (!answer.ok || !answer.body) {
    settle(undefined);
    return answer;
  }
  const streamed = answer.headers.get('content-type')?.includes('text/event-stream') ?? false;
  const decoder = new TextDecoder();
  let text = ''; // a body, or an unfinished line of a stream
  const look = (json: string): void => {
    const out = json.includes('"memory_out"') ? memoryOut(parsed(json.replace(/^data:/, ''))) : undefined;
    if (out) settle(out);
  };
  const see = (bytes: Uint8Array): void => {
    text += decoder.decode(bytes, { stream: true });
    if (!streamed) return;
    const lines = text.split(/\r\n|\n|\r/);
    text = lines.pop() ?? '';
    lines.forEach(look);
  };
  const end = (): void => {
    look(text);
    settle(undefined);
  };
  const reader = answer.body.getReader();
  const source: UnderlyingDefaultSource<Uint8Array<ArrayBuffer>> = {
    async pull(passing) {
      const { done, value } = await reader.read().catch((error: unknown) => {
        end();
        throw error;
      });
      if (done) {
        end();
        passing.close();
        return;
      }
      if (!told) see(value);
      passing.enqueue(value);
    },
    cancel(reason) {
      end();
      return reader.cancel(reason);
    },
  };
  const passed = new Response(new ReadableStream(source, { highWaterMark: 0 }), answer);
  return Object.defineProperty(passed, 'url', { value: answer.url });
}

function parsed(json: string): unknown {
  try {
    return JSON.parse(json) as unknown;
  } catch {
    return undefined;
  }
}
