"""`infer explain`: why a request to a running server took as long as it did."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import sys
import urllib.error
import urllib.parse

from infer.cli import flags
from infer.cli.answer import write_out
from infer.cli.connect import Unreachable, base_of, open_url
from infer.cli.terminal import WordWrap
from infer.errors import ConfigError, RequestError

HELP = "tell why a request to a running server took as long as it did"
DESCRIPTION = """\
Ask a server for the life of a request: where its time went, why it waited, what became of its prompt,
and what would have made it faster. The request may be running or have ended a short time ago.
"""
USAGE = "ID [options]"
EXAMPLES = """\
examples:
  infer explain chatcmpl-0f1c...             the id of an answer, or its header x-request-id
  infer explain req-7f21 --url http://gpu-box:8000 --api-key KEY
  infer explain req-7f21 --json              the same in numbers
"""
DEFAULT_URL = "http://127.0.0.1:8000"
TIMEOUT_S = 30.0
MAX_BYTES = 4 << 20  # size of an answer
FLAGS: flags.Rows = {
    "request_id ID": (str, "the id of an answer, or its header x-request-id"),
    "--url URL": (str, "the server to ask", DEFAULT_URL),
    "--api-key KEY": (str, "the key that the request was made with, or the server's admin key"),
    "--json": (bool, "print numbers and sentences as JSON"),
}


def run(args: argparse.Namespace) -> int:
    """Ask the server, and print its answer."""
    path = f"/explain/{urllib.parse.quote(os.fsencode(args.request_id), safe='/')}"
    headers = {"accept": "application/json" if args.json else "text/plain"}
    if args.api_key is not None:
        headers["authorization"] = f"Bearer {args.api_key}"
    try:
        with open_url(base_of(args.url), path, headers=headers, timeout_s=TIMEOUT_S) as answer:
            text = answer.read(MAX_BYTES).decode(errors="replace")
    except urllib.error.HTTPError as error:
        with error:  # the error is also the response
            raise RequestError(_reason(error)) from None
    except Unreachable as error:
        raise ConfigError(str(error)) from None
    except (OSError, http.client.HTTPException) as error:
        raise ConfigError(f"the answer of {args.url} broke off: {error}; try again") from None
    lines = WordWrap(sys.stdout)
    write_out(text + "\n" if args.json else lines.feed(text.rstrip("\n")) + lines.end() + "\n")
    return 0


def _reason(error: urllib.error.HTTPError) -> str:
    """The server's reason for not explaining a request."""
    try:
        return str(json.loads(error.read(1 << 16))["error"]["message"])
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        return f"the server answered with status {error.code}; does it have /explain?"
