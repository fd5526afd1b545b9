"""A byte-level tokenizer, a small model with it and a small dataset: one token a byte, so that counts can be done by hand."""

import dataclasses

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megahedge.checkpoint.store import CheckpointWriter
from megahedge.data.indexed_dataset import IndexedDataset
from megahedge.data.indexed_writer import IndexedDatasetWriter
from megahedge.data.meta import DatasetMeta, tokenizer_digest, write_meta
from megahedge.models.hf_weights import save_pretrained
from megahedge.models.language_model import LanguageModel
from megahedge.utils.files import write_json
from tests.models.small import randomize, small_config

EOD = "<|endoftext|>"
VOCAB_SIZE = 257
TEXTS = ["the cat sat", "naïve café, 汉字!", " two  words\n", "x"] + [
    f"document number {number} says {number * 7919 % 1000}" for number in range(20)
]


def byte_tokenizer(reverse: bool = False) -> PreTrainedTokenizerFast:
    """EOD is 0 and each byte a token; `reverse` numbers them the other way round, which makes another tokenizer."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=reverse)
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate([EOD, *alphabet])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOD, bos_token=EOD)


def write_texts(prefix, tokenizer, texts=TEXTS, name="no/such/tokenizer") -> IndexedDataset:
    """A `val` pair with its meta.json, each document ended by EOD."""
    with IndexedDatasetWriter(f"{prefix}_val", np.uint16) as writer:
        for text in texts:
            writer.add_document([*tokenizer(text)["input_ids"], tokenizer.eos_token_id])
        writer.finish()
    write_meta(prefix, DatasetMeta(tokenizer_digest(tokenizer), name, len(tokenizer), tokenizer.eos_token_id, {}))
    return IndexedDataset(f"{prefix}_val")


def write_run(path, digest: str | None, step: int = 7) -> LanguageModel:
    """A run folder with one checkpoint, and its export in `hf`."""
    model = randomize(LanguageModel(small_config(vocab_size=VOCAB_SIZE)))
    writer = CheckpointWriter(path / "checkpoints", step)
    for name, parameter in model.named_parameters():
        writer.add("parameters", name, parameter)
    writer.finish({"stage": "pretrain", "model": dataclasses.asdict(model.config)})
    write_json(path / "run.json", {"data": {"tokenizer_digest": digest}})
    save_pretrained(model.named_parameters(), model.config, path / "hf", torch.float32)
    return model
