"""Language models on instructions and responses: tokens, next tokens, loss, perplexity, LoRA."""

import json
import math

import datasets
import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from fedhet.tasks.evaluation import evaluate_model
from fedhet.tasks.examples import IGNORED
from fedhet.tasks.instructions import load
from tests.refused import refused
from tests.tasks.plain import task_of
from tests.tasks.tokenizers import write_tokenizer

pytestmark = pytest.mark.slow  # transformers and peft take seconds to import

ROWS = [
    {"instruction": "say a", "response": "a b", "kind": "first"},
    {"instruction": "say", "response": "b", "kind": "second"},
]
PAD, UNKNOWN, SAY, ONE, TWO, ASK, TELL = range(7)
GPT2 = {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2, "n_positions": 8}
IGNORE = [IGNORED]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    datasets.disable_progress_bars()
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"), ["say", "a", "b", "ask", "tell"])


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return str(path)


def options(tokenizer, rows, **more):
    prompt = "ask {instruction} tell"
    given = {"path": rows, "tokenizer": tokenizer, "prompt": prompt, "length": 6}
    return {**given, "test_fraction": 0.0, **more}


def language_task(tokenizer, rows, config=None, **keys):
    model_options = {"config": GPT2 | {"tie_word_embeddings": False} | (config or {})}
    return task_of("hf_causal", options(tokenizer, rows), model_options=model_options, **keys)


def test_the_response_s_tokens_are_the_labels(tokenizer, rows):
    """Of "ask say a tell a b" only a (after tell) and b are learnt; of the second row b."""
    (tokens, labels), _ = load(**options(tokenizer, rows))
    assert tokens.tolist() == [
        [ASK, SAY, ONE, TELL, ONE, PAD],
        [ASK, SAY, TELL, PAD, PAD, PAD],
    ]
    assert labels.tolist() == [
        [*IGNORE * 3, ONE, TWO, *IGNORE],
        [*IGNORE * 2, TWO, *IGNORE * 3],
    ]


def test_a_long_text_is_cut_and_of_a_plain_one_every_token_counts(tokenizer, rows):
    (tokens, labels), _ = load(**options(tokenizer, rows, length=3))
    assert tokens[0].tolist() == [ASK, SAY, ONE]
    assert (labels[0] == IGNORED).all()
    (tokens, labels), _ = load(**options(tokenizer, rows, prompt=""))
    assert tokens[0].tolist() == [ONE, *[PAD] * 5]
    assert labels[0].tolist() == [TWO, *IGNORE * 5]


def test_a_csv_file_and_a_column_of_clients(tokenizer, tmp_path):
    path = tmp_path / "rows.csv"
    lines = [",".join(row.values()) for row in ROWS]
    path.write_text("\n".join(["instruction,response,kind", *lines]) + "\n")
    train, test = load(**options(tokenizer, str(path), client_column="kind"))
    assert train[2].tolist() == ["first", "second"]
    assert len(test[0]) == 0
    natural = {"name": "natural", "holdout": 0.0, "seed": None}
    task = task_of(
        "hf_causal", options(tokenizer, str(path)), natural, client_column="kind", num_classes=7
    )
    assert [len(task.client_data(client)[0]) for client in (0, 1)] == [1, 1]


def test_a_column_that_a_row_lacks_is_empty_in_its_prompt(tokenizer, tmp_path):
    path = tmp_path / "rows.jsonl"
    asked = [json.dumps({"input": one, "response": "a b"}) for one in (None, "say")]
    path.write_text("\n".join(asked))
    how = {"prompt": "{input} "}
    (tokens, _), _ = load(**options(tokenizer, str(path), **how))
    assert tokens[:, :2].tolist() == [[ONE, PAD], [SAY, ONE]]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"prompt": "{question}"}, "task.data_options.prompt"),
        ({"prompt": "{instruction.words}"}, "task.data_options.prompt"),
        ({"prompt": "{instruction[a]}"}, "task.data_options.prompt"),
        ({"target": "answer"}, "answer"),
        ({"tokenizer": None}, "task.data_options.tokenizer"),
    ],
)
def test_what_the_rows_lack_is_said(tokenizer, rows, change, said):
    with refused(said):
        load(**options(tokenizer, rows) | change)


def test_loss_and_perplexity_are_means_over_the_labels_that_count(tokenizer, rows):
    task = language_task(tokenizer, rows)
    model = task.build_model(0).eval()  # without dropout
    data, _ = task.client_data(0)
    both = [*data.batches(9, generator=None, train=False)]
    second, _ = task.client_data(1)
    both += second.batches(9, generator=None, train=False)
    inputs, labels = (torch.cat(parts) for parts in zip(*both, strict=True))
    logits = model(inputs)[1].detach()
    assert logits.shape == (2, 7, 6)
    counted = labels != IGNORED
    expected = float(cross_entropy(logits.transpose(1, 2)[counted], labels[counted]))
    metrics = task.metric_set(["perplexity"], per_class=False, device="cpu")
    examples = task._examples((inputs.numpy(), labels.numpy()), "cpu")
    loss, accuracy = evaluate_model(model, examples, task.loss, batch_size=1, metrics=metrics)
    assert loss == pytest.approx(expected, rel=1e-6)
    assert metrics.compute()["perplexity"] == pytest.approx(math.exp(expected), rel=1e-5)
    assert accuracy is None


def test_a_token_sees_none_that_follow_it(tokenizer, rows):
    model = language_task(tokenizer, rows).build_model(0).eval()
    short, padded = torch.tensor([[ASK, SAY]]), torch.tensor([[ASK, SAY, PAD, PAD]])
    torch.testing.assert_close(model(padded)[1][..., :2], model(short)[1])


@pytest.mark.parametrize("tied", [False, True])
def test_with_lora_adapters_alone_are_trained(tokenizer, rows, tied):
    lora = {"r": 2, "alpha": 4, "target_modules": ["c_attn"]}
    task = language_task(tokenizer, rows, {"tie_word_embeddings": tied}, lora=lora)
    model = task.build_model(0)
    layer = "body.network.transformer.h.0.attn.c_attn.lora_{}.default.weight"
    assert [name for name, _ in model.named_parameters()] == [layer.format("A"), layer.format("B")]
    assert task.num_classes == 7
    assert model(torch.zeros(1, 6, dtype=torch.long))[1].shape == (1, 7, 6)


def test_other_partitions_are_refused(tokenizer, rows):
    skewed = {"name": "dirichlet", "holdout": 0.0, "seed": None, "alpha": 1.0, "min_size": 1}
    task = task_of("hf_causal", options(tokenizer, rows), skewed, num_classes=7)
    with refused("partition=dirichlet"):
        np.asarray(task.class_counts())
