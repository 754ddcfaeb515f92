/**
 * MemoryOut in the AI SDK's `providerMetadata`, for its versions 5, 6 and 7.
 *
 * Rule: it only reads. What a request tells memd goes through {@link Memory.fetch}: provider options have another key
 * for every provider, and `@ai-sdk/openai` takes no metadata of more than 512 characters.
 *
 * Each version has types of its own for models. The types here name only what is used, so that all of them fit.
 */
import { memoryHeaders, memoryOut, type MemoryOut } from './protocol.ts';

type Metadata = Record<string, Record<string, unknown>>;
type Answer = { headers?: Record<string, string> | undefined; body?: unknown };
type Generated = { providerMetadata?: Metadata | undefined; response?: Answer | undefined };
type Part = { type: string; rawValue?: unknown; providerMetadata?: Metadata | undefined };
type Streamed = { stream: ReadableStream<Part>; response?: Answer | undefined };
type Options = { includeRawChunks?: boolean | undefined };

/** A middleware for `wrapLanguageModel` of each version from 5 to 7. */
export type MemoryMiddleware = {
  /** As the types of version 6 want it; 5 and 7 take any. */
  readonly specificationVersion: 'v3';
  wrapGenerate<Result extends Generated>(call: { doGenerate: () => PromiseLike<Result> }): Promise<Result>;
  wrapStream<Params extends Options, Result extends Streamed>(call: {
    params: Params;
    model: { doStream(params: Params): PromiseLike<Result> };
  }): Promise<Result>;
};

/**
 * A middleware for `wrapLanguageModel` that tells under `providerMetadata.memd` what memd told: the MemoryOut as
 * `memory_out`, which `memoryOut(providerMetadata?.memd)` reads, beside what {@link memoryHeaders} gives. Answers that
 * did not come through memd stay as they are.
 */
export const memoryMiddleware: MemoryMiddleware = {
  specificationVersion: 'v3',

  async wrapGenerate({ doGenerate }) {
    const result = await doGenerate();
    return { ...result, ...told(result.providerMetadata, result.response, memoryOut(result.response?.body)) };
  },

  async wrapStream({ params, model }) {
    // The provider's own parts have no room for it: it is read from the raw chunks, which the caller need not see.
    const result = await model.doStream({ ...params, includeRawChunks: true });
    let out: MemoryOut | undefined;
    const stream = result.stream.pipeThrough(
      new TransformStream<Part, Part>({
        transform(part, passing) {
          if (part.type === 'raw') {
            out ??= memoryOut(part.rawValue);
            if (params.includeRawChunks !== true) return;
          }
          const isLast = part.type === 'finish';
          passing.enqueue(isLast ? { ...part, ...told(part.providerMetadata, result.response, out) } : part);
        },
      }),
    );
    return { ...result, stream };
  },
};

function told(
  metadata: Metadata | undefined,
  answer: Answer | undefined,
  out: MemoryOut | undefined,
): { providerMetadata?: Metadata } {
  const memd = { ...memoryHeaders(answer?.headers), ...(out && { memory_out: out }) };
  return Object.keys(memd).length > 0 ? { providerMetadata: { ...metadata, memd } } : {};
}
