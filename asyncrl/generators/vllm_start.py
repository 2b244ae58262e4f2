"""Settings of a vLLM replica: environment, engine arguments, sampling parameters, for CPU and CUDA.

Source: engine notes, vLLM.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from asyncrl.config import Config
from asyncrl.generators.engine import SampleRequest

__all__ = ["choose_start_method", "engine_arguments", "prepare_environment", "sampling_parameters"]

MIN_BATCHED_TOKENS = 4096
CPU_BLOCK_TOKENS = 32  # the least that its attention takes
_START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
WORKER_EXTENSION = "asyncrl.generators.vllm_worker.WeightLoader"


def prepare_environment(config: Config) -> str | None:
    """Sets the variables that vLLM reads; before anything of vLLM or torch is imported. The start method that the user asks for."""
    _keep_title()
    threads = str(config.generator.threads)
    os.environ.update({"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads})
    # bound by itself, every replica of a host takes the same cores, whatever OMP_NUM_THREADS says
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    # what a killed engine leaves in shared memory is cleaned up with a warning, which would hide the last line that says why
    os.environ.setdefault("PYTHONWARNINGS", "ignore::UserWarning:multiprocessing.resource_tracker")
    return os.environ.get(_START_METHOD)


def _keep_title() -> None:
    """Forked processes of vLLM name themselves over this one's command line, which setproctitle finds by the environment as it was.

    Setting up, it cuts off the last letter of a command line that it leaves as it is: the interpreter's folder goes instead.
    """
    with contextlib.suppress(ImportError):  # vLLM does without it too
        from setproctitle import setproctitle

        setproctitle(" ".join([Path(sys.orig_argv[0]).name, *sys.orig_argv[1:]]))


def engine_arguments(config: Config, model_dir: str) -> Any:
    """Arguments of the AsyncLLM; in lockstep without prefix cache, so that a response depends on its prompt, seed and version alone."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    generator = config.generator
    # vLLM rewinds the random state of a seeded request whose prompt it splits over steps; a CPU generator cannot be rewound
    whole_prompts = {"enable_chunked_prefill": False, "max_num_batched_tokens": max(MIN_BATCHED_TOKENS, _context_tokens(config, model_dir))}
    # only whole blocks of a prompt are shared between siblings; vLLM's default on a CPU is longer than many prompts
    place: dict[str, Any] = {"kv_cache_memory_bytes": generator.kv_cache_mib << 20, "block_size": CPU_BLOCK_TOKENS, **whole_prompts}
    if _on_cuda(config):
        place = {"gpu_memory_utilization": generator.gpu_memory_utilization}
    return AsyncEngineArgs(
        model=model_dir,
        dtype=config.model.dtype,
        seed=0,
        max_model_len=generator.max_model_len or None,
        max_num_seqs=generator.max_num_seqs,
        enforce_eager=generator.enforce_eager,
        enable_prefix_caching=config.queue.schedule != "lockstep",
        logprobs_mode="processed_logprobs",
        worker_extension_cls=WORKER_EXTENSION,
        disable_log_stats=True,
        **place,
    )


def choose_start_method(config: Config, asked: str | None) -> None:
    """How vLLM starts its processes: as the user's environment says, else new interpreters for CUDA and forks for a CPU.

    A fork spares an import of vLLM, fifteen seconds of a core, in each of the engine's core and its worker, which start one after the
    other. vLLM's settings for a CPU ask for new interpreters, so this comes after them. It comes before anything is computed here, so
    that no thread of OpenMP is left behind, and before the event loop handles signals, which a fork would answer too.
    """
    os.environ[_START_METHOD] = asked or ("spawn" if _on_cuda(config) else "fork")


def sampling_parameters(request: SampleRequest) -> Any:
    """Parameters of one request: the whole distribution (no top-p, no top-k), the log-prob of each sampled token."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        n=1,
        temperature=request.temperature,
        max_tokens=request.max_new_tokens,
        stop=list(request.stop),
        seed=request.seed,
        logprobs=0,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _context_tokens(config: Config, model_dir: str) -> int:
    description = json.loads((Path(model_dir) / "config.json").read_text())
    return config.generator.max_model_len or int(description.get("max_position_embeddings", MIN_BATCHED_TOKENS))


def _on_cuda(config: Config) -> bool:
    if config.generator.device != "auto":
        return config.generator.device == "cuda"
    import torch

    return torch.cuda.is_available()
