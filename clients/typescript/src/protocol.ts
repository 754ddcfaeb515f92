/**
 * MemoryIn, MemoryOut and the headers, as memd speaks them (docs/protocol.md).
 *
 * Rule: what came from a server is `unknown` until it was looked at; nothing in this file throws on it.
 */

/** What a request tells memd. Unknown members are ignored by memd; a malformed one costs the request its memory. */
export type MemoryIn = {
  /** 1 to 128 letters, digits, `.`, `_`, `-`, a letter or digit first. Default: the URL's topic, else `default`. */
  topic_id?: string;
  /** Searched too, never written to. */
  related_topic_ids?: readonly string[];
  corrections?: readonly Correction[];
  /** What is to be remembered, without having been said in the chat. */
  notes?: readonly Note[];
  /** What may be recalled for this request; everything without it. */
  filter?: MemoryFilter;
};

/** A choice among what was said. Times: ISO 8601, or microseconds since the epoch; of a date `to` means its end. */
export type MemoryFilter = {
  from?: string | number;
  to?: string | number;
  kinds?: readonly string[];
  sources?: readonly string[];
  tags?: readonly string[];
};

/** Something to remember. What is live in the topic already, from the same source, is not stored again. */
export type Note = {
  /** At most 1,000,000 characters; a long one is cut into several chunks. */
  content: string;
  /** Shown with it, and it is found by it. */
  title?: string;
  tags?: readonly string[];
  /** ISO 8601, or microseconds since the epoch. Default: now. */
  said_at?: string | number;
  /** Where it came from: a URI, a path, a name. */
  source?: string;
};

/**
 * What the caller says about chunks that it was shown. `Update` deprecates them and, with `content`, puts one new chunk
 * in their place; `Helpful` and `Unhelpful` make them easier or harder to recall.
 */
export type Correction = {
  /** Ids as in `[mem:…]` and {@link MemoryOut}, shown lately in the same topic. */
  chunk_ids: readonly string[];
  /** Kept in memd's log, never interpreted. */
  reason: string;
} & ({ action: 'Update'; content?: string } | { action: 'Helpful' | 'Unhelpful'; /** Counts as so many corrections, 1 to 10. */ steps?: number });

/** What memd tells in the body of an answer, if the request carried a MemoryIn. */
export type MemoryOut = {
  /** All chunks in the prompt, also those that earlier turns brought in. */
  injected_chunks: InjectedChunk[];
  /** Absent when there is nothing to say. */
  signals?: Signal[];
  /** What became of the request's notes, in their order; absent without any. */
  notes?: NoteOut[];
};

/** What became of a note. */
export type NoteOut = {
  /** Of the chunks that it was cut into, or of those that said the same already. */
  chunk_ids?: string[];
  /** All of it was live in the topic already. */
  duplicate?: boolean;
  /** Why it was not taken: `readonly`, `store`, `disk-full`, `forbidden` (what has no id was erased for good). */
  error?: string;
};

/** A chunk that memory put into the prompt. */
export type InjectedChunk = {
  id: string;
  /** The topic it was found in. */
  topic_id: string;
  /** Orders everything that was ever stored, across topics: microseconds since the epoch. */
  canonical_id: number;
};

/** Something the caller should know. */
export type Signal =
  /** `fill_ratio`: the tokens of everything relevant over the budget for it; beyond 1 some was left out. */
  | { type: 'context_pressure' | 'context_overflow'; fill_ratio: number }
  /** `chunk_id`: not corrected, because it is unknown, no longer live, or was not shown lately. */
  | { type: 'correction_failed'; chunk_id: string }
  /** An Update without `content` took it out, and nothing stands in its place. */
  | { type: 'taken_out'; chunk_id: string }
  /** Nothing of the MemoryIn was done; `reason` says why. */
  | { type: 'memory_in_refused'; reason: string };

/** What memd tells in the headers of every answer. */
export type MemoryHeaders = {
  /** `injected`, `none`, `off`, `token-required`, `bad-memory-in`, `bad-mode`, or `degraded:` and the reason. */
  status: string;
  /** The ids of the injected chunks; at most 4 KB of them. */
  injected: string[];
  /** The mode that was in force: `full`, `readonly` or `off`. */
  mode: string;
  /** memd's id for the request. */
  turn: string;
};

/**
 * The MemoryOut in an answer's body, a stream's chunk or event, or `providerMetadata.memd`.
 *
 * @returns undefined if there is none, as in all chunks of a stream but one and in the answers of other servers. Chunks
 * and signals that are not what they should be are left out.
 */
export function memoryOut(answer: unknown): MemoryOut | undefined {
  const out = isRecord(answer) ? answer['memory_out'] : undefined;
  if (!isRecord(out) || !Array.isArray(out['injected_chunks'])) return undefined;
  const signals = Array.isArray(out['signals']) ? out['signals'].filter(isSignal) : [];
  const notes = Array.isArray(out['notes']) ? out['notes'].filter(isNoteOut) : [];
  return {
    injected_chunks: out['injected_chunks'].filter(isChunk),
    ...(signals.length > 0 && { signals }),
    ...(notes.length > 0 && { notes }),
  };
}

/**
 * What the headers of an answer say about memory.
 *
 * @param headers - as fetch gives them, or as an object with names in lower case, as the AI SDK does.
 * @returns undefined if the answer did not come through memd.
 */
export function memoryHeaders(headers: Headers | Record<string, string> | undefined): MemoryHeaders | undefined {
  const value = (name: string): string =>
    (headers instanceof Headers ? headers.get(name) : headers?.[name]) ?? '';
  const status = value('x-memory-status');
  if (!status) return undefined;
  const injected = value('x-memory-injected').split(',').filter(Boolean);
  return { status, injected, mode: value('x-memory-mode'), turn: value('x-memory-turn') };
}

/** Whether `value` is an object with members, not a list. */
export function isRecord(value: unknown): value is Record<string, unknown> {
  return typeof value === 'object' && value !== null && !Array.isArray(value);
}

function isChunk(value: unknown): value is InjectedChunk {
  if (!isRecord(value) || typeof value['canonical_id'] !== 'number') return false;
  return typeof value['id'] === 'string' && typeof value['topic_id'] === 'string';
}

function isNoteOut(value: unknown): value is NoteOut {
  if (!isRecord(value)) return false;
  const ids = value['chunk_ids'] ?? [];
  return Array.isArray(ids) && ids.every((id) => typeof id === 'string') && ['undefined', 'string'].includes(typeof value['error']);
}

function isSignal(value: unknown): value is Signal {
  if (!isRecord(value)) return false;
  if (value['type'] === 'correction_failed' || value['type'] === 'taken_out') return typeof value['chunk_id'] === 'string';
  if (value['type'] === 'memory_in_refused') return typeof value['reason'] === 'string';
  const isFill = value['type'] === 'context_pressure' || value['type'] === 'context_overflow';
  return isFill && typeof value['fill_ratio'] === 'number';
}
