"""The built-in models load in transformers with the weights, tokenizer and end token that a run counts on."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import Config, ModelConfig, TaskConfig
from asyncrl.launch.models import prepare_model
from asyncrl.tasks import new_source


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_model(ModelConfig(seed=3), tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny)


def test_tiny_has_the_seeds_weights_and_an_untied_head(tiny: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny)
    torch.manual_seed(3)
    expected = Qwen3ForCausalLM(model.config)
    assert sum(p.numel() for p in model.parameters()) == 106_944
    assert model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))
    assert model.generation_config.eos_token_id == 1 and model.generation_config.pad_token_id == 0


def test_tiny_is_made_once(tiny: Path) -> None:
    before_s = (tiny / "model.safetensors").stat().st_mtime_ns
    assert prepare_model(ModelConfig(seed=3), tiny.parent) == tiny
    assert (tiny / "model.safetensors").stat().st_mtime_ns == before_s
    assert [entry.name for entry in tiny.parent.iterdir()] == [tiny.name], "no scratch folder stays"


def test_tied_bfloat16_tiny_has_one_matrix_for_both_ends(tmp_path: Path) -> None:
    import torch
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM

    folder = prepare_model(ModelConfig(tied=True, dtype="bfloat16"), tmp_path)
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118  safe_open is no mapping
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}  # noqa: SIM118
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_the_tiny_tokenizer_gives_one_token_a_character(tokenizer: Any) -> None:
    assert len(tokenizer) == 64
    assert tokenizer("0123>").input_ids == [3, 4, 5, 6, 13]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)


def test_the_tiny_tokenizer_decodes_what_it_encodes(tokenizer: Any) -> None:
    text = "question: what is 23 + 45?\nanswer: (68)"
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_an_unknown_character_is_one_unknown_token(tokenizer: Any) -> None:
    assert tokenizer("1é2").input_ids == [4, 2, 5]


def test_every_copy_prompt_takes_five_known_tokens_and_its_answer_four(tokenizer: Any) -> None:
    source = new_source(Config(task=TaskConfig(size=200, epochs=1)))
    prompts = [source.prompt(index) for index in range(200)]
    assert {len(tokenizer(prompt.prompt).input_ids) for prompt in prompts} == {5}
    assert {len(tokenizer(prompt.answer).input_ids) for prompt in prompts} == {4}
    assert not any(2 in tokenizer(prompt.prompt + prompt.answer).input_ids for prompt in prompts)


def test_the_tiny_chat_template_ends_with_the_assistants_turn(tokenizer: Any) -> None:
    text = tokenizer.apply_chat_template([{"role": "user", "content": "3 + 4?"}], tokenize=False, add_generation_prompt=True)
    assert text == "user: 3 + 4?\nassistant: "


@pytest.fixture
def smollm2() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as cache:  # half a gigabyte: not to be kept with the other test folders
        yield prepare_model(ModelConfig(path="builtin:smollm2-135m-instruct"), Path(cache))


@pytest.mark.real
def test_smollm2_answers_a_small_sum_greedily(smollm2: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(smollm2), AutoModelForCausalLM.from_pretrained(smollm2)
    assert model.dtype == torch.float32 and sum(p.numel() for p in model.parameters()) == 134_515_008
    assert tokenizer.decode([model.generation_config.eos_token_id]) == "<|im_end|>"
    ids = tokenizer("Question: What is 3 + 4?\nAnswer: 3 + 4 = ", return_tensors="pt").input_ids
    sampled = model.generate(ids, max_new_tokens=3, do_sample=False)[0, ids.shape[1] :]
    assert tokenizer.decode(sampled).split()[0].startswith("7")
