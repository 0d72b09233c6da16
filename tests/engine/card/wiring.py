"""vLLM's own objects between a ``vllm.LLM`` and the weights in a GPU's memory, wired up without a GPU.

Real are: LLM, LLMEngine, the client of the core with its message encoder, the core's dispatch of calls, the executor,
the GPU worker's methods for sleep and weights, its allocator, the weight-transfer engines, the layerwise reload. Not
there: sockets (messages pass as bytes), the scheduler's work, the model runner and its model, which is two layers.
"""

from __future__ import annotations

import importlib
import os
import pickle
import queue
import sys
from collections.abc import Iterable
from multiprocessing.reduction import ForkingPickler
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from gspo_hpc.engine import host
from gspo_hpc.engine.client import EngineDied
from tests.engine.card.memory import UUID, Card, Pool

WIDTH = 64
_IMPORTED = (
    "vllm.device_allocator",
    "vllm.distributed.weight_transfer",
    "vllm.entrypoints.llm",
    "vllm.model_executor.model_loader.reload",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.gpu_worker",
)


class Model(torch.nn.Module):
    """Two layers with a buffer, loaded by names like any of vLLM's models."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.second = torch.nn.Linear(3 * WIDTH, WIDTH)
        self.register_buffer("scale", torch.full((4,), 2.0))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load tensors as vLLM's models do, each by its parameter's loader."""
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        parameters, loaded = dict(self.named_parameters()), set()
        for name, tensor in weights:
            parameter = parameters[name]
            getattr(parameter, "weight_loader", default_weight_loader)(parameter, tensor)
            loaded.add(name)
        return loaded


class Scheduler:
    """A scheduler without requests."""

    def __init__(self) -> None:
        from vllm.v1.core.sched.interface import PauseState

        self.pause_state: Any = PauseState.UNPAUSED
        self.resets = 0

    def set_pause_state(self, state: Any) -> None:
        self.pause_state = state

    def reset_prefix_cache(self, *options: Any) -> bool:
        self.resets += 1
        return True

    def finish_requests(self, *options: Any) -> list[Any]:
        return []

    def reset_encoder_cache(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("has_", "is_")):
            return lambda *_: False
        raise AttributeError(name)


class Runner:
    """The part of a model runner that sleep and weight updates ask."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def get_model(self) -> torch.nn.Module:
        return self.model

    def post_kv_cache_wake_up(self) -> None:
        pass

    def reset_lora_state(self) -> None:
        pass


class Engines:
    """Makes the objects of an engine, and holds those that a test looks at."""

    def __init__(self, card: Card) -> None:
        self.card = card
        self.cache: torch.Tensor | None = None
        self.worker: Any = None
        self.scheduler: Any = None

    def llm(self, arguments: dict[str, Any]) -> Any:
        """Return a ``vllm.LLM`` whose model and cache are in pools of the card."""
        from vllm.config import DeviceConfig, VllmConfig, WeightTransferConfig
        from vllm.entrypoints.llm import LLM
        from vllm.platforms import current_platform
        from vllm.v1.engine.llm_engine import LLMEngine

        from gspo_hpc.engine import plugin

        plugin.register()  # vLLM calls it in each of its processes
        assert arguments["enable_sleep_mode"]
        config = VllmConfig(device_config=DeviceConfig(device=current_platform.device_type or "cuda"))
        config.weight_transfer_config = WeightTransferConfig(**arguments["weight_transfer_config"])
        config.model_config = SimpleNamespace(  # type: ignore[assignment]
            dtype=torch.float32,
            enable_cumem_allocator=True,
            enable_nccl_comm_suspend=False,
            enable_sleep_mode=True,
            sleep_mode_backend="cumem",
            sleep_preserve_parameter_names=(),
        )
        self.worker = self._worker(config)
        caches = SimpleNamespace(clear_mm_cache=lambda: None)  # of images, by the names that versions give them
        engine = _bare(LLMEngine, vllm_config=config, logger_manager=None, renderer=caches, input_processor=caches)
        engine.engine_core = self._client(self._core(config, self._executor(config, self.worker)))
        return _bare(LLM, llm_engine=engine, get_tokenizer=lambda: None)

    def end(self) -> None:
        """End the process of the core, and with it all that it holds of the card."""
        self.card.end_process()
        sys.modules["vllm.device_allocator.cumem"].CuMemAllocator.instance = None  # type: ignore[attr-defined]
        self.worker = self.cache = None

    def _worker(self, config: Any) -> Any:
        from vllm.distributed.weight_transfer import WeightTransferEngineFactory
        from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
        from vllm.v1.worker.gpu_worker import Worker

        device = torch.device("cuda", 0)
        worker = _bare(
            Worker,
            vllm_config=config,
            model_config=config.model_config,
            parallel_config=config.parallel_config,
            cache_config=config.cache_config,
            speculative_config=None,
            device=device,
            rank=0,
            local_rank=0,
            weight_transfer_engine=None,
            get_draft_model=lambda: None,
            synchronize_device=lambda: None,
            _weight_update_active=False,
            _weight_update_is_draft=False,
            _is_checkpoint_format=True,
            _sleep_saved_buffers={},
            _sleep_saved_draft_buffers={},
            _sleep_saved_parameters={},
            _sleep_mode_backend=None,
            _sleep_rebuild_draft_metadata_buffers=False,
        )
        with worker._maybe_get_memory_pool_context(tag="weights"), torch.device(device):
            model = Model()
            record_metadata_for_reloading(model)
        with worker._maybe_get_memory_pool_context(tag="kv_cache"):
            self.cache = torch.zeros(1 << 20, device=device)
        worker.model_runner = Runner(model.requires_grad_(False))
        where = (device, model) if "device" in _parameters(WeightTransferEngineFactory.create_engine) else (model,)
        first = config if len(where) == 2 else config.parallel_config
        worker.weight_transfer_engine = WeightTransferEngineFactory.create_engine(
            config.weight_transfer_config, first, *where
        )
        return worker

    def _executor(self, config: Any, worker: Any) -> Any:
        from vllm.v1.executor.uniproc_executor import UniProcExecutor

        made = _bare(UniProcExecutor, vllm_config=config, driver_worker=worker, sleeping_tags=set())
        if not isinstance(getattr(type(made), "is_sleeping", None), property):
            made.is_sleeping = False
        made.reset_mm_cache = made.reset_encoder_cache = lambda: None
        return made

    def _core(self, config: Any, executor: Any) -> Any:
        from vllm.v1.engine import core

        self.scheduler = Scheduler()
        return _bare(
            core.EngineCoreProc,
            vllm_config=config,
            model_executor=executor,
            scheduler=self.scheduler,
            output_queue=queue.Queue(),
            input_queue=queue.Queue(),
            batch_queue=None,
            mm_receiver_cache=None,
            shutdown_state=core.EngineShutdownState.RUNNING,
            engines_running=False,
            _idle_state_callbacks=[],
            _set_kv_connector_handshake_metadata=lambda: None,
        )

    def _client(self, core: Any) -> Any:
        from vllm.v1.engine import EngineCoreOutputs, core_client
        from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

        client = _bare(core_client.SyncMPClient, utility_results={}, encoder=MsgpackEncoder())
        there, back = (MsgpackDecoder(), MsgpackEncoder()), MsgpackDecoder(EngineCoreOutputs)

        def send(kind: Any, request: Any) -> None:
            """Pass a message as its frames, in the place of sockets and of the threads at their ends."""
            decoder, encoder = there
            core._handle_client_request(kind, decoder.decode([bytes(f) for f in client.encoder.encode(request)]))
            _, outputs = core.output_queue.get_nowait()
            answer = back.decode([bytes(frame) for frame in encoder.encode(outputs)])
            core_client._process_utility_output(answer.utility_output, client.utility_results)

        client._send_input = send
        return client


def _bare(kind: type, **attributes: Any) -> Any:
    """Return an object of a class derived from `kind` that was not initialized, with these attributes."""
    made = object.__new__(type(kind.__name__, (kind,), {}))
    for name, value in attributes.items():
        made.__dict__[name] = value
    return made


def _parameters(function: Any) -> Iterable[str]:
    import inspect

    return inspect.signature(function).parameters.keys()


class HostOnCard(host.Host):
    """The process that owns the ``vllm.LLM``, with one that is wired up here."""

    engines: Engines

    def start(self, arguments: dict[str, Any]) -> None:
        self._llm = self.engines.llm(arguments)

    def close(self) -> None:
        self._llm = None


class ClientOnCard:
    """The owner's end of an engine: calls and answers pass as pickles, as over a connection."""

    engines: Engines
    dead: str | None = None

    def __init__(self, values: dict[str, str], log_path: Any) -> None:
        self._host: Any = HostOnCard()
        self._host.engines = self.engines
        os.environ.update(values)  # the test has kept what was there
        self.processes = SimpleNamespace(find=lambda: None, excerpt=lambda: "", pids=lambda: [])
        self._answers: list[Any] = []

    def call(self, seconds: float, method: str, *arguments: Any) -> Any:
        self.post(seconds, method, *arguments)
        return self.answer(seconds)

    def post(self, seconds: float, method: str, *arguments: Any) -> None:
        if self.dead is not None:
            raise EngineDied(self.dead)
        name, values = pickle.loads(ForkingPickler.dumps((method, arguments)))
        try:
            self._answers.append(getattr(self._host, name)(*values))
        except Exception as error:
            self._answers.append(error)

    def answer(self, seconds: float) -> Any:
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return pickle.loads(ForkingPickler.dumps(answer))

    def kill(self, reason: str) -> EngineDied:
        if self.dead is None:
            self.dead = reason
            self.engines.end()
        return EngineDied(reason)

    def close(self) -> None:
        if self.dead is None:
            self.engines.end()
        self._host.close()


def insert(card: Card, patch: pytest.MonkeyPatch, ray: bool) -> None:
    """Put `card` in the place of the GPU: for torch, for CUDA's runtime, and for vLLM's compiled allocator.

    With `ray` that package can be imported, which some versions of vLLM need for their ``ipc`` backend. They use it in
    a sender only, which is not ours.
    """
    for name in _IMPORTED:  # as long as vLLM sees that there is no GPU: it would import its kernels
        importlib.import_module(name)
    import vllm.platforms
    from vllm.distributed.device_communicators import cuda_wrapper

    platform = type(vllm.platforms.current_platform)
    for name in ("is_cuda", "is_cuda_alike"):
        patch.setattr(platform, name, lambda self: True)
    patch.setattr(platform, "is_cpu", lambda self: False)
    _torch_on(card, patch)
    patch.setattr(cuda_wrapper, "CudaRTLibrary", type("Runtime", (), {"cudaMemcpy": staticmethod(card.copy)}))
    compiled: Any = ModuleType("vllm.cumem_allocator")
    for name in ("init_module", "python_create_and_map", "python_unmap_and_release"):
        setattr(compiled, name, getattr(card, name))
    patch.setitem(sys.modules, compiled.__name__, compiled)
    patch.setitem(sys.modules, "ray", ModuleType("ray") if ray else None)
    for name in ("vllm.device_allocator.cumem", "vllm.distributed.weight_transfer.ipc_engine"):
        patch.delitem(sys.modules, name, raising=False)
        package, _, module = name.rpartition(".")
        patch.delattr(sys.modules[package], module, raising=False)
    fresh = importlib.import_module("vllm.device_allocator.cumem")
    patch.setitem(sys.modules, fresh.__name__, fresh)
    assert fresh.cumem_available


def _torch_on(card: Card, patch: pytest.MonkeyPatch) -> None:
    import torch.cuda.memory
    import torch.multiprocessing.reductions as reductions

    def memory(*_: Any) -> tuple[int, int]:
        return card.total - card.used(), card.total

    class Allocator:
        def __init__(self, *_: Any) -> None:
            self._allocator = self

    stream = SimpleNamespace(synchronize=lambda: None)
    replaced: dict[Any, dict[str, Any]] = {
        torch.cuda.memory: {"MemPool": Pool, "use_mem_pool": card.use, "CUDAPluggableAllocator": Allocator},
        torch.cuda: {
            "current_device": lambda: 0,
            "current_stream": lambda *_: stream,
            "get_device_properties": lambda *_: SimpleNamespace(uuid=UUID),
            "ipc_collect": card.collect,
            "mem_get_info": memory,
            "_lazy_init": lambda: None,
        },
        torch.accelerator: {"get_memory_info": memory, "current_device_index": lambda: 0},
        reductions: {"reduce_tensor": card.export},
        torch.UntypedStorage: {"_new_shared_cuda": card.new_shared, "_release_ipc_counter_cuda": card.release},
    }
    for module in (torch.cuda, torch.accelerator):
        replaced[module] |= {"synchronize": lambda *_: None, "empty_cache": lambda: None}
    for module, names in replaced.items():
        for name, value in names.items():
            patch.setattr(module, name, value, raising=False)
