"""`POST /tokenize`, `POST /detokenize`, `GET /tokenizer_info`: the tokenizer by itself.

The tokens are exactly the prompt that the completion and chat routes would run, so a client can count first.
"""

from __future__ import annotations

import asyncio

from fastapi import Request, Response

from infer.errors import MalformedRequest
from infer.server.protocol.logprobs import spell
from infer.server.protocol.schemas import DetokenizeRequest, TokenizeRequest
from infer.server.protocol.translate import check_has_template, encode_prompts, read_opening
from infer.server.routes.json_route import in_thread_if_large, json_response, make_router, server_state

router = make_router()

OF_TEXTS = ("add_special_tokens",)  # fields of a text, and (below) fields of a conversation
OF_CHATS = ("add_generation_prompt", "chat_template_kwargs", "continue_final_message", "tools")


@router.post("/tokenize", response_model=None)
async def tokenize(body: TokenizeRequest, http: Request) -> Response:
    """Return the ids of a text or of a conversation."""
    encoder = (await server_state(http).use_model(body.model)).encoder
    if (body.prompt is None) == (body.messages is None):
        raise MalformedRequest("give either prompt or messages", param="prompt")
    others = OF_TEXTS if body.prompt is None else OF_CHATS
    body.note_ignored(name for name in others if getattr(body, name) is not None)
    if body.prompt is not None:
        add_special = body.add_special_tokens is not False
        (ids,) = await encode_prompts(encoder, [body.prompt], "prompt", add_special=add_special)
    else:
        check_has_template(encoder)
        ids = await asyncio.to_thread(
            encoder.encode_chat,
            body.messages or [],
            tools=body.tools,
            template_options=body.chat_template_kwargs,
            opening=read_opening(body),
        )
    strings = None
    if body.return_token_strs:
        strings = await in_thread_if_large(
            len(ids), lambda: [spell(encoder.tokenizer, token_id) for token_id in ids]
        )
    return json_response(
        {"count": len(ids), "max_model_len": encoder.context_len, "tokens": ids, "token_strs": strings}, body
    )


@router.post("/detokenize", response_model=None)
async def detokenize(body: DetokenizeRequest, http: Request) -> Response:
    """Return the text of some ids, including special tokens."""
    encoder = (await server_state(http).use_model(body.model)).encoder
    (ids,) = await encode_prompts(encoder, [body.tokens], "tokens")
    text = await asyncio.to_thread(encoder.tokenizer.decode, ids, skip_special=False)
    return json_response({"prompt": text}, body)


@router.get("/tokenizer_info", response_model=None)
async def tokenizer_info(http: Request) -> Response:
    """Return the facts that evaluation programs need to tokenize by themselves."""
    encoder = (await server_state(http).use_model(None)).encoder
    tokenizer = encoder.tokenizer
    return json_response(
        {
            "vocab_size": tokenizer.vocab_size,
            "model_max_length": encoder.context_len,
            "bos_token": None if tokenizer.bos_id is None else tokenizer.token_text(tokenizer.bos_id),
            "eos_token": tokenizer.token_text(tokenizer.eos_ids[0]) if tokenizer.eos_ids else None,
            "has_chat_template": encoder.has_chat_template,
        }
    )
