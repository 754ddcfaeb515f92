/**
 * A MemoryIn and its correction with every member that there is, printed as JSON; the rest of this file has to compile.
 */
import { Memory, type Correction, type MemoryFilter, type MemoryIn, type Note } from 'memd-client';

const correction: Required<Correction & { action: 'Update' }> = {
  chunk_ids: ['a3f9'],
  action: 'Update',
  reason: 'we moved',
  content: 'The office is in Bergen.',
};
const filter: Required<MemoryFilter> = { from: 1_700_000_000_000_001, to: 1_700_000_000_000_002, kinds: ['turn'], sources: ['handbook.md'], tags: ['ops'] };
const note: Required<Note> = { content: 'Lamps are in the attic.', title: 'Lamps', tags: ['ops'], said_at: 1_700_000_000_000_003, source: 'wiki' };
const whole: Required<MemoryIn> = {
  topic_id: 'office',
  related_topic_ids: ['company-wide'],
  corrections: [correction, { chunk_ids: ['b2e1'], action: 'Helpful', steps: 10, reason: 'it answered the question' }],
  notes: [note],
  filter,
};

function mustNotCompile(memory: Memory): void {
  // @ts-expect-error -- only an Update has a content
  memory.correct({ chunk_ids: ['a3f9'], action: 'Unhelpful', reason: 'beside the point', content: 'No.' });
  // @ts-expect-error -- no reason
  memory.correct({ chunk_ids: ['a3f9'], action: 'Helpful' });
  // @ts-expect-error -- no such action
  memory.correct({ chunk_ids: ['a3f9'], action: 'Delete', reason: 'wrong' });
  // @ts-expect-error -- a misspelled option
  new Memory({ related_topics: ['company-wide'] });
}

void mustNotCompile;
console.log(JSON.stringify(whole));
