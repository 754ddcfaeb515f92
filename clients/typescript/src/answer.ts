/**
 * The MemoryOut of an answer, told while it passes by.
 *
 * Rule: nothing is read ahead, and every byte passes as it came: who stops reading stops the model server, as without this.
 */
import { memoryOut, type MemoryOut } from './protocol.ts';

/** `answer`, whose MemoryOut is told once, as soon as it is known; undefined if there is none. */
export function watched(answer: Response, tell: (out: MemoryOut | undefined) => void): Response {
  let told = false;
  const settle = (out: MemoryOut | undefined): void => {
    if (!told) tell(out);
    told = true;
  };
  if (!answer.ok || !answer.body) {
    settle(undefined);
    return answer;
  }
  const streamed = /event-stream|ndjson/.test(answer.headers.get('content-type') ?? '');
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

/** The value of a JSON text; undefined if it is none. */
export function parsed(json: string): unknown {
  try {
    return JSON.parse(json) as unknown;
  } catch {
    return undefined;
  }
}
