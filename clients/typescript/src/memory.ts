/**
 * A `fetch` that puts a MemoryIn into every request to a model: any SDK that takes a `fetch` can speak to memd with it.
 *
 * Rule: requests that are none to a model, or carry a MemoryIn of their own, and all answers reach the other side as
 * they are. A correction leaves the queue for good only when memd said what became of it.
 */
import { watched } from './answer.ts';
import { addressOf, headersOf, scopeOf, type MemoryOptions } from './options.ts';
import { memoryHeaders, type Correction, type MemoryIn, type MemoryOut, type Note, type NoteOut } from './protocol.ts';
import { bodyText, changed, headersSent, isToModel, modelBody, type Fetched, type ModelBody } from './request.ts';
import { MemdError, Routes, type LogPage, type LogPart, type SearchAnswer, type SearchFilter } from './routes.ts';

const NOTES_MAX = 100; // memd takes so many at once
const DEFAULT_TOPIC = 'default';

/** What became of the corrections and notes that {@link Memory.flush} sent. */
export interface Flushed {
  /** The ids that could not be corrected: unknown, or no longer live. */
  failed: string[];
  /** What became of each note, in their order. */
  notes: NoteOut[];
}

/** One topic's side of the conversation with memd: give its {@link Memory.fetch} to the SDK. */
export class Memory {
  readonly #scope: MemoryIn;
  readonly #headers: Map<string, string>;
  readonly #send: typeof globalThis.fetch;
  readonly #routes: Routes;
  readonly #pending: Correction[] = [];
  readonly #refused: Correction[] = [];
  readonly #notes: Note[] = [];
  readonly #refusedNotes: Note[] = [];

  /** @throws TypeError at once where memd would refuse an option later; it says what to write instead. */
  constructor(options: MemoryOptions = {}) {
    this.#scope = scopeOf(options);
    this.#headers = headersOf(options);
    this.#send = options.fetch ?? ((input, init) => globalThis.fetch(input, init));
    this.#routes = new Routes(addressOf(options), options.token, this.#send);
  }

  /**
   * Queue corrections for the next request to a model, or for {@link flush}.
   *
   * They are queued again, before later ones, if that request fails or is answered without memory. So none is lost, and
   * one may be applied twice: memd stores corrections before it asks the model, and takes a repeated request for a
   * retry only while its last message and its corrections are the same.
   */
  correct(...corrections: Correction[]): void {
    this.#pending.push(...corrections);
  }

  /**
   * Queue notes for the next request to a model, or for {@link flush}: memd stores them before it asks the model.
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

  /**
   * The notes that memd could not read (`X-Memory-Status: bad-memory-in`), and those of which something was erased for
   * good. They are not sent again.
   */
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

  /**
   * What is remembered about a question, best first, without asking a model. Nothing is stored.
   *
   * @throws MemdError that says what to do, as also {@link log} and {@link flush}.
   */
  search(question: string, { topics, ...filter }: SearchFilter = {}): Promise<SearchAnswer> {
    const own = [this.#topic, ...(this.#scope.related_topic_ids ?? [])];
    return this.#routes.search(question, topics ?? own, filter);
  }

  /** What was stored and corrected, newest first. */
  log({ topics, ...part }: LogPart = {}): Promise<LogPage> {
    return this.#routes.log(topics ?? [this.#topic], part);
  }

  /**
   * Send what is queued now, without a model. Corrections may name any chunk of the topic, shown lately or not.
   *
   * What memd cannot read is refused, as in {@link refused} and {@link refusedNotes}; all else that it did not take
   * stays queued.
   */
  async flush(): Promise<Flushed> {
    const mode = this.#headers.get('x-memory-mode') ?? 'full';
    if (mode !== 'full') throw new MemdError(`mode is ${mode}, so nothing is stored: flush a Memory of mode full`);
    const flushed: Flushed = { failed: [], notes: [] };
    for (let notes = this.#notes.splice(0, NOTES_MAX); notes.length > 0; notes = this.#notes.splice(0, NOTES_MAX)) {
      const sent = this.#routes.remember(this.#topic, notes);
      flushed.notes.push(...(await kept(sent, notes, this.#notes, this.#refusedNotes)));
    }
    for (let next = this.#pending.splice(0, 1); next[0]; next = this.#pending.splice(0, 1)) {
      const sent = this.#routes.correct(this.#topic, next[0]);
      flushed.failed.push(...(await kept(sent, next, this.#pending, this.#refused)));
    }
    return flushed;
  }

  /** A `fetch` for the options of an SDK's client or provider. */
  readonly fetch: typeof globalThis.fetch = async (input, init) => {
    const asked = { input, init };
    if (!isToModel(asked)) return this.#send(input, init);
    const headers = headersSent(asked);
    for (const [name, value] of this.#headers) if (!headers.has(name)) headers.set(name, value);
    const mode = headers.get('x-memory-mode')?.toLowerCase() ?? 'full';
    // With `off` memd passes everything on: a MemoryIn would reach the model server.
    const text = mode === 'off' ? undefined : bodyText(asked);
    const body = modelBody((typeof text === 'string' ? text : await text) ?? '');
    if (body) return this.#ask(asked, headers, body, mode === 'full');
    const { input: same, init: other } = this.#headers.size > 0 ? changed(asked, headers) : asked;
    return this.#send(same, other);
  };

  get #topic(): string {
    return this.#scope.topic_id ?? DEFAULT_TOPIC;
  }

  async #ask(asked: Fetched, headers: Headers, body: ModelBody, stores: boolean): Promise<Response> {
    const corrections = stores ? this.#pending.splice(0) : [];
    const notes = stores ? this.#notes.splice(0, NOTES_MAX) : [];
    const memoryIn: MemoryIn = {
      ...this.#scope,
      ...(corrections.length > 0 && { corrections }),
      ...(notes.length > 0 && { notes }),
    };
    // A string, because that is what metadata's values are in the OpenAI API.
    body.metadata['memory_in'] = JSON.stringify(memoryIn);
    const { input, init } = changed(asked, headers, JSON.stringify(body));
    let answer: Response;
    try {
      answer = await this.#send(input, init);
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
  }

  #settleNotes(notes: Note[], answer: Response, out: MemoryOut | undefined): void {
    const isForGood = memoryHeaders(answer.headers)?.status === 'bad-memory-in';
    const isRefused = (place: number): boolean => isForGood || out?.notes?.[place]?.error === 'forbidden';
    this.#refusedNotes.push(...notes.filter((_, place) => isRefused(place)));
    this.#notes.unshift(...notes.filter((_, place) => !isRefused(place) && !out?.notes?.[place]?.chunk_ids));
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

/** Of what memd cannot read, and of what was erased for good: it would be refused again. */
const REFUSED_STATUSES = [400, 409];

/** What memd told; where it failed, what was sent is refused if memd will never take it, else queued again. */
async function kept<Sent, Told>(told: Promise<Told>, sent: Sent[], queue: Sent[], refused: Sent[]): Promise<Told> {
  try {
    return await told;
  } catch (error) {
    if (error instanceof MemdError && REFUSED_STATUSES.includes(error.status ?? 0)) refused.push(...sent);
    else queue.unshift(...sent);
    throw error;
  }
}
