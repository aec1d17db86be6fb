"""The modules of the page that touch no page, run by Node where there is one; what no file may contain."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from infer.server.routes.pages import DIRECTORY, DOCS_DIRECTORY
from tests.support.app import Site

NODE = shutil.which("node")


def run_js(expression: str, tmp_path: Path) -> Any:
    """The JSON value of an expression that sees what answer.js, api.js and markdown.js export."""
    if NODE is None:
        pytest.skip("no Node")
    for name in ("answer.js", "api.js", "markdown.js"):
        (tmp_path / name.replace(".js", ".mjs")).write_text((DIRECTORY / name).read_text("utf-8"), "utf-8")
    script = tmp_path / "test.mjs"
    script.write_text(
        'import * as answer from "./answer.mjs";\nimport * as api from "./api.mjs";\n'
        'import * as markdown from "./markdown.mjs";\n'
        "const attempt = (f) => { try { return f() ?? null; } catch (error) { return error.message; } };\n"
        f"console.log(JSON.stringify(await ({expression})));\n",
        "utf-8",
    )
    done = subprocess.run([NODE, str(script)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_pieces_of_a_stream_become_a_message(tmp_path: Path) -> None:
    pieces = [
        {"choices": [{"delta": {"role": "assistant", "content": None}}]},
        {"choices": [{"delta": {"reasoning_content": "Hm"}}]},
        {"choices": [{"delta": {"reasoning": "."}}]},
        {"choices": [{"delta": {"content": "I look. "}}]},
        {"choices": [{"delta": {"tool_calls": [{"index": 0, "id": "a", "function": {"name": "f"}}]}}]},
        {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"arguments": '{"x"'}}]}}]},
        {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]}}]},
        {"choices": [{"delta": {"tool_calls": [{"index": 1, "id": "b", "function": {"name": "g"}}]}}]},
        {"choices": [{"delta": {"tool_calls": [{"index": 2, "function": {"name": "h", "arguments": "{"}}]}}]},
        {"choices": [{"delta": {}, "finish_reason": "length"}]},
        {"choices": [], "usage": {"completion_tokens": 7}},
    ]
    stream = "".join(f"data: {json.dumps(piece)}\r\n\r\n" for piece in pieces) + "data: [DONE]\n\n"
    told = run_js(
        f"""(async () => {{
            let sent;
            globalThis.fetch = async (path, options) => {{
                sent = options;
                return new Response({json.dumps(stream)});
            }};
            const whole = new answer.Answer();
            let finish, usage;
            for await (const piece of api.streamAnswer("/v1/chat/completions", {{ model: "m" }}, "key")) {{
                whole.take(piece);
                finish ??= piece.finish;
                usage ??= piece.usage;
            }}
            const names = whole.calls.map((call) => call.name);
            return {{ message: whole.toMessage(), names, finish, usage, sent }};
        }})()""",
        tmp_path,
    )
    calls = [("a", "f", '{"x": 1}'), ("b", "g", "{}")]
    assert told["message"] == {
        "role": "assistant",
        "content": "I look. ",
        "reasoning_content": "Hm.",
        "tool_calls": [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for call_id, name, arguments in calls
        ],
    }
    assert told["names"] == ["f", "g", "h"], "the one that broke off is shown, and not sent"
    assert (told["finish"], told["usage"]) == ("length", {"completion_tokens": 7})
    assert told["sent"]["headers"]["authorization"] == "Bearer key"


def test_an_answer_of_nothing_or_of_reasoning_alone_is_no_message(tmp_path: Path) -> None:
    expression = """[{ reasoning: "" }, { reasoning: "Hm" }].map(({ reasoning }) => {
        const whole = new answer.Answer();
        whole.take({ text: "", reasoning, calls: [] });
        return whole.toMessage();
    })"""
    assert run_js(expression, tmp_path) == [None, None]


def test_fields_of_json_are_read_or_refused_in_words(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    given = {
        "schema": ["", " ", '{"type": "object"}', "[]", "{"],
        "tools": ["", "[]", '[{"name": "f"}]', json.dumps([tool]), "{}", "[1]", '[{"name": "f"}, {}]'],
    }
    schemas, tools = run_js(
        f"""[
            {json.dumps(given["schema"])}.map((text) => attempt(() => answer.readSchema(text))),
            {json.dumps(given["tools"])}.map((text) => attempt(() => answer.readTools(text))),
        ]""",
        tmp_path,
    )
    wanted = {"name": "answer", "schema": {"type": "object"}, "strict": True}
    assert schemas[:4] == [
        None,
        None,
        {"type": "json_schema", "json_schema": wanted},
        'a schema is a JSON object, such as {"type": "object"}',
    ]
    assert schemas[4].startswith("this is no JSON: ")
    assert tools[:4] == [None, None, [tool], [tool]]
    assert tools[4].startswith("tools are a JSON list")
    assert [text.partition(":")[0] for text in tools[5:]] == ["tool 1 has no name", "tool 2 has no name"]


def test_json_is_put_into_lines_and_anything_else_left_alone(tmp_path: Path) -> None:
    assert run_js("""['{"a":[1]}', "{", ""].map(answer.indent)""", tmp_path) == [
        '{\n  "a": [\n    1\n  ]\n}',
        "{",
        "",
    ]


def test_the_examples_are_schemas(tmp_path: Path) -> None:
    examples = run_js("answer.EXAMPLES", tmp_path)
    jsonschema.Draft202012Validator.check_schema(examples["schema"])
    for tool in examples["tools"]:
        jsonschema.Draft202012Validator.check_schema(tool["parameters"])


def test_the_docs_page_reads_the_description_of_the_api(tmp_path: Path) -> None:
    if NODE is None:
        pytest.skip("no Node")
    (tmp_path / "docs.mjs").write_text((DOCS_DIRECTORY / "docs.js").read_text("utf-8"), "utf-8")
    (tmp_path / "api.json").write_text(json.dumps(Site(docs=True).request("GET", "/openapi.json").json()))
    script = """
import { readFileSync } from "fs";
import { describeBody } from "./docs.mjs";
const api = JSON.parse(readFileSync("api.json", "utf8"));
const found = {};
for (const [path, operations] of Object.entries(api.paths))
  for (const [method, operation] of Object.entries(operations))
    found[`${method} ${path}`] = describeBody(operation, api);
console.log(JSON.stringify(found));
"""
    (tmp_path / "test.mjs").write_text(script, "utf-8")
    done = subprocess.run(
        [NODE, "test.mjs"], capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    chat = found["post /api/chat"]
    types = {field["name"]: field["type"] for field in chat["fields"]}
    assert types["think"] == "boolean | string | null"
    assert types["messages"] == "list of object | null"
    assert chat["example"]["messages"][0]["role"] == "user"
    assert [field["name"] for field in chat["fields"] if field["isRequired"]] == ["model"]
    assert found["get /v1/models"] == {"fields": [], "example": None}


def test_the_docs_page_is_served_on_request_and_is_open() -> None:
    for site in (Site(docs=True, api_key=("secret",)), Site(docs=True, ui=False, api_key=("secret",))):
        page = site.request("GET", "/docs")
        assert page.status_code == 200
        assert "script-src 'self'" in page.headers["content-security-policy"]
        for path in re.findall(r'(?:href|src)="(/docs/[^"]+)"', page.text):
            assert site.request("GET", path).status_code == 200
        assert site.request("GET", "/docs/nothing.js").status_code == 404
        assert site.request("GET", "/openapi.json").status_code == 401
    assert Site().request("GET", "/docs").status_code == 404
    assert Site(api_key=("secret",)).request("GET", "/docs").status_code == 401


def test_comments_of_a_stream_are_passed_over_and_its_errors_thrown(tmp_path: Path) -> None:
    error = {"error": {"message": "the engine is busy", "code": 503}}
    stream = f': ping\n\n: data: no\n\ndata:{{"choices": []}}\n\n: ping\n\ndata: {json.dumps(error)}\n\n'
    told = run_js(
        f"""(async () => {{
            globalThis.fetch = async () => new Response({json.dumps(stream)});
            const pieces = [];
            try {{
                for await (const piece of api.streamAnswer("/", {{}}, "")) pieces.push(piece.text);
            }} catch (error) {{
                return [pieces, error.name, error.message];
            }}
        }})()""",
        tmp_path,
    )
    assert told == [[""], "Error", "the engine is busy"]


def plain(nodes: list[dict[str, Any]]) -> list[Any]:
    """Inline nodes as strings and (type, children) lists, marks without a partner joined to their text."""
    made: list[Any] = []
    for node in nodes:
        if node["type"] != "text":
            inner = [node["text"]] if node["type"] == "code" else plain(node["children"])
            made.append([node["type"], *([node["url"]] if node["type"] == "link" else []), *inner])
        elif made and isinstance(made[-1], str):
            made[-1] += node["text"]
        elif node["text"]:
            made.append(node["text"])
    return made


INLINE: list[tuple[str, list[Any]]] = [
    ("a *b* c", ["a ", ["em", "b"], " c"]),
    ("**b *i***", [["strong", "b ", ["em", "i"]]]),
    ("***b* s**", [["strong", ["em", "b"], " s"]]),
    ("snake_case_name 2 * 3 * 4", ["snake_case_name 2 * 3 * 4"]),
    ("~~gone~~ ~kept~", [["del", "gone"], " ~kept~"]),
    ("``a`b`` `open", [["code", "a`b"], " `open"]),
    (r"\*no\* \q", [r"*no* \q"]),
    ("[a *b*](https://x/y)", [["link", "https://x/y", "a ", ["em", "b"]]]),
    ("[a](https://x/(y) 'title')", [["link", "https://x/(y)", "a"]]),
    ("hi! ![a](https://x/y) ![b]", ["hi! ", ["link", "https://x/y", "a"], " ![b]"]),
    ("[a](javascript:x) [b](/c)", ["[a](javascript:x) [b](/c)"]),
    ("(see https://x/y).", ["(see ", ["link", "https://x/y", "https://x/y"], ")."]),
    ("<https://x/> <b> a<br>b", [["link", "https://x/", "https://x/"], " <b> a\nb"]),
]


def test_markdown_within_a_line(tmp_path: Path) -> None:
    calls = ", ".join(f"markdown.parseInline({json.dumps(text)})" for text, _ in INLINE)
    for (text, nodes), made in zip(INLINE, run_js(f"[{calls}]", tmp_path), strict=True):
        assert plain(made) == nodes, text


def test_markdown_in_blocks(tmp_path: Path) -> None:
    def types(text: str) -> Any:
        return [
            (block["type"], block.get("text", block.get("start", block.get("level"))))
            for block in run_js(f"markdown.parse({json.dumps(text)})", tmp_path)
        ]

    assert types("# C#\n## x ##\ntext\n***\n> q\n1. a\n\n   more\n2. b") == [
        ("heading", 1),
        ("heading", 2),
        ("paragraph", None),
        ("rule", None),
        ("quote", None),
        ("list", 1),
    ]
    assert types("````\n```\n````\n~~~ py\nopen\n```") == [("code", "```"), ("code", "open\n```")]
    assert types("- a\n  ```\n  x\n  ```\nb\n\nc|d\n-|-\n1|2\n\na|b\nno") == [
        ("list", None),
        ("paragraph", None),
        ("table", None),
        ("paragraph", None),
    ]


@pytest.mark.parametrize(
    "file", sorted((*DIRECTORY.iterdir(), *DOCS_DIRECTORY.iterdir())), ids=lambda file: file.name
)
def test_no_file_names_another_server_or_needs_a_looser_policy(file: Path) -> None:
    text = file.read_text("utf-8")
    assert not re.findall(
        r"""(?:https?:)?//[a-z]\S*\.[a-z]{2,}""", text.replace("http://www.w3.org/2000/svg", "")
    )
    assert not re.findall(r"\bstyle=|\bon\w+=\"|innerHTML|insertAdjacentHTML|document\.write|eval\(", text)
