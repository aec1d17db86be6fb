"""Steps that no graph has: the same kernels, launched one by one, whatever the rows are.

Long prompts, prompt logprobs, embeddings, steps that the host samples (forks and beams), and drafts of models
whose windows are not rows. Rows that decode come first, padded to a number that kernels are compiled for;
then the given tokens, without padding.

Shapes:  T tokens, S sampled positions, C tokens whose hidden states are needed, D hidden size.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from infer.execution.device import Pending, Sampler, StepResult, no_rows
from infer.execution.embedding import Pooled, pool_hidden
from infer.execution.gpu.launcher import Followed, StepLauncher
from infer.execution.gpu.readback import drawn_by
from infer.execution.gpu.sending import send
from infer.execution.gpu.step_ids import StepIds
from infer.execution.gpu.step_inputs import Prompts
from infer.execution.head_model import drawn_places, following_tokens, kept_ids, with_drawn
from infer.execution.host_sampling import HostSampler, PromptTable
from infer.execution.layout import needed_tokens
from infer.execution.order import DECODE, ON_HOST, READS_PROMPTS, StepMasks, StepOrder


class RaggedSteps:
    """Launches steps kernel by kernel."""

    def __init__(self, launcher: StepLauncher, ids: StepIds, sampler: HostSampler) -> None:
        self._launcher, self._ids, self._sampler = launcher, ids, sampler
        self._model, self._rows, self._inputs = launcher.model, launcher.rows, launcher.inputs
        self._device, self._scratch, self._readback = launcher.device, launcher.scratch, ids.readback

    def start(self, order: StepOrder) -> Sampler:
        """Launch a step kernel by kernel, whatever its rows are."""
        num_decoding = int(np.count_nonzero(order.kinds == DECODE))
        prompts = Prompts(order, first=self._launcher.graphs.padded_rows(num_decoding))
        places, last_rows = needed_tokens(order, prompts.last_places.tolist())
        hidden_CD = self._hidden_of(order, prompts, places)
        if not self._launcher.has_logits:
            return partial(self._sample_elsewhere, order)
        pooled: Pooled | None = None
        if order.flags & READS_PROMPTS:  # results arrive before the ids, whose event is waited for
            states_CD = hidden_CD[:, : self._model.config.hidden_size]
            pooled = pool_hidden(order, self._rows.book, last_rows, states_CD)
            pooled = pooled._replace(states_ED=self._readback.fetch(pooled.states_ED))
        if order.flags & ON_HOST:
            return lambda masks: self._sample_on_host(order, prompts, last_rows, hidden_CD, pooled, masks)
        asked = [
            each._replace(table=self._readback.fetch(each.table))
            for each in self._sampler.prompt_tables(order, last_rows, hidden_CD)
        ]
        if not order.num_sampled.any():
            return lambda masks: self._sample_none(order, prompts, asked, pooled)
        sampled = order.num_sampled.astype(np.int64)
        ends = sampled.cumsum()
        assert ends[-1] <= self._scratch.max_rows, f"{ends[-1]} positions are sampled at once"
        back = (ends.repeat(sampled) - 1) - np.arange(ends[-1])  # places before each row's last
        rows = order.rows.repeat(sampled)
        lasts = np.array(last_rows, dtype=np.int64).repeat(sampled) - back
        advanced = np.where(sampled.repeat(sampled) == 1, rows, -1)
        packed = np.stack([lasts, rows, order.stops.repeat(sampled) - back, advanced])
        last_S, rows_S, positions_S, advanced_S = send(torch.from_numpy(packed), self._device).unbind()
        logits_SV = self._model.logits(hidden_CD[last_S] if places is None else hidden_CD)
        windows = partial(drawn_by, order, ends - 1)

        @torch.inference_mode()
        def sample(masks: StepMasks) -> Pending:
            ids_S = self._launcher.sample_rows(logits_SV, rows_S, positions_S, advanced_S.int())
            self._launcher.follow(partial(self._followed, order, prompts, ids_S))
            pending = self._ids.read_back(order, ids_S, logits_SV, rows)
            return pending.scatter(windows, asked, pooled).wait

        return sample

    def _hidden_of(self, order: StepOrder, prompts: Prompts, places: list[int] | None) -> torch.Tensor:
        """Compute the hidden states of a ragged step: of all tokens, or of the tokens at `places`."""
        launcher, inputs, device, slots = self._launcher, self._inputs, self._device, order.adapters
        inputs.send_rows(order.rows[prompts.decoding], prompts.first)
        if slots.any():
            slots_T = np.zeros(prompts.end, dtype=np.int32)
            slots_T[: len(prompts.decoding)] = slots[prompts.decoding]
            slots_T[prompts.first :] = slots[prompts.numbers].repeat(order.counts[prompts.numbers])
            inputs.send_adapters(slots_T, prompts.end)
        rows_S = inputs.rows_S[: prompts.first]
        launcher.gather(rows_S)
        dense = launcher.attention.dense
        batches, chunks = dense.split(prompts.chunks) if dense else ([], prompts.chunks)
        if len(prompts.numbers):
            table_XP = send(torch.from_numpy(prompts.table_XP), device)
            inputs.table_XT[:, prompts.first : prompts.end].copy_(table_XP)
        has_states = self._model.config.delta is not None
        tiles = prompts.tiles(chunks, inputs.tile_len, device, has_states=has_states) if chunks else None
        places_C = None if places is None else send(torch.tensor(places), device)
        has_adapters = bool(slots.any())
        return launcher.forward(
            self._model, prompts.end, rows_S, tiles, batches, places_C, has_adapters=has_adapters
        )

    def _sample_elsewhere(self, order: StepOrder, masks: StepMasks) -> Pending:
        """End a ragged step whose logits another stage has."""
        if order.flags & ON_HOST or not order.num_sampled.any():
            return no_rows
        ends, goes_on = order.num_sampled.cumsum(), order.num_sampled == 1  # drafts wait to be judged
        places, num_ids = ends[goes_on] - 1, int(ends[-1])
        return self._ids.await_ids(order.rows[goes_on], order.stops[goes_on], places, num_ids)

    @torch.inference_mode()
    def _sample_none(
        self, order: StepOrder, prompts: Prompts, asked: list[PromptTable], pooled: Pooled | None
    ) -> Pending:
        """End a ragged step without an id to sample; there may be results of prompts to wait for."""
        self._launcher.follow(partial(self._followed, order, prompts, self._scratch.ids_S[:0]))
        if not (asked or pooled):  # the middle of a prompt
            return lambda: StepResult([()] * order.num_rows, [()] * order.num_rows, {})
        pending = self._readback.take(order.step, self._scratch.ids_S[:0], order.num_rows)
        return pending.scatter(list, asked, pooled).wait

    @torch.inference_mode()
    def _sample_on_host(
        self, order: StepOrder, prompts: Prompts, last_rows: list[int], hidden_CD: torch.Tensor,
        pooled: Pooled | None, masks: StepMasks,
    ) -> Pending:  # fmt: skip
        if not self._launcher.samples:
            self._sampler.follow(order, last_rows, hidden_CD)
            return no_rows
        result = self._sampler.sample(order, last_rows, hidden_CD, masks)

        def followed() -> Followed:
            ids = torch.from_numpy(kept_ids(order, result.ids))
            return self._followed(order, prompts, send(ids, self._device))

        self._launcher.follow(followed)
        if pooled is not None:
            arrival = self._readback.take(order.step, self._scratch.ids_S[:0], 0).scatter(list, pooled=pooled)
            result = result._replace(pooled=arrival.wait().pooled)
        return lambda: result

    def _followed(self, order: StepOrder, prompts: Prompts, ids_S: torch.Tensor) -> Followed:
        """Return the facts about a ragged step that a draft head gets, given all drawn ids, row by row."""
        places, drawn = prompts.places, drawn_places(order)
        following = np.zeros(prompts.end, dtype=np.int64)  # tokens that follow, padding included
        following[places] = following_tokens(order)
        packed = np.concatenate([following, places[drawn], order.rows.repeat(order.num_sampled)])
        sent = send(torch.from_numpy(packed), self._device)
        places_C, rows_C = sent[len(following) :].view(2, -1)
        return Followed(with_drawn(sent[: len(following)], ids_S), places_C, rows_C)
