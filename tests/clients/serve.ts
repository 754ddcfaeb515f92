/**
 * Runs the other scripts of this folder one after the other, as `node SCRIPT BASE_URL < REQUEST.json` does each: what
 * they import is loaded once.
 *
 * Each line of its input is {"script": string, "base_url": string, "asked": object}; it answers with what was printed.
 */
import { createInterface } from 'node:readline';
import { Readable } from 'node:stream';

let number = 0;
for await (const line of createInterface(process.stdin)) {
  const { script, base_url, asked } = JSON.parse(line) as { script: string; base_url: string; asked: object };
  process.argv[2] = base_url;
  Object.defineProperty(process, 'stdin', { value: Readable.from([JSON.stringify(asked)]), configurable: true });
  number += 1;
  await import(`./${script}?${number}`); // evaluated anew for each number, and not what it imports
}
