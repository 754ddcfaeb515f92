/**
 * memd-client in a runtime, imported. Usage: RUNTIME runtime.mjs ASKED; prints one JSON object.
 */
import process from 'node:process';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateText, wrapLanguageModel } from 'ai';
import * as memd from 'memd-client';
import * as middleware from 'memd-client/ai-sdk';
import { round } from './runtime_round.cjs';

const ai = { createOpenAICompatible, generateText, wrapLanguageModel };
console.log(JSON.stringify(await round(memd, middleware, ai, JSON.parse(process.argv[2]))));
