"""Peak memory of log-probs over a large vocabulary, forward and backward, in a process of its own.

``python -m benchmarks.learner_head chunked|dense`` prints one JSON object: the highest resident memory of the process less that
before the pass. ``chunked`` is the learner's scorer with its default chunk; ``dense`` holds all logits, their log-softmax and its
gradient. The model in front of the head has one layer and a hidden size of 64, so that log-probs and not weights are measured.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import torch

from asyncrl.config import LearnerConfig
from asyncrl.learner.batch import MicroBatch
from asyncrl.learner.packing import attention_mask, pack
from asyncrl.learner.scoring import Scorer, chunk_tokens_of
from benchmarks.learner_data import new_group, rows_of

__all__ = ["FORMS", "VOCABULARY", "new_model"]

VOCABULARY = 151_936
NUM_TOKENS = 4096


def new_model(vocabulary: int) -> Any:
    """A random Qwen3 of one layer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=32, max_position_embeddings=8192, tie_word_embeddings=False,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    return Qwen3ForCausalLM(config)


def chunked(model: Any, micro: MicroBatch) -> torch.Tensor:
    """Log-probs [K] by the learner's scorer."""
    chunk_tokens = chunk_tokens_of(model, LearnerConfig().logits_chunk_mib)
    scorer = Scorer(model, attention="sdpa", chunk_tokens=chunk_tokens, compute_dtype=torch.float32)
    return scorer(micro, False)[0]  # type: ignore[no-any-return]


def dense(model: Any, micro: MicroBatch) -> torch.Tensor:
    """The same from logits of all positions at once."""
    mask = attention_mask(micro, additive=None)
    hidden = model.model(input_ids=micro.input_ids, position_ids=micro.position_ids, attention_mask=mask, use_cache=False).last_hidden_state
    logits = model.lm_head(hidden[0, micro.sources])  # [K, V]
    return torch.log_softmax(logits, dim=-1).gather(1, micro.targets[:, None])[:, 0]


FORMS = {"chunked": chunked, "dense": dense}


def _status_bytes(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("form", choices=sorted(FORMS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = new_model(VOCABULARY)
    ids = torch.randint(VOCABULARY, (3, NUM_TOKENS // 2)).tolist()
    (micro,) = pack(rows_of([new_group(0, ids[0][:16], ids[1:])]), cap_tokens=2 * NUM_TOKENS, shared_prompt=True)
    before = _status_bytes("VmRSS")
    FORMS[options.form](model, micro).sum().backward()
    print(json.dumps({"peak_bytes": _status_bytes("VmHWM") - before, "tokens": len(micro.targets)}), flush=True)


if __name__ == "__main__":
    main()
