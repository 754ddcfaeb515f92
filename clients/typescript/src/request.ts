/**
 * Requests to a model, in the shapes in which SDKs hand them to a `fetch`.
 *
 * Rule: a request is read without being used up, so that it can go on as it came.
 *
 * openai-node, Anthropic's SDK, the AI SDK and LangChain.js call `fetch(url, { body: '…' })`; ky and openapi-fetch
 * `fetch(request, options)`.
 */
import { parsed } from './answer.ts';
import { isRecord } from './protocol.ts';

const MODEL_PATH = /\/(chat\/completions|responses|messages|api\/chat)$/;

/** The arguments of a `fetch`. */
export type Fetched = { input: RequestInfo | URL; init: RequestInit | undefined };

/** A body into which a MemoryIn can be put. */
export type ModelBody = Record<string, unknown> & { metadata: Record<string, unknown> };

/** Whether memd would take this for a request to a model. */
export function isToModel({ input, init }: Fetched): boolean {
  const request = asRequest(input);
  if ((init?.method ?? request?.method)?.toUpperCase() !== 'POST') return false;
  return MODEL_PATH.test(new URL(request?.url ?? String(input), 'http://localhost').pathname);
}

/** The headers with which a request goes out. */
export function headersSent({ input, init }: Fetched): Headers {
  return new Headers(init?.headers ?? asRequest(input)?.headers);
}

/** The text of a request's body, at once where that can be; undefined if it could be read once only. */
export function bodyText({ input, init }: Fetched): string | Promise<string> | undefined {
  const body = init?.body;
  if (typeof body === 'string') return body;
  if (body instanceof ArrayBuffer || ArrayBuffer.isView(body) || body instanceof Blob) return new Response(body).text();
  const request = asRequest(input);
  if (body != null || !request || request.bodyUsed) return undefined;
  return request.clone().text();
}

/** The body of a request to a model, if it is one that has no MemoryIn yet. */
export function modelBody(text: string): ModelBody | undefined {
  const body = parsed(text);
  if (!isRecord(body)) return undefined;
  const metadata = body['metadata'] ?? {};
  if (!isRecord(metadata) || 'memory_in' in metadata || 'memory_in' in body) return undefined;
  return { ...body, metadata: { ...metadata } };
}

/** The request with these headers and, where there is a new one, this body. */
export function changed({ input, init }: Fetched, headers: Headers, body?: string): Fetched {
  const parts = { headers, ...(body !== undefined && { body }) };
  if (body !== undefined) headers.delete('content-length'); // the old body's
  if (!(input instanceof Request)) return { input, init: { ...init, ...parts } };
  const { headers: _, body: __, ...options } = init ?? {};
  return { input: new Request(input, { ...init, ...parts }), init: options };
}

function asRequest(input: RequestInfo | URL): Request | undefined {
  return typeof input === 'string' || input instanceof URL ? undefined : input;
}
