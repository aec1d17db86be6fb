"""Train an EAGLE-3 head for a model from the model's own answers, in minutes on one GPU.

    python scripts/train_eagle.py MODEL --out HEAD_DIR --minutes 8 --report report.json
    python scripts/train_eagle.py MODEL --out HEAD_DIR --prompts prompts.jsonl --tokens 40M

    prompts     a line each, or JSONL with "prompt" or "messages"; without a file, scripts/eagle_prompts.py
    answers     by the engine, with the chat template: one greedy, one or more at temperatures of 0.7 to 1
    states      of three layers, and logits, computed again for each batch: nothing of it is kept
    training    the head drafts several tokens in a row on the known text, each from its own state of the
                step before ("training-time test", eagle_head.py), and is compared with the model's own
                distribution
    choice      the head with the longest accepted drafts on held-out prompts is the one that is saved

HEAD_DIR gets config.json and model.safetensors in the published layout, and is read back by the engine's own
loader before the script ends.

Shapes:  T tokens, B sequences, L tokens of each (padded), R rows with a loss, C captured layers, D hidden
size, F numbers of the states of all layers, N query heads, G kv heads, H head size, W draft vocabulary,
V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path[:1] = [str(ROOT), str(ROOT / "src")]  # the package need not be installed

from infer import LLM, SamplingParams  # noqa: E402
from infer.errors import ConfigError, InferError  # noqa: E402
from infer.kernels.attention.reference import attend_sdpa  # noqa: E402
from infer.layers.attention import AttentionLayer, LayerInputs, StepContext  # noqa: E402
from infer.layers.whole_sequence import WholeSequence  # noqa: E402
from infer.loader.eagle import load_eagle  # noqa: E402
from infer.loader.find.source import resolve_model  # noqa: E402
from infer.loader.formats.checkpoint import write_safetensors  # noqa: E402
from infer.loader.load import LoadedModel, load_model  # noqa: E402
from infer.models.config import ModelConfig  # noqa: E402
from infer.models.eagle3 import default_layers  # noqa: E402
from scripts import eagle_prompts  # noqa: E402
from scripts.eagle_head import TrainedHead  # noqa: E402

TEMPERATURES = (0.7, 0.85, 1.0)  # of the answers behind the first, which is greedy
CHAIN = 5  # drafts in a row that are judged
LOGIT_ROWS = 8192  # rows of the whole vocabulary that are in memory together
SAVE_SECONDS = 10.0  # kept back for the last evaluation and the files


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a head is trained; defaults are for a GPU and a model of some 100M weights."""

    draft_vocab: int = 8192
    ttt_steps: int = 5  # drafts in a row while training
    step_weight: float = 0.8  # of each step's loss, relative to the step before
    batch_tokens: int = 16_384
    learning_rate: float = 1e-3
    warm_up: float = 0.03  # share of the training
    clip: float = 0.5
    generate_share: float = 0.4  # of the minutes
    round_prompts: int = 2048  # each has two answers
    answer_tokens: int = 320
    prompt_tokens: int = 256  # longer prompts are left out
    num_prompts: int = 24_000
    num_held_out: int = 200
    eval_seconds: float = 30.0


@dataclass(slots=True)
class Text:
    """A prompt and its answer."""

    tokens: list[int]
    num_prompt: int


@dataclass(slots=True)
class Progress:
    """What has happened so far, for the report."""

    seconds: dict[str, float] = field(default_factory=dict)
    tokens_generated: int = 0
    tokens_trained: int = 0
    steps: int = 0
    history: list[dict[str, float]] = field(default_factory=list)


# -- answers --------------------------------------------------------------------------------------------


def read_prompts(path: Path) -> list[Any]:
    """The prompts of a file: texts, or lists of messages."""
    prompts: list[Any] = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        if not line.strip():
            continue
        if not line.lstrip().startswith("{"):
            prompts.append(line)
            continue
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"line {number} of {path} is not JSON: {error}") from None
        prompt = entry.get("prompt") or entry.get("messages")
        if not prompt:
            raise ConfigError(f'line {number} of {path} has neither "prompt" nor "messages"')
        prompts.append(prompt)
    if len(prompts) < 20:
        raise ConfigError(f"{path} has {len(prompts)} prompts; at least 20 are needed, thousands are better")
    return prompts


def encode(llm: LLM, prompts: Sequence[Any], recipe: Recipe) -> list[list[int]]:
    """Token ids of prompts, behind the chat template if the model has one; long ones are left out."""
    made = []
    for prompt in prompts:
        is_text = isinstance(prompt, str) and not llm.has_chat_template
        ids = llm.encode(prompt) if is_text else llm.encode_chat(prompt)
        if len(ids) <= min(recipe.prompt_tokens, llm.context_len // 2):
            made.append(ids)
    return made


def answer(
    llm: LLM, prompts: Sequence[list[int]], temperatures: Sequence[float], recipe: Recipe, seed: int = 0
) -> list[Text]:
    """An answer to each prompt at its temperature; each has a seed of its own, from `seed` on."""
    max_tokens = min(recipe.answer_tokens, llm.context_len - max(map(len, prompts)))
    params = [
        SamplingParams(temperature=heat, top_p=1.0, seed=own, max_tokens=max_tokens)
        for own, heat in enumerate(temperatures, seed)
    ]
    outputs = llm.generate(list(prompts), params)
    texts = [Text(ids + out.token_ids, len(ids)) for ids, out in zip(prompts, outputs, strict=True)]
    return [text for text in texts if len(text.tokens) >= text.num_prompt + 3]  # else there is no guess


def ask(llm: LLM, prompts: Sequence[Any], recipe: Recipe) -> Iterator[list[tuple[list[int], float]]]:
    """Rounds of prompts and temperatures: each prompt greedy and sampled, later sampled again and again."""
    heats, done = cycle(TEMPERATURES), list[list[int]]()
    for first in range(0, len(prompts), recipe.round_prompts):
        fresh = encode(llm, prompts[first : first + recipe.round_prompts], recipe)
        done += fresh
        if fresh:
            yield [(ids, heat) for ids in fresh for heat in (0.0, next(heats))]
    while done:
        yield [(ids, next(heats)) for ids in done[: recipe.round_prompts]]
        done = done[recipe.round_prompts :] + done[: recipe.round_prompts]
    raise ConfigError(f"no prompt is short enough: {recipe.prompt_tokens} tokens are allowed")


def generate(
    args: argparse.Namespace, recipe: Recipe, deadline: float, progress: Progress
) -> tuple[list[Text], dict[str, list[Text]]]:
    """Answers to train with, and held-out ones by the name of their group, all of these greedy."""
    started = time.perf_counter()
    on_gpu = args.device != "cpu" and torch.cuda.is_available()
    batch_size, memory = (512, "12GiB") if on_gpu else (32, "1GiB")
    with LLM(args.model, device=args.device, max_batch_size=batch_size, kv_cache_memory=memory) as llm:
        progress.seconds["start"] = time.perf_counter() - started
        if args.prompts is None:
            training = eagle_prompts.training(recipe.num_prompts, args.seed)
            groups: dict[str, list[Any]] = {
                "held_out_topics": list(eagle_prompts.held_out(recipe.num_held_out, args.seed)),
                "written": list(eagle_prompts.WRITTEN),
            }
        else:
            training = read_prompts(args.prompts)
            random.Random(args.seed).shuffle(training)
            cut = min(recipe.num_held_out, len(training) // 10)
            groups, training = {"held_out": training[:cut]}, training[cut:]
        say(f"engine ready after {progress.seconds['start']:.0f} s; {len(training)} prompts")
        held_out = {name: encode(llm, prompts, recipe) for name, prompts in groups.items()}
        if not all(held_out.values()):
            raise ConfigError(
                f"no held-out prompt is short enough: {recipe.prompt_tokens} tokens are allowed"
            )
        judged = {name: answer(llm, own, [0.0] * len(own), recipe) for name, own in held_out.items()}
        texts: list[Text] = []
        asked, seconds, began = 0, 0.0, time.perf_counter()
        for asking in ask(llm, training, recipe):
            round_began = time.perf_counter()
            seed = args.seed * 2**24 + asked
            texts += answer(llm, [ids for ids, _ in asking], [heat for _, heat in asking], recipe, seed)
            asked, seconds = asked + len(asking), time.perf_counter() - round_began
            progress.tokens_generated = sum(len(text.tokens) - text.num_prompt for text in texts)
            rate = progress.tokens_generated / (time.perf_counter() - began)
            say(
                f"answers {len(texts)}  tokens {progress.tokens_generated / 1e6:.2f}M  {rate / 1e3:.1f}k/s  "
                f"left {max(0.0, deadline - time.perf_counter()):.0f} s"
            )
            is_late = time.perf_counter() + seconds / 2 > deadline  # another round would end far behind it
            if is_late or progress.tokens_generated >= args.tokens:
                break
    progress.seconds["generate"] = time.perf_counter() - started
    return texts, judged


# -- the model that is drafted for ------------------------------------------------------------------------


class PaddedBatch(StepContext):
    """Sequences of one padded length, each from its first token on; padding is behind all that counts."""

    def __init__(self, num_sequences: int, length: int, device: torch.device) -> None:
        self.shape = num_sequences, length
        self.positions = torch.arange(length, device=device).repeat(num_sequences)

    def attend(
        self, layer: AttentionLayer, q_TNH: torch.Tensor, k_TGH: torch.Tensor, v_TGH: torch.Tensor
    ) -> torch.Tensor:
        """Attend within each sequence; see layers/attention.py."""
        q, k, v = (
            heads.view(*self.shape, *heads.shape[1:]).transpose(1, 2) for heads in (q_TNH, k_TGH, v_TGH)
        )
        mask, length = None, self.shape[1]
        if layer.window is not None and layer.window < length:
            mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
            mask = mask.triu(1 - layer.window)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=layer.scale, enable_gqa=True
        )
        return out.transpose(1, 2).flatten(0, 1)


@dataclass(slots=True)
class Batch:
    """Texts of about one length, and what the model makes of them."""

    tokens_BL: torch.Tensor
    counts_BL: torch.Tensor  # rows whose guesses count: from the last token of the prompt on
    lengths_B: torch.Tensor
    states_BLF: torch.Tensor
    logits_RW: torch.Tensor  # of the draft vocabulary, of the places that a guess is compared with
    is_inside_R: torch.Tensor  # the model's own choice is in the draft vocabulary
    row_BL: torch.Tensor  # the row of each place in the two above, -1: it has none


class Teacher:
    """The model whose next tokens are guessed, with its weights unpacked."""

    def __init__(self, loaded: LoadedModel, draft_ids_W: torch.Tensor) -> None:
        self.loaded, self.model, self.device = loaded, loaded.model, loaded.device
        self.layers = default_layers(loaded.config.num_layers)
        if loaded.config.num_layers < 3:
            raise ConfigError(f"{loaded.name} has {loaded.config.num_layers} layers; a head reads three")
        self.ids_W = draft_ids_W.to(self.device)
        self.draft_of_V = torch.full((loaded.config.vocab_size,), -1, device=self.device)
        self.draft_of_V[self.ids_W] = torch.arange(len(draft_ids_W), device=self.device)

    @torch.no_grad()
    def run(self, texts: Sequence[Text]) -> Batch:
        """Run the model over texts, which are padded to the longest."""
        length = -(-max(len(text.tokens) for text in texts) // 8) * 8
        rows = [text.tokens + [0] * (length - len(text.tokens)) for text in texts]
        tokens_BL = torch.tensor(rows, device=self.device)
        lengths_B = torch.tensor([len(text.tokens) for text in texts], device=self.device)
        prompts_B = torch.tensor([text.num_prompt for text in texts], device=self.device)
        places_L = torch.arange(length, device=self.device)
        counts_BL = places_L >= prompts_B[:, None] - 1
        step = PaddedBatch(len(texts), length, self.device)
        step.layer_inputs = LayerInputs(self.layers)
        hidden_TD = self.model(tokens_BL.flatten(), step)
        read_BL = counts_BL & (places_L < lengths_B[:, None] - 1)  # a later token is known
        (chosen,) = read_BL.flatten().nonzero(as_tuple=True)
        row_T = torch.full((hidden_TD.shape[0],), -1, device=self.device)
        row_T[chosen] = torch.arange(len(chosen), device=self.device)
        logits, inside = [], []
        for part in torch.split(chosen, LOGIT_ROWS):
            whole = self.model.logits(hidden_TD[part])
            logits.append(whole.index_select(1, self.ids_W))
            inside.append(self.draft_of_V[whole.argmax(-1)] >= 0)
        states_BLF = step.layer_inputs.states().view(len(texts), length, -1)
        row_BL = row_T.view(len(texts), length)
        return Batch(
            tokens_BL, counts_BL, lengths_B, states_BLF, torch.cat(logits), torch.cat(inside), row_BL
        )

    def scales(self, texts: Sequence[Text]) -> list[float]:
        """The size of a typical number in the states of each layer, in answers."""
        batch = self.run(texts)
        rows_RF = batch.states_BLF[batch.row_BL >= 0].float()
        rows_RCD = rows_RF.view(len(rows_RF), len(self.layers), -1)
        return rows_RCD.square().mean((0, 2)).sqrt().tolist()

    @torch.no_grad()
    def embed(self, tokens_BL: torch.Tensor) -> torch.Tensor:
        """Embeddings of tokens."""
        rows_TD: torch.Tensor = self.model.embedding(tokens_BL.flatten())
        return rows_TD.view(*tokens_BL.shape, -1)


def shifted(x_BL: torch.Tensor, by: int, filler: int) -> torch.Tensor:
    """Each row moved to the left, with a filler behind it."""
    return F.pad(x_BL, (0, by), value=filler)[:, by:]


def drafts(head: TrainedHead, teacher: Teacher, batch: Batch, num_steps: int) -> Iterator[torch.Tensor]:
    """The y of every row in each draft step, on the known text."""
    states = head.start(batch.states_BLF)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    for number in range(num_steps):
        embedded = teacher.embed(shifted(batch.tokens_BL, 1 + number, 0))
        states = head.step(embedded, states, kept)
        yield states


def training_loss(head: TrainedHead, teacher: Teacher, batch: Batch, recipe: Recipe) -> torch.Tensor:
    """The cross-entropy with the model's distribution over draft tokens, weighted over the steps."""
    probabilities_RW = batch.logits_RW.float().softmax(-1)
    total = torch.zeros((), device=teacher.device)
    for number, y_BLD in enumerate(drafts(head, teacher, batch, recipe.ttt_steps)):
        row_BL = shifted(batch.row_BL, 1 + number, -1)  # of the place whose token is guessed
        row_BL = torch.where(batch.counts_BL, row_BL, -1)
        used_BL = (row_BL >= 0) & batch.is_inside_R[row_BL.clamp(min=0)]
        (places,) = used_BL.flatten().nonzero(as_tuple=True)
        if len(places):
            wanted = probabilities_RW[row_BL.flatten()[places]]
            logits = head.logits(y_BLD.flatten(0, 1)[places])
            total = total + recipe.step_weight**number * F.cross_entropy(logits.float(), wanted)
    return total / sum(recipe.step_weight**number for number in range(recipe.ttt_steps))


@torch.no_grad()
def judge(head: TrainedHead, teacher: Teacher, texts: Sequence[Text], recipe: Recipe) -> dict[str, Any]:
    """How many drafts of a chain are the tokens of greedy answers.

    A chain starts behind every token of an answer. `conditional` is the share of right drafts at a position
    among the chains that were right so far, `cumulative` the share of chains that were right up to it.
    """
    right, tried, reached = torch.zeros(CHAIN), torch.zeros(CHAIN), torch.zeros(CHAIN)
    chains = 0.0
    for group in batches(texts, recipe.batch_tokens, random.Random(0)):
        batch = teacher.run(group)
        with autocast(teacher.device):
            alive_BL = batch.counts_BL & (shifted(batch.row_BL, 1, -1) >= 0)
            chains += float(alive_BL.sum())
            for number, y_BLD in enumerate(drafts(head, teacher, batch, CHAIN)):
                places_L = torch.arange(y_BLD.shape[1], device=teacher.device)
                exists_BL = places_L + 2 + number < batch.lengths_B[:, None]
                alive_BL = alive_BL & exists_BL
                (places,) = alive_BL.flatten().nonzero(as_tuple=True)
                guesses = teacher.ids_W[head.logits(y_BLD.flatten(0, 1)[places]).argmax(-1)]
                is_right = guesses == shifted(batch.tokens_BL, 2 + number, -1).flatten()[places]
                tried[number] += len(places)
                reached[number] += float((batch.counts_BL & exists_BL).sum())
                right[number] += float(is_right.sum())
                alive_BL = torch.zeros_like(alive_BL).flatten().index_fill(0, places[is_right], True)
                alive_BL = alive_BL.view(batch.tokens_BL.shape)
    accepted = float(right.sum()) / max(chains, 1)
    return {
        "conditional": [round(float(a / max(b, 1)), 4) for a, b in zip(right, tried, strict=True)],
        "cumulative": [round(float(a / max(b, 1)), 4) for a, b in zip(right, reached, strict=True)],
        "accepted": round(accepted, 4),
        "tokens_per_step": round(1 + accepted, 4),  # the one that is drawn behind the drafts included
        "chains": int(chains),
    }


# -- training ---------------------------------------------------------------------------------------------


def autocast(device: torch.device) -> torch.autocast:
    """Products in bfloat16 on a GPU, in float32 on a CPU."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")


def batches(texts: Sequence[Text], batch_tokens: int, rng: random.Random) -> Iterator[list[Text]]:
    """All texts once, in batches of about one length and in random order."""
    order = sorted(texts, key=lambda text: (len(text.tokens) // 16, rng.random()))
    made: list[list[Text]] = [[]]
    for text in order:
        if made[-1] and (len(made[-1]) + 1) * (len(text.tokens) + 8) > batch_tokens:
            made.append([])
        made[-1].append(text)
    rng.shuffle(made)
    yield from (group for group in made if group)


def choose_vocabulary(texts: Sequence[Text], loaded: LoadedModel, size: int) -> tuple[torch.Tensor, float]:
    """The tokens that answers have most often, in order, and the share of all answers that they cover."""
    counts = Counter(token for text in texts for token in text.tokens[text.num_prompt :])
    size = min(size, loaded.config.vocab_size)
    common = [token for token, _ in counts.most_common(size)]
    rare = (token for token in range(loaded.config.vocab_size) if token not in counts)
    chosen = sorted(common + [token for token, _ in zip(rare, range(size - len(common)), strict=False)])
    return torch.tensor(chosen), sum(counts[token] for token in common) / max(1, sum(counts.values()))


def train(
    teacher: Teacher,
    head: TrainedHead,
    texts: Sequence[Text],
    judged: dict[str, list[Text]],
    recipe: Recipe,
    *,
    max_tokens: float,
    deadline: float,
    seed: int,
    progress: Progress,
) -> dict[str, torch.Tensor]:
    """Train until the deadline or `max_tokens`; returns the weights that were best on held-out prompts."""
    optimizer = torch.optim.AdamW(
        head.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.0,
        fused=teacher.device.type == "cuda",
    )  # fmt: skip
    rng, started = random.Random(seed), time.perf_counter()
    best: dict[str, torch.Tensor] = {}
    best_length, last_eval, losses = -1.0, started, list[torch.Tensor]()
    chosen = next(iter(judged.values()))

    slowest_step = slowest_eval = 0.0
    all_chains = sum(map(len, judged.values())) / len(chosen)  # evaluations that come after the training

    def share() -> float:
        end = deadline - slowest_step - (1 + all_chains) * slowest_eval
        by_time = (time.perf_counter() - started) / max(end - started, 1e-9)
        return max(by_time, progress.tokens_trained / max_tokens)

    def evaluate() -> None:
        nonlocal best, best_length, last_eval, slowest_eval
        began = time.perf_counter()
        found = judge(head, teacher, chosen, recipe)
        slowest_eval = max(slowest_eval, time.perf_counter() - began)
        loss = float(torch.stack(losses).mean()) if losses else math.nan
        losses.clear()
        seconds = time.perf_counter() - started
        progress.history.append(
            {"seconds": round(seconds, 1), "step": progress.steps, "tokens": progress.tokens_trained,
             "loss": round(loss, 4), "accepted": found["accepted"]}
        )  # fmt: skip
        left = max(0.0, deadline - time.perf_counter())
        say(
            f"step {progress.steps}  tokens {progress.tokens_trained / 1e6:.2f}M  loss {loss:.4f}  accepted "
            f"{found['accepted']:.3f}  by position {found['conditional']}  left {left:.0f} s"
        )
        if found["accepted"] > best_length:
            best_length = found["accepted"]
            best = {name: tensor.detach().clone() for name, tensor in head.state_dict().items()}
        last_eval = time.perf_counter()

    evaluate()
    while share() < 1:
        for group in batches(texts, recipe.batch_tokens, rng):
            if (done := share()) >= 1:
                break
            warm, rest = done / recipe.warm_up, (done - recipe.warm_up) / (1 - recipe.warm_up)
            factor = min(1.0, warm) if warm < 1 else 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * rest))
            if progress.steps < 50:  # the first steps are slow: time says little about progress yet
                factor = min(factor, (progress.steps + 1) / 50)
            for parameters in optimizer.param_groups:
                parameters["lr"] = recipe.learning_rate * max(factor, 1e-3)
            began = time.perf_counter()
            batch = teacher.run(group)
            with autocast(teacher.device):
                loss = training_loss(head, teacher, batch, recipe)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(head.parameters(), recipe.clip)
            optimizer.step()
            losses.append(loss.detach())
            progress.steps += 1
            slowest_step = max(slowest_step, time.perf_counter() - began)
            progress.tokens_trained += sum(len(text.tokens) for text in group)
            if time.perf_counter() - last_eval > recipe.eval_seconds:
                evaluate()
    if losses:
        evaluate()
    progress.seconds["train"] = time.perf_counter() - started
    return best


# -- files --------------------------------------------------------------------------------------------------


def published_config(config: ModelConfig, draft_vocab: int) -> dict[str, Any]:
    """The config.json of a head for a model."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "target_hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.context_len,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": draft_vocab,
        "tie_word_embeddings": False,
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": list(default_layers(config.num_layers)),
        "torch_dtype": "bfloat16",
    }


def save_head(
    out: Path, weights: dict[str, torch.Tensor], draft_ids_W: torch.Tensor, config: ModelConfig
) -> int:
    """Write a head in the published layout; returns the bytes of its weights."""
    out.mkdir(parents=True, exist_ok=True)
    flags = torch.zeros(config.vocab_size, dtype=torch.bool)
    flags[draft_ids_W] = True
    tensors = {name: tensor.to("cpu", torch.bfloat16) for name, tensor in weights.items()}
    tensors |= {"d2t": draft_ids_W - torch.arange(len(draft_ids_W)), "t2d": flags}
    write_safetensors(out / "model.safetensors", tensors)
    text = json.dumps(published_config(config, len(draft_ids_W)), indent=2)
    (out / "config.json").write_text(text + "\n", "utf-8")
    return (out / "model.safetensors").stat().st_size


@torch.no_grad()
def check_saved(out: Path, head: TrainedHead, teacher: Teacher, text: Text) -> float:
    """Load the files as the engine does; the largest difference of logits from the trained head's."""
    served = load_eagle(out, teacher.loaded)
    batch = teacher.run([text])
    length = len(text.tokens) - 1
    step = WholeSequence(attend_sdpa, teacher.device)
    step.advance(length)
    states = served.combine(batch.states_BLF[0, :length])
    ours = served.logits(served(batch.tokens_BL[0, 1 : length + 1], states, step).hidden_SD)
    with autocast(teacher.device):
        theirs = head.logits(next(drafts(head, teacher, batch, 1))[0, :length])
    return float((ours.float() - theirs.float()).abs().max())


def say(line: str) -> None:
    """Print a line of progress at once."""
    print(f"[{time.strftime('%H:%M:%S')}] {line}", flush=True)


def versions(device: torch.device) -> dict[str, str]:
    """What the head was made with."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    if device.type == "cuda":
        found |= {"cuda": str(torch.version.cuda), "gpu": torch.cuda.get_device_name(device)}
    return found


def run(args: argparse.Namespace, recipe: Recipe) -> dict[str, Any]:
    """Do all of it; returns the report."""
    started = time.perf_counter()
    torch.manual_seed(args.seed)
    progress = Progress()
    limit = 60 * args.minutes
    texts, judged = generate(args, recipe, started + recipe.generate_share * limit, progress)
    source = resolve_model(args.model, revision=None, show_progress=False)
    loaded = load_model(source, device=args.device, quantization="none")
    draft_ids_W, coverage = choose_vocabulary(texts, loaded, recipe.draft_vocab)
    teacher = Teacher(loaded, draft_ids_W)
    config, rows_WD = loaded.config, loaded.model.head.stored.dequantized()[draft_ids_W.to(loaded.device)]
    if loaded.device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    scales = teacher.scales(next(batches(texts, recipe.batch_tokens, random.Random(args.seed))))
    head = TrainedHead(config, rows_WD.float(), scales).to(loaded.device)
    num_weights = sum(parameter.numel() for parameter in head.parameters())
    say(
        f"{len(texts)} answers, {progress.tokens_generated} tokens, {len(draft_ids_W)} draft tokens cover "
        f"{coverage:.2%}; head of {num_weights / 1e6:.1f}M weights, states of {[round(x, 2) for x in scales]}"
    )
    best = train(
        teacher, head, texts, judged, recipe,
        max_tokens=args.train_tokens, deadline=started + limit - SAVE_SECONDS * min(1.0, args.minutes),
        seed=args.seed, progress=progress,
    )  # fmt: skip
    head.load_state_dict(best)
    num_bytes = save_head(args.out, head.published(), draft_ids_W, config)
    held_out = {name: judge(head, teacher, own, recipe) for name, own in judged.items()}
    for name, found in held_out.items():
        say(f"{name}: accepted {found['accepted']:.3f} of {CHAIN}, by position {found['conditional']}")
    difference = check_saved(args.out, head, teacher, max(next(iter(judged.values())), key=_size))
    return {
        "model": source.name,
        "head": {"bytes": num_bytes, "draft_vocab": len(draft_ids_W), "coverage": round(coverage, 5)},
        "held_out": held_out,
        "tokens_generated": progress.tokens_generated,
        "tokens_trained": progress.tokens_trained,
        "steps": progress.steps,
        "minutes": round((time.perf_counter() - started) / 60, 2),
        "seconds": {name: round(seconds, 1) for name, seconds in progress.seconds.items()},
        "served_logits_differ_by": round(difference, 5),
        "recipe": asdict(recipe) | {"seed": args.seed},
        "versions": versions(loaded.device),
        "history": progress.history,
    }


def _size(text: Text) -> int:
    return len(text.tokens)


def count(text: str) -> float:
    """Read `20M`, `500k` or a plain number."""
    factor = {"k": 1e3, "m": 1e6, "g": 1e9}.get(text[-1:].lower(), 1.0)
    try:
        value = float(text if factor == 1.0 else text[:-1]) * factor
    except ValueError:
        raise argparse.ArgumentTypeError(f"a number such as 20M or 500k is needed, got {text!r}") from None
    if not value > 0:
        raise argparse.ArgumentTypeError(f"a number above 0 is needed, got {text!r}")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """Train one head; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", help="directory, GGUF file or hub id; default: the default model")
    parser.add_argument("--out", type=Path, required=True, help="directory for the head")
    parser.add_argument("--minutes", type=float, default=8.0, help="time for everything (8)")
    parser.add_argument("--tokens", type=count, default=20e6, help="most tokens to generate (20M)")
    parser.add_argument("--train-tokens", type=count, default=1e12, help="most tokens to train on")
    parser.add_argument("--prompts", type=Path, help="a prompt per line, or JSONL; default: built-in ones")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--report", type=Path, help="JSON file for what was measured")
    parser.add_argument("--seed", type=int, default=0)
    defaults = Recipe()
    for name, value in asdict(defaults).items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=type(value), default=value, help=f"({value})")
    args = parser.parse_args(argv)
    recipe = Recipe(**{name: getattr(args, name) for name in asdict(defaults)})
    if args.minutes <= 0:
        parser.error(f"--minutes must be above 0, got {args.minutes}")
    if (args.out / "model.safetensors").exists():
        parser.error(f"{args.out} holds a head already; delete it or choose another directory")
    if args.prompts is not None and not args.prompts.is_file():
        parser.error(f"there is no file {args.prompts}")
    try:
        report = run(args, recipe)
    except InferError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.report is not None:
        args.report.write_text(json.dumps(report, indent=2) + "\n", "utf-8")
    say(f"saved {args.out} ({report['head']['bytes'] / 2**20:.1f} MiB) after {report['minutes']} minutes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
