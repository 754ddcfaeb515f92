/**
 * memd's own routes: what a program asks without a model (docs/openapi.json).
 *
 * Rule: an answer is looked at before it is believed, and every error says what to do now.
 */
import { isRecord, type Correction, type MemoryFilter, type Note, type NoteOut } from './protocol.ts';

/** memd did not do what it was asked. */
export class MemdError extends Error {
  override readonly name: string = 'MemdError';
  /** The HTTP status of the answer; undefined if there was none. */
  readonly status: number | undefined;

  constructor(message: string, status?: number, cause?: unknown) {
    super(`memd-client: ${message}`, { cause });
    this.status = status;
  }
}

/** The token was not known, or none was given (401): it was revoked or exchanged, or never was memd's. */
export class UnknownToken extends MemdError {
  override readonly name = 'UnknownToken';
}

/** The token may not do this, or not in this topic (403); the message says which right it lacks. */
export class RightMissing extends MemdError {
  override readonly name = 'RightMissing';
}

/** Too many wrong tokens came from this address (429). */
export class TooManyAttempts extends MemdError {
  override readonly name = 'TooManyAttempts';
  /** After so many seconds the next attempt counts. */
  readonly retryAfterSeconds: number;

  constructor(message: string, status: number, retryAfterSeconds: number) {
    super(message, status);
    this.retryAfterSeconds = retryAfterSeconds;
  }
}

/** What {@link Memory.search} looks for, beside the question. */
export type SearchFilter = MemoryFilter & {
  /** Where these topics are to be searched instead of the memory's own; none: in all that there are. */
  topics?: readonly string[];
  /** Only where one of these speaks: `user`, `assistant`, `tool`. */
  roles?: readonly string[];
  /** Only what one of these principals said or wrote; `owner` is the owner. */
  authors?: readonly string[];
  /** Only chunks whose text has this, in any case. */
  contains?: string;
  /** What was stored up to this time, or canonical_id. */
  as_of?: string | number;
  /** At most so many chunks, 1 to 500. */
  limit?: number;
};

/** Which part of the log {@link Memory.log} tells. */
export type LogPart = {
  /** Of these topics instead of the memory's own; none: of all that there are. */
  topics?: readonly string[];
  /** Only what was before this time, or canonical_id; `next` of a page leads to the one before it. */
  before?: string | number;
  /** At most so many events, 1 to 500. Default: 50. */
  limit?: number;
};

/** Where a chunk is from. Times are microseconds since the epoch. */
export type Origin = {
  id: string;
  uuid: string;
  topic_id: string;
  canonical_id: number;
  said_at: number;
  roles: string[];
  content: string;
  /** `turn`, `note` or `document`. */
  kind: string;
  source: string | null;
  tags: string[];
  /** Of a note its title, of a document's chunk the headings above it. */
  heading: string[];
  page: number | null;
  sheet: string | null;
  /** The principal who said it; empty for the owner, and where there are none. */
  author: string;
};

/** A chunk that a question found, and why; `score` orders them. */
export type FoundChunk = Origin & {
  created_at: number;
  /** (`meaning` + `words` + `feedback` + `neighbours`) × `multiplier` × `echo` × `time`. */
  score: number;
  cosine: number;
  meaning: number;
  words: number;
  feedback: number;
  neighbours: number;
  multiplier: number;
  echo: number;
  time: number;
  /** Of its line in a prompt. */
  tokens: number;
  /** `injected` if a prompt with this question would get it, else why not. */
  verdict: string;
  /** The signs that a document or a tool's result in it looks like an instruction to a model. */
  instructs: string[];
};

/** All that a question found, best first. */
export type SearchAnswer = {
  question: string;
  topics: string[];
  as_of: number | null;
  /** What could not be searched, or that nothing is near the question, in sentences; null: neither. */
  note: string | null;
  budget_tokens: number;
  tokens: number;
  /** Whether the embedding model read a part of the question; else the question table's vectors stood. */
  is_model_asked: boolean;
  /** Whether the order is the reranker's; else near copies of better chunks come last. */
  is_reranked: boolean;
  chunks: FoundChunk[];
};

/** One entry of the log. */
export type LogEvent = Origin & {
  /** When it was written. */
  at: number;
  /** `told`, `replacement`, `Helpful`, `Unhelpful`, `Update`, `Undo`, `re-embedded`, `erased`, `pending` or `damaged`. */
  event: string;
  reason: string | null;
  /** The principal who wrote this entry: who said it, or made the correction; empty for the owner. */
  by: string;
  multiplier: number;
  /** Whether this is the chunk's present state, which can be recalled. */
  live: boolean;
  /** Whether the chunk was not shown any more from this entry on; its text is then what went. */
  takes_out: boolean;
  /** The uuids of the chunks that it replaced. */
  supersedes: string[];
  /** The uuids of the chunks that memory showed to the assistant that speaks in it. */
  shown: string[];
  /** As in {@link FoundChunk}. */
  instructs: string[];
};

/** A page of the log, newest first. */
export type LogPage = {
  events: LogEvent[];
  /** `before` of the next page; null: this is the last one. */
  next: number | null;
  /** The topics that could not be read, in a sentence; null: none. */
  note: string | null;
};

/** Asks memd at its own address. */
export class Routes {
  readonly #address: string;
  readonly #token: string | undefined;
  readonly #send: typeof globalThis.fetch;

  constructor(address: string, token: string | undefined, send: typeof globalThis.fetch) {
    this.#address = address;
    this.#token = token;
    this.#send = send;
  }

  async search(question: string, topics: readonly string[], filter: SearchFilter): Promise<SearchAnswer> {
    const { from, to, roles, kinds, sources, tags, authors, contains, as_of, limit } = filter;
    const named = { topic: topics, role: roles, kind: kinds, source: sources, tag: tags, author: authors };
    const answer = await this.#ask('/memd/search', { q: question, ...named, from, to, contains, as_of, limit });
    if (isRecord(answer) && areTexts(answer['chunks'])) return answer as SearchAnswer;
    throw this.#stranger();
  }

  async log(topics: readonly string[], { before, limit }: LogPart): Promise<LogPage> {
    const answer = await this.#ask('/memd/log', { topic: topics, before, limit });
    if (isRecord(answer) && areTexts(answer['events'])) return answer as LogPage;
    throw this.#stranger();
  }

  /** Apply one correction; the ids that could not be corrected. */
  async correct(topic: string, correction: Correction): Promise<string[]> {
    const answer = await this.#ask('/memd/corrections', {}, { topic_id: topic, ...correction });
    if (isRecord(answer) && areStrings(answer['failed'])) return answer['failed'];
    throw this.#stranger();
  }

  /** Remember notes; what became of each. */
  async remember(topic: string, notes: readonly Note[]): Promise<NoteOut[]> {
    const answer = await this.#ask('/memd/notes', {}, { topic_id: topic, notes });
    const taken = isRecord(answer) ? answer['notes'] : undefined;
    if (Array.isArray(taken) && taken.every((one) => isRecord(one) && areStrings(one['chunk_ids']))) return taken as NoteOut[];
    throw this.#stranger();
  }

  async #ask(path: string, query: Record<string, Value>, body?: object): Promise<unknown> {
    const asked = new URLSearchParams();
    for (const [name, value] of Object.entries(query)) {
      for (const one of Array.isArray(value) ? value : [value]) if (one !== undefined) asked.append(name, String(one));
    }
    const url = `${this.#address}${path}${asked.size > 0 ? `?${asked}` : ''}`;
    const headers = {
      ...(this.#token && { 'X-Memory-Token': this.#token }),
      ...(body && { 'Content-Type': 'application/json' }),
    };
    const init = { headers, ...(body && { method: 'POST', body: JSON.stringify(body) }) };
    const answer = await this.#send(url, init).catch((error: unknown) => {
      const remedy = 'start it (memd serve), or give its own address (admin.port) as url';
      throw new MemdError(`no memd answers at ${this.#address} (${reason(error)}): ${remedy}`, undefined, error);
    });
    const told: unknown = await answer.json().catch(() => undefined);
    if (answer.ok) return told;
    const error = isRecord(told) ? told['error'] : undefined;
    if (!isRecord(error) || typeof error['message'] !== 'string') throw this.#stranger(answer.status);
    throw refused(answer, error['message'].replace(/^memd: /, ''));
  }

  #stranger(status?: number): MemdError {
    const told = status === undefined ? '' : ` (status ${status})`;
    return new MemdError(`${this.#address} does not answer like memd${told}: give its own address (admin.port) as url`, status);
  }
}

/** The error of an answer that says why memd did not do what it was asked. */
function refused({ status, headers }: Response, why: string): MemdError {
  if (status === 401) return new UnknownToken(`${why}: give memd's auth.token as token, or that of \`memd token add\``, status);
  if (status === 403) return new RightMissing(why, status);
  if (status === 429) return new TooManyAttempts(why, status, Number(headers.get('retry-after') ?? 1));
  return new MemdError(why, status);
}

type Value = string | number | readonly string[] | undefined;

function areStrings(value: unknown): value is string[] {
  return Array.isArray(value) && value.every((one) => typeof one === 'string');
}

/** Whether these are chunks or events: whatever else they lack, they can be shown and corrected. */
function areTexts(value: unknown): boolean {
  const isText = (one: unknown): boolean =>
    isRecord(one) && ['id', 'topic_id', 'content'].every((name) => typeof one[name] === 'string');
  return Array.isArray(value) && value.every(isText);
}

/** Why a `fetch` failed: its own message may say only that it did. */
function reason(error: unknown): string {
  const { message, cause } = error instanceof Error ? error : new Error(String(error));
  if (isRecord(cause) && typeof cause['code'] === 'string') return cause['code'];
  return cause instanceof Error ? cause.message : message;
}
