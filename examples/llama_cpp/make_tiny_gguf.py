"""Make a Llama of random weights with one token per byte, as GGUF: a real model of 1 MB, from nothing, offline.

usage: python make_tiny_gguf.py FILE        (the interpreter needs numpy and gguf: pip install gguf)
"""

import sys

import gguf
import numpy

WIDTH, LAYERS, HEADS, KV_HEADS, FORWARD, CONTEXT = 128, 2, 4, 2, 256, 512


def make(path: str) -> None:
    """The same weights every time."""
    tokens = [b"<unk>", b"<s>", b"</s>", *(b"<0x%02X>" % byte for byte in range(256))]
    kinds = [gguf.TokenType.UNKNOWN, *[gguf.TokenType.CONTROL] * 2, *[gguf.TokenType.BYTE] * 256]
    head = WIDTH // HEADS
    out = gguf.GGUFWriter(path, "llama")
    out.add_name("tiny")
    out.add_context_length(CONTEXT)
    out.add_embedding_length(WIDTH)
    out.add_block_count(LAYERS)
    out.add_feed_forward_length(FORWARD)
    out.add_head_count(HEADS)
    out.add_head_count_kv(KV_HEADS)
    out.add_rope_dimension_count(head)
    out.add_layer_norm_rms_eps(1e-5)
    out.add_file_type(gguf.LlamaFileType.ALL_F32)
    out.add_vocab_size(len(tokens))
    out.add_tokenizer_model("llama")
    out.add_token_list(tokens)
    out.add_token_scores([0.0] * len(tokens))
    out.add_token_types(kinds)
    out.add_unk_token_id(0)
    out.add_bos_token_id(1)
    out.add_eos_token_id(2)

    random = numpy.random.default_rng(0)

    def matrix(name: str, rows: int, columns: int) -> None:
        out.add_tensor(name, random.normal(0, 0.05, (rows, columns)).astype(numpy.float32))

    def ones(name: str) -> None:
        out.add_tensor(name, numpy.ones(WIDTH, numpy.float32))

    matrix("token_embd.weight", len(tokens), WIDTH)
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        ones(f"{block}.attn_norm.weight")
        matrix(f"{block}.attn_q.weight", WIDTH, WIDTH)
        matrix(f"{block}.attn_k.weight", KV_HEADS * head, WIDTH)
        matrix(f"{block}.attn_v.weight", KV_HEADS * head, WIDTH)
        matrix(f"{block}.attn_output.weight", WIDTH, WIDTH)
        ones(f"{block}.ffn_norm.weight")
        matrix(f"{block}.ffn_gate.weight", FORWARD, WIDTH)
        matrix(f"{block}.ffn_up.weight", FORWARD, WIDTH)
        matrix(f"{block}.ffn_down.weight", WIDTH, FORWARD)
    ones("output_norm.weight")
    matrix("output.weight", len(tokens), WIDTH)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    make(sys.argv[1])
