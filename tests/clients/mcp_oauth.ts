/**
 * The official MCP client and its whole flow of OAuth, as a program on somebody's computer runs it.
 *
 * Usage: node mcp_oauth.ts URL < ASKED.json
 * Prints lines of JSON: {"open": ADDRESS} where it would open a browser, and in the end {"told": …}.
 */
import { once } from 'node:events';
import { createServer } from 'node:http';
import type { AddressInfo } from 'node:net';
import { text } from 'node:stream/consumers';
import type { OAuthClientProvider } from '@modelcontextprotocol/sdk/client/auth.js';
import { Client } from '@modelcontextprotocol/sdk/client/index.js';
import { StreamableHTTPClientTransport } from '@modelcontextprotocol/sdk/client/streamableHttp.js';
import type { OAuthClientInformationMixed, OAuthTokens } from '@modelcontextprotocol/sdk/shared/auth.js';

interface Asked {
  name: string;
  calls: { name: string; arguments: Record<string, unknown> }[];
}

interface Told {
  /** What the browser brought back: `code`, `error`, `state`, `iss`. */
  answer: Record<string, string>;
  scope?: string;
  replies?: string[];
  refreshed?: boolean;
  after_revocation?: string;
}

const url = new URL(process.argv[2] ?? '');
const asked = JSON.parse(await text(process.stdin)) as Asked;

let took: (answer: Record<string, string>) => void;
const answered = new Promise<Record<string, string>>((resolve) => (took = resolve));
const listener = createServer((request, response) => {
  const { pathname, searchParams } = new URL(request.url ?? '/', 'http://localhost');
  response.writeHead(200, { 'Content-Type': 'text/html', Connection: 'close' });
  response.end('<!doctype html><link rel="icon" href="data:,"><h1>Back in the program</h1>');
  if (pathname === '/callback') took(Object.fromEntries(searchParams));
}).listen(0, 'localhost');
await once(listener, 'listening');
const redirectUrl = `http://localhost:${(listener.address() as AddressInfo).port}/callback`;

class Kept implements OAuthClientProvider {
  kept: { client?: OAuthClientInformationMixed; tokens?: OAuthTokens; verifier?: string } = {};
  redirectUrl = redirectUrl;
  clientMetadata = {
    client_name: asked.name,
    redirect_uris: [redirectUrl],
    grant_types: ['authorization_code', 'refresh_token'],
    response_types: ['code'],
    token_endpoint_auth_method: 'none',
  };
  state = () => 'a state';
  clientInformation = () => this.kept.client;
  saveClientInformation = (client: OAuthClientInformationMixed) => void (this.kept.client = client);
  tokens = () => this.kept.tokens;
  saveTokens = (tokens: OAuthTokens) => void (this.kept.tokens = tokens);
  redirectToAuthorization = (address: URL) => console.log(JSON.stringify({ open: address.href }));
  saveCodeVerifier = (verifier: string) => void (this.kept.verifier = verifier);
  invalidateCredentials = (what: string) => void (what === 'tokens' && (this.kept.tokens = undefined));
  codeVerifier = () => this.kept.verifier ?? '';
}

const authProvider = new Kept();

async function connected(): Promise<Client> {
  const client = new Client({ name: 'memd-tests', version: '1.0.0' });
  await client.connect(new StreamableHTTPClientTransport(url, { authProvider }));
  return client;
}

async function reply(client: Client, call: Asked['calls'][number]): Promise<string> {
  const { content } = await client.callTool(call);
  return (content as { text: string }[]).map((part) => part.text).join('\n');
}

async function flow(): Promise<Told> {
  const first = new StreamableHTTPClientTransport(url, { authProvider });
  const failed = await new Client({ name: 'memd-tests', version: '1.0.0' }).connect(first).catch((error: Error) => error);
  if (failed?.constructor.name !== 'UnauthorizedError') throw new Error(`it should have asked: ${failed}`);
  const answer = await answered;
  if (!answer.code) return { answer };
  await first.finishAuth(answer.code);
  const { scope, access_token: access } = authProvider.kept.tokens ?? {};
  const client = await connected();
  const replies = [];
  for (const call of asked.calls) replies.push(await reply(client, call));
  authProvider.kept.tokens = { ...authProvider.kept.tokens!, access_token: 'one that is over' };
  replies.push(await reply(client, asked.calls[0]!));
  const refreshed = ![access, 'one that is over'].includes(authProvider.kept.tokens?.access_token);
  const server = await fetch(new URL('/.well-known/oauth-authorization-server', url));
  const { revocation_endpoint: revoke } = (await server.json()) as { revocation_endpoint: string };
  await fetch(revoke, { method: 'POST', body: new URLSearchParams({ token: authProvider.kept.tokens?.refresh_token ?? '' }) });
  const after = await reply(client, asked.calls[0]!).catch((error: Error) => error.constructor.name);
  await client.close();
  return { answer, scope, replies, refreshed, after_revocation: after };
}

console.log(JSON.stringify({ told: await flow() }));
listener.closeAllConnections();
listener.close();
