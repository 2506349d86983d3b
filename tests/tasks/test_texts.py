"""Texts become tokens: by hand on a tiny corpus."""

import numpy as np
import pytest
import torch

from fedhet.tasks.sources import tables
from fedhet.tasks.sources.encodings import TokenEncoding
from fedhet.tasks.vocabulary import Vocabulary, split_words
from tests.refused import refused
from tests.tasks.generated import make_task, write_texts

pytestmark = pytest.mark.usefixtures("empty_cache")

TRAIN = [
    "The film was GOOD, the best!<br /><br />Don't miss the film.",
    "'Good' film; it's well-made.",
]
TEST = ["Best awful awful awful", "the FILM"]
# film 3, the 3, good 2, and of those that are there once the alphabet's first two; from token 3 on
WORDS = ["film", "the", "good", "best", "don't"]
TRAIN_TOKENS = [[1, 4, 3, 2, 5, 4, 6, 7], [1, 5, 3, 2, 2, 2, 0, 0]]
TEST_TOKENS = [[1, 6, 2, 2, 2, 0, 0, 0], [1, 4, 3, 0, 0, 0, 0, 0]]
TINY = {"length": 8, "vocabulary_size": 8}


@pytest.fixture
def root(tmp_path):
    write_texts(tmp_path / "imdb" / "train.parquet", TRAIN, [1, 0])
    write_texts(tmp_path / "imdb" / "test.parquet", TEST, [0, 1])
    return tmp_path


def imdb(root, partition="iid", **changes):
    values = {"clients": 1, "path": str(root), **TINY, **changes}
    return make_task("imdb", partition, **values)


def vocabulary_file(folder, words):
    path = folder / f"{'-'.join(words)}.txt"
    path.write_text("".join(f"{word}\n" for word in words), encoding="utf-8")
    return str(path)


def test_words_are_lower_case_without_punctuation_and_line_breaks():
    assert split_words(TRAIN[0]) == "the film was good the best don't miss the film".split()
    assert split_words(TRAIN[1]) == ["good", "film", "it's", "well", "made"]
    assert split_words("<br />9/10 — ''Café_noir'' 'n' roll…") == "9 10 café noir n roll".split()
    assert split_words(" ... <br /> ") == []
    assert split_words("हिन्दी x<br/>y<br>z") == ["हिन्दी", "x", "y", "z"]
    assert split_words("nai\u0308ve") == split_words("naïve") == ["naïve"]


def test_tokens_and_vocabulary_of_the_tiny_corpus(root, empty_cache):
    task = imdb(root)
    assert task.vocabulary == tuple(WORDS)
    same = imdb(root, vocabulary_file=vocabulary_file(root, WORDS))
    other = imdb(root, vocabulary_file=vocabulary_file(root, WORDS[::-1]))
    assert task.label_metadata() == same.label_metadata()
    assert task.label_metadata()["vocabulary"] != other.label_metadata()["vocabulary"]
    train, test = task._splits
    assert train.read().tolist() == TRAIN_TOKENS
    assert test.read().tolist() == TEST_TOKENS
    assert (train.labels.tolist(), test.labels.tolist()) == ([1, 0], [0, 1])
    [path] = (empty_cache / "tokens").glob("imdb-vocabulary-*/vocabulary.txt")
    assert path.read_text(encoding="utf-8").split() == WORDS
    task = imdb(root, vocabulary_size=100)
    assert task.vocabulary[5:] == ("it's", "made", "miss", "was", "well")
    assert task.build_model(0).body.embedding.num_embeddings == 100


def test_words_of_test_examples_that_are_split_off_are_not_counted(tmp_path):
    texts = [f"word{row}" for row in range(10)]
    write_texts(tmp_path / "imdb" / "train.parquet", texts, [0, 1] * 5)
    task = imdb(tmp_path, test_split=None, vocabulary_size=50)
    train, test = task._splits
    assert sorted(task.vocabulary) == [texts[row] for row in train.rows]
    assert test.read()[:, 1].tolist() == [2, 2]


def test_the_last_token_fits_the_arrays():
    for size, dtype in ((32_765, np.int16), (32_766, np.int32)):
        words = tuple(f"w{rank}" for rank in range(size))
        tokens = TokenEncoding(Vocabulary(words), 3).encode(f"{words[-1]} w0 w0")
        assert (tokens.tolist(), tokens.dtype) == ([1, size + 2, 3], dtype)


def test_texts_are_encoded_once_for_each_length_and_vocabulary(root, monkeypatch):
    for tokens, changes in (
        (TRAIN_TOKENS[1], {}),
        ([1, 5, 3], {"length": 3}),
        ([1, 2, 3, 2, 2, 2, 0, 0], {"vocabulary_size": 5}),
        ([1, 4, 2, 2, 2, 3, 0, 0], {"vocabulary_file": vocabulary_file(root, ["made", "good"])}),
    ):
        assert imdb(root, **changes).train_split.read()[1].tolist() == tokens
    monkeypatch.setattr(tables, "_rows", lambda *a: pytest.fail("read again"))
    assert imdb(root).train_split.read().tolist() == TRAIN_TOKENS


@pytest.mark.usefixtures("no_data_folder")
def test_sites_share_the_tokens_of_the_vocabulary_file(tmp_path):
    path = vocabulary_file(tmp_path, WORDS)
    write_texts(tmp_path / "a" / "train.parquet", ["The best film"], [1])
    write_texts(tmp_path / "b" / "train.parquet", ["awful film", "film"], [0, 1])
    write_texts(tmp_path / "b" / "test.parquet", ["the"], [0])
    write_texts(tmp_path / "server" / "imdb" / "test.parquet", TEST, [0, 1])
    task = imdb(tmp_path / "server", "site", clients=2, vocabulary_file=path)
    first, _ = task.client_data(0, site_folder=tmp_path / "a")
    second, held_out = task.client_data(1, site_folder=tmp_path / "b")
    for data, expected in (
        (first, [[1, 4, 6, 3, 0, 0, 0, 0]]),
        (second, [[1, 2, 3, 0, 0, 0, 0, 0], [1, 3, 0, 0, 0, 0, 0, 0]]),
        (held_out, [[1, 4, 0, 0, 0, 0, 0, 0]]),
        (task.test_data(), TEST_TOKENS),
    ):
        [(tokens, _)] = data.batches(8, generator=None, train=False)
        assert tokens.tolist() == expected
    assert (tokens.dtype, first.num_bytes) == (torch.int64, 8 * 2)

    with refused("task.vocabulary_file"):
        imdb(tmp_path, "site")
    with refused("task.classes"):
        imdb(tmp_path, "site", classes=None, num_classes=None)
    with refused("train.parquet"):
        task.client_data(0, site_folder=tmp_path)


def test_wrong_vocabulary_files_and_columns_are_refused_by_key(root):
    (root / "latin.txt").write_bytes("café".encode("latin-1"))
    for words, message in (
        (["film", "Film"], "film-Film.txt 2"),
        (["film", "", "the"], "2"),
        (["film", "the", "film"], "3"),
        (list("abcdef"), "6 task.vocabulary_size=8 5"),
    ):
        with refused(*message.split()):
            imdb(root, vocabulary_file=vocabulary_file(root, words)).client_data(0)
    for key, value, message in (
        ("vocabulary_file", str(root / "no"), "task.vocabulary_file"),
        ("vocabulary_file", str(root / "latin.txt"), "latin.txt task.vocabulary_file"),
        ("text_column", "review", "task.text_column"),
        ("text_column", "label", "1 task.text_column"),
    ):
        with refused(*message.split()):
            imdb(root, **{key: value}).client_data(0)
