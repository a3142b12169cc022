"""Models of images or sounds and text, each part as small as its configuration allows."""

import torch
import transformers as hf

from gpubound.models.registry import WRAPPERS

VOCABULARY = 89
IMAGE = 5  # the id of an image's or a sound's tokens
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
SAM = {"hidden_size": 32, "output_channels": 8, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 64,
       "patch_size": 16, "global_attn_indexes": (0,), "window_size": 2, "mlp_dim": 40}  # fmt: skip
PATCHES = {"depth": 1, "hidden_size": 32, "out_hidden_size": 32, "num_heads": 4, "intermediate_size": 40,
           "fullatt_block_indexes": [0]}  # fmt: skip
WINDOWS = {"layer_types": LOCAL["layer_types"], "sliding_window": 9}
DELTA = {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
         "linear_key_head_dim": 8, "linear_value_head_dim": 8}  # fmt: skip
LATENT = {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
          "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1,
          "topk_group": 1, "first_k_dense_replace": 1}  # fmt: skip
WHISPER = {"num_mel_bins": 8, "num_hidden_layers": 1, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 128}
SOUND = WHISPER | {"max_source_positions": 16}
ENCODER = {"num_mel_bins": 8, "encoder_layers": 1, "encoder_attention_heads": 4, "encoder_ffn_dim": 40, "d_model": 32}
WAVES = {"hidden_size": 8, "num_filters": 4, "downsampling_ratios": (2,), "depths": (1, 1), "vae_std": 0.0}
SOUNDS = {
    "audioflamingo3": lambda: hf.AudioFlamingo3Config(
        text_config=TEXT | {"model_type": "qwen2"}, audio_config=SOUND, audio_token_id=IMAGE
    ),
    "fun_asr_nano": lambda: hf.FunAsrNanoConfig(
        text_config=TEXT | {"model_type": "qwen3"}, audio_token_id=IMAGE,
        audio_config=WHISPER | {"num_hidden_layers": 2, "num_timestamp_prediction_layers": 1},
        adaptor_config={"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 8, "num_hidden_layers": 1,
                        "projector_hidden_size": 40},
    ),
    "glmasr": lambda: hf.GlmAsrConfig(
        text_config=TEXT | {"model_type": "llama"}, audio_config=WHISPER | {"num_key_value_heads": 4}, audio_token_id=IMAGE
    ),
    "moss_transcribe_diarize": lambda: hf.MossTranscribeDiarizeConfig(
        text_config=TEXT | {"model_type": "qwen3"}, audio_config=SOUND, audio_token_id=IMAGE
    ),
    "musicflamingo": lambda: hf.MusicFlamingoConfig(
        text_config=TEXT | {"model_type": "qwen2"}, audio_config=SOUND | {"model_type": "audioflamingo3_encoder"},
        audio_token_id=IMAGE,
    ),
    "qwen2_audio": lambda: hf.Qwen2AudioConfig(
        text_config=TEXT | {"model_type": "qwen2"}, audio_config=ENCODER | {"max_source_positions": 16}, audio_token_index=IMAGE
    ),
    "qwen3_asr": lambda: hf.Qwen3ASRConfig(
        text_config=TEXT | {"model_type": "qwen3"}, audio_token_id=IMAGE,
        audio_config=ENCODER | {"output_dim": 32, "downsample_hidden_size": 8},
    ),
    "vibevoice_asr": lambda: hf.VibeVoiceAsrConfig(  # whose sounds would be drawn by vae_std
        text_config=TEXT | {"model_type": "qwen2"}, audio_token_id=IMAGE, acoustic_tokenizer_encoder_config=WAVES,
        semantic_tokenizer_encoder_config=WAVES,
    ),
    "voxtral": lambda: hf.VoxtralConfig(
        text_config=TEXT | {"model_type": "llama"}, audio_config=SOUND, audio_token_id=IMAGE
    ),
}  # fmt: skip
KINDS = {
    **SOUNDS,
    "aya_vision": lambda: hf.AyaVisionConfig(
        text_config=TEXT | WINDOWS | {"model_type": "cohere2", "logit_scale": 0.25}, tie_word_embeddings=False,
        vision_config=SIGLIP | {"vision_use_head": False}, image_token_index=IMAGE, downsample_factor=1,
    ),
    "cohere2_vision": lambda: hf.Cohere2VisionConfig(
        text_config=TEXT | WINDOWS | {"model_type": "cohere2", "logit_scale": 0.25}, vision_config=SIGLIP, image_token_id=IMAGE,
        downsample_factor=2, alignment_intermediate_size=40, tie_word_embeddings=False,
    ),
    "deepseek_vl": lambda: hf.DeepseekVLConfig(
        text_config=TEXT | {"model_type": "llama"}, vision_config=SIGLIP, image_token_id=IMAGE
    ),
    "deepseek_vl_hybrid": lambda: hf.DeepseekVLHybridConfig(
        text_config=TEXT | {"model_type": "llama"}, vision_config=SIGLIP, image_token_id=IMAGE,
        high_res_vision_config=SAM | {"model_type": "sam_vision_model"},
    ),
    "exaone4_5": lambda: hf.Exaone4_5_Config(
        text_config=TEXT | WINDOWS | {"model_type": "exaone4"}, vision_config=PATCHES | {"num_key_value_heads": 2},
        image_token_id=IMAGE, video_token_id=6,
    ),
    "fast_vlm": lambda: hf.FastVlmConfig(  # whose own tower, of timm, has the features before the places
        text_config=TEXT | {"model_type": "qwen2"}, vision_config=SIGLIP | {"hidden_size": 4}, image_token_index=IMAGE
    ),
    "got_ocr2": lambda: hf.GotOcr2Config(
        text_config=TEXT | {"model_type": "qwen2"}, vision_config=SAM, image_token_index=IMAGE
    ),
    "hyperclovax_vision_v2": lambda: hf.HyperCLOVAXVisionV2Config(
        text_config=TEXT | {"model_type": "hyperclovax", "logits_scaling": 0.5, "embedding_multiplier": 2.0,
                            "residual_multiplier": 0.7, "attention_multiplier": 0.3},
        vision_config=PATCHES, image_token_id=IMAGE, video_token_id=6,
    ),
    "idefics2": lambda: hf.Idefics2Config(
        text_config=TEXT | {"model_type": "mistral"}, vision_config=VISION | {"model_type": "idefics2_vision"}, use_cache=False,
        perceiver_config={"hidden_size": 32, "resampler_n_latents": 4, "resampler_depth": 1, "resampler_n_heads": 2,
                          "resampler_head_dim": 8, "num_key_value_heads": 1}, image_token_id=IMAGE,
    ),
    "janus": lambda: hf.JanusConfig(
        text_config=TEXT | {"model_type": "llama"}, image_token_id=IMAGE,
        vision_config={"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 28, "patch_size": 14,
                       "mlp_ratio": 1.0, "projection_dim": 32, "model_type": "janus_vision_model"},
        vq_config={"embed_dim": 4, "num_embeddings": 8, "latent_channels": 4, "base_channels": 32, "channel_multiplier": [1],
                   "num_res_blocks": 1, "projection_dim": 32, "num_patches": 2, "model_type": "janus_vqgan"},
    ),
    "kimi_k25": lambda: hf.Kimi_K25Config(
        text_config=TEXT | LATENT | {"model_type": "deepseek_v3"}, image_token_id=IMAGE, video_token_id=6,
        vision_config={"pos_emb_height": 4, "pos_emb_width": 4, "num_attention_heads": 4, "num_hidden_layers": 1,
                       "hidden_size": 32, "intermediate_size": 40}, projection_hidden_size=32,
    ),
    "lfm2_vl": lambda: hf.Lfm2VlConfig(
        text_config=TEXT | {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]}, image_token_id=IMAGE,
        vision_config=VISION | {"model_type": "siglip2_vision_model", "num_patches": 4}, projector_hidden_size=40,
    ),
    "lighton_ocr": lambda: hf.LightOnOcrConfig(
        text_config=TEXT | {"model_type": "qwen3"}, vision_config=PIXTRAL, image_token_id=IMAGE, spatial_merge_size=1
    ),
    "llava_next_video": lambda: hf.LlavaNextVideoConfig(
        text_config=TEXT | {"model_type": "llama"}, vision_config=CLIP, image_token_index=IMAGE, video_token_index=6,
        vision_feature_layer=-1, image_grid_pinpoints=[[28, 28]],
    ),
    "minicpm_ocr": lambda: hf.MiniCPMOcrConfig(
        text_config=TEXT | DELTA, vision_config=VISION | {"insert_layer_id": 0}, insert_layer_id=0, image_token_id=IMAGE,
        video_token_id=6, tie_word_embeddings=False,
    ),
    "minicpmv4_6": lambda: hf.MiniCPMV4_6Config(
        text_config=TEXT | DELTA, vision_config=VISION | {"insert_layer_id": 0}, insert_layer_id=0, image_token_id=IMAGE,
        video_token_id=6,
    ),
    "minicpmv4_7": lambda: hf.MiniCPMV4_7Config(
        text_config=TEXT | DELTA, vision_config=VISION | {"insert_layer_id": 0}, insert_layer_id=0, image_token_id=IMAGE,
        video_token_id=6,
    ),
    "ovis2": lambda: hf.Ovis2Config(
        text_config=TEXT | {"model_type": "qwen2"}, vision_config=VISION | {"vocab_size": 16}, image_token_id=IMAGE,
        visual_indicator_token_ids=[75, 76, 77, 78, 79], vocab_size=VOCABULARY, hidden_size=32, tie_word_embeddings=False,
    ),
    "perception_lm": lambda: hf.PerceptionLMConfig(  # whose own tower is of timm
        text_config=TEXT | {"model_type": "llama"}, vision_config=CLIP | {"model_args": {"embed_dim": 32}},
        image_token_id=IMAGE, video_token_id=6,
    ),
    "qianfan_ocr": lambda: hf.QianfanOCRConfig(
        text_config=TEXT | {"model_type": "qwen3"}, image_token_id=IMAGE,
        vision_config={"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 4,
                       "image_size": [28, 28], "patch_size": [14, 14]},
    ),
    "video_llama_3": lambda: hf.VideoLlama3Config(
        text_config=TEXT | {"model_type": "qwen2"}, vision_config=VISION | {"model_type": "video_llama_3_vision"},
        image_token_id=IMAGE, video_token_id=6,
    ),
    "video_llava": lambda: hf.VideoLlavaConfig(
        text_config=TEXT | {"model_type": "llama"}, vision_config=CLIP, image_token_index=IMAGE, video_token_index=6,
        vision_feature_layer=-1,
    ),
    "vipllava": lambda: hf.VipLlavaConfig(
        text_config=TEXT | {"model_type": "llama"}, vision_config=CLIP, image_token_index=IMAGE, vision_feature_layer=[-1, -2]
    ),
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
    "cosmos3_omni": lambda: hf.Cosmos3OmniConfig(
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
        text_config=TEXT | DELTA,
        vision_config={"depth": 1, "hidden_size": 32, "out_hidden_size": 32, "num_heads": 4, "intermediate_size": 40},
        image_token_id=IMAGE, video_token_id=6,
    ),
}  # fmt: skip
TILED = ("llava_next", "llava_next_video", "llava_onevision")
GRIDS = ("cosmos3_omni", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5")
STATES = ("kimi_k25", "lfm2_vl", "minicpm_ocr", "minicpmv4_6", "minicpmv4_7")  # or latents, in place of keys and values
PLAIN = [kind for kind in KINDS if kind not in (*GRIDS, *STATES, "gemma4")]  # whose image's tokens have a text's positions
OWN_LOOP = ("aya_vision", "cohere2_vision", "hyperclovax_vision_v2", *STATES, "qwen3_vl_moe", "qwen3_5")  # or loss, if placed
ALIKE = (  # with a text model of another's kind
    "cohere2_vision", "cosmos3_omni", "deepseek_vl", "fast_vlm", "got_ocr2", "janus", "lighton_ocr", "llava_next_video",
    "minicpm_ocr", "minicpmv4_6", "minicpmv4_7", "ovis2", "perception_lm", "qianfan_ocr", "video_llama_3", "video_llava",
    "vipllava", *(kind for kind in SOUNDS if kind != "voxtral"),
)  # fmt: skip


def shifted(kind, name):
    """Whether a norm's gain is 1 + weight."""
    return "language" in name and (kind == "gemma3" or ("linear_attn" not in name and (kind == "qwen3_5" or "minicpm" in kind)))


def build(kind, text=None):
    """A model with weights large enough that attention decides the tokens. text: options of another text model"""
    torch.manual_seed(0)
    config = KINDS[kind]()
    if text is not None:
        config.text_config = hf.CONFIG_MAPPING[text["model_type"]](**TEXT | text)
    model = getattr(hf, f"{WRAPPERS[config.model_type]}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5).sub_(1.0 if shifted(kind, name) else 0.0)
            else:
                parameter.normal_(std=0.2)
    return model


# Tokens of an image of 28 x 28 or of a sound, where they are not 4. Tiled: the image, and its tile with an end of each line.
COUNTS = {"internvl": 1, "qianfan_ocr": 1, "cohere2_vision": 1, "exaone4_5": 1, "hyperclovax_vision_v2": 1, "got_ocr2": 1,
          **dict.fromkeys(TILED, 4 + 2 * 3), "audioflamingo3": 8, "fun_asr_nano": 8,
          "musicflamingo": 8, "qwen2_audio": 8, "qwen3_asr": 13, "vibevoice_asr": 16}  # fmt: skip
SIZED = (*TILED, "mistral3", "ministral3", "lighton_ocr")
FLAT = {"exaone4_5": 2, "hyperclovax_vision_v2": 2, "video_llama_3": 1}  # frames of a patch, where each is a row of pixels
NAMED = dict.fromkeys(SOUNDS, "input_features") | {"video_llava": "pixel_values_images", "vibevoice_asr": "input_values"}
HEARD = {  # shapes of a sound's features and of their masks
    **dict.fromkeys(SOUNDS, ((8, 32), {"input_features_mask": (32,)})),
    "fun_asr_nano": ((8, 56), {"input_features_mask": (8,)}),
    "moss_transcribe_diarize": ((8, 32), {"input_features_mask": (32,), "padding_mask": (32,)}),
    "qwen2_audio": ((8, 32), {"feature_attention_mask": (32,)}),
    "qwen3_asr": ((8, 100), {"input_features_mask": (100,)}),
    "vibevoice_asr": ((1, 32), {"padding_mask": (32,)}),
    "voxtral": ((8, 32), {}),
}


def with_image(kind, *texts, padding=0):
    """What a processor returns for texts (before, after an image or a sound), padded on the left to one length."""
    rows = [[*before, *[IMAGE] * COUNTS.get(kind, 4), *after] for before, after in texts]
    width = max(map(len, rows)) + padding
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    tiles = (2,) if kind in TILED else (1,) if kind in ("idefics2", "idefics3", "perception_lm", "smolvlm") else ()
    side = 64 if kind == "got_ocr2" else 28
    shape = (4 * len(rows), 3 * FLAT[kind] * 14 * 14) if kind in FLAT else (len(rows), *tiles, 3, side, side)
    shape, masks = ((len(rows), *HEARD[kind][0]), HEARD[kind][1]) if kind in HEARD else (shape, {})
    drawn = torch.Generator().manual_seed(0)
    inputs = {"input_ids": ids, "attention_mask": mask, NAMED.get(kind, "pixel_values"): torch.randn(shape, generator=drawn)}
    inputs |= {name: torch.ones(len(rows), *places, dtype=torch.bool) for name, places in masks.items()}
    if kind in SIZED:
        inputs["image_sizes"] = torch.tensor([[28, 28]] * len(rows))
    if kind in FLAT:
        inputs["image_grid_thw"] = torch.tensor([[1, 2, 2]] * len(rows))
    if kind == "video_llama_3":
        inputs["image_merge_sizes"] = torch.ones(len(rows), dtype=torch.long)
    if kind == "deepseek_vl_hybrid":
        inputs["high_res_pixel_values"] = torch.randn(len(rows), 3, 64, 64, generator=drawn)
    return inputs | ({"token_type_ids": (ids == IMAGE).long()} if kind == "gemma3" else {})
