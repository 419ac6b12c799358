"""Text rewards that stand on other packages, against those packages themselves."""

import json

import pytest
import reasoning_gym
import scipy.spatial.distance
import torch
from transformers import BertConfig, BertModel, BertTokenizer
from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

from modalities.errors import UserError
from modalities.samples import Prompt, Text
from rewards import packages
from rewards.combine import RewardSet
from rewards.text_models import ReasoningGymConfig, SentimentConfig, TopicalityConfig


def as_samples(*texts: str) -> list[Text]:
    return [Text(text, len(text), True) for text in texts]


@pytest.mark.parametrize("task", ["chain_sum", "spell_backward", "gsm_symbolic", "countdown"])
def test_reasoning_gym_gives_the_verdict_of_the_data_set_that_made_the_task(task):
    data = reasoning_gym.create_dataset(task, seed=3, size=4)
    entries = [json.loads(json.dumps(entry)) for entry in data]
    answers = [str(entry["answer"]) for entry in entries]
    answers[1], answers[3] = "no idea", answers[3] + " "
    prompts = [Prompt(entry["question"], index, record=entry) for index, entry in enumerate(entries)]
    for block in (ReasoningGymConfig(), ReasoningGymConfig(task=task)):
        scores = block.build("cpu").score(as_samples(*answers), prompts)
        expected = [data.score_answer(answer.strip(), entry) for answer, entry in zip(answers, entries, strict=True)]
        torch.testing.assert_close(scores, torch.tensor(expected, dtype=torch.float32))
        assert scores[0] == 1 and scores[1] < 0.5


def test_reasoning_gym_sees_only_the_extracted_answer():
    entry = reasoning_gym.create_dataset("chain_sum", seed=3, size=1)[0]
    right, prompt = entry["answer"], Prompt(entry["question"], 0, record=entry)
    texts = as_samples(f"Let me see: <answer>0</answer> <answer> {right} </answer>", f"It is {right}", "")
    tagged = ReasoningGymConfig(extract="<answer>(.*?)</answer>").build("cpu").score(texts, [prompt] * 3)
    last = ReasoningGymConfig(extract=r"-?\d+").build("cpu").score(texts, [prompt] * 3)
    assert tagged.tolist() == [1, 0, 0] and last.tolist() == [1, 1, 0]


def test_reasoning_gym_names_the_nearest_task_and_leaves_out_records_without_one():
    with pytest.raises(UserError, match="'chain_sums'; did you mean 'chain_sum'"):
        ReasoningGymConfig(task="chain_sums").build("cpu")
    reward = ReasoningGymConfig().build("cpu")
    assert reward.score(as_samples("1"), [Prompt("p", 0, record={"answer": "1"})]).isnan().all()
    with pytest.raises(UserError, match="no data set 'nonsense'"):
        reward.score(as_samples("1"), [Prompt("p", 0, record={"metadata": {"source_dataset": "nonsense"}})])


def test_reasoning_gym_scores_in_its_own_process_as_it_does_here():
    data = reasoning_gym.create_dataset("chain_sum", seed=1, size=3)
    prompts = [Prompt(entry["question"], index, record=entry) for index, entry in enumerate(data)]
    samples = as_samples(data[0]["answer"], "wrong", data[2]["answer"])
    rewards = RewardSet.build({"verifier": ReasoningGymConfig(timeout_seconds=30)}, "cpu")
    rewards.check("text", prompts)
    scores = rewards.score(samples, prompts, 0).raw["verifier"]
    rewards.close()
    assert torch.equal(scores, ReasoningGymConfig().build("cpu").score(samples, prompts))
    assert scores[0] == scores[2] == 1 > scores[1]


def test_sentiment_is_vaders_compound():
    texts = ["What a wonderful, lovely day!", "This is terrible.", "The table has four legs.", ""]
    scores = SentimentConfig().build("cpu").score(as_samples(*texts), [Prompt("p", 0)] * 4)
    analyzer = SentimentIntensityAnalyzer()
    expected = [analyzer.polarity_scores(text)["compound"] for text in texts]
    torch.testing.assert_close(scores, torch.tensor(expected))
    assert scores[0] > 0.5 and scores[1] < -0.3 and scores[2] == scores[3] == 0


@pytest.mark.parametrize("block", [SentimentConfig(), ReasoningGymConfig()])
def test_a_missing_package_is_named_with_its_command(block, monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(name=name.split(".")[0])

    monkeypatch.setattr(packages.importlib, "import_module", missing)
    with pytest.raises(UserError, match=r"pip install (vaderSentiment|reasoning-gym)"):
        block.build("cpu")


WORDS = ["the", "cat", "sat", "on", "mat", "dog", "ran"]


@pytest.fixture(scope="module")
def encoder_folder(tmp_path_factory):
    """A sentence-transformers folder with a random two-layer BERT that reads six tokens."""
    folder = tmp_path_factory.mktemp("encoder")
    vocabulary = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS])}
    BertTokenizer(vocab=vocabulary).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    BertModel(BertConfig(vocab_size=len(vocabulary), max_position_embeddings=16, **sizes)).save_pretrained(folder)
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 6}')
    return folder


def embed(folder, text: str) -> torch.Tensor:
    """One text, no padding: the plain mean over its tokens."""
    tokens = BertTokenizer.from_pretrained(folder)(text, return_tensors="pt", truncation=True, max_length=6)
    with torch.no_grad():
        return BertModel.from_pretrained(folder).eval()(**tokens).last_hidden_state[0].mean(dim=0)


def test_topicality_is_the_cosine_of_mean_pooled_embeddings_whatever_the_padding(encoder_folder):
    topics, answers = ["the cat", "dog", "the cat"], ["cat sat", "the dog ran on the mat the cat sat", ""]
    reward = TopicalityConfig(model=str(encoder_folder)).build("cpu")
    scores = reward.score(as_samples(*answers), [Prompt(topic, 0) for topic in topics])
    expected = [
        1 - scipy.spatial.distance.cosine(embed(encoder_folder, topic), embed(encoder_folder, answer))
        for topic, answer in zip(topics, answers, strict=True)
    ]
    torch.testing.assert_close(scores, torch.tensor(expected, dtype=torch.float32), atol=1e-5, rtol=0)


def test_topicality_takes_the_topic_from_a_field_and_leaves_out_records_without_it(encoder_folder):
    reward = TopicalityConfig(model=str(encoder_folder), field="topic").build("cpu")
    prompts = [Prompt("x", 0, record={"topic": "cat sat"}), Prompt("x", 1, record={"topic": None}), Prompt("x", 2)]
    scores = reward.score(as_samples("cat sat", "cat", "cat"), prompts)
    assert scores[0].item() == pytest.approx(1, abs=1e-5) and scores[1:].isnan().all()
    assert reward.fields == {"topic"}
    assert reward.score(as_samples("cat"), prompts[1:2]).isnan().all()


def test_topicality_refuses_another_pooling_and_a_folder_without_a_model(encoder_folder, tmp_path):
    for file in encoder_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": false}')
    with pytest.raises(UserError, match="does not pool by the mean"):
        TopicalityConfig(model=str(tmp_path)).build("cpu")
    with pytest.raises(UserError, match="does not exist"):
        TopicalityConfig(model=str(tmp_path / "nowhere")).build("cpu")
