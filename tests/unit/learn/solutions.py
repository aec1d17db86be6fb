"""A right solution of every exercise, and wrong ones with a part of what is said about them."""

from __future__ import annotations

RIGHT = {
    "one_token": """
def generate(next_logits, prompt, max_tokens, eos_id):
    output = []
    while len(output) < max_tokens and (not output or output[-1] != eos_id):
        logits = next_logits(prompt + output)
        output.append(max(range(len(logits)), key=lambda i: logits[i]))
    return output
""",
    "kv_cache": """
import numpy as np

def rotate(vector, position, theta=10000.0):
    low, high = np.split(np.asarray(vector, dtype=float), 2)
    angles = position * theta ** (-np.arange(len(low)) / len(low))
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin])

class Cache:
    def __init__(self):
        self.keys, self.values = [], []

    def append(self, key, value):
        self.keys.append(key)
        self.values.append(value)

    def attend(self, query):
        scores = np.stack(self.keys) @ query / len(query) ** 0.5
        weights = np.exp(scores - scores.max())
        return weights / weights.sum() @ np.stack(self.values)
""",
    "batching": """
def next_batch(running, waiting, max_batch_size):
    return running + waiting[: max_batch_size - len(running)]
""",
    "paging": """
class Blocks:
    def __init__(self, num_blocks):
        self.counts = [0] * num_blocks

    def num_free(self):
        return self.counts.count(0)

    def take(self, count):
        blocks = [block for block, refs in enumerate(self.counts) if not refs][:count]
        self.share(blocks)
        return blocks

    def share(self, blocks):
        for block in blocks:
            self.counts[block] += 1

    def drop(self, blocks):
        for block in blocks:
            self.counts[block] -= 1
""",
    "prefixes": """
def victim(idle):
    return min(idle, key=lambda each: each.since).block
""",
    "chunks": """
def chunks(prompts, num_decoding, budget):
    room, made = budget - num_decoding, []
    for left in prompts:
        made.append(min(left, room))
        room -= made[-1]
    return made
""",
    "scheduling": """
def urgency(seq):
    return seq.max_total
""",
    "sampling": """
import numpy as np

def probabilities(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    logits = np.asarray(logits, dtype=float)
    if temperature == 0:
        return np.eye(len(logits))[logits.argmax()]
    p = np.exp((logits - logits.max()) / temperature)
    if top_k:
        p[p < np.sort(p)[-top_k]] = 0
    p /= p.sum()
    order = np.argsort(-p)
    above = np.cumsum(p[order]) - p[order]
    if top_p < 1:
        p[order[above >= top_p]] = 0
    p[p < min_p * p.max()] = 0
    return p / p.sum()
""",
    "quantization": """
def quantize(weights, group_size):
    codes, scales = [], []
    for start in range(0, len(weights), group_size):
        group = weights[start : start + group_size]
        scale = max(map(abs, group)) / 7 or 1.0
        scales.append(scale)
        codes += [max(-8, min(7, round(weight / scale))) for weight in group]
    return codes, scales

def dequantize(codes, scales, group_size):
    return [code * scales[place // group_size] for place, code in enumerate(codes)]
""",
    "speculation": """
class Guesses:
    def propose(self, wishes):
        return [self.guess(list(wish.tokens), wish.num_drafts) for wish in wishes]

    def guess(self, tokens, count):
        for end in range(len(tokens) - 2, 1, -1):
            if tokens[end - 2 : end] == tokens[-2:]:
                return tokens[end : end + count]
        return []

    def has_match(self, wish):
        return True

    def finish(self, wish):
        pass
""",
    "constraints": """
import re

PIECE = "(0|[1-9][0-9]*)"
OPEN = re.compile(rf"\\\\[({PIECE},)*{PIECE}?")
DONE = re.compile(rf"\\\\[({PIECE},)*{PIECE}\\\\]")

def allowed(text, vocabulary):
    return {t for t in vocabulary if OPEN.fullmatch(text + t) or DONE.fullmatch(text + t)}
""".replace("\\\\", "\\"),
    "parallelism": """
import numpy as np

def split(up, down, num_ranks):
    return list(zip(np.split(up, num_ranks, axis=0), np.split(down, num_ranks, axis=1)))
""",
}

# by lesson: what is replaced in the right solution, by what, and a part of the verdict
WRONG = {
    "one_token": ("next_logits(prompt + output)", "next_logits(prompt)", "must see prompt and output so far"),
    "kv_cache": (" / len(query) ** 0.5", "", "divided by sqrt(D)"),
    "batching": (
        "running + waiting[: max_batch_size - len(running)]",
        "running or waiting[:max_batch_size]",
        "steps",
    ),
    "paging": (
        "        self.share(blocks)\n        return blocks",
        "        return blocks",
        "num_free() is",
    ),
    "prefixes": ("min(idle", "max(idle", "found in the cache"),
    "chunks": ("budget - num_decoding", "budget", "decode first"),
    "scheduling": ("seq.max_total", "-seq.max_total", "wait"),
    "sampling": ("above >= top_p", "above + p[order] >= top_p", "top_p"),
    "quantization": ("/ 7 or 1.0", "/ 3 or 1.0", "largest error"),
    "speculation": ("tokens[end : end + count]", "tokens[end + 1 : end + 1 + count]", "guesses were right"),
    "constraints": ('(0|[1-9][0-9]*)"', '([0-9]+)"', "must not come"),
    "parallelism": (
        "np.split(down, num_ranks, axis=1)",
        "np.split(down, num_ranks, axis=0)",
        "cannot multiply",
    ),
}
