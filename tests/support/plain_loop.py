"""The synchronous run, written plainly: one process, one vLLM, one unwrapped model, AdamW. No queue, no sync, no FSDP.

python plain_loop.py RUN_DIR OUT.safetensors     options and model of a run directory; weights after launch.steps steps
"""

from __future__ import annotations

import os
import sys
import tempfile

os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

import numpy as np


def main(run_dir: str, out: str) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from vllm import LLM

    from asyncrl.config.run_dir import RunDir
    from asyncrl.tasks import new_reward, new_source

    config, facts = RunDir(run_dir).read_config(), RunDir(run_dir).read_facts()
    llm = LLM(
        model=facts.model_dir, dtype="float32", seed=0, enforce_eager=True, max_num_seqs=config.generator.max_num_seqs,
        kv_cache_memory_bytes=config.generator.kv_cache_mib << 20, enable_prefix_caching=False, logprobs_mode="processed_logprobs",
        enable_chunked_prefill=False, max_num_batched_tokens=4096,
    )  # fmt: skip
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(facts.model_dir)
    model = AutoModelForCausalLM.from_pretrained(facts.model_dir, dtype=torch.float32, attn_implementation="sdpa").train()
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=(config.learner.beta1, config.learner.beta2), eps=1e-8, weight_decay=0.0, fused=True
    )
    source, reward = new_source(config), new_reward(config)
    size = config.algorithm.groups_per_step
    for step in range(config.launch.steps):
        push(llm, model)
        tickets = range(step * size, (step + 1) * size)
        rows = [row for ticket in tickets for row in sample(llm, tokenizer, config, source.prompt(ticket), ticket, reward)]
        update(model, optimizer, rows, config, step)
    save_file({name: p.detach().contiguous() for name, p in model.named_parameters()}, out)


def push(llm, model) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})


def sample(llm, tokenizer, config, prompt, ticket, reward):
    """Rows of one group: siblings one after another, advantages by hand."""
    from vllm import SamplingParams

    from asyncrl.generators.groups import sibling_seed
    from asyncrl.learner.batch import Row
    from asyncrl.queue.prompts import ticket_seed
    from asyncrl.trajectory import Trajectory, VersionSpan

    ids = tokenizer(prompt.prompt, add_special_tokens=False).input_ids
    made = []
    for sibling in range(config.algorithm.group_size):
        seed = sibling_seed(ticket_seed(config.task.seed, ticket), sibling)
        options = SamplingParams(temperature=1.0, max_tokens=config.generator.max_new_tokens, seed=seed, logprobs=0)
        output = llm.generate([{"prompt_token_ids": ids}], options, use_tqdm=False)[0].outputs[0]
        logprobs = [entry[token].logprob for token, entry in zip(output.token_ids, output.logprobs, strict=True)]
        made.append((list(output.token_ids), logprobs, reward.score(prompt, output.text)[0]))
    rewards = np.array([r for _, _, r in made], dtype=np.float64)
    centered = rewards - rewards.mean()
    spread = np.sqrt((centered**2).sum() / (len(rewards) - 1))
    advantages = centered / spread if rewards.max() != rewards.min() else np.zeros(len(rewards))
    for sibling, ((tokens, logprobs, score), advantage) in enumerate(zip(made, advantages, strict=True)):
        trajectory = Trajectory.checked(
            group_id=f"g{ticket}", ticket=ticket, attempt=0, sibling=sibling, sample=0, prompt_id=prompt.prompt_id, seed=0, incarnation=0,
            input_ids=ids + tokens, loss_mask=[False] * len(ids) + [True] * len(tokens), behavior_logprobs=[0.0] * len(ids) + logprobs,
            version_spans=[VersionSpan(len(ids), 0)], reward=score, finish_reason="stop", temperature=1.0, generator="g", engine="vllm",
            dispatched_s=0.0, finished_s=0.0,
        )  # fmt: skip
        yield Row(trajectory=trajectory, advantage=float(advantage))


def update(model, optimizer, rows, config, step) -> None:
    """One optimizer step over the packs that the learner would make of the rows."""
    import torch

    from asyncrl.learner.packing import attention_mask, pack

    rate = config.learner.learning_rate * min(1.0, (step + 1) / config.learner.warmup_steps)
    for group in optimizer.param_groups:
        group["lr"] = rate
    total = sum(row.trajectory.num_sampled_tokens for row in rows)
    for pack_ in pack(rows, cap_tokens=config.learner.micro_batch_tokens, shared_prompt=True):
        hidden = model.model(
            input_ids=pack_.input_ids, position_ids=pack_.position_ids, attention_mask=attention_mask(pack_, additive=None), use_cache=False
        ).last_hidden_state[0].index_select(0, pack_.sources)  # fmt: skip
        logprobs = torch.log_softmax(model.lm_head(hidden).float() / pack_.temperatures[:, None], -1)
        chosen = -torch.nn.functional.nll_loss(logprobs, pack_.targets, reduction="none")
        ratio = (chosen - pack_.behavior_logprobs).exp()
        gain = torch.minimum(ratio * pack_.advantages, ratio.clamp(0.8, 1.2) * pack_.advantages)
        ((-gain) * (torch.ones_like(gain) / total)).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), config.learner.grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
