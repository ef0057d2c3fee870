"""transformers' model families, tiny: `build("mistral")` returns (model in train mode, one global batch) as tests/zoo does.

A family is a row of data: the model's class, what its config says beyond the common sizes, and its batch. Sizes are those of
tests/zoo (2 layers, hidden 64, 8 heads, 8 × 16 tokens), given in the common names of transformers' configs and left out where a
config has no such field; all probabilities of dropping something are zero.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.zoo import BATCH, HEADS, HIDDEN, SEQ, VOCAB, Batch, Built, labels, ready, tokens

#: In the common names: a config's attribute_map translates them.
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 4 * HIDDEN, "num_hidden_layers": 2, "num_attention_heads": HEADS,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
IMAGE, PATCH, CLASSES = 32, 8, 12


def random(*shape: int, seed: int = 4) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def classes(n: int = CLASSES, seed: int = 5) -> Tensor:
    return torch.randint(0, n, (BATCH,), generator=torch.Generator().manual_seed(seed))


def padding() -> Tensor:
    """Attention mask i64[8, 16]: row i lacks its last i tokens."""
    mask = torch.ones(BATCH, SEQ, dtype=torch.long)
    for i in range(BATCH):
        mask[i, SEQ - i :] = 0
    return mask


def causal() -> Batch:
    return {"input_ids": tokens(), "labels": labels()}


def masked() -> Batch:
    return {"input_ids": tokens(), "attention_mask": padding(), "labels": labels()}


def classified() -> Batch:
    return {"input_ids": tokens(), "attention_mask": padding(), "labels": classes()}


def image() -> Batch:
    return {"pixel_values": random(BATCH, 3, IMAGE, IMAGE), "labels": classes()}


def patches() -> Batch:
    return {"pixel_values": random(BATCH, 3, 64, 64), "labels": classes()}


def pair() -> Batch:
    return {"input_ids": tokens(), "pixel_values": random(BATCH, 3, IMAGE, IMAGE), "attention_mask": padding(), "return_loss": True}


def sound() -> Batch:
    """Raw audio; class of every recording."""
    return {"input_values": random(BATCH, 400), "labels": classes()}


def transcribed() -> Batch:
    return {"input_values": random(BATCH, 400), "labels": tokens()[:, :4]}


@dataclass(frozen=True)
class Family:
    """model: class in transformers. config: fields beyond SIZES. batch: in float64."""

    model: str
    config: Mapping[str, Any] = field(default_factory=dict)
    batch: Callable[[], Batch] = causal


def F(model: str, batch: Callable[[], Batch] = causal, **config: Any) -> Family:
    return Family(model, config, batch)


GQA = {"num_key_value_heads": 4}
EXPERTS = {"experts_implementation": "batched_mm"}  # the default has no float64 kernel
SEQ2SEQ = {
    "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": 4 * HIDDEN, "decoder_ffn_dim": 4 * HIDDEN, "d_model": HIDDEN, "decoder_start_token_id": 2, "forced_eos_token_id": 2,
}  # fmt: skip
TEXT = {k: v for k, v in SIZES.items()} | {"projection_dim": HIDDEN}
VISION = {
    "hidden_size": HIDDEN, "intermediate_size": 4 * HIDDEN, "num_hidden_layers": 2, "num_attention_heads": HEADS, "image_size": IMAGE,
    "patch_size": PATCH, "projection_dim": HIDDEN,
}  # fmt: skip
VIT = {"image_size": IMAGE, "patch_size": PATCH, "num_labels": CLASSES}
CONVS = {"conv_dim": (HIDDEN, HIDDEN), "conv_kernel": (8, 4), "conv_stride": (5, 4), "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4, "apply_spec_augment": False, "mask_time_prob": 0.0}

FAMILIES: dict[str, Family] = {
    # decoders
    "llama": F("LlamaForCausalLM", **GQA),
    "mistral": F("MistralForCausalLM", **GQA, sliding_window=8),
    "qwen2": F("Qwen2ForCausalLM", **GQA),
    "qwen3": F("Qwen3ForCausalLM", **GQA, head_dim=8),
    "gemma": F("GemmaForCausalLM", num_key_value_heads=4, head_dim=16),
    "gemma2": F("Gemma2ForCausalLM", **GQA, head_dim=8, sliding_window=8),
    "gemma3": F("Gemma3ForCausalLM", **GQA, head_dim=8, sliding_window=8),
    "phi": F("PhiForCausalLM"),
    "phi3": F("Phi3ForCausalLM", **GQA),
    "gpt_neox": F("GPTNeoXForCausalLM"),
    "gptj": F("GPTJForCausalLM", rotary_dim=4),
    "gpt_neo": F("GPTNeoForCausalLM", attention_types=[[["global", "local"], 1]], window_size=8),
    "gpt_bigcode": F("GPTBigCodeForCausalLM"),
    "codegen": F("CodeGenForCausalLM", rotary_dim=4),
    "opt": F("OPTForCausalLM", ffn_dim=4 * HIDDEN, word_embed_proj_dim=HIDDEN),
    "bloom": F("BloomForCausalLM"),
    "falcon": F("FalconForCausalLM", new_decoder_architecture=True, num_kv_heads=4),
    "falcon_7b": F("FalconForCausalLM"),
    "falcon_alibi": F("FalconForCausalLM", alibi=True, multi_query=False),
    "mpt": F("MptForCausalLM", max_seq_len=64),
    "persimmon": F("PersimmonForCausalLM"),
    "olmo": F("OlmoForCausalLM", **GQA),
    "olmo2": F("Olmo2ForCausalLM", **GQA),
    "olmo3": F("Olmo3ForCausalLM", **GQA),
    "granite": F("GraniteForCausalLM", **GQA),
    "stablelm": F("StableLmForCausalLM", **GQA),
    "cohere": F("CohereForCausalLM", **GQA),
    "cohere2": F("Cohere2ForCausalLM", **GQA, sliding_window=8),
    "starcoder2": F("Starcoder2ForCausalLM", **GQA),
    "nemotron": F("NemotronForCausalLM", **GQA),
    "glm": F("GlmForCausalLM", **GQA, head_dim=8),
    "glm4": F("Glm4ForCausalLM", **GQA, head_dim=8),
    "helium": F("HeliumForCausalLM", **GQA, head_dim=8),
    "smollm3": F("SmolLM3ForCausalLM", **GQA),
    "ernie4_5": F("Ernie4_5ForCausalLM", **GQA, head_dim=8),
    "arcee": F("ArceeForCausalLM", **GQA),
    "apertus": F("ApertusForCausalLM", **GQA),
    "exaone4": F("Exaone4ForCausalLM", **GQA),
    "seed_oss": F("SeedOssForCausalLM", **GQA, head_dim=8),
    "diffllama": F("DiffLlamaForCausalLM", **GQA),
    "hunyuan": F("HunYuanDenseV1ForCausalLM", **GQA, head_dim=8),
    "doge": F("DogeForCausalLM", **GQA),
    "vaultgemma": F("VaultGemmaForCausalLM", **GQA, head_dim=8),
    "biogpt": F("BioGptForCausalLM"),
    "xglm": F("XGLMForCausalLM", attention_heads=HEADS, num_layers=2, d_model=HIDDEN, ffn_dim=4 * HIDDEN),
    "ctrl": F("CTRLLMHeadModel", dff=4 * HIDDEN),
    "openai_gpt": F("OpenAIGPTLMHeadModel"),
    "imagegpt": F("ImageGPTForCausalImageModeling", lambda: {"input_ids": tokens(VOCAB - 1), "labels": labels(VOCAB - 1)}),
    "mamba": F("MambaForCausalLM", state_size=4, time_step_rank=4),
    "mamba2": F("Mamba2ForCausalLM", state_size=4, num_heads=8, head_dim=16, n_groups=2, chunk_size=8),
    "rwkv": F("RwkvForCausalLM", attention_hidden_size=HIDDEN, context_length=32),
    "recurrent_gemma": F("RecurrentGemmaForCausalLM", num_key_value_heads=1, lru_width=HIDDEN, attention_window_size=8, block_types=["recurrent", "attention"]),
    "zamba": F("ZambaForCausalLM", num_hidden_layers=4, num_key_value_heads=4, layer_types=["mamba", "hybrid", "mamba", "hybrid"], mamba_d_state=4, mamba_dt_rank=4, n_mamba_heads=2, use_mamba_kernels=False),
    "deepseek_v3_dense": F("DeepseekV3ForCausalLM", num_key_value_heads=8, first_k_dense_replace=2, kv_lora_rank=16, q_lora_rank=32, qk_rope_head_dim=8, v_head_dim=8, qk_nope_head_dim=8),
    "minicpm3": F("MiniCPM3ForCausalLM", num_key_value_heads=8, kv_lora_rank=16, q_lora_rank=32, qk_rope_head_dim=8, v_head_dim=8, qk_nope_head_dim=8),
    "modernbert_decoder": F("ModernBertDecoderForCausalLM", num_labels=CLASSES),
    "lfm2": F("Lfm2ForCausalLM", **GQA, layer_types=["conv", "full_attention"]),
    "mixtral": F("MixtralForCausalLM", **GQA, **EXPERTS, num_local_experts=4),
    "qwen3_moe": F("Qwen3MoeForCausalLM", **GQA, **EXPERTS, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
    "olmoe": F("OlmoeForCausalLM", **GQA, **EXPERTS, num_experts=4, num_experts_per_tok=2),
    "gpt_oss": F("GptOssForCausalLM", **GQA, **EXPERTS, num_local_experts=4, num_experts_per_tok=2, head_dim=8, sliding_window=8),
    # encoder and decoder
    "bart": F("BartForConditionalGeneration", **SEQ2SEQ),
    "mbart": F("MBartForConditionalGeneration", **SEQ2SEQ),
    "pegasus": F("PegasusForConditionalGeneration", **SEQ2SEQ),
    "pegasus_x": F("PegasusXForConditionalGeneration", **SEQ2SEQ, block_size=8, num_global_tokens=4),
    "marian": F("MarianMTModel", **SEQ2SEQ),
    "blenderbot": F("BlenderbotForConditionalGeneration", **SEQ2SEQ),
    "blenderbot_small": F("BlenderbotSmallForConditionalGeneration", **SEQ2SEQ),
    "m2m_100": F("M2M100ForConditionalGeneration", **SEQ2SEQ),
    "plbart": F("PLBartForConditionalGeneration", **SEQ2SEQ),
    "t5": F("T5ForConditionalGeneration", d_kv=8, d_ff=256, num_layers=2, decoder_start_token_id=0),
    "mt5": F("MT5ForConditionalGeneration", d_kv=8, d_ff=256, num_layers=2, decoder_start_token_id=0),
    "umt5": F("UMT5ForConditionalGeneration", d_kv=8, d_ff=256, num_layers=2, decoder_start_token_id=0),
    "longt5": F("LongT5ForConditionalGeneration", masked, d_kv=8, d_ff=256, num_layers=2, decoder_start_token_id=0, local_radius=3),
    # encoders
    "bert": F("BertForMaskedLM", masked),
    "bert_cls": F("BertForSequenceClassification", classified, num_labels=CLASSES),
    "roberta": F("RobertaForMaskedLM", masked, max_position_embeddings=66),
    "xlm_roberta": F("XLMRobertaForMaskedLM", masked),
    "xlm_roberta_xl": F("XLMRobertaXLForMaskedLM", masked),
    "camembert": F("CamembertForMaskedLM", masked),
    "roberta_prelayernorm": F("RobertaPreLayerNormForMaskedLM", masked),
    "data2vec_text": F("Data2VecTextForMaskedLM", masked),
    "distilbert": F("DistilBertForMaskedLM", masked, hidden_dim=256),
    "electra": F("ElectraForMaskedLM", masked, embedding_size=32),
    "electra_disc": F("ElectraForTokenClassification", masked, num_labels=VOCAB),
    "deberta": F("DebertaForMaskedLM", masked, relative_attention=True, pos_att_type=["p2c", "c2p"]),
    "deberta_v2": F("DebertaV2ForMaskedLM", masked, relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8, norm_rel_ebd="layer_norm", share_att_key=True),
    "albert": F("AlbertForMaskedLM", masked, embedding_size=32),
    "mobilebert": F("MobileBertForMaskedLM", masked, embedding_size=32, intra_bottleneck_size=64, true_hidden_size=64),
    "squeezebert": F("SqueezeBertForMaskedLM", masked, embedding_size=HIDDEN),
    "big_bird": F("BigBirdForMaskedLM", masked, attention_type="original_full"),
    "ernie": F("ErnieForMaskedLM", masked),
    "megatron_bert": F("MegatronBertForMaskedLM", masked),
    "mpnet": F("MPNetForMaskedLM", masked),
    "modernbert": F("ModernBertForMaskedLM", masked, local_attention=8),
    "nystromformer": F("NystromformerForMaskedLM", masked, num_landmarks=16, segment_means_seq_len=16),
    "rembert": F("RemBertForMaskedLM", masked, input_embedding_size=32, output_embedding_size=32),
    "roformer": F("RoFormerForMaskedLM", masked),
    "convbert": F("ConvBertForMaskedLM", masked, embedding_size=64, head_ratio=2, num_groups=1),
    "funnel": F("FunnelForMaskedLM", masked, block_sizes=[1, 1], num_decoder_layers=1, d_model=64, n_head=8, d_head=8, d_inner=256),
    "fnet": F("FNetForMaskedLM", lambda: {"input_ids": tokens(), "labels": labels()}),
    "layoutlm": F("LayoutLMForMaskedLM", masked),
    "esm": F("EsmForMaskedLM", masked, position_embedding_type="rotary", mask_token_id=3),
    "eurobert": F("EuroBertForMaskedLM", masked, **GQA),
    "xlnet": F("XLNetLMHeadModel", causal, d_inner=256, d_head=8),
    "xlm": F("XLMWithLMHeadModel", causal),
    "flaubert": F("FlaubertWithLMHeadModel", causal),
    "canine": F("CanineForSequenceClassification", classified, num_labels=CLASSES, num_hash_functions=2, num_hash_buckets=16, local_transformer_stride=8),
    "mra": F("MraForMaskedLM", masked),
    "luke": F("LukeForMaskedLM", masked, entity_vocab_size=16),
    "gpt2_cls": F("GPT2ForSequenceClassification", classified, num_labels=CLASSES),
    "llama_cls": F("LlamaForSequenceClassification", classified, num_labels=CLASSES, **GQA),
    # vision
    "vit": F("ViTForImageClassification", image, **VIT),
    "vit_msn": F("ViTMSNForImageClassification", image, **VIT),
    "vit_mae": F("ViTMAEForPreTraining", lambda: {"pixel_values": random(BATCH, 3, IMAGE, IMAGE), "noise": random(BATCH, 16, seed=6)}, image_size=IMAGE, patch_size=PATCH, decoder_num_hidden_layers=1, decoder_hidden_size=64, decoder_num_attention_heads=8, decoder_intermediate_size=128),
    "deit": F("DeiTForImageClassification", image, **VIT),
    "beit": F("BeitForImageClassification", image, **VIT, use_relative_position_bias=True),
    "data2vec_vision": F("Data2VecVisionForImageClassification", image, **VIT),
    "dinov2": F("Dinov2ForImageClassification", image, **VIT),
    "dinov2_registers": F("Dinov2WithRegistersForImageClassification", image, **VIT),
    "ijepa": F("IJepaForImageClassification", image, **VIT),
    "swin": F("SwinForImageClassification", patches, image_size=64, patch_size=4, embed_dim=32, depths=[2, 2], num_heads=[2, 4], window_size=4, num_labels=CLASSES),
    "swinv2": F("Swinv2ForImageClassification", patches, image_size=64, patch_size=4, embed_dim=32, depths=[2, 2], num_heads=[2, 4], window_size=4, num_labels=CLASSES),
    "convnext": F("ConvNextForImageClassification", image, hidden_sizes=[16, 32], depths=[1, 1], num_stages=2, num_labels=CLASSES),
    "convnextv2": F("ConvNextV2ForImageClassification", image, hidden_sizes=[16, 32], depths=[1, 1], num_stages=2, num_labels=CLASSES),
    "segformer": F("SegformerForImageClassification", patches, depths=[1, 1], hidden_sizes=[16, 32], num_attention_heads=[2, 4], sr_ratios=[2, 1], num_encoder_blocks=2, patch_sizes=[7, 3], strides=[4, 2], mlp_ratios=[2, 2], num_labels=CLASSES),
    "resnet": F("ResNetForImageClassification", image, embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic", num_labels=CLASSES),
    "regnet": F("RegNetForImageClassification", image, embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], groups_width=8, num_labels=CLASSES),
    "mobilenet_v1": F("MobileNetV1ForImageClassification", image, depth_multiplier=0.25, num_labels=CLASSES),
    "mobilenet_v2": F("MobileNetV2ForImageClassification", image, depth_multiplier=0.35, num_labels=CLASSES),
    "efficientnet": F("EfficientNetForImageClassification", image, width_coefficient=0.25, depth_coefficient=0.2, hidden_dim=320, num_labels=CLASSES),
    "poolformer": F("PoolFormerForImageClassification", image, depths=[1, 1], hidden_sizes=[16, 32], num_encoder_blocks=2, patch_sizes=[7, 3], strides=[4, 2], padding=[2, 1], num_labels=CLASSES),
    "mobilevit": F("MobileViTForImageClassification", patches, image_size=64, hidden_sizes=[16, 24, 32], neck_hidden_sizes=[8, 8, 16, 16, 16, 16, 32], num_attention_heads=4, num_labels=CLASSES),
    "mobilevitv2": F("MobileViTV2ForImageClassification", patches, image_size=64, width_multiplier=0.25, num_labels=CLASSES),
    "pvt": F("PvtForImageClassification", patches, image_size=64, depths=[1, 1, 1, 1], hidden_sizes=[16, 16, 32, 32], num_attention_heads=[1, 2, 2, 4], num_labels=CLASSES),
    "pvt_v2": F("PvtV2ForImageClassification", patches, depths=[1, 1, 1, 1], hidden_sizes=[16, 16, 32, 32], num_attention_heads=[1, 2, 2, 4], image_size=64, num_labels=CLASSES),
    "levit": F("LevitForImageClassification", patches, image_size=64, hidden_sizes=[16, 32, 48], num_attention_heads=[2, 4, 4], key_dim=[8, 8, 8], depths=[1, 1, 1], num_labels=CLASSES),
    "focalnet": F("FocalNetForImageClassification", image, image_size=IMAGE, embed_dim=16, depths=[1, 1], hidden_sizes=[16, 32], focal_levels=[2, 2], focal_windows=[3, 3], num_labels=CLASSES),
    "bit": F("BitForImageClassification", image, embedding_size=32, hidden_sizes=[32, 64], depths=[1, 1], num_groups=4, num_labels=CLASSES),
    "vivit": F("VivitForVideoClassification", lambda: {"pixel_values": random(BATCH, 4, 3, IMAGE, IMAGE), "labels": classes()}, image_size=IMAGE, num_frames=4, tubelet_size=[2, 8, 8], num_labels=CLASSES),
    "videomae": F("VideoMAEForVideoClassification", lambda: {"pixel_values": random(BATCH, 4, 3, IMAGE, IMAGE), "labels": classes()}, image_size=IMAGE, patch_size=8, num_frames=4, num_labels=CLASSES),
    "timesformer": F("TimesformerForVideoClassification", lambda: {"pixel_values": random(BATCH, 4, 3, IMAGE, IMAGE), "labels": classes()}, image_size=IMAGE, patch_size=8, num_frames=4, num_labels=CLASSES),
    "hiera": F("HieraForImageClassification", patches, image_size=[64, 64], embed_dim=16, depths=[1, 1], num_heads=[2, 4], num_query_pool=1, masked_unit_size=[4, 4], query_stride=[2, 2], num_labels=CLASSES),
    "swiftformer": F("SwiftFormerForImageClassification", patches, depths=[1, 1], embed_dims=[16, 32], num_labels=CLASSES),
    # several kinds of input
    "clip": F("CLIPModel", pair, text_config=TEXT, vision_config=VISION, projection_dim=HIDDEN),
    "siglip": F("SiglipModel", pair, text_config=TEXT | {"projection_size": HIDDEN}, vision_config=VISION),
    "altclip": F("AltCLIPModel", pair, text_config=TEXT | {"project_dim": HIDDEN}, vision_config=VISION, projection_dim=HIDDEN),
    "x_clip": F("XCLIPModel", pair, text_config=TEXT, vision_config=VISION),
    "blip": F("BlipForConditionalGeneration", lambda: {"pixel_values": random(BATCH, 3, IMAGE, IMAGE), "input_ids": tokens(), "labels": labels()}, text_config=TEXT | {"encoder_hidden_size": HIDDEN}, vision_config=VISION, projection_dim=HIDDEN),
    "git": F("GitForCausalLM", lambda: {"pixel_values": random(BATCH, 3, IMAGE, IMAGE), "input_ids": tokens(), "labels": labels()}, vision_config=VISION),
    # sound
    "wav2vec2": F("Wav2Vec2ForSequenceClassification", sound, **CONVS, num_labels=CLASSES),
    "wav2vec2_ctc": F("Wav2Vec2ForCTC", transcribed, **CONVS),
    "hubert": F("HubertForSequenceClassification", sound, **CONVS, num_labels=CLASSES),
    "wavlm": F("WavLMForSequenceClassification", sound, **CONVS, num_labels=CLASSES),
    "sew": F("SEWForSequenceClassification", sound, **CONVS, num_labels=CLASSES, squeeze_factor=1),
    "sew_d": F("SEWDForSequenceClassification", sound, **CONVS, num_labels=CLASSES, squeeze_factor=1, position_buckets=8),
    "unispeech": F("UniSpeechForSequenceClassification", sound, **CONVS, num_labels=CLASSES),
    "unispeech_sat": F("UniSpeechSatForSequenceClassification", sound, **CONVS, num_labels=CLASSES),
    "data2vec_audio": F("Data2VecAudioForSequenceClassification", sound, **{k: v for k, v in CONVS.items() if k != "num_conv_pos_embeddings"}, num_labels=CLASSES),
    "wav2vec2_conformer": F("Wav2Vec2ConformerForSequenceClassification", sound, **CONVS, num_labels=CLASSES),
    "wav2vec2_bert": F("Wav2Vec2BertForSequenceClassification", lambda: {"input_features": random(BATCH, SEQ, 16), "labels": classes()}, apply_spec_augment=False, feature_projection_input_dim=16, num_labels=CLASSES),
    "ast": F("ASTForAudioClassification", lambda: {"input_values": random(BATCH, 32, 16), "labels": classes()}, max_length=32, num_mel_bins=16, patch_size=8, time_stride=8, frequency_stride=8, num_labels=CLASSES),
    "whisper": F("WhisperForConditionalGeneration", lambda: {"input_features": random(BATCH, 16, 32), "labels": tokens()}, **{k: v for k, v in SEQ2SEQ.items() if k != "forced_eos_token_id"}, num_mel_bins=16, max_source_positions=16, max_target_positions=32),
    "speech_to_text": F("Speech2TextForConditionalGeneration", lambda: {"input_features": random(BATCH, 32, 16), "labels": tokens()}, **{k: v for k, v in SEQ2SEQ.items() if k != "forced_eos_token_id"}, input_feat_per_channel=16, conv_channels=32, max_source_positions=64, max_target_positions=64),
    "moonshine": F("MoonshineForConditionalGeneration", lambda: {"input_values": random(BATCH, 2000), "labels": tokens()}, encoder_num_hidden_layers=2, decoder_num_hidden_layers=2, encoder_num_attention_heads=8, decoder_num_attention_heads=8, encoder_num_key_value_heads=8, decoder_num_key_value_heads=8, decoder_start_token_id=1),
    # series
    "time_series_transformer": F("TimeSeriesTransformerForPrediction", lambda: {
        "past_values": random(BATCH, 16 + 7), "past_time_features": random(BATCH, 16 + 7, 2), "past_observed_mask": torch.ones(BATCH, 23, dtype=torch.float64),
        "future_values": random(BATCH, 4), "future_time_features": random(BATCH, 4, 2)}, prediction_length=4, context_length=16, num_time_features=2, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=8, decoder_attention_heads=8, encoder_ffn_dim=128, decoder_ffn_dim=128),
    "patchtst": F("PatchTSTForPrediction", lambda: {"past_values": random(BATCH, 32, 3), "future_values": random(BATCH, 4, 3)}, num_input_channels=3, context_length=32, patch_length=4, patch_stride=4, prediction_length=4, d_model=64, ffn_dim=128),
    "patchtsmixer": F("PatchTSMixerForPrediction", lambda: {"past_values": random(BATCH, 32, 3), "future_values": random(BATCH, 4, 3)}, num_input_channels=3, context_length=32, patch_length=4, patch_stride=4, prediction_length=4, d_model=16),
}  # fmt: skip


def build(name: str, dtype: torch.dtype = torch.float64, **config: Any) -> Built:
    """A family's model and batch. config: fields that override the row's."""
    import transformers

    family = FAMILIES[name]
    model_class: Any = getattr(transformers, family.model)
    config_class: Any = model_class.config_class
    renamed, known = config_class.attribute_map, inspect.signature(config_class.__init__).parameters
    own = {**family.config, **config}
    common = {renamed.get(k, k): v for k, v in SIZES.items() if k not in own}
    found = config_class(**{k: v for k, v in common.items() if k in known and k not in own}, **own)
    _never_drop(found)
    torch.manual_seed(0)
    model = ready(model_class(found), dtype)
    batch = {k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in family.batch().items()}
    return model, batch


def _never_drop(config: Any) -> None:
    """Every probability of dropping something is zero, also in the configs within."""
    for name, value in vars(config).items():
        if hasattr(value, "to_dict"):
            _never_drop(value)
        elif "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
