"""Writes a tiny random Llama with a tokenizer of its own; run by the Python that has vLLM."""

from __future__ import annotations

import sys
from pathlib import Path

CONTEXT = 32_768
VOCABULARY = 2048


def main(folder: Path) -> None:
    """800,000 parameters: enough for every code path of a dense model."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = sorted(Path(torch.__file__).parent.joinpath("nn").glob("*.py"))[:6]
    special = ["<pad>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=special, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train([str(one) for one in texts], trainer)
    pad, begin, end = special
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, bos_token=begin, eos_token=end, model_max_length=CONTEXT
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=CONTEXT, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, tie_word_embeddings=False, dtype="bfloat16",
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
