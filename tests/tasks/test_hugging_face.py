"""Data sets, tokenizers and transformers of Hugging Face, all made here: no download."""

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

from fedhet.tasks.hugging_face import load
from tests.refused import refused
from tests.tasks.plain import SITE, task_of
from tests.tasks.tokenizers import write_tokenizer

pytestmark = pytest.mark.slow  # transformers and peft take seconds to import

PIXELS = np.arange(2 * 4 * 4, dtype=np.uint8).reshape(2, 4, 4)
TEXTS = ["a good film", "bad", "a bad bad film indeed"]


@pytest.fixture(autouse=True)
def no_progress_bars():
    datasets.disable_progress_bars()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"), ["a", "bad", "film", "good"])


def saved(folder, columns, features=None):
    split = datasets.Dataset.from_dict(columns, features and datasets.Features(features))
    datasets.DatasetDict({"train": split, "validation": split}).save_to_disk(folder)
    return str(folder)


@pytest.fixture
def images(tmp_path):
    columns = {"pic": [Image.fromarray(one) for one in PIXELS], "kind": [1, 0]}
    features = {"pic": datasets.Image(), "kind": datasets.ClassLabel(names=["x", "y"])}
    return saved(tmp_path / "set", columns, features)


IMAGES = {
    "input_column": "pic",
    "target": "kind",
    "test_split": "validation",
    "image_size": 4,
    "channels": 1,
    "mean": [0.5],
    "std": [0.25],
}


def test_images_are_normalised_by_channel(images):
    train, test = load(path=images, **IMAGES)
    assert (len(train), len(test)) == (2, 2)
    pixels, label = train[1]
    torch.testing.assert_close(pixels, (torch.tensor(PIXELS[1:]) / 255 - 0.5) / 0.25)
    assert label == 0


def test_a_model_of_fedhets_takes_the_shape_of_the_images(images):
    task = task_of("hf", {"path": images, **IMAGES}, clients=1, model="mlp", num_classes=2)
    assert task.input_shape == (1, 4, 4)
    data, _ = task.client_data(0)
    inputs, labels = next(data.batches(2, generator=None, train=False))
    assert task.build_model(0)(inputs)[1].shape == (2, 2)
    assert labels.tolist() == [1, 0]


def test_a_site_reads_its_own_folder(images):
    options = {**IMAGES, "test_split": None}
    task = task_of("hf", options, SITE | {"holdout": 0.5}, model="mlp", num_classes=2)
    train, held_out = task.client_data(1, site_folder=images)
    assert (len(train), len(held_out)) == (1, 1)
    assert task.input_shape == (1, 4, 4)  # the server has no image


def test_a_column_says_whose_images_numbers_and_texts_are(tmp_path, tokenizer):
    pictures = [Image.fromarray(one) for one in (*PIXELS, *PIXELS)]
    inputs = {"image": pictures, "x": [[1.0], [2.0]] * 2, "text": ["bad", "good"] * 2}
    whose = {"label": [0, 1, 0, 1], "writer": ["b", "a", "b", "b"]}
    for column, given in inputs.items():
        folder = saved(tmp_path / column, {column: given, **whose})
        options = {"path": folder, "input_column": column, "test_split": None, "test_fraction": 0.0}
        options |= {"tokenizer": tokenizer} if column == "text" else {}
        how = {"model": "mlp", "num_classes": 2, "client_column": "writer"}
        task = task_of("hf", options, {"name": "natural"}, clients=2, **how)
        assert task.client_names == ("a", "b")
        assert [len(task.client_data(client)[0]) for client in (0, 1)] == [1, 3]
        with refused("ward", "task.client_column"):
            load(**options, client_column="ward")
    task = task_of("hf", options, SITE | {"holdout": 0.0}, **how)
    assert len(task.client_data(0, site_folder=folder)[0]) == 4  # all are the site's


def test_columns_of_numbers_and_targets_of_a_regression(tmp_path):
    folder = saved(tmp_path / "set", {"x": [[1.0, 2.0], [3.0, 4.0]], "y": [0.5, 7]})
    options = {"input_column": "x", "target": "y", "test_split": None, "kind": "regression"}
    (inputs, targets), _ = load(path=folder, test_fraction=0.0, **options)
    assert inputs.tolist() == [[1, 2], [3, 4]]
    assert targets.tolist() == [0.5, 7]


def test_a_missing_number_of_a_row_is_refused(tmp_path):
    folder = saved(tmp_path / "set", {"x": [[1.0, 2.0], [3.0, None]], "y": [0.5, 7]})
    options = {"input_column": "x", "target": "y", "test_split": None, "kind": "regression"}
    with refused("1"):
        load(path=folder, test_fraction=0.0, **options)


def test_texts_become_tokens_cut_and_padded(tmp_path, tokenizer):
    folder = saved(tmp_path / "set", {"text": TEXTS, "label": ["up", "down", "down"]})
    (tokens, labels), _ = load(
        path=folder,
        input_column="text",
        test_split="validation",
        tokenizer=tokenizer,
        length=4,
        classes=["down", "up"],
    )
    # [PAD] 0, [UNK] 1, then the words
    assert tokens.tolist() == [[2, 5, 4, 0], [3, 0, 0, 0], [2, 3, 3, 4]]
    assert labels.tolist() == [1, 0, 0]


POLARITY = datasets.ClassLabel(names=["neg", "pos"])
DIGITS = datasets.ClassLabel(names=["1", "0"])
STARS = datasets.ClassLabel(names=["1", "2", "3"])
BOOL, WHOLE = datasets.Value("bool"), datasets.Value("int64")


def labels_of(tmp_path, feature, given, classes):
    features = {"x": datasets.Sequence(datasets.Value("float32")), "label": feature}
    folder = saved(tmp_path / "set", {"x": [[0.0]] * len(given), "label": given}, features)
    how = {"input_column": "x", "test_split": None, "test_fraction": 0.0, "classes": classes}
    return load(path=folder, **how)[0][1].tolist()


@pytest.mark.parametrize(
    ("feature", "given", "classes", "labels"),
    [
        (POLARITY, [0, 1, 1], ["neg", "pos"], [0, 1, 1]),
        (POLARITY, [0, 1, 1], ["pos", "neg"], [1, 0, 0]),
        (POLARITY, [0, 1, 1], ["none", "pos", "neg"], [2, 1, 1]),
        (POLARITY, [1, 1], ["pos"], [0, 0]),  # neg does not occur
        (POLARITY, [0, 1, 1], ["0", "1"], [0, 1, 1]),  # task.num_classes=2
        (POLARITY, [0, 1, 1], None, [0, 1, 1]),
        (DIGITS, [0, 1], ["0", "1"], [1, 0]),
        (STARS, [0, 1], ["0", "1", "2"], [0, 1]),  # the name 3 is no class: all are numbers
        (WHOLE, [0, 1, 1], ["neg", "pos"], [0, 1, 1]),
        (WHOLE, [0, 1, 1], ["1", "0"], [1, 0, 0]),
        (WHOLE, [1, 3, 2], ["1", "2", "3"], [0, 2, 1]),
        (WHOLE, [0, 1, 7], ["0", "1"], [0, 1, 7]),  # refused with the model's outputs
        (BOOL, [False, True], ["True", "False"], [1, 0]),
        (BOOL, [False, True], ["0", "1"], [0, 1]),
    ],
)
def test_labels_are_found_by_name_and_numbers_without_names_by_place(
    tmp_path, feature, given, classes, labels
):
    assert labels_of(tmp_path, feature, given, classes) == labels


@pytest.mark.parametrize(
    ("feature", "given", "classes", "said"),
    [
        (POLARITY, [0, 1], ["neg", "positive"], "task.classes=[neg,positive]"),
        (POLARITY, [-1, 1], ["neg", "pos"], "task.target=label"),
        (WHOLE, [0, 1], ["3", "other"], "task.classes=[3,other]"),
        (WHOLE, [0, 2], ["2", "1"], "0 task.classes=[2,1]"),
        (BOOL, [False, True], ["no", "yes"], "task.classes"),
    ],
)
def test_labels_that_fit_no_class_or_two_are_refused(tmp_path, feature, given, classes, said):
    with refused(*said.split()):
        labels_of(tmp_path, feature, given, classes)


WRONG = [
    ({"path": "/nowhere/at/all"}, "loaded"),
    ({"input_column": "pix"}, "input_column"),
    ({"test_split": "test"}, "test_split"),
    ({"channels": 3}, "1 task.data_options.channels=3"),
    ({"std": [0.0]}, "std=[0.0]"),
    ({"mean": [float("inf")]}, "mean=[inf]"),
    ({"input_column": "kind", "target": "pic"}, "task.target=pic"),
]


@pytest.mark.parametrize(("options", "said"), WRONG)
def test_what_is_wrong_is_said_with_the_key(images, monkeypatch, options, said):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with refused(*said.split()):
        load(**({"path": images} | IMAGES | options))


# ---------------------------------------------------------------------------------- transformers
BERT = {
    "model_type": "bert",
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
}


def text_task(tokenizer, **keys):
    options = {"config": BERT, **keys.pop("model_options", {})}
    given = {"tokenizer": tokenizer, "length": 6}
    return task_of("hf_text", given, num_classes=3, model_options=options, **keys)


def test_padding_does_not_change_the_logits(tokenizer):
    model = text_task(tokenizer).build_model(0).eval()
    tokens = torch.tensor([[2, 3, 4]])
    padded = torch.tensor([[2, 3, 4, 0, 0, 0]])
    torch.testing.assert_close(model(tokens)[1], model(padded)[1])
    assert model(tokens)[1].shape == (1, 3)


def test_a_config_gives_the_same_weights_for_a_seed_and_the_tokenizers_vocabulary(tokenizer):
    task = text_task(tokenizer)
    first, again, other = (task.build_model(seed).state_dict() for seed in (1, 1, 2))
    name = "body.network.bert.embeddings.word_embeddings.weight"
    assert first[name].shape == (6, 8)
    assert torch.equal(first[name], again[name])
    assert not torch.equal(first[name], other[name])


def test_a_folder_of_weights_is_loaded(tokenizer, tmp_path):
    network = text_task(tokenizer).build_model(5).body.network
    network.classifier = torch.nn.Linear(8, 3)
    network.save_pretrained(tmp_path)
    options = {"config": None, "pretrained": str(tmp_path)}
    loaded = text_task(tokenizer, model_options=options).build_model(0)
    torch.testing.assert_close(loaded.head.weight, network.classifier.weight)
    name = "bert.encoder.layer.0.output.dense.weight"
    assert torch.equal(loaded.body.network.get_parameter(name), network.get_parameter(name))


WRONG_MODELS = [
    ({"config": None}, "pretrained=None task.model_options.config=None"),
    ({"config": {"model_type": "brt"}}, "transformers"),
    ({"config": BERT | {"vocab_size": 3}}, "6 3"),
    ({"config": None, "pretrained": "/nowhere"}, "transformers"),
    ({"tokenizer": "/nowhere"}, "tokenizer=/nowhere"),
]


@pytest.mark.parametrize(("options", "said"), WRONG_MODELS)
def test_a_model_that_cannot_be_built_is_said(tokenizer, options, said):
    with refused(*said.split()):
        text_task(tokenizer, model_options=options).build_model(0)


# ------------------------------------------------------------------------------------------- LoRA
LORA = {"r": 2, "alpha": 6, "target_modules": ["query", "value"]}


def test_adapters_and_the_classifier_are_all_that_is_trained(tokenizer):
    model = text_task(tokenizer, lora=LORA).build_model(0)
    sizes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    layer = "body.network.bert.encoder.layer.0.attention.self"
    assert sizes == {
        f"{layer}.query.lora_A.default.weight": (2, 8),
        f"{layer}.query.lora_B.default.weight": (8, 2),
        f"{layer}.value.lora_A.default.weight": (2, 8),
        f"{layer}.value.lora_B.default.weight": (8, 2),
        "head.weight": (3, 8),
        "head.bias": (3,),
    }
    assert sizes.keys() == dict(model.named_parameters()).keys()


def test_a_layer_with_an_adapter_is_what_the_paper_says(tokenizer):
    plain, model = (
        text_task(tokenizer).build_model(0),
        text_task(tokenizer, lora=LORA).build_model(0),
    )
    path = "body.network.bert.encoder.layer.0.attention.self.query"
    layer, adapted = plain.get_submodule(path), model.get_submodule(path)
    values = torch.arange(8.0)[None]
    torch.testing.assert_close(adapted(values), layer(values))  # B is zero at first
    a, b = adapted.lora_A["default"].weight, adapted.lora_B["default"].weight
    torch.nn.init.ones_(b)
    torch.testing.assert_close(adapted(values), layer(values) + 6 / 2 * values @ a.T @ b.T)
