"""More of transformers' families, as data (see zoo/hf.py): models that nobody listed will be tried.

tests/test_models_hf.py tries them with data parallelism, and with whatever their plan or structure says for tensor parallelism.
"""

from __future__ import annotations

import torch

from tests.zoo import BATCH, HEADS, HIDDEN, SEQ, VOCAB, Batch, labels, tokens
from tests.zoo.hf import (  # fmt: skip
    CLASSES,
    CONVS,
    EXPERTS,
    GQA,
    IMAGE,
    PATCH,
    SEQ2SEQ,
    SIZES,
    TEXT,
    VISION,
    VIT,
    Family,
    causal,
    classes,
    classified,
    image,
    masked,
    pair,
    patches,
    random,
    row,
    sound,
)


def video() -> Batch:
    return {"pixel_values": random(BATCH, 4, 3, IMAGE, IMAGE), "labels": classes()}


def captioned() -> Batch:
    return {"pixel_values": random(BATCH, 3, IMAGE, IMAGE), "input_ids": tokens(), "labels": labels()}


def shown() -> Batch:
    """Text that begins with the four places of an image."""
    ids = tokens(VOCAB - 1)
    ids[:, 1:5] = VOCAB - 1
    return {"pixel_values": random(BATCH, 3, 2 * PATCH, 2 * PATCH), "input_ids": ids, "labels": labels()}


def short_series() -> Batch:
    return {"past_values": random(BATCH, 32, 3), "future_values": random(BATCH, 4, 3)}


def series() -> Batch:
    """16 steps and 7 of lags before them."""
    return {
        "past_values": random(BATCH, 23), "past_time_features": random(BATCH, 23, 2), "past_observed_mask": torch.ones(BATCH, 23),
        "future_values": random(BATCH, 4), "future_time_features": random(BATCH, 4, 2),
    }  # fmt: skip


FAMILIES: dict[str, Family] = {
    # decoders
    "gemma": row("GemmaForCausalLM", num_key_value_heads=4, head_dim=16),
    "gemma3": row("Gemma3ForCausalLM", **GQA, head_dim=8, sliding_window=8),
    "phi": row("PhiForCausalLM"),
    "gptj": row("GPTJForCausalLM", rotary_dim=4),
    "gpt_neo": row("GPTNeoForCausalLM", attention_types=[[["global", "local"], 1]], window_size=8),
    "gpt_bigcode": row("GPTBigCodeForCausalLM"),
    "codegen": row("CodeGenForCausalLM", rotary_dim=4),
    "olmo": row("OlmoForCausalLM", **GQA),
    "olmo2": row("Olmo2ForCausalLM", **GQA),
    "olmo3": row("Olmo3ForCausalLM", **GQA),
    "granite": row("GraniteForCausalLM", **GQA),
    "stablelm": row("StableLmForCausalLM", **GQA),
    "cohere": row("CohereForCausalLM", **GQA),
    "cohere2": row("Cohere2ForCausalLM", **GQA, sliding_window=8),
    "starcoder2": row("Starcoder2ForCausalLM", **GQA),
    "nemotron": row("NemotronForCausalLM", **GQA),
    "glm": row("GlmForCausalLM", **GQA, head_dim=8),
    "glm4": row("Glm4ForCausalLM", **GQA, head_dim=8),
    "helium": row("HeliumForCausalLM", **GQA, head_dim=8),
    "smollm3": row("SmolLM3ForCausalLM", **GQA),
    "ernie4_5": row("Ernie4_5ForCausalLM", **GQA, head_dim=8),
    "arcee": row("ArceeForCausalLM", **GQA),
    "apertus": row("ApertusForCausalLM", **GQA),
    "exaone4": row("Exaone4ForCausalLM", **GQA),
    "seed_oss": row("SeedOssForCausalLM", **GQA, head_dim=8),
    "diffllama": row("DiffLlamaForCausalLM", **GQA),
    "hunyuan": row("HunYuanDenseV1ForCausalLM", **GQA, head_dim=8),
    "doge": row("DogeForCausalLM", **GQA),
    "vaultgemma": row("VaultGemmaForCausalLM", **GQA, head_dim=8),
    "biogpt": row("BioGptForCausalLM"),
    "xglm": row("XGLMForCausalLM", attention_heads=HEADS, num_layers=2, d_model=HIDDEN, ffn_dim=4 * HIDDEN),
    "ctrl": row("CTRLLMHeadModel", dff=4 * HIDDEN),
    "openai_gpt": row("OpenAIGPTLMHeadModel"),
    "imagegpt": row("ImageGPTForCausalImageModeling", lambda: {"input_ids": tokens(VOCAB - 1), "labels": labels(VOCAB - 1)}),
    "mamba": row("MambaForCausalLM", state_size=4, time_step_rank=4),
    "mamba2": row("Mamba2ForCausalLM", state_size=4, num_heads=8, head_dim=16, n_groups=2, chunk_size=8),
    "rwkv": row("RwkvForCausalLM", attention_hidden_size=HIDDEN, context_length=32),
    "recurrent_gemma": row(
        "RecurrentGemmaForCausalLM", num_key_value_heads=1, lru_width=HIDDEN, attention_window_size=8, block_types=["recurrent",
        "attention"],
    ),
    "zamba": row(
        "ZambaForCausalLM", num_hidden_layers=4, num_key_value_heads=4, layer_types=["mamba", "hybrid", "mamba", "hybrid"],
        mamba_d_state=4, mamba_dt_rank=4, n_mamba_heads=2, use_mamba_kernels=False,
    ),
    "deepseek_v3_dense": row(
        "DeepseekV3ForCausalLM", num_key_value_heads=8, first_k_dense_replace=2, kv_lora_rank=16, q_lora_rank=32,
        qk_rope_head_dim=8, v_head_dim=8, qk_nope_head_dim=8,
    ),
    "minicpm3": row(
        "MiniCPM3ForCausalLM", num_key_value_heads=8, kv_lora_rank=16, q_lora_rank=32, qk_rope_head_dim=8, v_head_dim=8,
        qk_nope_head_dim=8,
    ),
    "modernbert_decoder": row("ModernBertDecoderForCausalLM", num_labels=CLASSES),
    "lfm2": row("Lfm2ForCausalLM", **GQA, layer_types=["conv", "full_attention"]),
    "mixtral": row("MixtralForCausalLM", **GQA, **EXPERTS, num_local_experts=4),
    "qwen3_moe": row("Qwen3MoeForCausalLM", **GQA, **EXPERTS, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
    "olmoe": row("OlmoeForCausalLM", **GQA, **EXPERTS, num_experts=4, num_experts_per_tok=2),
    "gpt_oss": row("GptOssForCausalLM", **GQA, **EXPERTS, num_local_experts=4, num_experts_per_tok=2, head_dim=8, sliding_window=8),
    # encoder and decoder
    "mbart": row("MBartForConditionalGeneration", **SEQ2SEQ),
    "pegasus": row("PegasusForConditionalGeneration", **SEQ2SEQ),
    "pegasus_x": row("PegasusXForConditionalGeneration", **SEQ2SEQ, block_size=8, num_global_tokens=4),
    "marian": row("MarianMTModel", **SEQ2SEQ),
    "blenderbot": row("BlenderbotForConditionalGeneration", **SEQ2SEQ),
    "blenderbot_small": row("BlenderbotSmallForConditionalGeneration", **SEQ2SEQ),
    "fsmt": row("FSMTForConditionalGeneration", masked, **SEQ2SEQ, src_vocab_size=VOCAB, tgt_vocab_size=VOCAB, max_position_embeddings=64),
    "m2m_100": row("M2M100ForConditionalGeneration", **SEQ2SEQ),
    "plbart": row("PLBartForConditionalGeneration", **SEQ2SEQ),
    "mt5": row("MT5ForConditionalGeneration", d_kv=8, d_ff=256, num_layers=2, decoder_start_token_id=0),
    "umt5": row("UMT5ForConditionalGeneration", d_kv=8, d_ff=256, num_layers=2, decoder_start_token_id=0),
    "longt5": row("LongT5ForConditionalGeneration", masked, d_kv=8, d_ff=256, num_layers=2, decoder_start_token_id=0, local_radius=3),
    # encoders
    "bert_cls": row("BertForSequenceClassification", classified, num_labels=CLASSES),
    "xlm_roberta": row("XLMRobertaForMaskedLM", masked),
    "xlm_roberta_xl": row("XLMRobertaXLForMaskedLM", masked),
    "camembert": row("CamembertForMaskedLM", masked),
    "roberta_prelayernorm": row("RobertaPreLayerNormForMaskedLM", masked),
    "data2vec_text": row("Data2VecTextForMaskedLM", masked),
    "electra_disc": row("ElectraForTokenClassification", masked, num_labels=VOCAB),
    "deberta": row("DebertaForMaskedLM", masked, relative_attention=True, pos_att_type=["p2c", "c2p"]),
    "albert": row("AlbertForMaskedLM", masked, embedding_size=32),
    "mobilebert": row("MobileBertForMaskedLM", masked, embedding_size=32, intra_bottleneck_size=64, true_hidden_size=64),
    "squeezebert": row("SqueezeBertForMaskedLM", masked, embedding_size=HIDDEN),
    "big_bird": row("BigBirdForMaskedLM", masked, attention_type="original_full"),
    "ernie": row("ErnieForMaskedLM", masked),
    "megatron_bert": row("MegatronBertForMaskedLM", masked),
    "mpnet": row("MPNetForMaskedLM", masked),
    "modernbert": row("ModernBertForMaskedLM", masked, local_attention=8),
    "nystromformer": row("NystromformerForMaskedLM", masked, num_landmarks=16, segment_means_seq_len=16),
    "rembert": row("RemBertForMaskedLM", masked, input_embedding_size=32, output_embedding_size=32),
    "roformer": row("RoFormerForMaskedLM", masked),
    "convbert": row("ConvBertForMaskedLM", masked, embedding_size=64, head_ratio=2, num_groups=1),
    "funnel": row("FunnelForMaskedLM", masked, block_sizes=[1, 1], num_decoder_layers=1, d_model=64, n_head=8, d_head=8, d_inner=256),
    "fnet": row("FNetForMaskedLM"),
    "layoutlm": row("LayoutLMForMaskedLM", masked),
    "esm": row("EsmForMaskedLM", masked, position_embedding_type="rotary", mask_token_id=3),
    "eurobert": row("EuroBertForMaskedLM", masked, **GQA),
    "xlnet": row("XLNetLMHeadModel", causal, d_inner=256, d_head=8),
    "xlm": row("XLMWithLMHeadModel", causal),
    "flaubert": row("FlaubertWithLMHeadModel", causal),
    "canine": row(
        "CanineForSequenceClassification", classified, num_labels=CLASSES, num_hash_functions=2, num_hash_buckets=16,
        local_transformer_stride=8,
    ),
    "mra": row("MraForMaskedLM", masked),
    "luke": row("LukeForMaskedLM", masked, entity_vocab_size=16),
    "gpt2_cls": row("GPT2ForSequenceClassification", classified, num_labels=CLASSES),
    "llama_cls": row("LlamaForSequenceClassification", classified, num_labels=CLASSES, **GQA),
    # vision
    "vit_msn": row("ViTMSNForImageClassification", image, **VIT),
    "vit_mae": row(
        "ViTMAEForPreTraining", lambda: {"pixel_values": random(BATCH, 3, IMAGE, IMAGE), "noise": random(BATCH, 16, seed=6)},
        image_size=IMAGE, patch_size=PATCH, decoder_num_hidden_layers=1, decoder_hidden_size=64, decoder_num_attention_heads=8,
        decoder_intermediate_size=128,
    ),
    "beit": row("BeitForImageClassification", image, **VIT, use_relative_position_bias=True),
    "data2vec_vision": row("Data2VecVisionForImageClassification", image, **VIT),
    "dinov2": row("Dinov2ForImageClassification", image, **VIT),
    "dinov2_registers": row("Dinov2WithRegistersForImageClassification", image, **VIT),
    "ijepa": row("IJepaForImageClassification", image, **VIT),
    "swinv2": row(
        "Swinv2ForImageClassification", patches, image_size=64, patch_size=4, embed_dim=32, depths=[2, 2], num_heads=[4, 8],
        window_size=4, num_labels=CLASSES,
    ),
    "convnextv2": row(
        "ConvNextV2ForImageClassification", image, hidden_sizes=[16, 32], depths=[1, 1], num_stages=2, num_labels=CLASSES,
    ),
    "segformer": row(
        "SegformerForImageClassification", patches, depths=[1, 1], hidden_sizes=[16, 32], num_attention_heads=[2, 4],
        sr_ratios=[2, 1], num_encoder_blocks=2, patch_sizes=[7, 3], strides=[4, 2], mlp_ratios=[2, 2], num_labels=CLASSES,
    ),
    "resnet": row(
        "ResNetForImageClassification", image, embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic",
        num_labels=CLASSES,
    ),
    "regnet": row(
        "RegNetForImageClassification", image, embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], groups_width=8,
        num_labels=CLASSES,
    ),
    "mobilenet_v1": row("MobileNetV1ForImageClassification", image, depth_multiplier=0.25, num_labels=CLASSES),
    "mobilenet_v2": row("MobileNetV2ForImageClassification", image, depth_multiplier=0.35, num_labels=CLASSES),
    "efficientnet": row(
        "EfficientNetForImageClassification", image, width_coefficient=0.25, depth_coefficient=0.2, hidden_dim=320,
        num_block_repeats=[1, 1], in_channels=[32, 16], out_channels=[16, 24], kernel_sizes=[3, 3], strides=[1, 2],
        expand_ratios=[1, 6], depthwise_padding=[], num_labels=CLASSES,
    ),
    "poolformer": row(
        "PoolFormerForImageClassification", image, depths=[1, 1], hidden_sizes=[16, 32], num_encoder_blocks=2, patch_sizes=[7, 3],
        strides=[4, 2], padding=[2, 1], num_labels=CLASSES,
    ),
    "mobilevit": row(
        "MobileViTForImageClassification", patches, image_size=64, hidden_sizes=[16, 24, 32], neck_hidden_sizes=[8, 8, 16, 16, 16,
        16, 32], num_attention_heads=4, num_labels=CLASSES,
    ),
    "mobilevitv2": row("MobileViTV2ForImageClassification", patches, image_size=64, width_multiplier=0.25, num_labels=CLASSES),
    "pvt": row(
        "PvtForImageClassification", patches, image_size=64, depths=[1, 1, 1, 1], hidden_sizes=[16, 16, 32, 32],
        num_attention_heads=[1, 2, 2, 4], num_labels=CLASSES,
    ),
    "pvt_v2": row(
        "PvtV2ForImageClassification", patches, depths=[1, 1, 1, 1], hidden_sizes=[16, 16, 32, 32], num_attention_heads=[1, 2, 2,
        4], image_size=64, num_labels=CLASSES,
    ),
    "levit": row(
        "LevitForImageClassification", patches, image_size=64, hidden_sizes=[16, 32, 48], num_attention_heads=[2, 4, 4],
        key_dim=[8, 8, 8], depths=[1, 1, 1], num_labels=CLASSES,
    ),
    "focalnet": row(
        "FocalNetForImageClassification", image, image_size=IMAGE, embed_dim=16, depths=[1, 1], hidden_sizes=[16, 32],
        focal_levels=[2, 2], focal_windows=[3, 3], num_labels=CLASSES,
    ),
    "bit": row(
        "BitForImageClassification", image, embedding_size=32, hidden_sizes=[32, 64], depths=[1, 1], num_groups=4,
        num_labels=CLASSES,
    ),
    "vivit": row(
        "VivitForVideoClassification", video,
        image_size=IMAGE, num_frames=4, tubelet_size=[2, 8, 8], num_labels=CLASSES,
    ),
    "videomae": row(
        "VideoMAEForVideoClassification", video,
        image_size=IMAGE, patch_size=8, num_frames=4, num_labels=CLASSES,
    ),
    "timesformer": row(
        "TimesformerForVideoClassification", video,
        image_size=IMAGE, patch_size=8, num_frames=4, num_labels=CLASSES,
    ),
    "hiera": row(
        "HieraForImageClassification", patches, image_size=[64, 64], embed_dim=16, depths=[1, 1], num_heads=[2, 4],
        num_query_pool=1, masked_unit_size=[4, 4], query_stride=[2, 2], num_labels=CLASSES,
    ),
    "swiftformer": row("SwiftFormerForImageClassification", patches, depths=[1, 1], embed_dims=[16, 32], num_labels=CLASSES),
    # several kinds of input
    "siglip": row("SiglipModel", pair, text_config=TEXT | {"projection_size": HIDDEN}, vision_config=VISION),
    "altclip": row("AltCLIPModel", pair, text_config=TEXT | {"project_dim": HIDDEN}, vision_config=VISION, projection_dim=HIDDEN),
    "blip": row(
        "BlipForConditionalGeneration", captioned, text_config=TEXT | {"encoder_hidden_size": HIDDEN}, vision_config=VISION, projection_dim=HIDDEN,
    ),
    "llava": row(
        "LlavaForConditionalGeneration", shown, image_token_id=VOCAB - 1, vision_feature_layer=-1,
        text_config=SIZES | GQA | {"model_type": "llama"},
        vision_config=VISION | {"image_size": 2 * PATCH, "model_type": "clip_vision_model"},
    ),
    "git": row(
        "GitForCausalLM", captioned,
        vision_config=VISION,
    ),
    # sound
    "hubert": row("HubertForSequenceClassification", sound, **CONVS, num_labels=CLASSES),
    "wavlm": row("WavLMForSequenceClassification", sound, **CONVS, num_labels=CLASSES),
    "sew": row("SEWForSequenceClassification", sound, **CONVS, num_labels=CLASSES, squeeze_factor=1),
    "sew_d": row("SEWDForSequenceClassification", sound, **CONVS, num_labels=CLASSES, squeeze_factor=1, position_buckets=8),
    "unispeech": row("UniSpeechForSequenceClassification", sound, **CONVS, num_labels=CLASSES),
    "unispeech_sat": row("UniSpeechSatForSequenceClassification", sound, **CONVS, num_labels=CLASSES),
    "data2vec_audio": row(
        "Data2VecAudioForSequenceClassification", sound, **{k: v for k, v in CONVS.items() if k != "num_conv_pos_embeddings"},
        num_labels=CLASSES,
    ),
    "wav2vec2_conformer": row("Wav2Vec2ConformerForSequenceClassification", sound, **CONVS, num_labels=CLASSES),
    "wav2vec2_bert": row(
        "Wav2Vec2BertForSequenceClassification", lambda: {"input_features": random(BATCH, SEQ, 16), "labels": classes()},
        apply_spec_augment=False, feature_projection_input_dim=16, num_labels=CLASSES,
    ),
    "ast": row(
        "ASTForAudioClassification", lambda: {"input_values": random(BATCH, 32, 16), "labels": classes()}, max_length=32,
        num_mel_bins=16, patch_size=8, time_stride=8, frequency_stride=8, num_labels=CLASSES,
    ),
    "speech_to_text": row(
        "Speech2TextForConditionalGeneration", lambda: {"input_features": random(BATCH, 32, 16), "labels": tokens()}, **SEQ2SEQ,
        input_feat_per_channel=16, conv_channels=32, max_source_positions=64, max_target_positions=64,
    ),
    "moonshine": row(
        "MoonshineForConditionalGeneration", lambda: {"input_values": random(BATCH, 2000), "labels": tokens()},
        encoder_num_hidden_layers=2, decoder_num_hidden_layers=2, encoder_num_attention_heads=8, decoder_num_attention_heads=8,
        encoder_num_key_value_heads=8, decoder_num_key_value_heads=8, decoder_start_token_id=1,
    ),
    # series
    "time_series_transformer": row(
        "TimeSeriesTransformerForPrediction", series, prediction_length=4, context_length=16, num_time_features=2, d_model=64,
        encoder_layers=2, decoder_layers=2, encoder_attention_heads=8, decoder_attention_heads=8, encoder_ffn_dim=128,
        decoder_ffn_dim=128,
    ),
    "patchtst": row(
        "PatchTSTForPrediction", short_series,
        num_input_channels=3, context_length=32, patch_length=4, patch_stride=4, prediction_length=4, d_model=64, ffn_dim=128,
    ),
    "patchtsmixer": row(
        "PatchTSMixerForPrediction", short_series,
        num_input_channels=3, context_length=32, patch_length=4, patch_stride=4, prediction_length=4, d_model=16,
    ),
}  # fmt: skip
