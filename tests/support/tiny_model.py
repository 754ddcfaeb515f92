"""A language model of a quarter of a megabyte that real llama.cpp loads and whose answer shows what was in its prompt.

Rule: the weights are computed, never trained, and generation is greedy, so a prompt's answer is certain: one attention
head looks for the marker token anywhere in the prompt; the rest is a chain that emits one of two replies.

Its vocabulary is bytes and single ASCII characters, so any text tokenizes and one ASCII character is about one token
(four times what cl100k counts, which makes memd's drift correction work for its living).

Two architectures: llama, whose one layer sees everything, and with `sliding_window` gemma3, whose first layer sees only
that many tokens back, so that llama.cpp keeps no more of it. The marker is found by a layer that sees everything.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float32]

# As small as can be: reading prompts that fill a window was much of the tests' processor time.
EMBEDDING_WIDTH = 64
LLAMA_LAYERS, GEMMA_LAYERS = 1, 2
HEADS, KV_HEADS = 2, 1
HEAD_WIDTH = EMBEDDING_WIDTH // HEADS
LLAMA_SLOWEST = HEAD_WIDTH - 2  # of the rope pair that rotates so slowly that the marker is found at any distance
GEMMA_SLOWEST = HEAD_WIDTH // 2 - 1  # the same where a pair is (i, i + half) instead of (2i, 2i + 1)
GEMMA_EPSILON = 1.0  # so large that a norm leaves small vectors small: else an unsure head is as loud as a sure one

CHATML_TEMPLATE = (
    "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\\n' + (m.content or '') -}}"
    "{%- if m.tool_calls -%}{%- for t in m.tool_calls -%}"
    "{{- '\\n<tool_call>\\n' + ({'name': t.function.name, 'arguments': t.function.arguments} | tojson)"
    " + '\\n</tool_call>' -}}{%- endfor -%}{%- endif -%}"
    "{{- '<|im_end|>\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


class Vocabulary:
    """Token texts, scores and types."""

    def __init__(self) -> None:
        self.texts: list[bytes] = []
        self.scores: list[float] = []
        self.types: list[int] = []

    def add(self, text: str, score: float, kind: gguf.TokenType = gguf.TokenType.NORMAL) -> int:
        """The token of this text; llama.cpp aborts where a text is there twice."""
        encoded = text.replace(" ", "▁").encode()
        if encoded not in self.texts:
            self.texts.append(encoded)
            self.scores.append(float(score))
            self.types.append(int(kind))
        return self.texts.index(encoded)


@contextmanager
def model_file(
    path: Path,
    architecture: str,
    vocabulary: Vocabulary,
    *,
    context: int,
    width: int,
    layers: int,
    heads: tuple[int, int],
) -> Iterator[gguf.GGUFWriter]:
    """A file with what every model says of itself; written in the end. `heads`: of queries, and of keys and values."""
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_context_length(context)
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(width)
    writer.add_head_count(heads[0])
    writer.add_head_count_kv(heads[1])
    writer.add_vocab_size(len(vocabulary.texts))
    writer.add_token_list(vocabulary.texts)
    writer.add_token_scores(vocabulary.scores)
    writer.add_token_types(vocabulary.types)
    yield writer
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_scripted_model(
    path: Path,
    *,
    marker: str,
    reply: Sequence[str],
    reply_seen: Sequence[str],
    trained_context: int = 32_768,
    template: str = CHATML_TEMPLATE,
    sliding_window: int | None = None,
) -> None:
    """Write a GGUF that answers `reply_seen` if `marker` is anywhere in the prompt, else `reply`.

    Args:
        path: The file to write.
        marker: Any text; it becomes one token.
        reply, reply_seen: The pieces that are generated, one token each; all distinct within and across both.
        trained_context: The largest window the model claims to support, in tokens.
        template: Jinja chat template; empty: none.
        sliding_window: Tokens that the first layer sees; None: all layers see all.
    """
    if len({*reply, *reply_seen}) != len(reply) + len(reply_seen):
        raise ValueError("the pieces of both replies must be distinct: the model remembers only its last token")
    vocabulary, gemma = _Vocabulary(marker, reply, reply_seen), sliding_window is not None
    with model_file(
        path,
        "gemma3" if gemma else "llama",
        vocabulary,
        context=trained_context,
        width=EMBEDDING_WIDTH,
        layers=GEMMA_LAYERS if gemma else LLAMA_LAYERS,
        heads=(HEADS, KV_HEADS),
    ) as writer:
        _write_header(writer, vocabulary, template)
        if sliding_window is None:
            writer.add_layer_norm_rms_eps(1e-6)
            writer.add_rope_dimension_count(HEAD_WIDTH)
        else:
            writer.add_layer_norm_rms_eps(GEMMA_EPSILON)
            writer.add_key_length(HEAD_WIDTH)
            writer.add_value_length(HEAD_WIDTH)
            writer.add_sliding_window(sliding_window)
            writer.add_sliding_window_pattern(GEMMA_LAYERS)  # the last layer of so many sees everything
        _write_weights(writer, vocabulary, gemma=gemma)


class _Vocabulary(Vocabulary):
    """Where the scripted tokens are."""

    def __init__(self, marker: str, reply: Sequence[str], reply_seen: Sequence[str]) -> None:
        super().__init__()
        kind = gguf.TokenType
        self.unknown = self.add("<unk>", 0, kind.UNKNOWN)
        self.begin = self.add("<s>", 0, kind.CONTROL)
        self.end = self.add("</s>", 0, kind.CONTROL)
        for byte in range(256):
            self.add(f"<0x{byte:02X}>", 0, kind.BYTE)
        self.add("<|im_start|>", 0, kind.CONTROL)
        self.end_of_message = self.add("<|im_end|>", 0, kind.CONTROL)
        self.add("▁", -1000)
        for code in range(33, 127):
            self.add(chr(code), -1000 - code)
        # No merge can reach these: they can be generated but never come out of tokenizing user text.
        self.reply = [self.add(piece, -1e6) for piece in reply]
        self.reply_seen = [self.add(piece, -1e6) for piece in reply_seen]
        self.marker = self.add(marker, 0, kind.USER_DEFINED)


def _write_header(writer: gguf.GGUFWriter, vocabulary: _Vocabulary, template: str) -> None:
    writer.add_name("memd-tiny")
    writer.add_rope_freq_base(1e9)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("llama")
    writer.add_bos_token_id(vocabulary.begin)
    writer.add_eos_token_id(vocabulary.end)
    writer.add_unk_token_id(vocabulary.unknown)
    writer.add_eot_token_id(vocabulary.end_of_message)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(False)
    if template:
        writer.add_chat_template(template)


def _write_weights(writer: gguf.GGUFWriter, vocabulary: _Vocabulary, *, gemma: bool) -> None:
    size, width = len(vocabulary.texts), EMBEDDING_WIDTH
    directions = np.eye(width, dtype=np.float32)  # each token or finding that matters gets a direction of its own
    ordinary, marker, seen = directions[:3]
    embedding = np.tile(ordinary, (size, 1))
    embedding[vocabulary.marker] = marker
    output: Matrix = np.zeros((size, width), np.float32)
    own = iter(directions[3:])
    for tokens in (vocabulary.reply, vocabulary.reply_seen):
        for token, following in zip(tokens, [*tokens[1:], vocabulary.end], strict=True):
            embedding[token] = next(own)
            output[following] += 10 * embedding[token]
    output[vocabulary.reply[0]] += 10 * ordinary
    output[vocabulary.reply_seen[0]] += 5 * ordinary + 10 * seen
    writer.add_tensor("token_embd.weight", embedding)
    writer.add_tensor("output_norm.weight", np.ones(width, np.float32))
    writer.add_tensor("output.weight", output)
    layers = GEMMA_LAYERS if gemma else LLAMA_LAYERS
    for layer in range(layers):
        looking = layer == layers - 1
        _write_layer(writer, layer, *_looking_head(ordinary, marker, seen, gemma=gemma, looking=looking))
        if gemma:
            _write_gemma_norms(writer, layer)


def _looking_head(
    ordinary: Matrix, marker: Matrix, seen: Matrix, *, gemma: bool, looking: bool
) -> tuple[Matrix, Matrix, Matrix, Matrix]:
    """Query, key, value and output weights; the first head adds `seen` to the residual if the marker came before.

    A layer that is not `looking` adds nothing.
    """
    query = np.zeros((HEADS * HEAD_WIDTH, EMBEDDING_WIDTH), np.float32)
    key = np.zeros((KV_HEADS * HEAD_WIDTH, EMBEDDING_WIDTH), np.float32)
    value, attended = np.zeros_like(key), np.zeros_like(query.T)
    if looking:
        # After the norm a one-hot embedding has length sqrt(width): the marker scores about 25, everything else 0.
        slowest = GEMMA_SLOWEST if gemma else LLAMA_SLOWEST
        query[slowest] = 1.5 * ordinary
        key[slowest] = 1.5 * marker
        value[0] = marker / np.sqrt(EMBEDDING_WIDTH)
        attended[:, 0] = seen
    return query, key, value, attended


def _write_layer(
    writer: gguf.GGUFWriter, layer: int, query: Matrix, key: Matrix, value: Matrix, attended: Matrix
) -> None:
    width = EMBEDDING_WIDTH
    tensors = {
        "attn_norm": np.ones(width, np.float32),
        "ffn_norm": np.ones(width, np.float32),
        "attn_q": query,
        "attn_k": key,
        "attn_v": value,
        "attn_output": attended,
        **{name: np.zeros((width, width), np.float32) for name in ("ffn_gate", "ffn_up", "ffn_down")},
    }
    for name, tensor in tensors.items():
        writer.add_tensor(f"blk.{layer}.{name}.weight", np.ascontiguousarray(tensor))


def _write_gemma_norms(writer: gguf.GGUFWriter, layer: int) -> None:
    """What gemma3 has beside: its embeddings are scaled by sqrt(width), so what a layer adds is too."""
    scale = np.full(EMBEDDING_WIDTH, np.sqrt(EMBEDDING_WIDTH), np.float32)
    head = np.full(HEAD_WIDTH, 3, np.float32)  # times 3 each: the marker scores about 46
    norms = {"attn_q_norm": head, "attn_k_norm": head, "post_attention_norm": scale, "post_ffw_norm": scale}
    for name, norm in norms.items():
        writer.add_tensor(f"blk.{layer}.{name}.weight", norm)
