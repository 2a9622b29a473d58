"""What transformers makes of checkpoints; runs under the interpreter of the peers environment.

transformers_reference.py write DIRECTORY    tiny random checkpoints of each family, their logits
transformers_reference.py read DIRECTORY     logits of the checkpoints in it
transformers_reference.py embed MODEL TEXTS VECTORS    sentence vectors of a BERT model
"""

import json
import pathlib
import sys

import numpy as np
import torch
import transformers

SIZES = {
  "vocab_size": 97,
  "hidden_size": 32,
  "intermediate_size": 56,
  "num_hidden_layers": 3,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "max_position_embeddings": 64,
}
LLAMA3 = {
  "rope_type": "llama3",
  "rope_theta": 500.0,
  "factor": 8.0,
  "low_freq_factor": 1.0,
  "high_freq_factor": 4.0,
  "original_max_position_embeddings": 16,
}
FAMILIES = {
  "llama": ("Llama", {"tie_word_embeddings": True, "rms_norm_eps": 1e-3}),
  "llama-3": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": False}),
  "mistral": ("Mistral", {"sliding_window": 5}),
  "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
  "qwen2-window": (
    "Qwen2",
    {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0},
  ),
  "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": False}),
  "qwen3-tied": (
    "Qwen3",
    {
      "head_dim": 12,
      "tie_word_embeddings": True,
      "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
  ),
}


def logits(model):
  tokens = torch.from_numpy(np.random.default_rng(0).integers(97, size=(2, 24)))
  with torch.no_grad():
    return model.eval().float()(tokens).logits.numpy()


def write(directory):
  for name, (family, changes) in FAMILIES.items():
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
      **SIZES | changes, attn_implementation="eager"
    )
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
      for parameter in model.parameters():  # norms and biases away from one and zero
        parameter.add_(0.1 * torch.randn_like(parameter))
    # Small shards, so that checkpoints with an index are read as well.
    model.save_pretrained(directory / name, max_shard_size="30KB" if name == "qwen3" else "5GB")
    np.save(directory / f"{name}.npy", logits(model))


def read(directory):
  for folder in sorted(directory.iterdir()):
    if folder.is_dir():
      model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", output_loading_info=True
      )
      assert not any(info.values()), (folder, info)
      np.save(directory / f"{folder.name}.npy", logits(model))


def embed(folder, texts, vectors):
  tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
  model = transformers.BertModel.from_pretrained(folder, attn_implementation="eager").eval()
  batch = tokenizer(
    json.loads(texts.read_text()),
    padding=True,
    truncation=True,
    max_length=256,
    return_tensors="pt",
  )
  with torch.no_grad():
    hidden = model(**batch).last_hidden_state
  mask = batch["attention_mask"][..., None]
  mean = (hidden * mask).sum(1) / mask.sum(1)
  np.save(vectors, torch.nn.functional.normalize(mean).numpy())


if __name__ == "__main__":
  {"write": write, "read": read, "embed": embed}[sys.argv[1]](*map(pathlib.Path, sys.argv[2:]))
