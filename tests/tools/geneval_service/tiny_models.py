"""Tiny models with random weights, in the folder layout of the published ones."""

import json

import torch
from transformers import CLIPConfig, CLIPModel, CLIPTokenizer, Mask2FormerConfig, SwinConfig

from data.vocabulary import CLASS_NAMES, COCO_SPELLINGS
from tools.geneval_service.mask2former import InstanceModel

SPELLINGS = {ours: coco for coco, ours in COCO_SPELLINGS.items()}
VOC = {"motorcycle": "motorbike", "airplane": "aeroplane", "couch": "sofa", "tv": "tvmonitor"}
LETTERS = "abcdefghijklmnopqrstuvwxyz-"


def write_mask2former(folder):
    """Classes in COCO's spelling, some in PASCAL VOC's, as published checkpoints have them."""
    torch.manual_seed(0)
    labels = [SPELLINGS.get(name, VOC.get(name, name)) for name in CLASS_NAMES]
    InstanceModel(_mask2former_config(labels)).save_pretrained(folder)
    return folder


def write_clip(folder, side):
    """With a tokenizer that knows letters only."""
    words = [*LETTERS, *(letter + "</w>" for letter in LETTERS)]
    tokens = [*words, "<|startoftext|>", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
    tokenizer.save_pretrained(folder)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    shape["num_attention_heads"] = 2
    ends = {"bos_token_id": len(tokens) - 2, "eos_token_id": len(tokens) - 1}
    config = CLIPConfig(
        text_config={**shape, **ends, "vocab_size": len(tokens), "max_position_embeddings": 77},
        vision_config={**shape, "image_size": side, "patch_size": 8},
        projection_dim=16,
    )
    torch.manual_seed(0)
    CLIPModel(config).save_pretrained(folder)
    return folder


def _mask2former_config(labels):
    backbone = SwinConfig(
        image_size=64,
        patch_size=4,
        embed_dim=8,
        depths=[1, 1, 1, 1],
        num_heads=[1, 1, 2, 2],
        window_size=4,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )
    return Mask2FormerConfig(
        backbone_config=backbone,
        feature_size=32,  # the least that the model's normalization allows
        mask_feature_size=32,
        hidden_dim=32,
        encoder_feedforward_dim=16,
        encoder_layers=1,
        decoder_layers=2,
        num_attention_heads=2,
        dim_feedforward=16,
        num_queries=10,
        id2label=dict(enumerate(labels)),
        label2id={label: index for index, label in enumerate(labels)},
    )
