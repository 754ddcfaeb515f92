/**
 * The two shapes that memd adds to a chat request and its answer. A client that wants them copies these lines, or uses
 * `clients/typescript`.
 */

export interface MemoryIn {
  topic_id?: string;
  related_topic_ids?: string[];
  corrections?: Correction[];
}

export interface Correction {
  chunk_ids: string[];
  action: 'Update' | 'Helpful' | 'Unhelpful';
  reason: string;
  content?: string;
  steps?: number;
}

export interface MemoryOut {
  injected_chunks: InjectedChunk[];
  signals?: Signal[];
}

export interface InjectedChunk {
  id: string;
  topic_id: string;
  canonical_id: number;
}

export interface Signal {
  type: 'context_pressure' | 'context_overflow' | 'correction_failed';
  fill_ratio?: number;
  chunk_id?: string;
}

/** What an answer or a stream chunk looks like when the request carried a `memory_in`. */
export interface WithMemory {
  memory_out?: MemoryOut;
}
