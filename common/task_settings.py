"""Keys of the group task, with their types, ranges and meanings.

conf/schema checks recipes by them; tasks/config.py builds from them, and checks how they fit.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from fedhet.common.kinds import (
    MOST,
    Count,
    Inside,
    NotNegative,
    Positive,
    Reference,
    Section,
    Share,
    ShareBelowOne,
    Text,
    Two,
)

ImageModel = Literal[
    "mlp",
    "fedavg_cnn",
    "feddw_cnn",
    "gn_cnn",
    "bn_cnn",
    "maecho_cnn",
    "vgg11",
    "resnet8",
    "resnet18_gn",
    "resnet18_bn",
    "feddw_resnet18",
    "feddw_shufflenet",
    "feddw_mobilenetv2",
    "frozen_resnet18",
    "frozen_resnet34",
    "cvae",
]


ClassificationLoss = Literal["cross_entropy", "focal"] | Reference


class Lora(Section):
    """Adapters that are trained in place of a model's weights."""

    r: Count = Field(description="rank of an adapter")
    alpha: Positive = Field(description="an adapter is scaled by alpha / r")
    target_modules: Annotated[list[Text], Field(min_length=1)] = Field(
        description="ends of the names of the layers that get one, such as [q_lin,v_lin]"
    )
    dropout: ShareBelowOne = Field(0.0, description="dropout of an adapter's inputs")
    modules_to_save: list[Text] = Field(
        [], description="modules that are trained in full, beside the classifier"
    )
    share_base: bool = Field(
        False,
        description="send the weights that have adapters to the clients, too: flora and fedex_lora "
        "change them at the server",
    )


class _AnyTask(Section):
    name: Text = Field(description="name of the task; set by task=...")
    path: Text | None = Field(
        None,
        description="the data: a folder, a file, or a data set's name on the hub, as the task's "
        "file says; null: FEDHET_DATA, or with partition=site the nodes' data-folder",
    )
    client_column: Text | None = Field(
        None, description="column that says whose an example is, for partition=natural"
    )
    num_classes: Two | None = Field(None, description="number of classes; null: those of the data")
    classes: list[str | int] | None = Field(
        None, description="the classes in the order of their labels; null: 0, 1, ..., or subfolders"
    )
    classifier: Text | None = Field(
        None,
        description="your own model: the module that makes the outputs, such as fc; null: its "
        "last linear layer",
    )
    head_bias: bool | None = Field(
        None, description="whether the classifier has a bias; null: as the model's paper has it"
    )
    head_init: Literal["orthogonal"] | None = Field(
        None,
        description="orthogonal: the classifier starts with rows of length 1 at right angles; "
        "null: as PyTorch has it",
    )
    model_options: dict[str, Any] | None = Field(
        None, description="your own model: further arguments of its function"
    )
    class_weights: Literal["balanced"] | list[NotNegative] | None = Field(
        None,
        description="weights of the classes in the training loss: balanced (each client by its own "
        "training labels; nothing is sent), or a list in the order of the classes",
    )
    lora: Lora | None = Field(
        None, description="your own model: train and send low-rank adapters and the classifier"
    )

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """The classes in the order of their labels; None: the data folder's."""
        if self.classes is None:
            return None if self.num_classes is None else tuple(map(str, range(self.num_classes)))
        return tuple(map(str, self.classes))


class _Task(_AnyTask):
    loss: ClassificationLoss | None = Field(
        None, description="(outputs, targets) -> mean loss; null: cross_entropy"
    )
    hub: Text | None = Field(None, description="name of the data set on the Hugging Face hub")
    label_column: Text = Field("label", description="column of the labels")
    train_split: Text = Field("train", description="name of the training split")
    test_split: Text | None = Field(
        "test", description="name of the test split; null: split off, always in the same way"
    )
    test_fraction: Inside = Field(
        0.2, description="share of the examples to test on, if there is no test split"
    )
    train_size: Count | None = Field(
        None, description="train on a random subset of that many examples; null: all"
    )
    test_size: Count | None = Field(
        None, description="test on a subset of that many, the same for every seed; null: all"
    )


class ImageTask(_Task):
    """A task on images."""

    inputs: Literal["images"] = Field("images", description="images | text | own")
    source: Literal["embedded", "hub", "files", "image_folder"] = Field(
        description="where the examples come from; hub: files below task.path or FEDHET_DATA when "
        "there, or else the hub"
    )
    model: ImageModel | Reference = Field(
        description="what is trained; frozen_*: ImageNet's weights, with two layers to train"
    )
    channels: Literal[1, 3] = Field(description="3: colour, 1: grey")
    image_size: Annotated[int, Field(ge=1, le=4096)] = Field(
        description="images of another size are scaled to it"
    )
    mean: list[float] = Field(description="per channel, of pixels in [0, 1]")
    std: list[Positive] = Field(description="per channel, of pixels in [0, 1]")
    image_column: Text = Field("image", description="column of the images")
    flip: bool = Field(False, description="training images: mirror half of them")
    crop_padding: Annotated[int, Field(ge=0, le=4096)] = Field(
        0,
        description="training images: cut from a copy padded by so many pixels; 0: no crop",
    )
    crop_padding_mode: Literal["constant", "reflect"] = Field(
        "constant", description="constant: black pixels | reflect: the image mirrored at its edge"
    )
    crop_probability: Share = Field(1.0, description="probability that a training image is cut so")
    stem: Literal["imagenet", "cifar"] | None = Field(
        None, description="first layers of a ResNet-18; null: as the model's paper has it"
    )


class TextTask(_Task):
    """A task on texts of words from a vocabulary."""

    inputs: Literal["text"] = Field(description="images | text | own")
    source: Literal["hub", "files"] = Field(
        description="where the examples come from; hub: files below task.path or FEDHET_DATA when "
        "there, or else the hub"
    )
    model: Literal["bilstm"] | Reference = Field(description="what is trained")
    length: Two = Field(
        description="tokens of a text, the start included: longer ones are cut, shorter ones "
        "padded, both at the end"
    )
    vocabulary_size: Annotated[int, Field(ge=4, le=MOST)] = Field(
        description="tokens: padding, start, unknown, and the most frequent words of the training "
        "split"
    )
    vocabulary_file: Text | None = Field(
        None,
        description="a file of words instead, one a line, by rank, as runs leave it in the cache "
        "folder; partition=site needs one, at the same path everywhere",
    )
    text_column: Text = Field("text", description="column of the texts")


class OwnTask(_AnyTask):
    """A task on data that a function of the user's gives."""

    inputs: Literal["own"] = Field(description="images | text | own")
    kind: Literal["classification", "regression", "segmentation"] = Field(
        "classification", description="what the model's outputs are"
    )
    model: ImageModel | Reference = Field(description="what is trained")
    target: Text | None = Field(
        None, description="column of the class, or of the number to predict"
    )
    data: Reference = Field(
        description="gives (train, test): one client's, if it has a parameter client_id or "
        "partition_id, else everybody's; docs/own.md"
    )
    test_data: Reference | None = Field(
        None,
        description="gives the server's test examples; null: task.data's, if it gives everybody's",
    )
    loss: Literal["cross_entropy", "focal", "mse", "l1", "huber"] | Reference | None = Field(
        None,
        description="(outputs, targets) -> mean loss; null: cross_entropy, for a regression mse",
    )
    data_options: dict[str, Any] | None = Field(
        None, description="further arguments of the data function"
    )
    columns: list[Text] | None = Field(
        None, description="names of input and target if an example is a dict; null: found"
    )
    input_shape: list[Count] | None = Field(
        None, description="shape of an input, for fedhet's models; null: as the test examples"
    )
    input_range: list[float] | None = Field(
        None, description="images: the values of black and white, for strategy=dense"
    )


def _inputs(node: Any) -> str:
    return str(node.get("inputs", "images")) if isinstance(node, dict) else ""


AnyTask = Annotated[
    Annotated[ImageTask, Tag("images")]
    | Annotated[TextTask, Tag("text")]
    | Annotated[OwnTask, Tag("own")],
    Discriminator(_inputs),
]
