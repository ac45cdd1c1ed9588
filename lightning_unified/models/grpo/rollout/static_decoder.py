"""Decode over a static cache, one token a row and step, recorded as a CUDA graph on CUDA."""

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from lightning_unified.models.causal_lm.language_model import forward_last
from lightning_unified.models.grpo.rollout.attention import packed_attention
from lightning_unified.models.grpo.rollout.capture import capture, new_pool, pool_bytes
from lightning_unified.models.grpo.rollout.compiled import compiled_blocks
from lightning_unified.models.grpo.rollout.few_rows.layers import reading_weights_once
from lightning_unified.models.grpo.rollout.few_rows.operators import has_kernels
from lightning_unified.models.grpo.rollout.recorded_prompts import RecordedPrompts, padded, read_prompts
from lightning_unified.models.grpo.rollout.static_cache import LayerCache, Storage
from lightning_unified.models.pretrained.architecture import blocks_of
from lightning_unified.nn.module_tree.walks import modules_of, tensors_of

__all__ = ["StaticDecoder", "slots_for"]

log = logging.getLogger("lightning_unified")

_ADAPTED = "active_adapters"  # a property of peft's layers, and a method of transformers' models
_SHORTEST = 128
_FEWER = 4  # judgement: a recorded step of half the rows is hardly shorter, and each number of rows needs a recording
_WORTH_DROPPING = 16  # judgement: with fewer rows, a captured step takes the time of reading the weights


def slots_for(length: int, *, most: int) -> int:
    """Return the slots to attend to; `length` are needed now, `most` at the end.

    It is a power of two of at least 128. If fewer than twice this power will be needed, it is the number of all slots instead. Few
    lengths need few recorded graphs, which later rollouts use again.
    """
    whole = -(-most // _SHORTEST) * _SHORTEST
    power = max(_SHORTEST, 1 << (length - 1).bit_length())
    return whole if whole < 2 * power else power


def _switches(layer: Any) -> tuple[Any, ...]:
    """Return which adapters of a layer of peft are active or merged, and their scales."""
    scales = getattr(layer, "scaling", None)
    numbers = [one for one in scales.values() if isinstance(one, int | float)] if isinstance(scales, dict) else []
    return *layer.active_adapters, layer.disable_adapters, *layer.merged_adapters, *numbers


class StaticDecoder:
    """Decoder over a static cache; memory and graphs stay for the next rollout until `release`.

    Args:
        lm: A causal language model of transformers, with or without adapters.
        captured: Record a step as a CUDA graph.
        compiled: Compile the model's blocks; with `captured` only.
    """

    def __init__(self, lm: Any, *, captured: bool, compiled: bool) -> None:
        self._lm = lm
        self._captured = captured
        self._compiled = compiled
        self._kernels = compiled and has_kernels(next(lm.parameters()).device)
        self._storage: Storage | None = None
        self._prompts: RecordedPrompts | None = None
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._made_for: tuple[Any, ...] = ()
        self._graph_bytes = 0
        self._takes_positions = "position_ids" in inspect.signature(type(lm).forward).parameters

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the products in attention, once a rollout has begun."""
        assert self._storage is not None
        return self._storage.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the cache, of a step's fixed tensors and of the graphs' memory pools."""
        if self._storage is None:
            return 0
        beside = (self._mask, self._ids, self._positions, self._slot, self._logits)
        graphs = self._graph_bytes + (0 if self._prompts is None else self._prompts.nbytes)
        return self._storage.nbytes + sum(one.nbytes for one in beside) + graphs

    def padded(self, prompt: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return prompts and their mask (P, S) with the pads that recorded passes read."""
        return (prompt, mask) if self._prompts is None else padded(prompt, mask)

    def read(self, prompt: Tensor, mask: Tensor) -> tuple[Tensor, Any]:
        """Return the logits (P, V) after prompts (P, S), and the model's cache.

        The next call overwrites both.
        """
        if self._prompts is None or not self._is_as_recorded(mask.device):
            return read_prompts(self._lm, prompt, mask)
        return self._prompts.read(prompt, mask)

    def begin(self, cache: Any, *, mask: Tensor, group: int, new: int) -> None:
        """Copy the model's own cache of the prompts.

        Args:
            cache: Keys and values of P prompts of S tokens; see `static_cache.is_plain_cache`.
            mask: Mask of the prompt tokens (P, S), pads on the left.
            group: Rows that continue each prompt.
            new: Upper bound on new tokens of a row.
        """
        prompt = [(layer.keys, layer.values) for layer in cache.layers]
        (P, S), device = mask.shape, mask.device
        self.rows, self._slot_now, self._most = P * group, S, S + new
        self._length = slots_for(S + 1, most=self._most)
        self._prepare(prompt, slots=self.rows * slots_for(self._most, most=self._most), device=device)
        assert self._storage is not None
        self._storage.fill(prompt, group=group, length=self._length)
        mask_view = self._mask_view()
        mask_view.fill_(torch.finfo(mask_view.dtype).min)
        mask_view[:, 0, 0, :S].masked_fill_(mask.repeat_interleave(group, 0), 0)
        self._positions[: self.rows, 0] = mask.sum(1).repeat_interleave(group, 0)
        self._slot.fill_(S)

    def step(self, tokens: Tensor) -> Tensor:
        """Return the logits (N, V) after another token (N) a row; the next step overwrites them."""
        if self._slot_now >= self._length:
            self._resize(
                torch.arange(self.rows, device=tokens.device), length=slots_for(self._slot_now + 1, most=self._most)
            )
        self._ids[: self.rows, 0] = tokens
        key = (self.rows, self._length)
        if self._captured and key not in self._graphs:
            self._graphs[key] = self._capture()
            self._graph_bytes = pool_bytes(self._pool)
        if self._captured:
            self._graphs[key].replay()
        else:
            with self._decoding():
                self._once()
        self._slot_now += 1
        return self._logits[: self.rows]

    def rows_worth_keeping(self, live: int) -> int:
        """Return the number of rows to continue with when `live` rows have not ended.

        Each number of rows needs its own graph, so only a few numbers are used.
        """
        if not self._captured:
            return live if 2 * live <= self.rows else self.rows
        if _FEWER * live > self.rows or self.rows <= _WORTH_DROPPING:
            return self.rows
        return max(_WORTH_DROPPING, 1 << (live - 1).bit_length())

    def keep(self, rows: Tensor) -> None:
        """Continue with the rows `rows` (K) only, in their order."""
        self._positions[: len(rows)] = self._positions[rows]
        self._resize(rows, length=self._length)

    def release_prompts(self) -> None:
        """Free the recorded passes over prompts; until `release`, prompts are read without."""
        self._prompts = None

    def release(self) -> None:
        """Free cache and graphs."""
        self._graphs.clear()
        self._graph_bytes = 0
        self._storage = self._prompts = None
        self._made_for = ()
        for name in ("_mask", "_ids", "_positions", "_slot", "_logits", "_pool"):
            vars(self).pop(name, None)

    def _prepare(self, prompt: list[tuple[Tensor, Tensor]], *, slots: int, device: torch.device) -> None:
        """Allocate memory, and drop the graphs, which hold addresses, unless the memory fits."""
        dtype = self._dtype(device) or prompt[0][0].dtype
        fits = (
            self._storage is not None and self._storage.fits(slots=slots, dtype=dtype) and len(self._ids) >= self.rows
        )
        if fits and self._is_as_recorded(device):
            return
        self.release()
        self._storage, self._made_for = Storage(prompt, slots=slots, dtype=dtype), self._state(device)
        self._mask = torch.empty(slots, dtype=dtype, device=device)
        self._ids = torch.zeros(self.rows, 1, dtype=torch.long, device=device)
        self._positions = torch.zeros(self.rows, 1, dtype=torch.long, device=device)
        self._slot = torch.zeros(1, dtype=torch.long, device=device)
        vocabulary = self._lm.get_output_embeddings().weight.shape[0]
        self._logits = torch.empty(self.rows, vocabulary, dtype=torch.float32, device=device)
        self._pool = new_pool() if self._captured else None
        if self._captured:
            self._prompts = RecordedPrompts(self._lm, dtype=dtype, context=self._without_kept_casts)

    def _is_as_recorded(self, device: torch.device) -> bool:
        """Return whether weights, buffers, adapters and autocast are as they were."""
        return self._made_for == self._state(device)

    def _state(self, device: torch.device) -> tuple[Any, ...]:
        """Return what a recording depends on.

        A rollout asks twice, so the walks are this package's: torch's take ten times as long.
        """
        layers = [one for one in modules_of(self._lm) if isinstance(getattr(type(one), _ADAPTED, None), property)]
        places = [one.data_ptr() for tensors in tensors_of(self._lm) for one in tensors]
        return self._dtype(device), *places, *map(_switches, layers)

    @staticmethod
    def _dtype(device: torch.device) -> torch.dtype | None:
        """Return autocast's dtype; None if autocast is off."""
        return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None

    def _mask_view(self) -> Tensor:
        return self._mask[: self.rows * self._length].view(self.rows, 1, 1, self._length)

    def _resize(self, rows: Tensor, *, length: int) -> None:
        assert self._storage is not None
        self._storage.move(rows=self.rows, length=self._length, kept=rows, to_length=length)
        held = self._mask_view()[rows]
        old, self.rows, self._length = self._length, len(rows), length
        mask_view = self._mask_view()
        mask_view.fill_(torch.finfo(mask_view.dtype).min)
        mask_view[..., :old] = held

    def _layers(self) -> list[LayerCache]:
        assert self._storage is not None
        views = self._storage.views(rows=self.rows, length=self._length)
        return [LayerCache(keys=keys, values=values, slot=self._slot) for keys, values in views]

    def _once(self, layers: list[LayerCache] | None = None) -> None:
        """Run one step on the fixed tensors: unmask the slot, read the token, advance both places."""
        from transformers.cache_utils import Cache, CacheLayerMixin

        CacheLayerMixin.register(LayerCache)  # a cache asks such layers alone for their length
        mask = self._mask_view()
        mask.index_fill_(3, self._slot, 0)
        positions = {"position_ids": self._positions[: self.rows]} if self._takes_positions else {}
        logits, _ = forward_last(
            self._lm,
            input_ids=self._ids[: self.rows],
            attention_mask=mask,
            cache=Cache(layers=layers or self._layers()),  # pyright: ignore[reportArgumentType]
            **positions,
        )
        self._logits[: self.rows].copy_(logits)
        self._slot.add_(1)
        self._positions[: self.rows].add_(1)

    @contextmanager
    def _decoding(self) -> Iterator[None]:
        with packed_attention(self._lm, by_kernel=self._kernels), self._without_kept_casts():
            yield

    def _without_kept_casts(self) -> AbstractContextManager[Any]:
        """Return a context without autocast's cache.

        A cast that the cache keeps would not be part of a graph.
        """
        device = self._slot.device
        dtype = self._dtype(device)
        return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype, cache_enabled=False)

    def _capture(self) -> torch.cuda.CUDAGraph:
        """Record a step, with fewer optimizations where a compiler fails."""
        state = [self._mask_view(), self._positions, self._slot]
        assert self._pool is not None
        layers = self._layers()
        step: Callable[[], None] = lambda: self._once(layers)  # noqa: E731
        while True:
            try:
                with self._decoding(), self._compiling(layers):
                    return capture(step, state=state, pool=self._pool)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # a compiler may raise any exception
                if not (self._kernels or self._compiled):
                    raise
                way = "compiled without this package's kernels" if self._kernels else "recorded as they are"
                log.warning(
                    "Blocks of %s do not compile (%s): from now on they are %s.", type(self._lm).__name__, error, way
                )
                self._compiled, self._kernels = self._compiled and self._kernels, False

    @contextmanager
    def _compiling(self, layers: list[LayerCache]) -> Iterator[None]:
        blocks = blocks_of(self._lm)
        with ExitStack() as stack:
            if self._compiled and len(blocks) == len(layers):
                if self._kernels:
                    stack.enter_context(reading_weights_once(blocks, rows=self.rows))
                stack.enter_context(compiled_blocks(blocks, layers))
            yield
