"""Models of transformers with random weights and few layers, by PyTorch's exporters. A tokenizer trained on a few
sentences gives the inputs."""

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

from .export import SEED, Group
from .pytorch import DYNAMO, TORCHSCRIPT, pytorch

GROUP = Group()
PACKAGES = ("transformers", "torch", "tokenizers", "onnx", "numpy")
SENTENCES = ["the quick brown fox jumps over the lazy dog", "a server answers requests before their deadline",
             "where does the fox sleep when it rains", "in a hole below the old oak"]
SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


def tokenizer():
    """A word-piece tokenizer as BERT has it, of the sentences above."""
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.train_from_iterator(SENTENCES, trainers.WordPieceTrainer(vocab_size=150, special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]"]))
    made.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1",
                                                        special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    made.enable_padding()
    return made


def encoded(pairs=False, types=True):
    """Ids, mask and, as BERT wants them, types of the sentences."""
    found = tokenizer().encode_batch(list(zip(SENTENCES[2:], SENTENCES[:2])) if pairs else SENTENCES)
    arrays = {"input_ids": [one.ids for one in found], "attention_mask": [one.attention_mask for one in found]}
    if types:
        arrays["token_type_ids"] = [one.type_ids for one in found]
    return {name: np.array(rows, np.int64) for name, rows in arrays.items()}


class Answers(torch.nn.Module):
    """A model of transformers as a function of its inputs in order, which gives only the named answers."""

    def __init__(self, model, inputs, outputs):
        super().__init__()
        self.model, self.inputs, self.outputs = model, inputs, outputs

    def forward(self, *arguments):
        answer = self.model(**dict(zip(self.inputs, arguments)), return_dict=True)
        return tuple(answer[name] for name in self.outputs)


class Embedder(torch.nn.Module):
    """The mean of the words' vectors, of length 1: what sentence-transformers calls pooling and normalising."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask, token_type_ids):
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids).last_hidden_state
        mask = attention_mask.unsqueeze(2).to(hidden.dtype)
        return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)


def bert(kind, **more):
    torch.manual_seed(SEED)
    config = transformers.BertConfig(vocab_size=150, max_position_embeddings=40, attn_implementation="eager", **SMALL, **more)
    return kind(config)


def distilbert(kind, **more):
    torch.manual_seed(SEED)
    return kind(transformers.DistilBertConfig(vocab_size=150, max_position_embeddings=40, dim=16, n_layers=1, n_heads=2, hidden_dim=32, **more))


def roberta(kind, **more):
    torch.manual_seed(SEED)
    return kind(transformers.RobertaConfig(vocab_size=150, max_position_embeddings=40, pad_token_id=0, type_vocab_size=2, **SMALL, **more))


def text(module, arrays, outputs, exporter, output_axes, how):
    """A model of texts with varying batch and length."""
    example = {name: rows[:2, :8] for name, rows in arrays.items()}
    if exporter is DYNAMO:
        axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence", min=2, max=36)}
        wrapped = isinstance(module, Answers)
        options = {"dynamic_shapes": (tuple(axes for _ in arrays),) if wrapped else tuple(axes for _ in arrays)}
    else:
        axes = {0: "batch", 1: "sequence"}
        options = {"dynamic_axes": {name: axes for name in arrays} | {name: {axis: axes[axis] for axis in output_axes} for name in outputs}}
    made = pytorch(module, list(example.values()), list(arrays.values()), exporter=exporter, names=list(arrays), outputs=outputs, how=how,
                   packages=PACKAGES, framework="transformers", **options)
    made.how = f"torch.onnx.export({how}, dynamo={exporter is DYNAMO}, batch and sequence dynamic)"
    return made


def each_exporter(name, make):
    for suffix, exporter in (("torchscript", TORCHSCRIPT), ("dynamo", DYNAMO)):
        GROUP[f"transformers_{name}_{suffix}"] = lambda exporter=exporter: make(exporter)


def classification(exporter):
    arrays = encoded()
    module = Answers(bert(transformers.BertForSequenceClassification, num_labels=3), list(arrays), ["logits"])
    return text(module, arrays, ["logits"], exporter, [0], "BertForSequenceClassification")


def token_classification(exporter):
    arrays = encoded(types=False)
    module = Answers(distilbert(transformers.DistilBertForTokenClassification, num_labels=5), list(arrays), ["logits"])
    return text(module, arrays, ["logits"], exporter, [0, 1], "DistilBertForTokenClassification")


def embeddings(exporter):
    return text(Embedder(bert(transformers.BertModel)), encoded(), ["sentence_embedding"], exporter, [0], "BertModel, mean of words, length 1")


def question_answering(exporter):
    arrays = encoded(pairs=True, types=False)
    outputs = ["start_logits", "end_logits"]
    module = Answers(roberta(transformers.RobertaForQuestionAnswering), list(arrays), outputs)
    return text(module, arrays, outputs, exporter, [0, 1], "RobertaForQuestionAnswering")


each_exporter("classification", classification)
each_exporter("token_classification", token_classification)
each_exporter("embeddings", embeddings)
each_exporter("question_answering", question_answering)


def picture(exporter):
    torch.manual_seed(SEED)
    config = transformers.ViTConfig(image_size=32, patch_size=8, num_labels=4, **SMALL)
    rows = np.random.default_rng(SEED).normal(size=(3, 3, 32, 32)).astype(np.float32)
    module = Answers(transformers.ViTForImageClassification(config), ["pixel_values"], ["logits"])
    if exporter is DYNAMO:
        options = {"dynamic_shapes": (({0: torch.export.Dim("batch")},),)}
    else:
        options = {"dynamic_axes": {"pixel_values": {0: "batch"}, "logits": {0: "batch"}}}
    return pytorch(module, [rows[:2]], [rows], exporter=exporter, names=["pixel_values"], outputs=["logits"], how="ViTForImageClassification",
                   packages=PACKAGES, framework="transformers", **options)


each_exporter("image_classification", picture)
