"""Models of images and text, each part as small as its configuration allows."""

import torch
import transformers as hf

VOCABULARY = 89
IMAGE = 5  # the id of an image's tokens
TEXT = {
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "vocab_size": VOCABULARY, "max_position_embeddings": 96, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
VISION = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 28}
VISION |= {"patch_size": 14}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 96, "beta_fast": 4.0,
        "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.7}  # fmt: skip
LOCAL = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9, "query_pre_attn_scalar": 5}
GRID = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 1, 1]}
SIGLIP = VISION | {"model_type": "siglip_vision_model"}
PIXTRAL, CLIP = VISION | {"model_type": "pixtral"}, VISION | {"model_type": "clip_vision_model"}
KINDS = {
    "gemma3": lambda: hf.Gemma3Config(
        text_config=TEXT | LOCAL, vision_config=VISION, mm_tokens_per_image=4, image_token_index=IMAGE, boi_token_index=6,
        eoi_token_index=7,
    ),
    "gemma4": lambda: hf.Gemma4Config(
        text_config=TEXT | {
            "num_hidden_layers": 4, "layer_types": LOCAL["layer_types"] * 2, "sliding_window": 9, "global_head_dim": 16,
            "pad_token_id": 0, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 6,
            "vocab_size_per_layer_input": VOCABULARY,
        },
        image_token_id=IMAGE,
    ),
    "mistral3": lambda: hf.Mistral3Config(
        text_config=TEXT | {"model_type": "mistral"}, vision_config=PIXTRAL, image_token_index=IMAGE, spatial_merge_size=1
    ),
    "ministral3": lambda: hf.Mistral3Config(
        text_config=TEXT | {"model_type": "ministral3", "rope_parameters": YARN}, vision_config=PIXTRAL,
        image_token_index=IMAGE, spatial_merge_size=1,
    ),
    "llava": lambda: hf.LlavaConfig(
        text_config=TEXT | {"model_type": "llama"}, vision_config=CLIP, image_token_index=IMAGE, vision_feature_layer=-1
    ),
    "llava_next": lambda: hf.LlavaNextConfig(
        text_config=TEXT | {"model_type": "mistral"}, vision_config=CLIP, image_token_index=IMAGE, vision_feature_layer=-1,
        image_grid_pinpoints=[[28, 28]],
    ),
    "llava_onevision": lambda: hf.LlavaOnevisionConfig(
        text_config=TEXT | {"model_type": "qwen2"}, vision_config=SIGLIP, image_token_index=IMAGE, vision_feature_layer=-1,
        image_grid_pinpoints=[[28, 28]],
    ),
    "idefics3": lambda: hf.Idefics3Config(
        text_config=TEXT | {"model_type": "llama", "pad_token_id": 0}, image_token_id=IMAGE, scale_factor=1, use_cache=False,
        vision_config=VISION | {"model_type": "idefics3_vision"},
    ),
    "smolvlm": lambda: hf.SmolVLMConfig(
        text_config=TEXT | {"model_type": "llama", "pad_token_id": 0}, image_token_id=IMAGE, scale_factor=1, use_cache=False,
        vision_config=VISION | {"model_type": "smolvlm_vision"},
    ),
    "internvl": lambda: hf.InternVLConfig(
        text_config=TEXT | {"model_type": "qwen2"}, image_token_id=IMAGE,
        vision_config={"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 4,
                       "image_size": [28, 28], "patch_size": [14, 14]},
    ),
    "qwen2_vl": lambda: hf.Qwen2VLConfig(
        text_config=TEXT | {"rope_parameters": GRID}, image_token_id=IMAGE, video_token_id=6,
        vision_config={"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 1},
    ),
    "qwen2_5_vl": lambda: hf.Qwen2_5_VLConfig(
        text_config=TEXT | {"rope_parameters": GRID}, image_token_id=IMAGE, video_token_id=6,
        vision_config={"depth": 1, "hidden_size": 32, "out_hidden_size": 32, "num_heads": 4, "intermediate_size": 40,
                       "fullatt_block_indexes": [0]},
    ),
    "qwen3_vl": lambda: hf.Qwen3VLConfig(
        text_config=TEXT | {"rope_parameters": GRID}, image_token_id=IMAGE, video_token_id=6,
        vision_config={"depth": 1, "hidden_size": 32, "out_hidden_size": 32, "num_heads": 4, "intermediate_size": 40,
                       "deepstack_visual_indexes": [0]},
    ),
    "qwen3_vl_moe": lambda: hf.Qwen3VLMoeConfig(
        text_config=TEXT | {"rope_parameters": GRID, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
        vision_config={"depth": 1, "hidden_size": 32, "out_hidden_size": 32, "num_heads": 4, "intermediate_size": 40,
                       "deepstack_visual_indexes": [0]}, image_token_id=IMAGE, video_token_id=6,
    ),
    "qwen3_5": lambda: hf.Qwen3_5Config(
        text_config=TEXT | {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
                            "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
        vision_config={"depth": 1, "hidden_size": 32, "out_hidden_size": 32, "num_heads": 4, "intermediate_size": 40},
        image_token_id=IMAGE, video_token_id=6,
    ),
}  # fmt: skip
GRIDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5")
PLAIN = [kind for kind in KINDS if kind not in (*GRIDS, "gemma4")]  # built with a part for images, whose tokens are a text's


def shifted(kind, name):
    """Whether a norm's gain is 1 + weight."""
    return "language" in name and (kind == "gemma3" or (kind == "qwen3_5" and "linear_attn" not in name))


def build(kind, text=None):
    """A model with weights large enough that attention decides the tokens. text: options of another text model"""
    torch.manual_seed(0)
    config = KINDS[kind]()
    if text is not None:
        config.text_config = hf.CONFIG_MAPPING[text["model_type"]](**TEXT | text)
    model = getattr(hf, type(config).__name__.replace("Config", "ForConditionalGeneration"))(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5).sub_(1.0 if shifted(kind, name) else 0.0)
            else:
                parameter.normal_(std=0.2)
    return model


def with_image(kind, *texts, padding=0):
    """What a processor returns for texts (before, after an image), padded on the left to one length."""
    tiled = kind in ("llava_next", "llava_onevision")  # the image, and its tile with an end of each line
    count = {"internvl": 1, "llava_next": 4 + 2 * 3, "llava_onevision": 4 + 2 * 3}.get(kind, 4)  # tokens of the image
    rows = [[*before, *[IMAGE] * count, *after] for before, after in texts]
    width = max(map(len, rows)) + padding
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    tiles = (2,) if tiled else (1,) if kind in ("idefics3", "smolvlm") else ()
    pixels = torch.randn(len(rows), *tiles, 3, 28, 28, generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "attention_mask": mask, "pixel_values": pixels}
    if tiled or kind in ("mistral3", "ministral3"):
        inputs["image_sizes"] = torch.tensor([[28, 28]] * len(rows))
    return inputs | ({"token_type_ids": (ids == IMAGE).long()} if kind == "gemma3" else {})
