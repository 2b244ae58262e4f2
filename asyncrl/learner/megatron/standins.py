"""Stand-ins that let Megatron-core compute on a CPU over gloo; where torch sees CUDA, nothing here has an effect.

Megatron-core writes ``torch.cuda.current_device()`` and ``device="cuda"`` wherever it makes a tensor. Its modules get a ``torch`` of
their own in which those mean the CPU: no other module's torch changes, so that other engines run in the same process as ever. What
calls a tensor's own methods cannot be reached so: ``Tensor.type`` and ``Tensor.cuda`` are replaced for the process, and do as ever for
callers outside Megatron-core. The few functions that need more are replaced, each beside its reason. All of it is known to hold for
:data:`~asyncrl.config.megatron_core.VERSIONS` alone.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from asyncrl.config.megatron_core import installed_version
from asyncrl.errors import UnsupportedError

__all__ = ["check_device", "import_megatron"]

_MODULES = (
    "dist_checkpointing.strategies.checkpointable",
    "distributed",
    "distributed.finalize_model_grads",
    "models.gpt",
    "models.gpt.gpt_layer_specs",
    "optimizer",
    "pipeline_parallel",
    "pipeline_parallel.p2p_communication",
    "pipeline_parallel.schedules",
    "tensor_parallel",
    "tensor_parallel.random",
    "transformer.moe.moe_utils",
    "transformer.moe.router",
    "transformer.moe.token_dispatcher",
    "transformer.transformer_config",
)
_FACTORIES = ("zeros", "ones", "empty", "full", "tensor", "arange", "zeros_like", "ones_like", "empty_like", "full_like", "as_tensor")
_FORWARD, _BACKWARD = 11, 12  # tags of messages to the next stage and to the one before
_CPU = torch.device("cpu")


@functools.cache
def import_megatron() -> str:
    """Imports what this package uses of Megatron-core; every module that imports it calls this first. Its version.

    Raises:
        ImportError: it is not installed.
        UnsupportedError: a version that the stand-ins and the table of weights are not known to fit.
    """
    version, on_cpu = installed_version(), not torch.cuda.is_available()
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # of Transformer Engine and Apex, which nothing here uses
        if on_cpu:
            stack.enter_context(_no_compiler())
            if version != "0.16.1":
                stack.enter_context(_no_triton())
        for name in _MODULES:
            importlib.import_module(f"megatron.core.{name}")
    if on_cpu:
        _give_torch()
        _replace_rng()
        _replace_moe()
        _replace_messages()
    return version


def check_device(device: torch.device) -> None:
    """Raises UnsupportedError for a CPU where torch sees CUDA, which Megatron-core would then compute on."""
    if device.type == "cpu" and torch.cuda.is_available():
        raise UnsupportedError(
            "megatron-core computes on a CPU only where torch sees no GPU; met device cpu beside "
            f"{torch.cuda.device_count()} GPUs: set CUDA_VISIBLE_DEVICES to nothing, or learner.engine=fsdp2"
        )


@contextlib.contextmanager
def _no_compiler() -> Iterator[None]:
    """Small functions of Megatron-core go to torch.compile when they are defined; on a CPU that is a C++ compiler and minutes."""

    def leave(function: Any = None, **_: Any) -> Any:
        return function if function is not None else leave

    holder: Any = torch
    compiler, holder.compile = holder.compile, leave
    try:
        yield
    finally:
        holder.compile = compiler


@contextlib.contextmanager
def _no_triton() -> Iterator[None]:
    """0.19 imports triton for kernels that no model here reaches; torch for CPUs comes without it. An empty one is there meanwhile."""
    if importlib.util.find_spec("triton") is not None:
        yield
        return
    from torch.utils._triton import has_triton, has_triton_package

    has_triton_package(), has_triton()  # torch keeps its answer: none
    modules: dict[str, types.ModuleType] = {name: _Hollow(name) for name in ("triton", "triton.language")}
    modules["triton"].__dict__.update(language=modules["triton.language"], __version__="0.0.0")
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]


class _Hollow(types.ModuleType):
    """Whatever is asked of it is a decorator that leaves functions as they are."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda function=None, **_: function if callable(function) else (lambda inner: inner)


class _Stream:
    """There is one order of things on a CPU: waiting for it is over at once."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = _CPU

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: self  # wait_stream, wait_event, record, synchronize; record_event gives what can be waited for

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class _Around(types.ModuleType):
    """A module with some names replaced."""

    def __init__(self, inner: types.ModuleType, **names: Any) -> None:
        super().__init__(inner.__name__)
        self.__dict__.update(names, _inner=inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _give_torch() -> None:
    """Gives Megatron-core's modules a torch whose CUDA device is the CPU."""
    nothing, current = (lambda *_, **__: None), _Stream()
    cuda = _Around(
        torch.cuda,
        current_device=lambda: _CPU,
        synchronize=nothing,
        empty_cache=nothing,
        set_stream=nothing,
        Stream=_Stream,
        Event=_Stream,
        current_stream=lambda *_: current,
        default_stream=lambda *_: current,
        stream=lambda _: contextlib.nullcontext(),
        is_current_stream_capturing=lambda: False,
        get_rng_state=lambda *_: torch.get_rng_state(),
        set_rng_state=lambda state, *_: torch.set_rng_state(state),
        manual_seed=lambda seed: torch.default_generator.manual_seed(int(seed)),
        nvtx=_Around(torch.cuda.nvtx, range_push=nothing, range_pop=nothing),
    )
    given = _Around(torch, cuda=cuda, **{name: _on_cpu(getattr(torch, name)) for name in _FACTORIES})
    loaded: list[tuple[str, Any]] = list(sys.modules.items())
    for name, module in loaded:
        if name.startswith("megatron.core") and getattr(module, "torch", None) is torch:
            module.torch = given
    _replace_method("type", _cuda_type)
    _replace_method("cuda", lambda _, self, *__, **___: self)


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    """The factory, for which CUDA and pinned memory are the CPU and its memory."""

    @functools.wraps(factory)
    def make(*args: Any, **named: Any) -> Any:
        named.pop("pin_memory", None)
        if "device" in named and not (named["device"] is None or torch.device(named["device"]).type in ("cpu", "meta")):
            named["device"] = _CPU
        return factory(*args, **named)

    return make


def _replace_method(name: str, stand_in: Callable[..., Any]) -> None:
    """Replaces a tensor's method where Megatron-core's modules call it; ``stand_in`` is given the method first."""
    method = getattr(torch.Tensor, name)

    @functools.wraps(method)
    def call(self: torch.Tensor, *args: Any, **named: Any) -> Any:
        if sys._getframe(1).f_globals.get("__name__", "").startswith("megatron.core"):
            return stand_in(method, self, *args, **named)
        return method(self, *args, **named)

    setattr(torch.Tensor, name, call)


def _cuda_type(method: Callable[..., Any], self: torch.Tensor, *args: Any, **named: Any) -> Any:
    """The optimizers take parameters whose type is called ``torch.cuda.FloatTensor`` and the like, and no others."""
    answer = method(self, *args, **named)
    return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer


def _replace_rng() -> None:
    """The states of CUDA's generators are reached through torch's C functions, past the torch of the module."""
    random: Any = sys.modules["megatron.core.tensor_parallel.random"]
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()


def _replace_moe() -> None:
    """Counts of tokens become numpy arrays only where they lie on a GPU, and all_to_all wants no tensors for them; 0.16.1 asks
    whether Transformer Engine multiplies for the router by a name that is not there without it."""
    utils: Any = sys.modules["megatron.core.transformer.moe.moe_utils"]
    dispatcher: Any = sys.modules["megatron.core.transformer.moe.token_dispatcher"]

    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.detach().numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    utils.maybe_move_tensor_to_cpu = dispatcher.maybe_move_tensor_to_cpu = move
    if not hasattr(utils, "te_general_gemm"):
        utils.te_general_gemm = None


def _replace_messages() -> None:
    """gloo matches messages by peer and tag. Of two stages each is the other's next and previous one: without tags a gradient is taken
    for an activation, and gradients are wrong in silence."""
    messages: Any = sys.modules["megatron.core.pipeline_parallel.p2p_communication"]
    messages._p2p_ops = _begin
    messages._batched_p2p_ops = lambda **named: list(_begin(**named).values())
    messages.P2PCommunicator._communicate_shapes = _exchange_shapes


def _begin(
    *,
    tensor_send_prev: torch.Tensor | None,
    tensor_recv_prev: torch.Tensor | None,
    tensor_send_next: torch.Tensor | None,
    tensor_recv_next: torch.Tensor | None,
    group: dist.ProcessGroup,
    prev_pipeline_rank: int,
    next_pipeline_rank: int,
) -> dict[str, Any]:
    begun: dict[str, Any] = {}
    if tensor_recv_prev is not None:
        begun["recv_prev"] = dist.irecv(tensor_recv_prev, prev_pipeline_rank, group, _FORWARD)
    if tensor_recv_next is not None:
        begun["recv_next"] = dist.irecv(tensor_recv_next, next_pipeline_rank, group, _BACKWARD)
    if tensor_send_next is not None:
        begun["send_next"] = dist.isend(tensor_send_next.contiguous(), next_pipeline_rank, group, _FORWARD)
    if tensor_send_prev is not None:
        begun["send_prev"] = dist.isend(tensor_send_prev.contiguous(), prev_pipeline_rank, group, _BACKWARD)
    return begun


def _exchange_shapes(
    self: Any, tensor_send_next: torch.Tensor | None, tensor_send_prev: torch.Tensor | None, recv_prev: bool, recv_next: bool
) -> tuple[list[int], list[int]]:
    def shape_of(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else torch.tensor(tensor.shape, dtype=torch.int64)

    from_prev, from_next = (torch.zeros(3, dtype=torch.int64) for _ in range(2))
    begun = _begin(
        tensor_send_prev=shape_of(tensor_send_prev),
        tensor_recv_prev=from_prev if recv_prev else None,
        tensor_send_next=shape_of(tensor_send_next),
        tensor_recv_next=from_next if recv_next else None,
        group=self.pp_group,
        prev_pipeline_rank=self.prev_rank,
        next_pipeline_rank=self.next_rank,
    )
    for request in begun.values():
        request.wait()
    return from_prev.tolist(), from_next.tolist()
