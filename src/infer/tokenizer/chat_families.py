"""The table of chat templates and the models that they belong to.

The model type alone does not identify a template: SmolLM2, Llama 3 and TinyLlama are all `llama`. The
vocabulary does, because chat formats use special tokens, and a model trained on a format has its tokens:

    <|start_header_id|>   Llama 3            <|im_start|>   ChatML: SmolLM2, Qwen
    <start_of_turn>       Gemma              [INST]         Mistral from tokenizer v3 on; with [ARGS] v11
    <|channel|>           gpt-oss

The first matching row wins. A model without a match uses the template it was shipped with; a base model has
none, and an error says so. Some formats are plain text (Mistral 7B v0.1 and v0.2, Mixtral 8x7B, Llama 2), and
models of Mistral's tokenizer v7 differ in their default system prompt. Their vocabularies do not tell them
apart, so a row that `yields` prefers the shipped template; ours is used on request, or if none was shipped.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable

from infer.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ChatFamily:
    """A template, its model types, and what distinguishes its models from others of these types."""

    template: str
    model_types: frozenset[str]
    tokens: tuple[str, ...] = ()  # special tokens the vocabulary must have
    not_tokens: tuple[str, ...] = ()  # special tokens it must not have
    published: str = ""  # text that the shipped template must contain, if tokens do not decide
    yields: bool = False  # True: a template shipped with the model takes precedence

    def fits(self, model_type: str, tokenizer: Tokenizer) -> bool:
        """Return True if a model of this type, with this vocabulary, was trained on this format."""
        return (
            model_type in self.model_types
            and all(_is_special(tokenizer, token) for token in self.tokens)
            and not any(_is_special(tokenizer, token) for token in self.not_tokens)
            and self.published in (tokenizer.published_chat_template or "")
        )


def _is_special(tokenizer: Tokenizer, token: str) -> bool:
    return tokenizer.token_id(token) in tokenizer.special_ids


_LLAMA = frozenset({"llama"})
_QWEN2 = frozenset({"qwen2", "qwen2_moe"})
_QWEN3 = frozenset({"qwen3", "qwen3_moe"})
_GEMMA3 = frozenset({"gemma2", "gemma3", "gemma3_text"})
_MISTRAL = frozenset({"mistral", "mixtral"})
_MISTRAL3 = frozenset({"mistral3", "ministral3"})  # newer models, whose templates write their system prompts
_GPT_OSS = frozenset({"gpt_oss", "gpt-oss"})

FAMILIES = (
    ChatFamily("harmony", _GPT_OSS, tokens=("<|start|>", "<|channel|>", "<|message|>", "<|call|>")),
    ChatFamily("llama3", _LLAMA, tokens=("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")),
    ChatFamily("smollm2", _LLAMA, tokens=("<|im_start|>", "<|im_end|>", "<gh_stars>")),
    ChatFamily("zephyr", _LLAMA, published="<|user|>"),
    ChatFamily("qwen2", _QWEN2, tokens=("<|im_start|>", "<|im_end|>")),
    ChatFamily("qwen3_coder", _QWEN3, tokens=("<|im_start|>", "<|im_end|>"), published="<function="),
    ChatFamily("qwen3", _QWEN3, tokens=("<|im_start|>", "<|im_end|>")),
    ChatFamily("gemma3", _GEMMA3, tokens=("<start_of_turn>", "<end_of_turn>")),
    ChatFamily("mistral_v11", _MISTRAL3, tokens=("[INST]", "[SYSTEM_PROMPT]", "[ARGS]"), yields=True),
    ChatFamily("mistral_v7", _MISTRAL3, tokens=("[INST]", "[SYSTEM_PROMPT]"), yields=True),
    ChatFamily("mistral_v11", _LLAMA | _MISTRAL, tokens=("[INST]", "[SYSTEM_PROMPT]", "[ARGS]")),
    ChatFamily("mistral_v7", _LLAMA | _MISTRAL, tokens=("[INST]", "[SYSTEM_PROMPT]"), yields=True),
    # GGUF files call Mistral's architecture llama
    ChatFamily("mistral", _LLAMA | _MISTRAL, tokens=("[INST]", "[/INST]"), not_tokens=("[SYSTEM_PROMPT]",)),
    ChatFamily("chatml", _LLAMA | _MISTRAL, tokens=("<|im_start|>", "<|im_end|>")),
    ChatFamily("llama2", _LLAMA, published="<<SYS>>", yields=True),
    ChatFamily("mistral_v1", _LLAMA | _MISTRAL, published="[INST]", yields=True),
)
TEMPLATES = tuple(dict.fromkeys(family.template for family in FAMILIES))


def templates_directory() -> Traversable:
    """Return the directory of our templates: models/templates of the installed package."""
    return resources.files("infer") / "models" / "templates"
