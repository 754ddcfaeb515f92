"""Tiny stand-ins for the models that llama.cpp's server tests download, where llama.cpp looks for downloaded ones.

Rule: nobody's weights: every file is computed here. A language model tells the same story whatever its prompt is, and
the words that the tests look for are in it, because what a model says is not what is tested here.

The story is a ring of pieces, several alike for each place: which of them comes next is drawn, so seeds make a
difference and greedy decoding does not vary. The vocabulary is chosen such that the texts of the tests have as many
tokens as with the real one, which has 512 for children's stories; a search found these pieces.

The model for embeddings and for ranking is a real BERT with random weights.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray
from tiny_model import Vocabulary, model_file

Matrix = NDArray[np.float32]

NAMES = "Anna Jack Tom Lily Ben Sue Max Mia Sam Tim Leo Zoe"
STORY = (
    tuple(f" blue Suddenly {name}" for name in NAMES.split()),
    (" said Dad", " asked Dad"),
    (" But she couldn't", " But she couldn't go"),
    (" Whillicter", " Whillicter far from home"),
    (" going to bed", " going home to bed"),
    (" everyone Whiskers", " princesses Whiskers"),
    (" small little girl", " special small little girl"),
    (" love the bright owl", " love the bright wise owl"),
)
PIECES = (
    "al Hel ad ▁do ▁p si ro co ne mp ▁u er ▁you he ▁lon ▁A ▁w ri ean ic ▁a ll Hi ho it ur di ell th ti im ▁co te ed "
    "se om na un ▁b ra liq ha qua ich mo how ▁be ul ar do ut at in or lo qu llo ca wh ▁l ▁the st ▁c ma ▁no ch temp "
    "ion Hell en ▁pro ve us ▁t li ip ou an hi et es on io ing oo you is il ▁i ta ▁o ▁of ▁m re lon ac no"
)
MORE_PIECES = f"{PIECES} Hello ▁Hello"
"""Those of a larger vocabulary, of the model with 15M weights."""
FILL_IN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
WORDS = "a is of i the life this test hello believe meaning machine learning city paris which write joke about"
WIDTH, HEADS, LAYERS, CONTEXT = 128, 2, 2, 2048
NOISE = 0.01  # of what the model does not say: no two tokens are equally unlikely
RANKING_SEED = 17
"""Of weights with which the tests' relevant document is the first and the French one the last."""

REVISION = "0" * 40  # of every repository


def write_hub(folder: Path) -> None:
    """Write what the tests want downloaded, in the layout of the hub's cache (`LLAMA_CACHE`)."""
    for repository, name in (
        ("test-model-stories260K", "stories260K-F32.gguf"),
        ("models", "tinyllamas/split/stories15M-q8_0-00001-of-00003.gguf"),
        ("tinylaya-for-testing-gguf", "tinylaya-Q8_0.gguf"),
        ("tinyopenjev-for-testing-gguf", "tinyopenjev-Q8_0.gguf"),
        ("tinygemma3-GGUF", "tinygemma3-Q8_0.gguf"),
    ):
        _write_story_model(_cached(folder, repository, name))
    _write_story_model(_cached(folder, "test-model-stories260K-infill", "stories260K-infill-F32.gguf"), FILL_IN)
    _write_story_model(_cached(folder, "stories15M_MOE", "stories15M_MOE-F16.gguf"), pieces=MORE_PIECES)
    _write_bert(_cached(folder, "models", "bert-bge-small/ggml-model-f16.gguf"), seed=1, ranks=False)
    ranking = _cached(folder, "models", "jina-reranker-v1-tiny-en/ggml-model-f16.gguf")
    _write_bert(ranking, seed=RANKING_SEED, ranks=True)


def write_downloads(folder: Path) -> None:
    """Write what the tests download by themselves, where they look for it first."""
    _write_story_model(folder / "stories15M-q4_0.gguf", pieces=MORE_PIECES)
    _write_lora(folder / "moe_shakespeare15M.gguf")


def _cached(folder: Path, repository: str, name: str) -> Path:
    place = folder / f"models--ggml-org--{repository}"
    path = place / "snapshots" / REVISION / name
    path.parent.mkdir(parents=True, exist_ok=True)
    (place / "refs").mkdir(exist_ok=True)
    (place / "refs" / "main").write_text(REVISION)
    return path


def _model(path: Path, architecture: str, vocabulary: Vocabulary) -> AbstractContextManager[gguf.GGUFWriter]:
    shape = {"context": CONTEXT, "width": WIDTH, "layers": LAYERS}
    return model_file(path, architecture, vocabulary, heads=(HEADS, HEADS), **shape)


def _write_story_model(path: Path, control: Sequence[str] = (), pieces: str = PIECES) -> None:
    vocabulary = Vocabulary()
    vocabulary.add("<unk>", 0, gguf.TokenType.UNKNOWN)
    for text in ("<s>", "</s>", *control):
        vocabulary.add(text, 0, gguf.TokenType.CONTROL)
    for byte in range(256):
        vocabulary.add(f"<0x{byte:02X}>", 0, gguf.TokenType.BYTE)
    for rank, piece in enumerate(pieces.split()):
        vocabulary.add(piece, -rank)
    for code in range(32, 127):
        vocabulary.add(chr(code), -1000 - code)
    ring = [[vocabulary.add(piece, -1e6) for piece in place] for place in STORY]  # no merge can reach these
    with _model(path, "llama", vocabulary) as writer:
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_rope_dimension_count(WIDTH // HEADS)
        writer.add_tokenizer_model("llama")
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        writer.add_add_bos_token(True)
        writer.add_add_space_prefix(True)
        _add_tensors(writer, _story_weights(len(vocabulary.texts), ring))


def _story_weights(size: int, ring: list[list[int]]) -> dict[str, Matrix]:
    """The place in the story is the direction of a token's embedding; every other token is where the story begins."""
    directions = np.eye(WIDTH, dtype=np.float32)
    embedding = np.tile(directions[len(ring)], (size, 1))
    output = np.random.default_rng(0).standard_normal((size, WIDTH)).astype(np.float32) * NOISE
    output[0] -= 1  # <unk> is never among the likely ones
    for place, tokens in enumerate(ring):
        embedding[tokens] = directions[place]
        output[tokens] += 10 * directions[place - 1]
    output[ring[0]] += 10 * directions[len(ring)]
    square: Matrix = np.zeros((WIDTH, WIDTH), np.float32)
    one: Matrix = np.ones(WIDTH, np.float32)
    matrices = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    layer = dict.fromkeys(matrices, square) | dict.fromkeys(("attn_norm", "ffn_norm"), one)
    weights = {f"blk.{number}.{name}": tensor for number in range(LAYERS) for name, tensor in layer.items()}
    return {"token_embd": embedding, "output_norm": one, "output": output, **weights}


def _write_bert(path: Path, *, seed: int, ranks: bool) -> None:
    vocabulary = Vocabulary()
    for text in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"):
        vocabulary.add(text, 0, gguf.TokenType.CONTROL)
    # llama.cpp has a mark before what begins a word instead of one before what does not
    for word in [*WORDS.split(), *map(chr, range(33, 127))]:
        vocabulary.add(f" {word.lower()}", 0)
    for code in range(33, 127):
        vocabulary.add(chr(code), 0)
    with _model(path, "bert", vocabulary) as writer:
        writer.add_layer_norm_eps(1e-12)
        writer.add_causal_attention(False)
        writer.add_pooling_type(gguf.PoolingType.RANK if ranks else gguf.PoolingType.CLS)
        writer.add_tokenizer_model("bert")
        writer.add_token_type_count(2)
        writer.add_unk_token_id(1)
        writer.add_bos_token_id(2)
        writer.add_sep_token_id(3)
        writer.add_pad_token_id(0)
        writer.add_mask_token_id(4)
        if ranks:
            writer.add_classifier_output_labels(["relevance"])
        _add_tensors(writer, _bert_weights(len(vocabulary.texts), np.random.default_rng(seed), ranks=ranks))


def _bert_weights(size: int, chance: np.random.Generator, *, ranks: bool) -> dict[str, Matrix]:
    def drawn(*shape: int) -> Matrix:
        return (chance.standard_normal(shape) * 0.3).astype(np.float32)

    one: Matrix = np.ones(WIDTH, np.float32)
    zero: Matrix = np.zeros(WIDTH, np.float32)
    weights = {"token_embd": drawn(size, WIDTH), "position_embd": drawn(CONTEXT, WIDTH), "token_types": drawn(2, WIDTH)}
    norms = ["token_embd_norm"]
    for number in range(LAYERS):
        names = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_down")
        weights |= {f"blk.{number}.{name}": drawn(WIDTH, WIDTH) for name in names}
        norms += [f"blk.{number}.attn_output_norm", f"blk.{number}.layer_output_norm"]
    weights |= dict.fromkeys(norms, one)
    if ranks:
        weights |= {"cls": drawn(WIDTH, WIDTH), "cls.output": drawn(1, WIDTH)}
    return weights | {f"{name}.bias": zero for name in norms}


def _write_lora(path: Path) -> None:
    """An adapter for the story model that changes nothing."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, 1.0)
    for half, shape in (("a", (4, WIDTH)), ("b", (WIDTH, 4))):
        writer.add_tensor(f"blk.0.attn_q.weight.lora_{half}", np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tensors(writer: gguf.GGUFWriter, weights: Mapping[str, Matrix]) -> None:
    for name, tensor in weights.items():
        full = name if re.search(r"\.bias$", name) else f"{name}.weight"
        writer.add_tensor(full, np.ascontiguousarray(tensor))
