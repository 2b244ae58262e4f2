"""Fault B41: an update fits the model in every name, shape, dtype and tie, or is refused with what is wrong."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from asyncrl.errors import SyncError
from asyncrl.generators.model_shape import ModelShape
from asyncrl.sync.messages import TensorSpec

EMBED, HEAD, NORM = "model.embed.weight", "lm_head.weight", "model.norm.weight"
UNTIED = ModelShape(shapes={EMBED: (6, 4), NORM: (4,), HEAD: (6, 4)}, tied=(), head=HEAD, embedding=EMBED, dtype="float32")
TIED = ModelShape(shapes=UNTIED.shapes, tied=(frozenset({EMBED, HEAD}),), head=EMBED, embedding=EMBED, dtype="float32")


def spec(name, shape, checksum=1, dtype="float32"):
    return TensorSpec(name=name, dtype=dtype, shape=shape, offset=0, num_bytes=96, checksum=checksum)


def update(*tensors, ties=None):
    return SimpleNamespace(version=3, tensors=tensors, ties=ties or {})


def test_an_untied_model_takes_all_its_tensors_and_a_tied_one_all_but_the_tied():
    UNTIED.check(update(spec(EMBED, (6, 4), 1), spec(NORM, (4,), 2), spec(HEAD, (6, 4), 3)))
    TIED.check(update(spec(EMBED, (6, 4), 1), spec(NORM, (4,), 2), ties={HEAD: EMBED}))


@pytest.mark.parametrize(
    ("shape", "sent", "fault"),
    [
        (UNTIED, update(spec(EMBED, (6, 4)), spec(HEAD, (6, 4), 3)), "model.norm.weight is missing"),
        (UNTIED, update(spec(EMBED, (6, 4)), spec(NORM, (4,)), ties={HEAD: EMBED}), r"\['lm_head.weight'\] are not tied in the model"),
        (UNTIED, update(spec(EMBED, (6, 4)), spec(NORM, (4,)), spec(HEAD, (6, 4), 3), spec("x", (1,))), "x is not in the model"),
        (UNTIED, update(spec(EMBED, (6, 4)), spec(NORM, (5,)), spec(HEAD, (6, 4), 3)), r"has shape \(4,\); met \(5,\)"),
        (UNTIED, update(spec(EMBED, (6, 4)), spec(NORM, (4,), dtype="bfloat16"), spec(HEAD, (6, 4), 3)), "is float32; met bfloat16"),
        (UNTIED, update(spec(EMBED, (6, 4), 5), spec(NORM, (4,)), spec(HEAD, (6, 4), 5)), "equals model.embed.weight though"),
        (TIED, update(spec(EMBED, (6, 4)), spec(NORM, (4,))), r"\['lm_head.weight'\] are tied to model.embed.weight; the update says \{\}"),
        (TIED, update(spec(NORM, (4,))), "met none"),
        (TIED, update(spec(EMBED, (6, 4)), spec(NORM, (4,)), spec(HEAD, (6, 4), 3)), "one of the tied .* is sent"),
    ],
)
def test_b41_what_does_not_fit_is_named(shape, sent, fault):
    with pytest.raises(SyncError, match=fault):
        shape.check(sent)


@pytest.mark.parametrize("tied", [False, True])
def test_b41_the_shape_of_a_folder_is_that_of_its_model_with_its_ties(tmp_path, tied):
    torch = pytest.importorskip("torch")
    from asyncrl.launch.model_builders import build_tiny

    build_tiny(tmp_path / "m", dtype="float32", tied=tied, seed=0)
    shape = ModelShape.of_folder(str(tmp_path / "m"), "float32")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
    assert shape.shapes == {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert shape.tied == ((frozenset({"model.embed_tokens.weight", "lm_head.weight"}),) if tied else ())
    assert shape.embedding == "model.embed_tokens.weight"
    assert shape.head == ("model.embed_tokens.weight" if tied else "lm_head.weight")
