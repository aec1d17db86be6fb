from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from infer.errors import ConfigError
from infer.loader.find.source import resolve_model
from infer.loader.load import load_model
from scripts.make_checkpoint import CORPUS, READS_IMAGES, TOKENS, Sizes, main, make_checkpoint
from tests.support.step import run_step


def load_reference(path: Path) -> Any:
    import transformers

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, output_loading_info=True
        )
    model, info = loaded
    assert not info["unexpected_keys"]
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    return model.eval()


# the text part of a model that reads images is nothing that the reference loads by itself
@pytest.mark.parametrize("family", [family for family in TOKENS if family not in READS_IMAGES])
def test_the_reference_reads_the_same_network_out_of_it(family: str, tmp_path: Path) -> None:
    make_checkpoint(family, tmp_path, num_shards=2)
    tokens = list(range(10, 40))  # past the window of 16
    # longrope has other factors for what is served beyond the trained length (phi3)
    ours = load_model(resolve_model(str(tmp_path)), dtype="float32", device="cpu", max_seq_len=40).model
    with torch.no_grad():
        expected = load_reference(tmp_path)(input_ids=torch.tensor([tokens])).logits[0]

    torch.testing.assert_close(run_step(ours, [tokens])[0], expected, atol=2e-5, rtol=0)
    assert expected.std() > 0.1  # a network with something to say


@pytest.mark.parametrize("family", TOKENS)
def test_its_tokenizer_knows_every_byte_and_the_special_tokens(family: str, tmp_path: Path) -> None:
    make_checkpoint(family, tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    config = json.loads((tmp_path / "config.json").read_text())

    text = CORPUS + "héllo 你好 🙂\x00"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text
    for token in (*TOKENS[family].special, *TOKENS[family].plain):
        assert tokenizer.encode(token, add_special_tokens=False).ids == [tokenizer.token_to_id(token)]
    assert tokenizer.get_vocab_size() <= config.get("text_config", config)["vocab_size"]
    starts_with_bos = tokenizer.encode("x").ids[0] == config["bos_token_id"]
    assert starts_with_bos == TOKENS[family].adds_bos


def test_shards_hold_the_same_tensors_as_a_single_file(tmp_path: Path) -> None:
    make_checkpoint("qwen2", tmp_path / "one", seed=3)
    make_checkpoint("qwen2", tmp_path / "many", seed=3, num_shards=3)
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    whole = load_file(tmp_path / "one" / "model.safetensors")
    pieces: dict[str, torch.Tensor] = {}
    for file_name in sorted(set(index["weight_map"].values())):
        shard = load_file(tmp_path / "many" / file_name)
        assert all(index["weight_map"][name] == file_name for name in shard)
        pieces |= shard

    assert len(set(index["weight_map"].values())) == 3
    assert pieces.keys() == whole.keys()
    assert all(torch.equal(pieces[name], whole[name]) for name in whole)


def test_the_same_arguments_write_the_same_files(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make_checkpoint("gemma3", tmp_path / name, seed=seed, sizes=Sizes(num_layers=1))
    files = {name: {p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in "abc"}

    assert files["a"] == files["b"]
    assert files["a"]["model.safetensors"] != files["c"]["model.safetensors"]


def test_an_existing_checkpoint_is_not_overwritten(tmp_path: Path) -> None:
    make_checkpoint("gpt2", tmp_path)

    with pytest.raises(ConfigError, match="already holds a checkpoint"):
        make_checkpoint("gpt2", tmp_path, num_shards=2)


def test_sizes_and_dtype_come_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--layers", "1", "--hidden", "32", "--kv-heads", "1", "--dtype", "bfloat16", "--tied"]
    assert main(["llama", str(tmp_path / "ok"), *arguments]) == 0
    tensors = load_file(tmp_path / "ok" / "model.safetensors")

    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert tensors["model.layers.0.self_attn.k_proj.weight"].shape == (8, 32)
    assert "lm_head.weight" not in tensors
    assert main(["llama", str(tmp_path / "bad"), "--vocab", "100"]) == 2
    assert "too small" in capsys.readouterr().err
    assert not (tmp_path / "bad").exists()
