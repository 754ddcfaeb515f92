/**
 * What a {@link Memory} is told when it is made.
 *
 * Rule: what memd would refuse later, or silently do without memory, is an error here, at once, that says what to do.
 */
import type { MemoryIn } from './protocol.ts';

const MODES = ['full', 'readonly', 'off'] as const;
const TOPIC = /^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$/;
const TOPIC_RULE = 'use 1 to 128 letters, digits, ".", "_" or "-", beginning with a letter or digit';

/** `full`: recalls and stores; `readonly`: recalls and stores nothing; `off`: memd passes requests on as they are. */
export type MemoryMode = (typeof MODES)[number];

/** What all requests through one {@link Memory} have in common. */
export interface MemoryOptions {
  /** The memory that is read and written. Default: the URL's topic, else `default`. */
  topic?: string | undefined;
  /** Topics that are searched too and never written to. */
  relatedTopics?: readonly string[] | undefined;
  /** Default: `full`. A request's own `X-Memory-Mode` counts before it. */
  mode?: MemoryMode | undefined;
  /** Identifies the conversation, where the program has a name for it. A request's own `X-Memory-Session` counts before it. */
  session?: string | undefined;
  /** memd's own address, for `search`, `log` and `flush`. Default: `http://127.0.0.1:8766`. */
  url?: string | undefined;
  /** memd's `auth.token`, or one of `memd token add`, for `url`. Requests to a model carry it as the SDK's API key. */
  token?: string | undefined;
  /** What sends the requests. Default: the global `fetch`. */
  fetch?: typeof globalThis.fetch | undefined;
}

/** The part of a MemoryIn that every request carries. */
export function scopeOf({ topic, relatedTopics }: MemoryOptions): MemoryIn {
  if (topic !== undefined) checkTopic('topic', topic);
  relatedTopics?.forEach((related, place) => checkTopic(`relatedTopics[${place}]`, related));
  return { ...(topic && { topic_id: topic }), ...(relatedTopics && { related_topic_ids: relatedTopics }) };
}

/** The headers that every request to a model carries unless it has its own. */
export function headersOf({ mode, session }: MemoryOptions): Map<string, string> {
  const headers = new Map<string, string>();
  if (mode !== undefined) {
    if (!MODES.includes(mode)) throw wrong('mode', mode, `use one of ${MODES.join(', ')}`);
    headers.set('x-memory-mode', mode);
  }
  if (session !== undefined) {
    // Beyond these a header's value cannot go, or would be cut of its spaces.
    if (!/^[!-~]([ -~]*[!-~])?$/.test(session)) throw wrong('session', session, 'use letters, digits and signs of ASCII');
    headers.set('x-memory-session', session);
  }
  return headers;
}

/** memd's own address, without a slash at its end. */
export function addressOf({ url = 'http://127.0.0.1:8766' }: MemoryOptions): string {
  if (!URL.canParse(url)) throw wrong('url', url, "give memd's own address, like http://127.0.0.1:8766");
  return url.replace(/\/+$/, '');
}

function checkTopic(name: string, topic: string): void {
  if (typeof topic !== 'string' || !TOPIC.test(topic)) throw wrong(name, topic, TOPIC_RULE);
}

function wrong(name: string, value: unknown, remedy: string): TypeError {
  return new TypeError(`memd-client: ${name} cannot be ${JSON.stringify(value)}: ${remedy}`);
}
