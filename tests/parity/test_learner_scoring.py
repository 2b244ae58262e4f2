from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from learner_support import random_groups, rows_of, tiny_model_dir

from asyncrl.errors import UnsupportedError
from asyncrl.learner import packed, scoring
from asyncrl.learner.exactness import check_exact, probe_of
from asyncrl.learner.hf_model import layers_of, load_model, refuse_windows, ties_of
from asyncrl.learner.packing import pack
from asyncrl.learner.scoring import Scorer, tempered_logprobs


def scorer_of(folder: Path, chunk_tokens: int = 1024, attention: str = "sdpa") -> Scorer:
    model = load_model(tiny_model_dir(folder), attention)
    return Scorer(model, attention=attention, chunk_tokens=chunk_tokens, compute_dtype=torch.float32)


def prove(scorer: Scorer) -> None:
    check_exact(scorer, probe_of(scorer), torch.device("cpu"))


def logprob_at(temperature: float) -> tuple[float, float]:
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    found, entropy = tempered_logprobs(torch.nn.Identity(), logits, torch.tensor([0]), torch.tensor([temperature]), False)
    return found.item(), entropy.item()


def test_b01_the_temperature_is_inside_the_softmax():
    assert logprob_at(0.5)[0] == pytest.approx(-0.1429, abs=1e-4)
    assert logprob_at(1.0)[0] == pytest.approx(-0.4076, abs=1e-4)


def test_the_entropy_is_that_of_the_tempered_distribution():
    # p = e^(2, 1, 0) / (e^2 + e + 1) = 0.6652, 0.2447, 0.0900
    assert logprob_at(1.0)[1] == pytest.approx(0.8324, abs=1e-4)
    assert logprob_at(1e6)[1] == pytest.approx(1.0986, abs=1e-4)


def test_chunks_give_the_same_values_and_gradients_and_bound_the_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (micro,) = pack(rows_of(random_groups(3, 4, seed=1)), cap_tokens=200, shared_prompt=True)
    widths: list[int] = []
    original = scoring.tempered_logprobs

    def spy(head: Any, hidden: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        widths.append(len(hidden))
        return original(head, hidden, *arguments)

    monkeypatch.setattr(scoring, "tempered_logprobs", spy)
    results = []
    for chunk in (1024, 7):
        scorer = scorer_of(tmp_path, chunk)
        logprobs, entropy, _ = scorer(micro, True)
        (logprobs.sum() + 0.3 * entropy.sum()).backward()
        results.append((logprobs.detach(), entropy.detach(), [p.grad for p in scorer.parameters()]))
    (one, one_entropy, one_grads), (many, many_entropy, many_grads) = results
    torch.testing.assert_close(one, many, atol=1e-6, rtol=0)
    torch.testing.assert_close(one_entropy, many_entropy, atol=1e-6, rtol=0)
    for a, b in zip(one_grads, many_grads, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    assert widths[0] == len(micro.targets) and max(widths[1:]) == 7
    assert sum(widths[1:]) == 2 * len(micro.targets)  # each chunk's logits are made again for its backward


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_model_that_packs_exactly_is_accepted(tmp_path: Path, attention: str):
    prove(scorer_of(tmp_path, attention=attention))


def test_a_planted_attention_leak_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def leaky(micro: Any, *, additive: Any) -> torch.Tensor:
        return torch.ones(len(micro), len(micro)).tril().bool()[None, None]

    monkeypatch.setattr(packed, "attention_mask", leaky)
    with pytest.raises(UnsupportedError, match="its attention leaks"):
        prove(scorer_of(tmp_path))


def test_a_head_that_is_more_than_a_projection_is_refused(tmp_path: Path):
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=32,
        final_logit_softcapping=0.5,
        attn_logit_softcapping=None,
    )
    torch.manual_seed(0)
    Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    model = load_model(str(tmp_path), "sdpa")
    with pytest.raises(UnsupportedError, match="its head is more than a projection"):
        prove(Scorer(model, attention="sdpa", chunk_tokens=64, compute_dtype=torch.float32))


def test_layers_and_ties_are_found_by_what_the_model_declares(tmp_path: Path):
    untied = load_model(tiny_model_dir(tmp_path / "a"), "sdpa")
    assert layers_of(untied) == list(untied.model.layers)
    assert ties_of(untied) == {}
    tied = load_model(tiny_model_dir(tmp_path / "b", tied=True), "sdpa")
    assert ties_of(tied) == {"lm_head.weight": "model.embed_tokens.weight"}
    with pytest.raises(UnsupportedError, match="declares no decoder layers"):
        layers_of(torch.nn.Linear(2, 2))


def test_a_sliding_window_shorter_than_a_pack_is_refused_and_one_that_is_off_is_not():
    from transformers import MistralConfig, Qwen2Config

    with pytest.raises(UnsupportedError, match="slides over 64 tokens"):
        refuse_windows(MistralConfig(sliding_window=64), 65)
    refuse_windows(MistralConfig(sliding_window=64), 64)
    refuse_windows(MistralConfig(sliding_window=None), 65)
    refuse_windows(Qwen2Config(sliding_window=64, use_sliding_window=False), 65)
