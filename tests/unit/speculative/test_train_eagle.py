"""Training a head: what is trained is what is served, and a few seconds of it already help."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from infer.errors import ConfigError
from infer.kernels.attention.reference import attend_naive
from infer.layers.whole_sequence import WholeSequence
from infer.loader.eagle import load_eagle
from infer.loader.find.source import resolve_model
from infer.loader.load import LoadedModel, load_model
from scripts import eagle_prompts
from scripts.eagle_head import TrainedHead
from scripts.make_checkpoint import Sizes, make_checkpoint
from scripts.train_eagle import (
    Recipe,
    Teacher,
    Text,
    batches,
    choose_vocabulary,
    count,
    drafts,
    judge,
    main,
    read_prompts,
    save_head,
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target") / "llama"
    make_checkpoint("llama", path, sizes=Sizes(num_layers=6), seed=2)
    return path


@pytest.fixture(scope="module")
def target(checkpoint: Path) -> LoadedModel:
    return load_model(resolve_model(str(checkpoint)), dtype="float32", device="cpu")


def texts(target: LoadedModel, lengths: list[int]) -> list[Text]:
    generator = torch.Generator().manual_seed(4)
    vocab_size = target.config.vocab_size
    return [
        Text(torch.randint(vocab_size, (length,), generator=generator).tolist(), num_prompt=5)
        for length in lengths
    ]


def random_head(target: LoadedModel, ids: torch.Tensor) -> TrainedHead:
    """A head whose weights bfloat16 holds exactly, so that nothing is lost when it is saved."""
    torch.manual_seed(1)
    head = TrainedHead(target.config, torch.randn(len(ids), target.config.hidden_size), (0.5, 2.0, 4.0))
    with torch.no_grad():
        for parameter in head.parameters():
            noise = torch.randn(parameter.shape) * 0.3
            spread = 1 + noise if parameter.dim() == 1 else noise
            parameter.copy_(spread.to(torch.bfloat16))
    return head


def test_every_row_drafts_in_training_as_it_does_when_served(tmp_path: Path, target: LoadedModel) -> None:
    given = texts(target, [19, 14])
    ids = torch.arange(3, target.config.vocab_size, 4)
    head, teacher = random_head(target, ids), Teacher(target, ids)
    save_head(tmp_path, head.published(), ids, target.config)
    served = load_eagle(tmp_path, target, num_drafts=8)
    assert torch.equal(served.token_ids_W, ids)
    batch = teacher.run(given)
    with torch.no_grad():
        trained = [head.logits(y) for y in drafts(head, teacher, batch, 4)]
        for number, text in enumerate(given):
            for row in (0, 3, 9):
                step = WholeSequence(attend_naive, torch.device("cpu"))
                step.advance(row + 1)
                states = served.combine(batch.states_BLF[number, : row + 1])
                for place in range(4):
                    known = text.tokens[1 : row + 2] if place == 0 else [text.tokens[row + 1 + place]]
                    guess = served(torch.tensor(known), states, step)
                    logits = served.logits(guess.hidden_SD[-1:])[0]
                    torch.testing.assert_close(logits, trained[place][number, row], rtol=1e-4, atol=1e-4)
                    states = guess.states_SD[-1:]
                    step.advance(1)


def test_a_chain_is_judged_up_to_its_first_wrong_draft(target: LoadedModel) -> None:
    """Against drafting one chain after the other, for a head that guesses among few tokens."""
    given = [Text([token % 3 for token in text.tokens], 5) for text in texts(target, [16, 11])]
    ids = torch.arange(3)
    head, teacher = random_head(target, ids), Teacher(target, ids)
    batch = teacher.run(given)
    with torch.no_grad():
        guesses = [ids[head.logits(y).argmax(-1)] for y in drafts(head, teacher, batch, 5)]
    accepted, chains = 0, 0
    for number, text in enumerate(given):
        for row in range(text.num_prompt - 1, len(text.tokens) - 2):
            chains += 1
            for place in range(min(5, len(text.tokens) - 2 - row)):
                if int(guesses[place][number, row]) != text.tokens[row + 2 + place]:
                    break
                accepted += 1
    found = judge(head, teacher, given, Recipe(batch_tokens=64))
    assert found["chains"] == chains
    assert accepted > 0
    assert found["accepted"] == pytest.approx(accepted / chains, abs=1e-4)


def test_draft_tokens_are_those_of_answers(target: LoadedModel) -> None:
    given = [Text([9, 9, 9, 9, 9, 40, 41, 40, 300], 5)]
    ids, coverage = choose_vocabulary(given, target, 2)
    assert ids.tolist() == [40, 41]
    assert coverage == 0.75
    assert len(choose_vocabulary(given, target, 10)[0]) == 10  # filled up with others


def test_batches_hold_every_text_once_and_no_more_than_they_may(target: LoadedModel) -> None:
    import random

    given = texts(target, [7 + (place * 13) % 50 for place in range(40)])
    made = list(batches(given, 200, random.Random(0)))
    assert sorted(id(text) for group in made for text in group) == sorted(map(id, given))
    assert all(len(group) * max(len(text.tokens) for text in group) <= 200 for group in made)


def test_held_out_prompts_share_no_topic_with_the_others() -> None:
    training, held_out = eagle_prompts.training(5000, 0), eagle_prompts.held_out(150, 0)
    assert len(set(training)) == 5000
    assert not set(training) & set(held_out)
    topics = set(eagle_prompts._topics(held_out=True)) & set(eagle_prompts._topics(held_out=False))
    assert not topics


def test_prompt_files(tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    path.write_text("\n".join(["Hello", '{"prompt": "Hi"}', '{"messages": [1]}', ""] * 7))
    assert read_prompts(path)[:3] == ["Hello", "Hi", [1]]
    path.write_text("Hello\n")
    with pytest.raises(ConfigError, match="1 prompts; at least 20"):
        read_prompts(path)
    path.write_text('{"text": 1}\n' * 30)
    with pytest.raises(ConfigError, match='line 1 of .* has neither "prompt" nor "messages"'):
        read_prompts(path)
    path.write_text("{\n")
    with pytest.raises(ConfigError, match="line 1 of .* is not JSON"):
        read_prompts(path)


def test_counts() -> None:
    assert [count(text) for text in ("20M", "500k", "7")] == [20e6, 500e3, 7]


@pytest.mark.slow
def test_a_few_seconds_of_training_help(checkpoint: Path, tmp_path: Path) -> None:
    prompts, out, report = tmp_path / "prompts.txt", tmp_path / "head", tmp_path / "report.json"
    prompts.write_text("\n".join(f"The river number {number} said:" for number in range(60)))
    options = (
        "--device cpu --minutes 2 --tokens 2k --train-tokens 60k --answer-tokens 40 --num-held-out 5 "
        "--batch-tokens 512 --draft-vocab 300 --ttt-steps 3 --eval-seconds 0.5 --round-prompts 54"
    )
    files = ["--prompts", str(prompts), "--out", str(out), "--report", str(report)]
    assert main([str(checkpoint), *files, *options.split()]) == 0

    found = json.loads(report.read_text())
    losses = [entry["loss"] for entry in found["history"] if entry["loss"] == entry["loss"]]
    assert losses[-1] < 0.9 * losses[0], losses
    assert found["served_logits_differ_by"] < 0.1  # the weights are saved in bfloat16
    assert found["minutes"] < 2
    assert len(found["held_out"]["held_out"]["conditional"]) == 5
    with pytest.raises(SystemExit):  # it would overwrite a head
        main([str(checkpoint), *files])
