"""vLLM's own scheduler and both sides of the connector around a model whose KV says which tokens it stands for.

The model checks, whenever it attends to a position, that the block holds what these tokens give, so a wrong byte, a
block that was given to somebody else and a copy that came late all show at once.
"""

from __future__ import annotations

import copy
import functools
import json
import pickle
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import sha256
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from lmcache.client.engine_environment import EngineEnvironment
from lmcache.integration.vllm.connector import LMCacheMPConnector
from simulation.believing_router import BelievingRouter
from simulation.chain import VOCABULARY, Chain, may_follow
from simulation.simulated_connector import ENVIRONMENT, transfer_settings
from simulation.world import World

_MASK = 2**64 - 1
_ENCODER_TOKENS = 1 << 20
_DRAFTS = 3  # tokens that a head drafts a step
_WRONG_DRAFTS = 0.25
_JUNK = 0xBAD


Images = Sequence[tuple[int, int, str]]


@dataclass(frozen=True)
class Shape:
    """One engine's form. Token counts are small, so that a request passes many boundaries in a few steps."""

    block_tokens: int = 16
    blocks: int = 40
    ranks: int = 1
    mla: bool = False
    stages: int = 1  # of a pipeline, each with layers of its own; the ranks of a stage come one after the other
    window: int | None = None  # of a second KV cache group
    local: int | None = None  # of a second KV cache group: attention sees multiples of so many tokens
    state: bool = False  # a second KV cache group keeps a recurrent state
    # A second KV cache group is that of a head, whose KV of a position depends on so many further tokens: EAGLE, or a
    # chain of heads.
    head: int = 0
    alone: bool = False  # there is no group of full attention beside it
    prefix_caching: bool = True
    overlapped: bool = False  # the next step is scheduled before the last one's result is known
    step_tokens: int = 64
    running: int = 6
    events: bool = False  # it tells a router what it and the server have
    sessions: bool = False  # requests that get more input, with images, while they run
    hands_over: bool = False  # what requests say as if it computed for another engine, or went on where one ended
    role: str = "kv_both"
    multi: dict[str, Any] | None = None  # the connector is in a MultiConnector with these settings
    beside: str = ""  # "before", "behind": in it is another connector that loads prompts, too
    extra: dict[str, Any] = field(default_factory=dict)


@functools.cache
def _model_config(folder: str) -> ModelConfig:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "torch_dtype": "bfloat16",
    }
    (Path(folder) / "config.json").write_text(json.dumps(config))
    return ModelConfig(
        model=folder, tokenizer=folder, skip_tokenizer_init=True, dtype="bfloat16", seed=0, max_model_len=1024
    )


def _with_latent_kv(model: ModelConfig) -> ModelConfig:
    """The same model with one latent vector a token (MLA), for those who ask whether it has one."""
    latent = copy.copy(model)
    latent.model_arch_config = copy.copy(model.model_arch_config)
    latent.model_arch_config.is_deepseek_mla = True
    return latent


def _configs(
    shape: Shape, folder: str, engine_id: str, environment: EngineEnvironment, engine: Engine
) -> tuple[VllmConfig, KVCacheConfig]:
    extra = {"lmcache.mp.heartbeat_interval": 2.0, ENVIRONMENT: environment, **shape.extra}
    transfer = transfer_settings(shape.role, extra, shape.multi, shape.beside, engine)
    config = VllmConfig(
        model_config=_model_config(folder),
        scheduler_config=SchedulerConfig(
            max_num_seqs=shape.running,
            max_num_batched_tokens=shape.step_tokens,
            max_model_len=1024,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=shape.overlapped,
        ),
        cache_config=CacheConfig(
            block_size=shape.block_tokens, gpu_memory_utilization=0.9, enable_prefix_caching=shape.prefix_caching
        ),
        kv_transfer_config=KVTransferConfig(engine_id=engine_id, **transfer),
        kv_events_config=KVEventsConfig(enable_kv_cache_events=shape.events, publisher="null"),
        device_config=DeviceConfig("cpu"),
    )
    if shape.mla:  # now, because vLLM for CPU forces other settings on such a model
        config.model_config = _with_latent_kv(config.model_config)
    config.cache_config.num_gpu_blocks = shape.blocks
    config.parallel_config.tensor_parallel_size = shape.ranks // shape.stages
    config.parallel_config.pipeline_parallel_size = shape.stages
    config.parallel_config.world_size = shape.ranks
    common = {"block_size": shape.block_tokens, "num_kv_heads": 1, "head_size": 64, "dtype": torch.bfloat16}
    groups = [KVCacheGroupSpec(["layer0"], FullAttentionSpec(**common))]
    if shape.window is not None:
        groups.append(KVCacheGroupSpec(["layer1"], SlidingWindowSpec(**common, sliding_window=shape.window)))
    if shape.local is not None:
        spec = ChunkedLocalAttentionSpec(**common, attention_chunk_size=shape.local)
        groups.append(KVCacheGroupSpec(["layer1"], spec))
    if shape.state:
        config.cache_config.mamba_cache_mode = "align"
        spec = MambaSpec(
            block_size=shape.block_tokens,
            shapes=((shape.block_tokens,),),
            dtypes=(torch.int64,),
            mamba_cache_mode="align",
        )
        groups.append(KVCacheGroupSpec(["layer1"], spec))
    if shape.head:
        config.speculative_config = _head(shape.head, config.model_config)
        config.__class__ = _SecondRunner
        groups.append(KVCacheGroupSpec(["layer1"], FullAttentionSpec(**common), is_eagle_group=True))
    if shape.alone:
        groups = [KVCacheGroupSpec(["layer0"], groups[1].kv_cache_spec)]
    return config, KVCacheConfig(num_blocks=shape.blocks, kv_cache_tensors=[], kv_cache_groups=groups)


class _SecondRunner(VllmConfig):
    """Chains of heads are of the newer of vLLM's two runners, which the workers here stand for."""

    use_v2_model_runner = property(lambda self: True)


def _head(lookahead: int, model: ModelConfig) -> SpeculativeConfig:
    """As far as vLLM's scheduler asks it, which is told nothing of the head's weights."""
    config: SpeculativeConfig = object.__new__(SpeculativeConfig)
    draft = copy.copy(model)
    draft.hf_config = copy.deepcopy(model.hf_config)
    draft.hf_config.num_nextn_predict_layers = lookahead
    config.__dict__.update(
        method="mtp" if lookahead > 1 else "eagle",
        model=model.model,
        num_speculative_tokens=_DRAFTS,
        draft_model_config=draft,
        disable_eagle_block_drop=False,
        num_speculative_tokens_per_batch_size=None,
        parallel_drafting=False,
        draft_load_config=None,
    )
    return config


@dataclass
class _Scheduled:
    request: Request
    start: int
    count: int
    blocks: tuple[list[int], ...]
    samples: bool
    tokens: list[int]  # known when the step was scheduled
    features: tuple[MultiModalFeatureSpec, ...]
    drafts: list[int]  # the last tokens of the step

    @property
    def end(self) -> int:
        """Behind the tokens that are known to be the request's."""
        return self.start + self.count - len(self.drafts)


class Engine:
    def __init__(
        self, world: World, shape: Shape, folder: Path, environment: EngineEnvironment, engine_id: str = "engine"
    ) -> None:
        init_none_hash(sha256)
        self.world = world
        self.shape = shape
        self._folder = folder
        config, kv_config = _configs(shape, str(folder), engine_id, environment, self)
        self._groups = len(kv_config.kv_cache_groups)
        self.scheduler = (AsyncScheduler if shape.overlapped else Scheduler)(
            vllm_config=config,
            kv_cache_config=kv_config,
            structured_output_manager=StructuredOutputManager(config),
            block_size=shape.block_tokens,
            log_stats=False,
        )
        self.scheduler.max_num_encoder_input_tokens = _ENCODER_TOKENS  # the model of the configuration sees nothing
        self.scheduler.encoder_cache_manager = EncoderCacheManager(_ENCODER_TOKENS)
        self.router = BelievingRouter()
        self.scheduler.kv_event_publisher = self.router
        self.connector: LMCacheMPConnector = self.scheduler.connector
        self.memory = [np.zeros((shape.blocks, shape.block_tokens), np.uint64) for _ in range(shape.ranks)]
        self.workers = [self._worker(config, kv_config, rank) for rank in range(shape.ranks)]
        self._aggregator = KVOutputAggregator(shape.ranks)
        self._hasher = get_request_block_hasher(shape.block_tokens, sha256)
        self.chains: dict[str, Chain] = {}
        self.live: dict[str, Request] = {}
        self.finished: list[Request] = []
        self.told: dict[str, Any] = {}  # what the answers of requests had under `kv_transfer_params`
        self.in_flight: deque[tuple[Any, list[_Scheduled]]] = deque()
        self.loaded_tokens = self.steps = self.preemptions = 0
        self.weights = 0  # their version: other weights give every position another KV

    def _worker(self, config: VllmConfig, kv_config: KVCacheConfig, rank: int) -> LMCacheMPConnector:
        mine = copy.copy(config)
        mine.parallel_config = copy.copy(config.parallel_config)
        mine.parallel_config.rank = rank
        kv_config = copy.deepcopy(kv_config)
        for index, group in enumerate(kv_config.kv_cache_groups):
            group.layer_names = [f"layer{index + self._stage(rank) * self._groups}"]
        with set_current_vllm_config(mine):
            connector = KVConnectorFactory.create_connector(mine, KVConnectorRole.WORKER, kv_config)
        tensor = torch.from_numpy(self.memory[rank].view(np.int64))
        names = [name for group in kv_config.kv_cache_groups for name in group.layer_names]
        connector.register_kv_caches(dict.fromkeys(names, tensor))
        return connector

    def _adapter(self, name: str) -> Path:
        folder = self._folder / name
        if not folder.exists():
            folder.mkdir()
            (folder / "adapter_model.safetensors").write_text(name)
        return folder

    # ---- requests ----------------------------------------------------------------------------------------------------
    def add(
        self,
        name: str,
        tokens: list[int],
        max_tokens: int,
        salt: str | None,
        lora: str | None,
        kv_transfer_params: dict[str, Any] | None = None,
    ) -> Request:
        extra_args = {"kv_transfer_params": kv_transfer_params} if kv_transfer_params is not None else None
        request = Request(
            name,
            tokens,
            SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=extra_args),
            None,
            cache_salt=salt,
            lora_request=LoRARequest(lora, int(lora[1:]), str(self._adapter(lora))) if lora else None,
            block_hasher=self._hasher,
        )
        self.chains[name] = Chain(request)
        self.live[name] = request
        self.scheduler.add_request(request)
        return request

    def add_input(self, name: str, tokens: list[int], max_tokens: int, images: Images = ()) -> Request:
        """The first input of a session, or a further one. `images`: (position in these tokens, length, name)."""
        request = Request(
            name,
            tokens,
            SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            None,
            mm_features=[
                MultiModalFeatureSpec(None, "image", image, PlaceholderRange(offset=offset, length=length))
                for offset, length, image in images
            ],
            block_hasher=self._hasher,
            resumable=True,
        )
        if name not in self.live:
            self.chains[name] = Chain(request)
            self.live[name] = request
        self.scheduler.add_request(request)
        return request

    def end_input(self, name: str) -> None:
        self.scheduler.add_request(Request(name, [0], SamplingParams(max_tokens=1), None))
        self._retire()

    def is_lost(self, name: str) -> bool:
        """vLLM drops the tokens of a session that stops while it is preempted, and never schedules it again."""
        request = self.live.get(name)
        return request is not None and request.resumable and request.num_tokens < request.num_prompt_tokens

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    # ---- a step ------------------------------------------------------------------------------------------------------
    def step(self) -> None:
        """Schedules and runs a step; its result is taken at once or, when overlapped, after the next is scheduled."""
        self.steps += 1
        output = self.scheduler.schedule()
        self.in_flight.append((output, self._snapshot(output)))
        if len(self.in_flight) > (1 if self.shape.overlapped else 0):
            self.settle_one()

    def settle_one(self) -> None:
        output, scheduled = self.in_flight.popleft()
        results = [self._run_worker(rank, output, scheduled) for rank in range(self.shape.ranks)]
        result = self._aggregator.aggregate(results)
        self.world.sleep(self.world.random.choice((0.0, 0.001, 0.005, 0.02)))
        for outputs in self.scheduler.update_from_output(output, result).values():
            self.told.update({each.request_id: each.kv_transfer_params for each in outputs.outputs if each.finished})
        if self.shape.head:
            self.scheduler.update_draft_token_ids(self._drafts([share.request for share in scheduled]))
        self._retire()

    def _retire(self) -> None:
        for name in [name for name, request in self.live.items() if request.is_finished()]:
            self.finished.append(self.live.pop(name))

    def _snapshot(self, output: Any) -> list[_Scheduled]:
        scheduled = []
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for name, count in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            blocks = self.scheduler.kv_cache_manager.get_block_ids(name)
            known = request.num_tokens + request.num_output_placeholders
            drafts = list(output.scheduled_spec_decode_tokens.get(name, ()))
            end = starts[name] + count - len(drafts)
            # In overlapped scheduling this step's own placeholder is counted already.
            samples = end >= (known - (1 if self.shape.overlapped and request.num_output_placeholders else 0))
            scheduled.append(
                _Scheduled(
                    request,
                    starts[name],
                    count,
                    tuple(map(list, blocks)),
                    samples,
                    list(request.all_token_ids),
                    tuple(request.mm_features),
                    drafts,
                )
            )
        return scheduled

    def _run_worker(self, rank: int, output: Any, scheduled: list[_Scheduled]) -> ModelRunnerOutput:
        connector = self.workers[rank]
        metadata = pickle.loads(pickle.dumps(output.kv_connector_metadata))
        connector.bind_connector_metadata(metadata)
        context = SimpleNamespace(attn_metadata={} if scheduled else None)
        if output.has_sync_kv_loads:
            connector.start_load_kv(context)
        sampled = [self._forward(rank, share) for share in scheduled]
        if not output.has_sync_kv_loads:
            connector.start_load_kv(context)
        connector.wait_for_save()
        results = connector.get_transfer_results(output.finished_req_ids)
        kv_output = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=connector.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=pickle.loads(pickle.dumps(connector.build_connector_worker_meta())),
        )
        connector.clear_connector_metadata()
        names = [share.request.request_id for share in scheduled]
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=kv_output,
        )

    def _forward(self, rank: int, share: _Scheduled) -> list[int]:
        end = share.start + share.count
        request, chain = share.request, self.chains[share.request.request_id]
        tokens = self._tokens(share)
        expected = chain.upto(tokens, end, share.features)
        sampled = self._sample(chain, share) if share.samples else []
        for group, blocks in enumerate(share.blocks):
            values = expected ^ np.uint64(self._flavour(rank, group))
            table = np.array(blocks, dtype=np.int64)
            if group and self.shape.head:
                self._advance_head(rank, share, table, tokens, sampled)
                continue
            is_special = group or self.shape.alone
            if is_special and self.shape.state:
                self._advance_state(rank, share, table, values)
                continue
            positions = np.arange(end)
            where = table[positions // self.shape.block_tokens], positions % self.shape.block_tokens
            first = self._first_seen(share.start) if is_special else 0
            written = self.memory[rank][where][first : share.start]
            wrong = np.nonzero(written != values[first : share.start])[0]
            assert not wrong.size, (
                f"{request.request_id} attends to wrong KV at positions {(wrong + first).tolist()} of {share.start}, "
                f"group {group}, rank {rank}, blocks {blocks}"
            )
            written = slice(share.start, end)
            assert (where[0][written] != 0).all(), "the null block is written"
            self.memory[rank][where[0][written], where[1][written]] = values[written]
        return sampled

    def _sample(self, chain: Chain, share: _Scheduled) -> list[int]:
        """The drafts that are right, and the token behind them."""
        sampled: list[int] = []
        for draft in (*share.drafts, None):
            sampled.append(chain.next_token(share.end + len(sampled)))
            if draft != sampled[-1]:
                break
        return sampled

    def _advance_head(
        self, rank: int, share: _Scheduled, table: np.ndarray, tokens: list[int], sampled: list[int]
    ) -> None:
        """Drafting: the head reads what it has, writes the KV of the accepted tokens as far as the next ones are known,
        and leaves junk behind."""
        memory, size, ahead = self.memory[rank], self.shape.block_tokens, self.shape.head
        known = [*tokens[: share.end], *sampled] if sampled else share.tokens
        accepted = share.end + max(0, len(sampled) - 1)
        states = self.chains[share.request.request_id].upto(known, len(known), share.features)
        flavour = np.uint64(self._flavour(rank, 1))
        values = states[ahead:] ^ flavour  # by position: with so many further tokens
        seen = np.arange(max(0, share.start - ahead + 1))
        read = memory[table[seen // size], seen % size]
        wrong = np.nonzero(read != values[: len(seen)])[0].tolist()
        if self.shape.prefix_caching:
            wrong = [at for at in wrong if not self._ends_another_prompt(at, states[at], read[at] ^ flavour)]
        assert not wrong, (
            f"the head of {share.request.request_id} attends to wrong KV at positions {wrong} of {len(seen)}, "
            f"rank {rank}, blocks {table.tolist()}"
        )
        final = np.arange(len(seen), min(accepted, len(values)))
        memory[table[final // size], final % size] = values[final]
        junk = np.arange(max(len(seen), len(values)), min(accepted + _DRAFTS, len(table) * size))
        assert (table[junk // size] != 0).all(), "the null block is written"
        memory[table[junk // size], junk % size] = _JUNK

    def _ends_another_prompt(self, position: int, value: np.uint64, next_value: np.uint64) -> bool:
        """vLLM's own cache names a block by its own tokens, so the head's KV of its last one may be of a prompt that
        goes on with another token. Loads are held to every position in the shapes without that cache."""
        is_end = position % self.shape.block_tokens == self.shape.block_tokens - 1
        return is_end and may_follow(int(value), int(next_value))

    def may_end_so(self, address: int, content: bytes) -> bool:
        """Whether some token behind a head's block, of the worker's memory at `address`, gives its last one this KV."""
        rank = next(rank for rank, memory in enumerate(self.memory) if memory.ctypes.data == address)
        before, last = np.frombuffer(content, np.uint64)[-2:] ^ np.uint64(self._flavour(rank, 1))
        return may_follow(int(before), int(last))

    def _drafts(self, requests: Sequence[Request]) -> DraftTokenIds:
        drafts = []
        for request in requests:
            chain, tokens = self.chains[request.request_id], list(request.all_token_ids)
            for _ in range(_DRAFTS):
                chain.upto(tokens, len(tokens), request.mm_features)
                wrong = self.world.random.random() < _WRONG_DRAFTS
                tokens.append(2 if wrong else chain.next_token(len(tokens)))
            drafts.append(tokens[-_DRAFTS:])
        return DraftTokenIds([request.request_id for request in requests], drafts)

    def _first_seen(self, start: int) -> int:
        """The first position that a token at `start` attends to in the second group."""
        if self.shape.local is not None:
            return start // self.shape.local * self.shape.local
        assert self.shape.window is not None
        return max(0, start - self.shape.window + 1)

    def _advance_state(self, rank: int, share: _Scheduled, table: np.ndarray, values: np.ndarray) -> None:
        """The block that the last step wrote holds the state; where this step ends in another, it goes there."""
        memory, name = self.memory[rank], share.request.request_id
        if share.start:
            block = table[(share.start - 1) // self.shape.block_tokens]
            assert block != 0, f"{name} has no state at {share.start}"
            assert (memory[block] == values[share.start - 1]).all(), f"{name} has a wrong state at {share.start}"
        block = table[(share.start + share.count - 1) // self.shape.block_tokens]
        assert block != 0, "the null block is written"
        memory[block] = values[share.start + share.count - 1]

    def _tokens(self, share: _Scheduled) -> Any:
        """The tokens as the worker knows them: with those sampled in steps whose result the scheduler has not seen."""
        if share.drafts:
            return [*share.tokens[: share.end], *share.drafts]
        tokens = list(share.tokens)
        chain = self.chains[share.request.request_id]
        while len(tokens) < share.start + share.count:
            chain.upto(tokens, len(tokens), share.features)
            tokens.append(chain.next_token(len(tokens)))
        return tokens

    def _stage(self, rank: int) -> int:
        return rank * self.shape.stages // self.shape.ranks

    def values(self, name: str, tokens: list[int], end: int, rank: int, group: int) -> np.ndarray:
        """The KV of a request's first tokens, without images."""
        return self.chains[name].upto(tokens, end, ()) ^ np.uint64(self._flavour(rank, group))

    def _flavour(self, rank: int, group: int) -> int:
        place = (self._stage(rank) + 1 if self.shape.mla else rank + 1) * 0x9E3779B97F4A7C15 * (group + 1)
        return (place ^ self.weights * 0xD1342543DE82EF95) & _MASK

    # ---- what must hold ----------------------------------------------------------------------------------------------
    def owned_blocks(self) -> set[int]:
        """Blocks of requests that a forward pass may read or write now."""
        manager = self.scheduler.kv_cache_manager
        tables = [manager.get_block_ids(request.request_id) for request in self.scheduler.running]
        return {block for table in tables for blocks in table for block in blocks}

    def stored_blocks(self, name: str) -> set[int]:
        """Blocks of a request that a store reads: somebody beside requests holds them."""
        manager = self.scheduler.kv_cache_manager
        tables = {request: manager.get_block_ids(request) for request in self.scheduler.requests}
        users = Counter(block for table in tables.values() for blocks in table for block in blocks)
        of_request = {block for blocks in tables[name] for block in blocks}
        return {block for block in of_request if manager.block_pool.blocks[block].ref_cnt > users[block] > 0} - {0}

    def check_output(self, request: Request) -> None:
        chain = Chain(request)
        tokens = list(request.prompt_token_ids)
        for token in request.output_token_ids:
            chain.upto(tokens, len(tokens), request.mm_features)
            assert token == chain.next_token(len(tokens)), f"{request.request_id} got a wrong token"
            tokens.append(token)

    def check_idle(self) -> None:
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == self.shape.blocks - 1, "blocks leaked"
        assert not self.scheduler.requests
        assert self.connector.scheduler_side is not None
        self.connector.scheduler_side.check_idle()
        for worker in self.workers:
            assert worker.worker_side is not None
            worker.worker_side.check_idle()

    def close(self) -> None:
        self.connector.shutdown()
        for worker in self.workers:
            worker.shutdown()
